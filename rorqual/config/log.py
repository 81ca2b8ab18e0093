"""Logging: a record's message is one line, even if it contains untrusted text."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

from rorqual.errors import escaped

# id of the HTTP request for which a line is logged
request_id: ContextVar[str] = ContextVar("request_id", default="")


class LineFormatter(logging.Formatter):
    """Escapes control characters and line breaks. Lines of a traceback are indented, so that none
    can be taken for a record."""

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
    """As logging.basicConfig: does nothing if the root logger has a handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
