"""A request's span as router and server see it, and the one that stands there while nobody asks for
spans. Needs nothing of the extra `otel`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]


class SpanKind(Enum):
    """Numbers are OTLP's."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class RequestSpan:
    """Something that takes time on a request's way; this one tells nobody. Times are seconds on
    the monotonic clock, which all processes of a machine share; None is now.

    recording: whether anything of it will be exported, so that attributes are worth making."""

    recording = False

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        start: float | None = None,
    ) -> RequestSpan:
        return self

    def set(self, attributes: Attributes) -> None:
        """More of them."""

    def fail(self, kind: str, why: str = "") -> None:
        """What it stands for went wrong. kind: one of few words, for `error.type`."""

    def end(self, at: float | None = None) -> None:
        """Once; later changes are lost."""

    def carry(self, headers: dict[str, str]) -> dict[str, str]:
        """Headers of a request on its behalf: what the other side makes is its child."""
        return headers


class RequestTracer:
    """Makes spans of requests that come in; this one makes none."""

    active = False

    def start(
        self, name: str, headers: Mapping[str, str], attributes: Attributes | None = None
    ) -> RequestSpan:
        """headers: names in lower case. A `traceparent` among them says whose child it is."""
        return NO_SPAN

    def close(self) -> None:
        """Tells what is left, for a bounded time. From any thread."""


NO_SPAN = RequestSpan()
