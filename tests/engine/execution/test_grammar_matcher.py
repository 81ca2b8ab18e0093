"""Compiled grammars on their way to other ranks: each once, dropped by both sides alike."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("xgrammar")

from rorqual.engine.execution import grammar_matcher
from rorqual.engine.execution.grammar import mask_words
from rorqual.engine.execution.grammar_matcher import GrammarSender, ReceivedGrammars
from rorqual.models.hub import BUNDLED
from rorqual.request import StructuredOutput
from rorqual.text.grammar import XGrammars
from rorqual.text.grammar_limits import GrammarLimits

VOCAB = 4096


@pytest.fixture(scope="module")
def grammars():
    made = XGrammars.make(BUNDLED, VOCAB, (1,), GrammarLimits())
    yield made
    made.close()


def choice(word: str) -> StructuredOutput:
    return StructuredOutput("regex", word)


def first_mask(matcher) -> torch.Tensor:
    mask = torch.zeros(1, mask_words(VOCAB), dtype=torch.int32)
    matcher.fill(mask, 0)
    return mask


def test_a_grammar_goes_out_once_and_again_where_it_was_dropped(
    grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_matcher, "KEPT", 2)
    frames: list[bytes] = []
    sender = GrammarSender(frames.append)
    received = ReceivedGrammars()
    # frames by plan; the last but one names more than are kept
    expected = {"a": 1, "ab": 1, "aa": 0, "bcd": 2, "aba": 2}
    for words, count in expected.items():
        output = [choice(f"{word}+[x-z]{{2}}") for word in words]
        frames.clear()
        sender.send_missing(grammars, output)
        for frame in frames:
            received.receive(frame)
        for structure in output:
            assert torch.equal(
                first_mask(received.matcher(structure)), first_mask(grammars.matcher(structure))
            )
        received.used(output)
        assert len(frames) == count, words
        assert list(received.latest) == list(sender.sent)
        assert len(sender.sent) <= 2


def test_what_arrived_follows_the_grammar(grammars) -> None:
    frames: list[bytes] = []
    sender = GrammarSender(frames.append)
    received = ReceivedGrammars()
    sender.send_missing(grammars, [choice("a")])
    received.receive(frames[0])
    matcher = received.matcher(choice("a"))
    here = grammars.matcher(choice("a"))
    allowed = [t for t in range(VOCAB) if first_mask(here)[0, t // 32] >> (t % 32) & 1]
    assert allowed
    assert matcher.accept(allowed[0])
    assert not matcher.accept(allowed[0])
    matcher.rollback(1)
    assert matcher.accept(allowed[0])
    assert matcher.accept(1)
    assert matcher.done
