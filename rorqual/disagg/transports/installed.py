"""Which transport libraries are installed. No torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from contextlib import suppress

from rorqual.disagg.transports.mooncake import PACKAGES as MOONCAKE_PACKAGES
from rorqual.disagg.transports.nixl import PACKAGES as NIXL_PACKAGES
from rorqual.errors import ConfigError

TCP = "tcp"
HANDLES = "handles"
# modules to import, and the distributions that provide them
LIBRARIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nixl": (NIXL_PACKAGES, ("nixl-cu12", "nixl-cu13")),
    "mooncake": (
        MOONCAKE_PACKAGES,
        ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    ),
}


def package_of(library: str) -> tuple[str, str]:
    """(module, version) of what is installed. Raises ConfigError."""
    modules, distributions = LIBRARIES[library]
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            return module, _version(distributions)
    raise ConfigError(
        f"kv_transport={library!r} needs the package {distributions[0]}, which is not installed: "
        f"pip install 'rorqual[{library}]'"
    )


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"
