"""Requests, sampling parameters and outputs: plain data, validated at construction, no torch."""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

from rorqual.config.option import option
from rorqual.errors import RequestError, quoted

MAX_LOGPROBS = 64
MAX_STOP = 64
MAX_N = 128
MAX_PRIORITY = 100
MAX_ALLOWED = 2**18
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_TRANSFER = 65_536  # characters of kv_transfer_params, as JSON
DEEPEST_TRANSFER = 8
MAX_COUNT = 2**31 - 1  # of tokens: what the sampler's tensors and the messages hold
GREEDY_TEMPERATURE = 1e-5


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # cancelled by the caller


def int64_array(tokens: Sequence[int]) -> array[int]:
    """A copy. Raises OverflowError where a token does not fit."""
    if not isinstance(tokens, array):
        try:  # a fifth of the time that `array` takes for a tuple
            return array("q", struct.pack(f"{len(tokens)}q", *tokens))
        except struct.error:
            pass  # `array` says what is wrong
    return array("q", tokens)


def _check(condition: bool, name: str, value: object, accepted: str) -> None:
    if not condition:
        raise RequestError(f"{name}={value!r} is out of range; accepted: {accepted}")


def _listed(name: str, value: object) -> tuple[Any, ...]:
    _check(value is None or isinstance(value, (list, tuple, set, frozenset)), name, value, "a list")
    return tuple(value or ())  # type: ignore[arg-type]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name}={value!r} must be a finite number")
    return float(value)


def check_object(name: str, value: object, characters: int, depth: int, largest: int) -> None:
    """Check a caller's JSON object: at most `characters` as JSON, nesting of `depth`, numbers up to
    `largest`."""
    _check(isinstance(value, Mapping), name, value, "an object")
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        part, level = waiting.pop()
        if isinstance(part, (Mapping, list, tuple)):
            if level > depth:
                raise RequestError(f"{name}: it nests deeper than {depth}; accepted: {depth}")
            inner = part.values() if isinstance(part, Mapping) else part
            waiting.extend((item, level + 1) for item in inner)
        elif isinstance(part, (int, float)) and not abs(part) <= largest:
            shown = quoted(str(part), "")
            raise RequestError(
                f"{name}: {shown} is too large a number; accepted: up to {largest:,}"
            )
    size = len(json.dumps(value, ensure_ascii=False))
    if size > characters:
        raise RequestError(
            f"{name}: it has {size} characters as JSON; accepted: at most {characters}"
        )


def check_transfer(given: object) -> None:
    # numbers: as large as messages between processes allow
    check_object("kv_transfer_params", given, MAX_TRANSFER, DEEPEST_TRANSFER, 2**63 - 1)


STRUCTURES = ("json_object", "json_schema", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True)
class StructuredOutput:
    """The structure required of the text. `value`: empty for json_object, the schema as JSON text,
    the regular expression, the choices as a JSON list of strings, a grammar in EBNF, or an xgrammar
    structural tag as JSON text."""

    kind: str
    value: str = ""

    def __post_init__(self) -> None:
        _check(self.kind in STRUCTURES, "kind", self.kind, ", ".join(STRUCTURES))
        _check(isinstance(self.value, str), "value", self.value, "text")


