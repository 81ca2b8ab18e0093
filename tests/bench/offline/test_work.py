"""What an offline benchmark runs is refused before a model is loaded where it can be, and the
prompts of a text have nothing in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rorqual import LLM
from rorqual.bench.offline.run import Report, make_prompts, run
from rorqual.bench.offline.work import OfflineWork
from rorqual.cli.app import app
from rorqual.errors import ConfigError
from rorqual.models.hub import BUNDLED
from rorqual.text.tokenizer import Tokenizer

PAGE = 16


def text_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text)
    return path


def wrong(tmp_path: Path) -> list[tuple[dict[str, Any], str]]:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("où".encode("latin-1"))
    return [
        ({"repeats": 0}, "repeats=0 must be an integer of at least 1"),
        ({"groups": 0}, "groups=0 must be an integer of at least 1"),
        ({"groups": -1}, "groups=-1 must be an integer of at least 1"),
        ({"prompt": 0}, "prompt=0 must be an integer of at least 1"),
        ({"output": 0}, "output=0 must be an integer of at least 1"),
        ({"data": tmp_path / "none"}, "none' cannot be read as text: No such file or directory"),
        ({"data": tmp_path}, "cannot be read as text: Is a directory"),
        ({"data": latin}, "latin.txt' cannot be read as text: 'utf-8' codec"),
    ]


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for given, words in wrong(tmp_path):
        with pytest.raises(ConfigError) as caught:
            OfflineWork(**given)
        assert words in str(caught.value)


def test_it_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr("rorqual.cli.bench.load", lambda *given, **more: loaded.append(given))
    flags = {"prompt": "--prompt-len", "output": "--output-len"}
    for given, words in wrong(tmp_path):
        ((name, value),) = given.items()
        done = CliRunner().invoke(
            app, ["bench", "offline", flags.get(name, f"--{name}"), str(value)]
        )
        assert isinstance(done.exception, ConfigError), done.output
        assert words in str(done.exception)
    assert not loaded


def test_pieces_of_a_text_are_whole_and_do_not_overlap(tmp_path: Path) -> None:
    work = OfflineWork(prompt=20, data=text_of(tmp_path, "any"))
    for size in (100, 101, 119, 120, 180, 1000):
        found = work.pieces(range(size), 5, PAGE)
        assert [len(piece) for piece in found] == [20] * 5
        tokens = [token for piece in found for token in piece]
        assert len(set(tokens)) == len(tokens)
        assert max(tokens) < size
    assert [piece[0] for piece in work.pieces(range(1000), 5, PAGE)] == [0, 196, 392, 588, 784]
    assert work.pieces(range(20), 1, PAGE) == [list(range(20))]


def test_a_text_that_is_too_short_says_what_it_has_and_needs(tmp_path: Path) -> None:
    path = text_of(tmp_path, "any")
    for size, count in ((1019, 51), (19, 1), (0, 1)):
        with pytest.raises(ConfigError) as caught:
            OfflineWork(prompt=20, data=path).pieces(range(size), count, PAGE)
        assert str(caught.value) == (
            f"data={str(path)!r} holds {size:,} tokens; accepted: at least {20 * count:,}, for "
            f"{count} different prompts of 20"
        )


def test_a_text_that_repeats_itself_would_be_found_in_the_cache(tmp_path: Path) -> None:
    repeated = [*range(40)] * 3
    with pytest.raises(ConfigError, match="of 3 prompts of 40 tokens some begin with the same 16"):
        OfflineWork(prompt=40, data=text_of(tmp_path, "any")).pieces(repeated, 3, PAGE)
    # no page of so short a prompt is ever found
    short = OfflineWork(prompt=PAGE, data=text_of(tmp_path, "any"))
    assert short.pieces([*range(PAGE)] * 3, 3, PAGE) == [list(range(PAGE))] * 3


def test_the_largest_concurrency_is_asked_for_before_the_first_is_measured(tmp_path: Path) -> None:
    text = "The old gentleman looked at her and said that it was a truth."
    path = text_of(tmp_path, text)
    held = len(Tokenizer(BUNDLED).encode(text, add_special_tokens=False))
    llm = LLM(max_num_seqs=4, max_model_len=64, num_pages=16, device="cpu")
    work = OfflineWork(prompt=held // 2, output=2, repeats=1, data=path)
    assert len(make_prompts(llm, 2, work)) == 2
    report = Report()
    with pytest.raises(ConfigError, match=f"holds {held} tokens; accepted: at least "):
        run(report, llm, [1, 2, 3], work)
    assert not report.rows
    llm.engine.close()
