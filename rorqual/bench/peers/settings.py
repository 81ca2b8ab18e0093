"""What a comparison of servers is asked for. Imports little: the command line reads the options
whenever it starts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rorqual.bench.peers.rows import DEFAULT_ROWS, Row, parse_rows
from rorqual.config.option import check_options, option
from rorqual.errors import ConfigError

_peer = partial(option, group="The peer")
_ours = partial(option, group="Ours")
_rows = partial(option, group="Rows")
_call = partial(option, group="The call")

DEFAULT = "default"
# the most important settings, in the engines' own names, in addition to their defaults
PRESETS: dict[str, dict[str, str]] = {
    "vllm": {
        DEFAULT: "",
        "seqs-256": "--max-num-seqs 256",
        "tokens-16384": "--max-num-batched-tokens 16384",
    },
    "sglang": {
        DEFAULT: "",
        "seqs-1024": "--max-running-requests 1024",
        "tokens-16384": "--chunked-prefill-size 16384 --max-prefill-tokens 16384",
    },
    "command": {DEFAULT: ""},
    "none": {},
}


@dataclass(frozen=True)
class PeerSettings:
    """The servers, the rows, and time limits."""

    peer: str = _peer(
        "vllm",
        "vllm, sglang, command (see --peer-command), or none to measure ours alone.",
        choices=tuple(PRESETS),
    )
    peer_settings: tuple[str, ...] = _peer(
        (DEFAULT,),
        "How the peer is started: default, seqs-256, tokens-16384 (vllm), seqs-1024, tokens-16384 "
        "(sglang), or NAME=FLAGS; may be repeated.",
    )
    peer_command: str | None = _peer(
        None, "For --peer command: how it is started, with {model} and {port} in it."
    )
    peer_python: str = _peer("python3", "The interpreter that has vLLM or SGLang.")
    peer_env: tuple[str, ...] = _peer(
        (), "NAME=VALUE in the peer's environment, say PYTHONPATH; may be repeated."
    )
    our_options: str = _ours("", "Further flags of rorqual serve, in one string.")
    offline: int | None = _ours(
        None,
        "Also measure steps of so many requests without a server, for the ratio of served steps.",
        at_least_one=True,
    )
    rows: str = _rows(DEFAULT_ROWS, "IN/OUT@CONCURRENCY,..., prefix@64, poisson@70.")
    waves: int | None = _rows(
        None,
        "Requests of a closed row, as a multiple of its concurrency; 3, 2 from 64 on and 1 from "
        "512 on if left out.",
        at_least_one=True,
    )
    seconds: float = _rows(
        60.0, "Of a row: after so long nothing more is sent; how long requests come at a rate."
    )
    prefix_cache: str = _rows(
        "rows",
        "rows: off but for shared prefixes, which takes two starts of each server where both are "
        "asked for; on: for all rows; off: for none.",
        choices=("rows", "on", "off"),
    )
    temperature: float = _rows(0.0, "0 is greedy.")
    layers: int | None = _call(
        None,
        "Cut a shape to this many layers.",
        flags=("--num-layers", "--layers"),
        at_least_one=True,
    )
    results: Path = option(
        Path("peers.jsonl"), "The file that rows are added to.", group="The call"
    )
    again: bool = _call(False, "Measure also what the file has a pair of already.")
    table: bool = _call(False, "Measure nothing: show what the file has.")
    best: bool = _call(False, "Show the peer's best settings for each row, not each settings.")
    chart: Path | None = option(
        None,
        "PATH.png and PATH.html: a Pareto chart of the closed rows of most concurrencies.",
        group="The call",
    )
    start_seconds: float = _call(420.0, "That a server may take to get ready.")
    budget: float = _call(570.0, "Seconds of the whole call; rows that do not fit are left.")
    commit: str | None = _call(
        None, "Of ours, for the file, where no repository says it.", env="RORQUAL_COMMIT"
    )
    logs: Path | None = option(None, "A folder to keep the servers' logs in.", group="The call")

    def __post_init__(self) -> None:
        check_options(self)
        if self.peer == "command" and "{port}" not in (self.peer_command or ""):
            raise ConfigError("--peer command needs --peer-command with {port} in it")
        if min(self.seconds, self.start_seconds, self.budget) <= 0:
            raise ConfigError("--seconds, --start-seconds and --budget; accepted: above 0")

    @property
    def wanted(self) -> list[Row]:
        return parse_rows(self.rows)

    @property
    def flags(self) -> dict[str, list[str]]:
        """Of the peer, by the settings' names."""
        known = PRESETS[self.peer]
        found: dict[str, list[str]] = {}
        for item in self.peer_settings if known else ():
            name, equals, text = item.partition("=")
            if not equals and name not in known:
                accepted = f"{', '.join(known)}, or NAME=FLAGS"
                raise ConfigError(f"peer_settings={item!r}; accepted: {accepted}")
            found[name] = shlex.split(text if equals else known[name])
        return found

    @property
    def environment(self) -> dict[str, str]:
        pairs = [item.partition("=") for item in self.peer_env]
        if not all(name and equals for name, equals, _ in pairs):
            raise ConfigError("--peer-env takes NAME=VALUE")
        return {name: value for name, _, value in pairs}
