"""rorqual route: one address for several servers."""

from __future__ import annotations

import logging
import sys
from typing import Any

from rorqual import __version__
from rorqual.cli.options import Given, with_options
from rorqual.errors import ConfigError
from rorqual.route.config import RouteConfig


@with_options(routing=RouteConfig)
def route(routing: Given) -> None:
    """Route requests to several servers; streams go on where one dies."""
    config = RouteConfig(**routing)
    logging.getLogger("rorqual").setLevel(logging.INFO)
    sys.exit(_app().run(config, __version__))


def _app() -> Any:
    """The router's module, or an error that names the missing extra."""
    try:
        from rorqual.route import app
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rorqual route needs the package {error.name!r}; install rorqual[route]"
        ) from None
    return app