_sampling = partial(option, group="Sampling")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Names and defaults follow vLLM's SamplingParams; units are tokens and
    natural-log probabilities.

    seed None: a random one. The random number of a token depends only on (seed, position), so a
    seeded request is reproducible whatever else is in the batch. max_tokens None: as many as fit
    into the context, and into the cache if that is smaller.
    """

    n: int = 1
    temperature: float = _sampling(1.0, "0 is greedy.")
    top_p: float = _sampling(1.0, "Smallest set of most likely tokens that has this probability.")
    top_k: int = _sampling(0, "So many most likely tokens; 0 or -1 is off.")
    min_p: float = _sampling(0.0, "Tokens of at least this share of the likeliest's probability.")
    seed: int | None = _sampling(None, "The same seed gives the same text.")
    presence_penalty: float = _sampling(0.0, "Subtracted from the logits of tokens in the output.")
    frequency_penalty: float = _sampling(0.0, "Likewise, times how often they occur there.")
    repetition_penalty: float = _sampling(
        1.0, "Divides the logits of tokens in prompt and output, where they are above 0."
    )
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = _sampling(
        16, "Most tokens of the answer.", flags=("--max-tokens", "-n")
    )
    min_tokens: int = 0
    stop: str | Sequence[str] = _sampling((), "A string that ends the text; may be repeated.")
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # number of likely tokens listed for each prompt token
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured: StructuredOutput | None = None
    allowed_token_ids: Sequence[int] | None = None  # no other token is sampled
    # Banned words, as text, and as the token sequences they become (with_bad_words of
    # text/bad_words.py). The last token of a sequence is banned where the output ends with those
    # before it.
    bad_words: Sequence[str] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    truncate_prompt_tokens: int | None = None  # the last N; -1: leave room for max_tokens
    speculate: bool = True  # False: this request opts out of speculative decoding

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _listed("stop", stop))
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        bias = self.logit_bias or {}
        _check(isinstance(bias, Mapping), "logit_bias", bias, "a mapping from token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(bias))
        allowed = self.allowed_token_ids
        if allowed is not None:
            object.__setattr__(self, "allowed_token_ids", _listed("allowed_token_ids", allowed))
        object.__setattr__(self, "bad_words", _listed("bad_words", self.bad_words))
        words = _listed("bad_word_ids", self.bad_word_ids)
        words = tuple(_listed("bad_word_ids", word) for word in words)
        object.__setattr__(self, "bad_word_ids", words)
        self._check_ranges()
        self._check_lists()
        self._check_bans()
        self._check_structured()

    def _check_ranges(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            _number(name, getattr(self, name))
        for name in ("n", "top_k", "min_tokens"):
            _check(isinstance(getattr(self, name), int), name, getattr(self, name), "an integer")
        _check(1 <= self.n <= MAX_N, "n", self.n, f"1 to {MAX_N}")
        _check(0 <= self.temperature <= 100, "temperature", self.temperature, "0 to 100")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1")
        _check(
            0 <= self.top_k <= MAX_COUNT,
            "top_k",
            self.top_k,
            f"-1 or 0 (off), or 1 to {MAX_COUNT}",
        )
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _check(
            -2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "-2 to 2"
        )
        _check(
            -2 <= self.frequency_penalty <= 2,
            "frequency_penalty",
            self.frequency_penalty,
            "-2 to 2",
        )
        _check(
            0 < self.repetition_penalty <= 100,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0, up to 100",
        )
        _check(
            self.seed is None or (isinstance(self.seed, int) and -(2**63) <= self.seed < 2**63),
            "seed",
            self.seed,
            "a 64-bit integer",
        )
        tokens = self.max_tokens
        _check(
            tokens is None or (isinstance(tokens, int) and 1 <= tokens <= MAX_COUNT),
            "max_tokens",
            tokens,
            f"1 to {MAX_COUNT}, or None",
        )
        most = MAX_COUNT if tokens is None else tokens
        _check(
            0 <= self.min_tokens <= most, "min_tokens", self.min_tokens, f"0 to max_tokens={tokens}"
        )
        _check(
            self.n == 1 or not self.greedy,
            "n",
            self.n,
            "1 when temperature is 0: every sample would be the same",
        )

    def _check_lists(self) -> None:
        _check(len(self.stop) <= MAX_STOP, "stop", len(self.stop), f"at most {MAX_STOP} strings")
        _check(
            all(isinstance(text, str) and text for text in self.stop),
            "stop",
            self.stop,
            "strings that are not empty",
        )
        ids = self.stop_token_ids
        _check(
            len(ids) <= MAX_STOP and all(isinstance(i, int) and i >= 0 for i in ids),
            "stop_token_ids",
            ids,
            f"up to {MAX_STOP} token ids",
        )
        _check(
            self.detokenize or not self.stop,
            "stop",
            self.stop,
            "no stop strings when detokenize is False",
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(
                count is None or (isinstance(count, int) and 0 <= count <= MAX_LOGPROBS),
                name,
                count,
                f"0 to {MAX_LOGPROBS}, or None",
            )
        for token, bias in (self.logit_bias or {}).items():
            _check(isinstance(token, int) and token >= 0, "logit_bias", token, "token ids as keys")
            _check(-100 <= _number("logit_bias", bias) <= 100, "logit_bias", bias, "-100 to 100")

    def _check_bans(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None:
            accepted = f"1 to {MAX_ALLOWED} token ids, or None"
            _check(0 < len(allowed) <= MAX_ALLOWED, "allowed_token_ids", len(allowed), accepted)
            for token in allowed:
                right = isinstance(token, int) and token >= 0
                _check(right, "allowed_token_ids", token, "token ids")
        _check(
            len(self.bad_words) <= MAX_BAD_WORDS
            and all(isinstance(word, str) and word.strip() for word in self.bad_words),
            "bad_words",
            self.bad_words,
            f"up to {MAX_BAD_WORDS} strings of more than spaces",
        )
        words = self.bad_word_ids
        _check(
            len(words) <= 2 * MAX_BAD_WORDS
            and all(0 < len(word) <= MAX_BAD_WORD_TOKENS for word in words)
            and all(isinstance(i, int) and i >= 0 for word in words for i in word),
            "bad_word_ids",
            words,
            f"up to {2 * MAX_BAD_WORDS} sequences of 1 to {MAX_BAD_WORD_TOKENS} token ids",
        )
        kept = self.truncate_prompt_tokens
        _check(
            kept is None or (isinstance(kept, int) and (kept == -1 or 1 <= kept <= MAX_COUNT)),
            "truncate_prompt_tokens",
            kept,
            f"-1, 1 to {MAX_COUNT}, or None",
        )

    def kept_prompt(self, prompt_tokens: int, context: int) -> int:
        """How many of a prompt's last tokens are kept after truncation; context: of the model."""
        kept = self.truncate_prompt_tokens
        if kept is None:
            return prompt_tokens
        if kept == -1:
            kept = max(1, context - (self.max_tokens or 1))
        return min(prompt_tokens, kept)

    def _check_structured(self) -> None:
        """A grammar allows only end of sequence where its text ends: parameters that forbid it
        there, or continue after it, would leave no token to sample."""
        given = self.structured
        if given is not None:
            accepted = "a StructuredOutput, or None"
            _check(isinstance(given, StructuredOutput), "structured", given, accepted)
            only = "with structured output, which ends by itself"
            _check(not self.ignore_eos, "ignore_eos", self.ignore_eos, f"False {only}")
            _check(not self.min_tokens, "min_tokens", self.min_tokens, f"0 {only}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def filters(self) -> bool:
        """True with top-k, top-p or min-p: the sampler must find a threshold."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def needs_host(self) -> bool:
        """True where a step cannot be sampled by a fixed sequence of device operations."""
        return self.edits_logits or self.logprobs is not None or self.structured is not None

    @property
    def edits_logits(self) -> bool:
        """True where logits are changed before sampling."""
        penalties = (
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )
        return bool(penalties or self.logit_bias or self.min_tokens or self.bans)

    @property
    def bans(self) -> bool:
        """True where some token is banned, always or after certain others."""
        return self.allowed_token_ids is not None or bool(self.bad_word_ids)


@dataclass(frozen=True)
class Request:
    """One sequence to continue. `eos_token_ids` comes from the model; `arrival` is seconds on a
    monotonic clock. `client`, and `user` within it: the accounts for fair scheduling
    (engine/scheduling/waiting_queue.py). `priority`: lower numbers come first.
    `kv_transfer_params`: where a prompt's pages are fetched from or offered; stored here without
    effect. `outputs`: the first output tokens, where generation started elsewhere; it continues
    after them as if they had been sampled here."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival: float = 0.0
    cache_salt: str = ""
    client: str = ""
    user: str = ""
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kv_transfer_params is not None:
            check_transfer(self.kv_transfer_params)
        _check(
            isinstance(self.priority, int) and abs(self.priority) <= MAX_PRIORITY,
            "priority",
            self.priority,
            f"-{MAX_PRIORITY} to {MAX_PRIORITY}",
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens known before the first is sampled."""
        return self.prompt + self.outputs if self.outputs else self.prompt

    @cached_property
    def token_array(self) -> array[int]:
        """`tokens` as int64, made once to avoid conversions; must not be modified. Raises
        OverflowError where one does not fit."""
        return int64_array(self.tokens)

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether another engine will fetch the prompt's pages."""
        return bool((self.kv_transfer_params or {}).get("do_remote_decode"))

    @property
    def hands_over(self) -> bool:
        """Whether it ends with its first token, after which another engine continues it."""
        return self.goes_on_elsewhere and bool((self.kv_transfer_params or {}).get("first_token"))

    def transferred(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """The tokens whose pages are transferred between engines, all but the last of them: the
        prompt, and where the other engine sampled the first token, this too. outputs: the known
        tokens of the answer."""
        first = outputs[:1] if (self.kv_transfer_params or {}).get("first_token") else ()
        return (*self.prompt, *first) if first else self.prompt

    @property
    def stop_ids(self) -> frozenset[int]:
        ids = set(self.params.stop_token_ids)
        return frozenset(ids if self.params.ignore_eos else ids | set(self.eos_token_ids))


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of one token under the model's unmodified distribution; rank 1 is
    the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """drafted and accepted count speculative tokens by position in the draft; empty without
    speculation."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens per step with drafts to verify."""
        return 1 + sum(self.accepted) / self.drafted[0] if self.drafted else None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token
