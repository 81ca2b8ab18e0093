"""Typed errors. A user's mistake raises one of these with the offending value and the accepted
range; `assert` is for our own bugs."""

from __future__ import annotations


class RorqualError(Exception):
    """Base of every error a user can cause; the CLI prints it as one sentence and exits with its
    status."""

    status = 2


class ConfigError(RorqualError):
    """A model or engine configuration that is invalid or that this engine would compute wrongly."""


class LoadError(RorqualError):
    """A checkpoint that is damaged, incomplete, of the wrong shape, or that holds tensors nobody
    asked for."""


class RequestError(RorqualError):
    """A request that can never be served: impossible sampling parameters, an over-long prompt,
    an unknown token id."""


class BusyError(RorqualError):
    """Too much of the same waits already; later there may be room."""


class EngineError(RorqualError):
    """The engine can compute nothing more: one of its ranks died, hangs, or failed in a step."""


class ExpertsMissing(RorqualError):
    """No expert server that answers holds an expert that a step needs. A step can be tried again
    once one does."""


class CapacityError(RorqualError):
    """Not enough memory for the weights, or for the cache of even one request."""


class TargetError(RorqualError):
    """A server to be measured that does not answer, or not as an OpenAI-compatible server does."""


class WriteError(RorqualError):
    """Output that cannot be written any more: a full disk, or a folder that went away."""

    status = 1


ECHOED = 100  # characters of a caller's own text that an error says back


def escaped(text: str) -> str:
    """On one line, without characters that a terminal acts on."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quoted(text: str, mark: str = "'") -> str:
    """What a caller sent, to be said back or logged: on one line, and not all of a long text."""
    rest = f"... ({len(text)} characters)" if len(text) > ECHOED else ""
    return f"{mark}{escaped(text[:ECHOED])}{rest}{mark}"
