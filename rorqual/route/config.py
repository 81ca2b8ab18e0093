"""How to route: addresses, servers, policy, time limits. Needs nothing of the extra `route`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from rorqual.config.option import MOST_SECONDS, check_options, option
from rorqual.errors import ConfigError
from rorqual.registry.address import etcd_address

POLICIES = ("power_of_two", "least_loaded", "round_robin", "prefix")
ROLES = ("replica", "prefill", "decode")
MAX_SERVERS = 1024

_servers = partial(option, group="Servers")
_router = partial(option, group="Router")
_time = partial(option, group="Time limits", most=MOST_SECONDS)
_limits = partial(option, group="Limits")


@dataclass(frozen=True)
class RouteConfig:
    """Times in seconds and sizes in bytes, unless the name says otherwise."""

    replicas: tuple[str, ...] = _servers(
        (),
        "URL of a server that computes prompts and answers; may be repeated.",
        flags=("--replica",),
    )
    prefill: tuple[str, ...] = _servers(
        (), "URL of a server started with --role prefill (or both); may be repeated."
    )
    decode: tuple[str, ...] = _servers(
        (), "URL of a server started with --role decode (or both); may be repeated."
    )
    host: str = _router("127.0.0.1", "Address to listen on.")
    port: int = _router(8080, "0 takes a free one.", least=0, most=65535)
    policy: str = _router(
        "power_of_two",
        "power_of_two: of two drawn servers the one with fewer requests; least_loaded; "
        "round_robin; prefix: where the longest beginning of the prompt went last, unless that "
        "server has a quarter more requests than the average.",
        choices=POLICIES,
    )
    first_token: str = _router(
        "prefill",
        "Who sends the first token of a stream whose prompt a prefill server computes: prefill "
        "(that server, where it can), or decode (the server that answers, once it has the pages).",
        choices=("prefill", "decode"),
    )
    admin_secret_file: str | None = _router(
        None,
        "A file with the secret for /admin (register, drain, leave). Without it there are no "
        "such routes.",
    )
    otlp_endpoint: str | None = _router(
        None,
        "http://HOST:4318 of an OpenTelemetry collector that spans of requests are sent to (OTLP "
        "over HTTP); needs rorqual[otel].",
    )
    registry: str | None = _router(
        None,
        "etcd://HOST:PORT[,HOST:PORT][/PREFIX] where servers are found that registered there "
        "(`rorqual serve --register`); needs --admin-secret-file.",
    )
    health_interval: float = _time(1.0, "Seconds between two looks at a server's /health.", above=0)
    health_timeout: float = _time(2.0, "Seconds that /health may take.", above=0)
    health_failures: int = _time(
        2, "Looks in a row without an answer after which a server is down.", at_least_one=True
    )
    connect_timeout: float = _time(5.0, "Seconds that a connection may take.", above=0)
    stall_timeout: float = _time(
        5.0,
        "Seconds of silence after which a stream of a server that is down counts as lost.",
        above=0,
    )
    resume_wait: float = _time(
        30.0, "Seconds that a request whose server died waits for another one.", least=0
    )
    prefill_timeout: float = _time(
        60.0, "Seconds that a prefill server may take for a prompt.", least=0
    )
    reader_timeout: float = _time(
        60.0,
        "Seconds that a client may take nothing of its answer before the request ends.",
        above=0,
    )
    drain_timeout: float = _time(30.0, "Seconds that open requests have after SIGTERM.", least=0)
    breaker_seconds: float = _time(
        10.0,
        "How long a server that failed --breaker-failures requests in a row gets none.",
        least=0,
    )
    breaker_failures: int = _limits(5, "See --breaker-seconds.", at_least_one=True)
    tries: int = _limits(3, "Servers that are tried for a request in a row.", at_least_one=True)
    resumes: int = _limits(8, "Times that a stream goes on elsewhere.", least=0)
    resume_tokens: int = _limits(
        131_072, "Tokens of a stream that are kept; one with more cannot go on elsewhere.", least=0
    )
    max_in_flight: int = _limits(4096, "Requests at once; more get 503.", at_least_one=True)
    max_body_bytes: int = _limits(32 << 20, "Bytes of a request's body.", at_least_one=True)
    max_held_bytes: int = _limits(
        1 << 30,
        "Bytes of all open requests' bodies, and of answers that do not stream, until they are "
        "sent; more bodies get 503.",
        at_least_one=True,
    )
    max_answer_bytes: int = _limits(
        256 << 20, "Bytes of an answer that does not stream.", at_least_one=True
    )
    prefill_from: int = _limits(
        512, "Bytes of prompt from which on it is worth a prefill server of its own.", least=0
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.registry is not None:
            etcd_address(self.registry)
            if self.admin_secret_file is None:
                raise ConfigError("registry needs admin_secret_file: it proves who may join")
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError("prefill and decode servers need each other; name both, or replicas")
        if not (self.replicas or self.decode or self.admin_secret_file):
            raise ConfigError(
                "no server is named; accepted: --replica URL, --prefill URL with --decode URL, or "
                "--admin-secret-file FILE for servers that register"
            )
        for url in (*self.replicas, *self.prefill, *self.decode):
            server_url(url)

    def secret(self) -> str | None:
        """The admin routes' secret, read from its file."""
        if self.admin_secret_file is None:
            return None
        try:
            found = Path(self.admin_secret_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"admin_secret_file={self.admin_secret_file!r} cannot be read: {error}"
            ) from None
        if len(found) < 16:
            raise ConfigError("admin_secret_file holds fewer than 16 characters")
        return found


def server_url(url: str) -> str:
    """The address without /v1 and a slash at its end. Raises ConfigError."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        known = bool(parts.hostname and parts.hostname.encode("idna")) and parts.port != 0
    except ValueError:  # a port out of range, or an invalid host name
        known = False
    if not known or parts.scheme not in ("http", "https") or parts.query:
        raise ConfigError(f"{url!r} is no address of a server; accepted: http://HOST:PORT")
    return base
