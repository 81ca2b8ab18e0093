"""<think> apart from the answer, cut anywhere."""

from __future__ import annotations

import pytest

from rorqual.text.reasoning import Reasoning


def split(inside: bool, pieces: list[str]) -> tuple[str, str]:
    reader = Reasoning(inside)
    parts = [*(reader.push(piece) for piece in pieces), reader.flush()]
    return "".join(thought for thought, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>a b</think>c", ("a b", "c")),
        (False, "<think>\na\n\nb\n</think>\n\nc\n", ("a\n\nb", "c\n")),
        (False, "\n<think>a</think>", ("a", "")),
        (False, "no thought <think>here</think>", ("", "no thought <think>here</think>")),
        (False, "<thin", ("", "<thin")),
        (False, "<thinking> aloud", ("", "<thinking> aloud")),
        (False, "", ("", "")),
        (False, "  indented", ("", "  indented")),
        (False, "<think>never ends </thin", ("never ends </thin", "")),
        (True, "a</think>b", ("a", "b")),
        (True, "\na\n</think>\n\nb", ("a", "b")),
        (True, "a < b </think>x</think>", ("a < b ", "x</think>")),
        (True, "a only", ("a only", "")),
    ],
)
def test_every_cut_gives_the_same(inside: bool, text: str, expected: tuple[str, str]):
    assert split(inside, [text]) == expected
    for cut in range(1, len(text)):
        assert split(inside, [text[:cut], text[cut:]]) == expected
    assert split(inside, list(text)) == expected
