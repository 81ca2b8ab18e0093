"""Files that are written whole: what is there afterwards, and with which mode."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rorqual.config.whole_file import write_whole


@pytest.fixture
def umask() -> Iterator[None]:
    """Not the usual one, which a fixed mode could be right for."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "new.json"
    write_whole(path, "{}\n")
    assert path.read_text() == "{}\n"
    assert mode(path) == 0o640
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("before", [0o600, 0o664])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, before: int) -> None:
    path = tmp_path / "old"
    path.write_text("old")
    path.chmod(before)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert mode(path) == before


def test_of_a_link_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    link = tmp_path / "link"
    link.symlink_to("file")
    for text in ("missing before", "there before"):
        write_whole(link, text)
        assert link.is_symlink()
        assert path.read_text() == text


def test_a_device_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(path, "words")
    assert os.read(reader, 100) == b"words"
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    with pytest.raises(OSError, match="No space left"):
        write_whole(Path("/dev/full"), "words")


def test_a_failure_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old"
    path.write_text("old")

    def refuse(self: Path, target: Path) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
