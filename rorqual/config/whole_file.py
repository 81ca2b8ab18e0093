"""Atomic file replacement: a reader sees the old or the new file, even with several writers."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def write_whole(path: Path, data: str | bytes) -> None:
    """Creates the folder if needed. A new file has the mode that the umask leaves, one that is
    replaced keeps its own; so this is not for secrets. Raises OSError, and then leaves no temporary
    file."""
    content = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():  # a terminal, a pipe or a device
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))  # of a link the file that it names
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{os.urandom(8).hex()}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if target.exists():
                os.fchmod(handle, stat.S_IMODE(target.stat().st_mode))
            file.write(content)
        part.replace(target)
    except BaseException:
        part.unlink()
        raise
