"""How often the prefix cache hashes pages."""

from __future__ import annotations

from typing import Any

import pytest

from rorqual.cache import prefix


def counted_keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that are computed from now on."""
    computed: list[bytes] = []
    key_after = prefix.PrefixCache.key_after
    extend_keys = prefix.extend_keys

    def counted(self: prefix.PrefixCache, *given: Any) -> bytes:
        computed.append(key_after(self, *given))
        return computed[-1]

    def extended(keys: list[bytes], *given: Any) -> None:
        before = len(keys)
        extend_keys(keys, *given)
        computed.extend(keys[before:])

    monkeypatch.setattr(prefix.PrefixCache, "key_after", counted)
    monkeypatch.setattr(prefix, "extend_keys", extended)
    return computed
