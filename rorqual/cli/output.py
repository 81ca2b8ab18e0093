"""Files that a command writes: refused before the work where they cannot be written, and written
whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from rorqual.config.whole_file import write_whole
from rorqual.errors import ConfigError, WriteError

HERE = Path("-")  # of files that may also be shown in the terminal


def checked_output(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """The callback of an option that names a file to write, or several."""
    for path in value if isinstance(value, list | tuple) else (value,):
        if path is not None and path != HERE:
            check_output(path, parameter.opts[0])
    return value


def check_output(path: Path, flag: str) -> None:
    """Raises ConfigError where a file cannot be written. Its folder must be there: a missing one
    is rather a mistake in the path."""
    try:
        reason = _obstacle(path)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise ConfigError(f"{flag}={str(path)!r} cannot be written: {reason}")


def check_chart(path: Path) -> None:
    """The same of --chart, which names files but for their endings."""
    check_output(path.parent / f"{path.name}.png", "--chart")


def _obstacle(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():  # a device or a pipe
        return None if os.access(path, os.W_OK) else "permission denied"
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}"
    with tempfile.TemporaryFile(dir=folder):  # raises OSError where none can be made
        return None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises WriteError for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from None


def write_output(path: Path, text: str) -> None:
    with writing(path):
        write_whole(path, text)
