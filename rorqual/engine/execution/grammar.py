"""What the sampler needs of a grammar: masks of allowed tokens, position by position. The
grammars themselves are injected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rorqual.request import StructuredOutput

if TYPE_CHECKING:
    from torch import Tensor


class Matcher(Protocol):
    """One request's state in its grammar."""

    def fill(self, mask: Tensor, row: int) -> None:
        """Write the tokens allowed next into mask[row]: int32 [rows, ceil(vocabulary / 32)] on
        the host, bit i % 32 of word i // 32."""

    def accept(self, token: int) -> bool:
        """Advance by a token; False, without advancing, where the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""

    @property
    def done(self) -> bool:
        """True once an end-of-sequence token was accepted: nothing may follow."""


class Grammars(Protocol):
    """Makes matchers. Compiling may take long, so servers prepare grammars off the engine's
    thread."""

    def matcher(self, structure: StructuredOutput) -> Matcher:
        """A fresh matcher. Raises RequestError where the structure cannot be compiled within the
        limits."""


class SharedGrammars(Grammars, Protocol):
    """Grammars that can be sent to other ranks, which compile nothing themselves."""

    def packed(self, structure: StructuredOutput) -> str:
        """The compiled form as text."""

    def vocabulary(self) -> str:
        """The tokenizer data needed to load any of them."""


def mask_words(vocab: int) -> int:
    """int32 words of one row of a mask."""
    return -(-vocab // 32)
