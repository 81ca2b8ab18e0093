"""How each engine's server is started on a model folder."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rorqual.bench.peers import natural_weights
from rorqual.bench.peers.model_folder import ServedModel
from rorqual.bench.peers.results import OURS
from rorqual.bench.peers.settings import DEFAULT, PeerSettings

RESIDUAL_GAIN = 0.5  # as in the engine's own random weights; tests compare the two
WAITING = 1024  # our server's default limit of waiting requests
CACHE_OFF = {
    OURS: "--no-prefix-caching",
    "vllm": "--no-enable-prefix-caching",
    "sglang": "--disable-radix-cache",
}
# Quiet about the world outside: no hub, no usage reports.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class ServerSide:
    """One engine with one group of flags. command: of a port, the prefix cache on or off, and the
    most requests that will be open."""

    engine: str
    settings: str
    command: Callable[[int, bool, int], Sequence[str]]
    environment: dict[str, str] = field(default_factory=dict)
    random: bool = False

    @property
    def name(self) -> str:
        return self.engine if self.settings == DEFAULT else f"{self.engine}-{self.settings}"

    def routing(self, log: str) -> tuple[bool | None, str]:
        """Whether its tokens are known to spread over the experts, and why."""
        if not self.random:
            return True, "the checkpoint's own weights"
        if self.engine == OURS:
            return True, "random weights of unit norm"
        for line in log.splitlines():
            _, mark, rest = line.partition(natural_weights.MARK)
            if mark:
                return True, f"random weights of unit norm in {rest.strip()}"
        if self.engine == "command":
            return None, "weights of its own choice"
        return False, "the engine's dummy weights: nearly all tokens go to the same experts"


def our_side(model: ServedModel, asked: PeerSettings) -> ServerSide:
    more = shlex.split(asked.our_options)
    random = ["--weights", "random"] if model.random else []

    def command(port: int, prefix_cache: bool, most: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port)]
        cache = [] if prefix_cache else [CACHE_OFF[OURS]]
        waiting = ["--max-waiting", str(most)] if most > WAITING else []
        start = [sys.executable, "-m", "rorqual", "serve", str(model.folder), *random]
        return [*start, *where, *cache, *waiting, *more]

    return ServerSide(OURS, asked.our_options or DEFAULT, command, random=model.random)


def peer_sides(model: ServedModel, asked: PeerSettings, scratch: Path) -> list[ServerSide]:
    environment = QUIET | asked.environment
    if model.random and asked.peer in ("vllm", "sglang"):
        plugin = natural_weights.plugin_folder(scratch / "plugin")
        path = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = f"{plugin}{os.pathsep}{path}" if path else str(plugin)
        environment[natural_weights.GAIN] = str(RESIDUAL_GAIN * (2 * model.layers) ** -0.5)
    return [
        ServerSide(asked.peer, name, _peer(model, asked, flags), environment, model.random)
        for name, flags in asked.flags.items()
    ]


def _peer(
    model: ServedModel, asked: PeerSettings, flags: Sequence[str]
) -> Callable[[int, bool, int], Sequence[str]]:
    folder = str(model.folder)
    starts = {
        "vllm": ["-m", "vllm.entrypoints.cli.main", "serve", folder],
        "sglang": ["-m", "sglang.launch_server", "--model-path", folder],
    }

    def command(port: int, prefix_cache: bool, most: int) -> list[str]:
        if asked.peer == "command":
            words = shlex.split(asked.peer_command or "")
            named = {"model": folder, "port": str(port)}
            return [*(_filled(word, named) for word in words), *flags]
        dummy = ["--load-format", "dummy"] if model.random else []
        cache = [] if prefix_cache else [CACHE_OFF[asked.peer]]
        where = ["--host", "127.0.0.1", "--port", str(port)]
        return [asked.peer_python, *starts[asked.peer], *dummy, *where, *cache, *flags]

    return command


def _filled(word: str, named: dict[str, str]) -> str:
    """Braces with other names are unchanged: flags may contain JSON."""
    for name, value in named.items():
        word = word.replace("{" + name + "}", value)
    return word
