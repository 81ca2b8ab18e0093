"""Prompts of `bench serve` with exact token lengths, from a seed. `datasets.py` has prompts from
files.

Every generator takes a `Vocabulary` (ids or text, and the length of a text), a numpy Generator and
a count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rorqual.errors import ConfigError
from rorqual.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]
# conventions for --random-range-ratio
SYMMETRIC = "vllm"
UP_TO = "sglang"
TRIES = 8


@dataclass(frozen=True, eq=False)
class Prompt:
    """`content`: token ids, int32 [input_len], or text. Lengths in tokens; `at`: seconds after
    the start, if a trace says so."""

    content: Ids | str
    input_len: int
    output_len: int
    at: float | None = None


@dataclass(frozen=True)
class PromptLengths:
    """Tokens in and out. `convention` of the ratio r: vllm draws from [n(1-r), n(1+r)], sglang
    from [n r, n]; r = 0 is n exactly."""

    input_len: int = 1000
    output_len: int = 1000
    range_ratio: float = 0.0
    convention: str = SYMMETRIC

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise ConfigError(
                f"input_len={self.input_len}, output_len={self.output_len}; both must be at least 1"
            )
        if not 0 <= self.range_ratio <= 1 or (
            self.convention == SYMMETRIC and self.range_ratio == 1
        ):
            raise ConfigError(
                f"range_ratio={self.range_ratio}; accepted: 0 to 1 (below 1 with the vllm "
                "convention)"
            )
        if self.convention not in (SYMMETRIC, UP_TO):
            raise ConfigError(
                f"range_convention={self.convention!r}; accepted: {SYMMETRIC}, {UP_TO}"
            )

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        ins, outs = (
            self._uniform(rng, length, count) for length in (self.input_len, self.output_len)
        )
        return list(zip(ins, outs, strict=True))

    def _uniform(self, rng: np.random.Generator, length: int, count: int) -> list[int]:
        ratio = self.range_ratio
        low = length
        high = length
        if ratio and self.convention == SYMMETRIC:
            low = math.floor(length * (1 - ratio))
            high = math.ceil(length * (1 + ratio))
        elif ratio:
            low = math.floor(length * ratio)
        return rng.integers(max(1, low), max(1, high) + 1, size=count).tolist()


class Vocabulary:
    """The tokens prompts are drawn from. `as_text`: prompts become text whose length was
    verified by encoding it again; only words that the tokenizer finds again are used then.
    Otherwise prompts are token ids, any but special ones."""

    def __init__(self, folder: str | Path, as_text: bool, name: str | None = None):
        self.tokenizer = Tokenizer(folder)
        self.as_text = as_text
        self.name = name or str(folder)
        # what a server adds to a text, not to ids
        self.specials = self.tokenizer.raw.num_special_tokens_to_add(False)

    @cached_property
    def ids(self) -> Ids:
        pool = (
            self._words()
            if self.as_text
            else [i for i in range(self.size) if i not in self.tokenizer.special_ids]
        )
        if len(pool) < 16:
            raise ConfigError(
                f"the tokenizer {self.name} has {len(pool)} tokens that survive decoding and "
                "encoding; use token ids"
            )
        return np.asarray(pool, dtype=np.int32)

    @property
    def size(self) -> int:
        return self.tokenizer.raw.get_vocab_size(with_added_tokens=False)

    def _words(self) -> list[int]:
        """Tokens that are a space and letters, and that encoding finds again wherever they stand
        after another of their kind."""
        raw = self.tokenizer.raw
        ids = [i for i in range(self.size) if i not in self.tokenizer.special_ids]
        texts = raw.decode_batch([[i, i] for i in ids])
        likely = [
            (i, text)
            for i, text in zip(ids, texts, strict=True)
            if text.isascii() and text.replace(" ", "").isalpha()
        ]
        again = raw.encode_batch([text for _, text in likely], add_special_tokens=False)
        return [
            i
            for (i, text), found in zip(likely, again, strict=True)
            if found.ids == [i, i] and " " in text.strip()
        ]

    def draw(self, rng: np.random.Generator, length: int) -> Ids:
        """int32 [length], uniform over the pool."""
        return self.ids[rng.integers(0, len(self.ids), size=length)]

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False)) + self.specials

    def prompt(
        self,
        rng: np.random.Generator,
        lengths: tuple[int, int],
        prefix: Ids | None = None,
        at: float | None = None,
    ) -> Prompt:
        """A prompt of exactly lengths[0] tokens, the prefix included (and, in a text, what the
        server's tokenizer puts before it)."""
        input_len, output_len = lengths
        prefix = np.empty(0, np.int32) if prefix is None else prefix
        own = input_len - len(prefix) - (self.specials if self.as_text else 0)
        if own < 0 or input_len < 1:
            raise ConfigError(
                f"a prompt of {input_len} tokens cannot hold a prefix of {len(prefix)} and "
                f"{self.specials} special tokens"
            )
        if not self.as_text:
            return Prompt(np.concatenate([prefix, self.draw(rng, own)]), input_len, output_len, at)
        for _ in range(TRIES):
            text = self.tokenizer.decode(np.concatenate([prefix, self.draw(rng, own)]).tolist())
            if self.count(text) == input_len:
                return Prompt(text, input_len, output_len, at)
        raise ConfigError(
            f"no text of exactly {input_len} tokens found with the tokenizer {self.name}; "
            "use token ids"
        )


def random_prompts(
    vocabulary: Vocabulary, rng: np.random.Generator, count: int, lengths: PromptLengths
) -> list[Prompt]:
    return [vocabulary.prompt(rng, pair) for pair in lengths.draw(rng, count)]


@dataclass(frozen=True)
class PrefixGroups:
    """Prompts that share prefixes: `groups` prefixes of `prefix_len` tokens, each followed by
    `per_group` different questions."""

    groups: int = 64
    per_group: int = 16
    prefix_len: int = 2048

    def __post_init__(self) -> None:
        if min(self.groups, self.per_group, self.prefix_len) < 1:
            raise ConfigError(f"{self}: every number must be at least 1")


def shared_prefix_prompts(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    shape: PrefixGroups,
    lengths: PromptLengths,
    count: int | None = None,
) -> list[Prompt]:
    """In shuffled order. `lengths.input_len` is the question's: a prompt has prefix_len +
    input_len tokens. `count` cuts the list."""
    prefixes = [vocabulary.draw(rng, shape.prefix_len) for _ in range(shape.groups)]
    pairs = lengths.draw(rng, shape.groups * shape.per_group)
    order = rng.permutation(len(pairs))[:count]
    return [_grown(vocabulary, rng, prefixes[i // shape.per_group], pairs[i]) for i in order]


def _grown(
    vocabulary: Vocabulary, rng: np.random.Generator, prefix: Ids, pair: tuple[int, int]
) -> Prompt:
    return vocabulary.prompt(rng, (len(prefix) + pair[0], pair[1]), prefix)


def warm_up_prompts(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    like: Sequence[Prompt],
    count: int,
    longest: int = 32,
) -> list[Prompt]:
    """Other prompts of the same lengths as `like`, with short outputs, so that the run finds
    none of its own prompts in a prefix cache."""
    least = 1 + (vocabulary.specials if vocabulary.as_text else 0)
    chosen = [like[i % len(like)] for i in range(count)]
    return [
        vocabulary.prompt(rng, (max(least, one.input_len), min(longest, one.output_len)))
        for one in chosen
    ]
