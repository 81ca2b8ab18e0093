"""Small files below the cache folder that hold what an earlier start found out, so that later ones
need not; named by a digest of all that it depends on."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from rorqual.config.whole_file import write_whole

MAX_BYTES = 1 << 20  # of a file; all are far shorter


def digest(given: object) -> int:
    """63 bits, to fit an int64 tensor; the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(given).encode()).digest()[:8], "big") >> 1


def read(path: Path) -> str:
    """The file's text; empty where it is missing or longer than MAX_BYTES."""
    try:
        text = path.read_text() if path.stat().st_size <= MAX_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""
    return text


def write(path: Path, text: str) -> bool:
    """Atomic, also with concurrent writers. False where writing fails."""
    try:
        write_whole(path, text)
    except OSError:
        return False
    return True


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but so many files; others may be doing the same."""
    with suppress(OSError):
        found = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in found[count:]:
            path.unlink(missing_ok=True)
