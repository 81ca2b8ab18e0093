"""Limits of one request, and of the whole server: every number in one place, each with its flag."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from rorqual.config.option import MOST_SECONDS, check_options, option
from rorqual.text.grammar_limits import GrammarLimits

# seconds after `patience` at which a body still arriving is cut off without a response
BODY_GRACE = 10.0

_limit = partial(option, group="Limits")

GUESS_SECONDS = 60.0  # in which an address may try `wrong_keys` wrong keys
MAX_GUESSERS = 10_000  # addresses remembered
MAX_REQUEST_ID_LENGTH = 128  # characters of a caller's X-Request-Id
LARGE_BODIES = 4 << 20  # bytes of bodies after which freed memory is returned to the system,
TRIM_SECONDS = 5.0  # a few times, this far apart


@dataclass(frozen=True)
class ServerLimits:
    body: int = _limit(4 << 20, "Bytes of a request's body.", flags=("--max-body-bytes",), least=1)
    headers: int = _limit(
        64 << 10,
        "Bytes of all of a request's header lines.",
        flags=("--max-header-bytes",),
        least=1,
    )
    n: int = _limit(32, "Completions of one prompt.", flags=("--max-n",), least=1)
    choices: int = _limit(256, "Completions of one request.", flags=("--max-choices",), least=1)
    logprobs: int = _limit(20, "Most likely tokens to list.", flags=("--max-logprobs",), least=1)
    prompt_logprobs: int = _limit(
        500_000,
        "Log probabilities of prompts in one request: tokens times one more than the likely ones.",
        flags=("--max-prompt-logprobs",),
        least=1,
    )
    tools: int = _limit(128, "Functions of one request.", flags=("--max-tools",), least=1)
    waiting: int = _limit(
        1024,
        "Sequences that may wait, beyond those that run; beyond, 429.",
        flags=("--max-waiting",),
        least=0,
    )
    client_sequences: int = _limit(
        0,
        "Sequences that one client (API key, else address) may have open; 0 is no limit.",
        least=0,
    )
    client_tokens: int = _limit(
        0,
        "Tokens of one client's open sequences, prompt and answer as far as max_tokens says; 0 is "
        "no limit.",
        least=0,
    )
    timeout: float = _limit(
        600.0,
        "Seconds a request may take.",
        flags=("--request-timeout",),
        above=0,
        most=MOST_SECONDS,
    )
    drain: float = _limit(
        30.0,
        "Seconds open requests have after SIGTERM.",
        flags=("--drain-seconds",),
        least=0,
        most=MOST_SECONDS,
    )
    buffered: int = _limit(
        4096,
        "Tokens kept for a slow reader before its request is cancelled.",
        flags=("--max-buffered-tokens",),
        least=1,
    )
    patience: float = _limit(
        30.0,
        "Seconds a client has to send each request.",
        flags=("--client-seconds",),
        above=0,
        most=MOST_SECONDS,
    )
    wrong_keys: int = _limit(
        20,
        "Wrong API keys that one address may try in a minute; beyond, 429 for it.",
        flags=("--max-wrong-keys",),
        least=1,
    )
    unknown_fields: str = _limit(
        "ignore",
        "Fields of a completion's body that are not known: ignore (the answer's header "
        "x-rorqual-ignored names them) or refuse.",
        choices=("ignore", "refuse"),
    )
    grammar: GrammarLimits = field(default_factory=GrammarLimits)

    def __post_init__(self) -> None:
        check_options(self)
