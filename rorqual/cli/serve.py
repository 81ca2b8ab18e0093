"""rorqual serve: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Any

from rorqual import __version__
from rorqual.cli.options import (
    Given,
    Model,
    Recipe,
    Settings,
    TokenizerName,
    become_rank,
    engine_options,
    with_options,
)
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.serve.config import ServeConfig
from rorqual.serve.cors import CorsConfig
from rorqual.serve.engines.begin import early_engines
from rorqual.serve.limits import ServerLimits
from rorqual.text.grammar_limits import GrammarLimits


@with_options(
    serving=ServeConfig,
    cors=CorsConfig,
    limits=ServerLimits,
    grammar=GrammarLimits,
    engine=EngineConfig,
)
def serve(
    serving: Given,
    cors: Given,
    limits: Given,
    grammar: Given,
    engine: Given,
    model: Model = None,
    tokenizer: TokenizerName = None,
    config: Recipe = None,
    settings: Settings = None,
) -> None:
    """Serve a model through the OpenAI API."""
    named, options = engine_options(config, settings, engine)
    become_rank(model or named, options)
    server = ServeConfig(
        model=model or named,
        tokenizer=tokenizer,
        engine=options,
        cors=CorsConfig(**cors),
        limits=ServerLimits(**limits, grammar=GrammarLimits(**grammar)),
        **serving,
    )
    # until the server handles it: engines end with this process, and a handler's exception may be
    # raised where Python drops it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with early_engines() as early:
        early.begin(server.replicas)  # they import torch in parallel with this process's imports
        launch = _server()
        logging.getLogger("rorqual").setLevel(logging.INFO)
        sys.exit(launch.run(server, __version__, early))


def _server() -> Any:
    """The server's module, or an error that names the missing extra."""
    try:
        from rorqual.serve import launch
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rorqual serve needs the package {error.name!r}; install rorqual[serve]"
        ) from None
    return launch
