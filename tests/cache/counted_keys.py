"""How often the prefix cache hashes pages."""

from __future__ import annotations

from typing import Any

import pytest

from rorqual.cache.prefix import PrefixCache


def counted_keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that are computed from now on."""
    computed: list[bytes] = []
    key_after = PrefixCache.key_after

    def counted(self: PrefixCache, *given: Any) -> bytes:
        computed.append(key_after(self, *given))
        return computed[-1]

    monkeypatch.setattr(PrefixCache, "key_after", counted)
    return computed
