"""How this program logs: a record's message is one line, whatever a stranger's text holds."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

from rorqual.errors import escaped

# of the HTTP request on whose behalf a line is written
request_id: ContextVar[str] = ContextVar("request_id", default="")


class LineFormatter(logging.Formatter):
    """Characters that a terminal or a reader of lines would act on are escaped. A traceback keeps
    its lines, each indented: none can pass for a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        name = request_id.get()
        return escaped(super().formatMessage(record) + (f" [request {name}]" if name else ""))

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))


def log_to_stderr(form: str, level: int) -> None:
    """As logging.basicConfig: nothing changes where the root logger has a handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
