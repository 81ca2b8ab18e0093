"""Where tables are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def wide_console(width: int) -> Console:
    """The terminal; where the output goes to a file or a pipe, which has no width to fit into, of
    `width` columns."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=width)
