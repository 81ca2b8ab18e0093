"""Where spans are sent: a flag, or OpenTelemetry's environment variables."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from rorqual.errors import ConfigError

PATH = "/v1/traces"


def check_otlp_endpoint(given: str | None) -> None:
    """Raises ConfigError."""
    if given is None:
        return
    try:
        parts = urlsplit(given)
        known = bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"otlp_endpoint={given!r} is no address of a collector; accepted: http://HOST:PORT, "
            f"or a whole URL as http://HOST:PORT{PATH}"
        )


def traces_url(given: str | None) -> str | None:
    """The URL that spans are posted to; None if tracing is off. given: the flag's value, which
    overrides the environment; PATH is added if it has no path."""
    if given is not None:
        return given if urlsplit(given).path.strip("/") else given.rstrip("/") + PATH
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none":
        return None
    whole = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    return whole or (base.rstrip("/") + PATH if base else None)
