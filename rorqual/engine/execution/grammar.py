"""What the sampler needs of a grammar: masks of allowed tokens, position by position. The
grammars themselves are injected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rorqual.request import StructuredOutput

if TYPE_CHECKING:
    from torch import Tensor


class Matcher(Protocol):
    """One request's place in its grammar."""

    def fill(self, mask: Tensor, row: int) -> None:
        """Write the tokens allowed next into mask[row]: int32 [rows, ceil(vocabulary / 32)] on
        the host, bit i % 32 of word i // 32."""

    def accept(self, token: int) -> bool:
        """Move past a token; False, without moving, where the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""

    @property
    def done(self) -> bool:
        """True once the grammar has been told an end-of-sequence token: nothing may follow."""


class Grammars(Protocol):
    """Makes matchers; compiling may take long, so whoever serves requests prepares them off the
    engine's thread."""

    def matcher(self, structure: StructuredOutput) -> Matcher:
        """A fresh matcher. Raises RequestError where the structure cannot be compiled within the
        limits."""


class SharedGrammars(Grammars, Protocol):
    """Grammars that other ranks can have too: they compile nothing themselves."""

    def packed(self, structure: StructuredOutput) -> str:
        """The compiled form as text."""

    def vocabulary(self) -> str:
        """What it takes to read any of them."""


def mask_words(vocab: int) -> int:
    """int32 words of one row of a mask."""
    return -(-vocab // 32)
