"""Matchers of xgrammar's compiled grammars, and the transfer of these from rank 0 to other ranks.
xgrammar is imported on first use."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rorqual.engine.execution.grammar import SharedGrammars
from rorqual.request import StructuredOutput

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 128


class XMatcher:
    """One request's state in its grammar; see engine.grammar.Matcher. `compiled` is an
    xgrammar.CompiledGrammar."""

    def __init__(self, compiled: Any):
        import xgrammar

        self.matcher = xgrammar.GrammarMatcher(compiled)

    def fill(self, mask: Tensor, row: int) -> None:
        if not self.matcher.fill_next_token_bitmask(mask, row):
            mask[row].fill_(-1)  # everything is allowed

    def accept(self, token: int) -> bool:
        return not self.done and bool(self.matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)

    @property
    def done(self) -> bool:
        return bool(self.matcher.is_terminated())


class LRUGrammars(OrderedDict[StructuredOutput, Any]):
    """LRU cache of grammars. All ranks see the same steps, so they evict the same entries without
    communication."""

    def used(self, structures: Iterable[StructuredOutput]) -> None:
        """Called after a step with the structures of its new rows, in order. There may be more than
        KEPT of them."""
        for structure in structures:
            self.move_to_end(structure)
        while len(self) > KEPT:
            self.popitem(last=False)


class GrammarSender:
    """Rank 0's side: sends each compiled grammar before the step with its first request, and again
    after eviction."""

    def __init__(self, send: Callable[[bytes], None]):
        self.send = send
        self.sent = LRUGrammars()
        self.vocabulary_sent = False

    def send_missing(
        self, grammars: SharedGrammars, structures: Sequence[StructuredOutput]
    ) -> None:
        """`structures`: those of a step's new rows, in order."""
        for structure in structures:
            if structure not in self.sent:
                packed = grammars.packed(structure)
                vocabulary = None if self.vocabulary_sent else grammars.vocabulary()
                self.send(
                    json.dumps(
                        [structure.kind, structure.value, packed, vocabulary], separators=(",", ":")
                    ).encode()
                )
                self.vocabulary_sent = True
                self.sent[structure] = None
        self.sent.used(structures)


class ReceivedGrammars:
    """Another rank's side: see engine.grammar.Grammars. Nothing is compiled here."""

    def __init__(self) -> None:
        self.latest = LRUGrammars()
        self.info: Any = None

    def receive(self, data: bytes) -> None:
        import xgrammar

        kind, value, packed, vocabulary = json.loads(data)
        if vocabulary is not None:
            self.info = xgrammar.TokenizerInfo.deserialize_json(vocabulary)
        self.latest[StructuredOutput(kind, value)] = xgrammar.CompiledGrammar.deserialize_json(
            packed, self.info
        )

    def matcher(self, structure: StructuredOutput) -> XMatcher:
        # rank 0 sends a grammar before the step that needs it
        return XMatcher(self.latest[structure])

    def used(self, structures: Iterable[StructuredOutput]) -> None:
        """Called with the structures of a step's new rows, in order, once their matchers are
        made."""
        self.latest.used(structures)
