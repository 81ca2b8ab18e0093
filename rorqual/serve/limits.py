"""What one request may ask for, and what the server holds at once: every number in one place,
each with its flag."""

from __future__ import annotations

from dataclasses import dataclass, field

from rorqual.errors import ConfigError
from rorqual.text.grammar import GrammarLimits


@dataclass(frozen=True)
class ServerLimits:
    """body: bytes of a request; headers: bytes of all header lines; n and choices: completions
    of one prompt and of one request; logprobs: most likely tokens to list; tools: functions of
    one request; waiting: sequences beyond those that can run; timeout and drain: seconds;
    buffered: tokens kept for a reader who is slow; patience: seconds a client has to send its
    request."""

    body: int = 4 << 20
    headers: int = 64 << 10
    n: int = 32
    choices: int = 256
    logprobs: int = 20
    tools: int = 128
    waiting: int = 1024
    timeout: float = 600.0
    drain: float = 30.0
    buffered: int = 4096
    patience: float = 30.0
    grammar: GrammarLimits = field(default_factory=GrammarLimits)

    def __post_init__(self) -> None:
        for name in ("body", "headers", "n", "choices", "logprobs", "tools", "buffered"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range; accepted: at least 1"
                )
        for name in ("waiting", "drain"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range; accepted: at least 0"
                )
        for name in ("timeout", "patience"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range; accepted: more than 0 seconds"
                )
