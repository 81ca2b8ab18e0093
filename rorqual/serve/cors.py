"""Cross-origin requests: which origins' pages a browser allows to call the server. Needs nothing of
the extra `serve` until an app is wrapped."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from rorqual.config.option import option
from rorqual.errors import ConfigError

ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.IGNORECASE)
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # of HTTP: names of methods and headers
EXPOSED = ("retry-after", "x-request-id", "x-rorqual-ignored")

_cors = partial(option, group="Cross-origin requests")


@dataclass(frozen=True)
class CorsConfig:
    """Off without origins. A value may also be a JSON list, as vLLM's flags take it."""

    allowed_origins: tuple[str, ...] = _cors(
        (),
        "An origin whose pages may ask this server, as https://host:port, or * for all; may be "
        "repeated. None if left out.",
    )
    allow_credentials: bool = _cors(False, "Such pages may send cookies; not with origin *.")
    allowed_methods: tuple[str, ...] = _cors(
        (ANY,), "A method that such pages may use; may be repeated."
    )
    allowed_headers: tuple[str, ...] = _cors(
        (ANY,), "A header that such pages may send; may be repeated."
    )

    def __post_init__(self) -> None:
        for name, form in (
            ("allowed_origins", ORIGIN),
            ("allowed_methods", TOKEN),
            ("allowed_headers", TOKEN),
        ):
            values = _listed(name, getattr(self, name))
            object.__setattr__(self, name, values)
            for value in values:
                if value != ANY and not form.fullmatch(value):
                    takes = "scheme://host:port" if form is ORIGIN else "a name"
                    raise ConfigError(f"{name}: {value!r} is none; accepted: {takes}, or *")
        if self.allow_credentials and not self.allowed_origins:
            raise ConfigError("allow_credentials has no effect without allowed_origins")
        if self.allow_credentials and ANY in self.allowed_origins:
            raise ConfigError(
                "allow_credentials with allowed_origins * would let every page act in its "
                "reader's name; name the origins"
            )


def _listed(name: str, given: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for value in given:
        if not value.startswith("["):
            found.append(value)
            continue
        try:
            several = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value!r} is not valid JSON: {error}") from None
        if not all(isinstance(one, str) for one in several):
            raise ConfigError(f"{name}={value!r} is no list of strings")
        found.extend(several)
    return tuple(found)


def with_cors(app: Any, config: CorsConfig) -> Any:
    """The app wrapped in middleware that answers preflights and adds the headers. It must be
    outermost: a preflight carries no API key, and errors need the headers too."""
    if not config.allowed_origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_credentials=config.allow_credentials,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        expose_headers=EXPOSED,
    )
