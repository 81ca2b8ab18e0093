"""The tracer of a process, by what its options and the environment say."""

from __future__ import annotations

import logging

from rorqual.config.otlp import check_otlp_endpoint, traces_url
from rorqual.errors import ConfigError
from rorqual.telemetry.spans import RequestTracer

log = logging.getLogger("rorqual.telemetry")


def start_tracer(given: str | None, service: str, version: str) -> RequestTracer:
    """One that makes no spans where nobody asks for any. given: --otlp-endpoint. Raises ConfigError
    where that is no URL, or is given and the extra is not installed; where the environment alone
    asks, which may be that of every program of a host, the log says so."""
    check_otlp_endpoint(given)
    url = traces_url(given)
    if url is None:
        return RequestTracer()
    try:
        from rorqual.telemetry.otlp import OtlpTracer
    except ModuleNotFoundError as error:
        missing = f"spans need the package {error.name!r}; install rorqual[otel]"
        if given is not None:
            raise ConfigError(missing) from None
        log.warning("no spans are exported: %s", missing)
        return RequestTracer()
    log.info("spans of requests are sent to %s", url)
    return OtlpTracer(url, service, version)
