"""By which number hosts are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from rorqual.config import host_memory


def test_a_boot_has_one_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the kernel names no boot; it fits into an int64 tensor."""
    found = set()
    for text in ("a boot\n", "another\n", None):
        boot = tmp_path / "boot_id"
        boot.unlink(missing_ok=True)
        if text is not None:
            boot.write_text(text)
        monkeypatch.setattr(host_memory, "BOOT_ID", boot)
        number = host_memory.host_number()
        assert 0 <= number < 2**56
        assert host_memory.host_number() == number
        found.add(number)
    assert len(found) == 3
