"""Where a model is looked for: the bundled one, a published shape, a folder, the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from rorqual.errors import LoadError
from rorqual.models.hub import BUNDLED, SHAPES, model_folder


def test_names_and_folders(tmp_path: Path):
    assert model_folder(None) == BUNDLED
    assert model_folder("deepseek-v3") == SHAPES / "deepseek-v3"
    assert model_folder(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["./missing", "/no/such/model", "plainname", "a/b/c"])
def test_what_is_no_model_id_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rorqual.models.hub._fetch", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(LoadError, match="neither a folder"):
        model_folder(name)


def test_an_id_is_fetched_without_pickled_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked.update(repo=repo, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model_folder("owner/name") == tmp_path
    assert asked["repo"] == "owner/name"
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in asked["patterns"])


def test_no_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> str:
        raise OSError("connection refused\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(LoadError, match="could not be fetched") as caught:
        model_folder("owner/name")
    assert "\n" not in str(caught.value)
