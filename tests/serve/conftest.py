"""One server a session, with the bundled checkpoint, for every test that only asks it things."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

collect_ignore = []
if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("openai") is None:
    collect_ignore += ["http", "engines/test_pressure.py", "test_remote.py"]

MODEL = "rorqual-bundled"


@pytest.fixture(scope="session")
def profile_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="session")
def server(profile_dir: Path) -> Iterator[Any]:
    from tests.serve.running import start_server

    options = (
        "--dtype",
        "float32",
        "--max-num-seqs",
        "32",
        "--max-model-len",
        "512",
        "--record-expert-load",
        "--reasoning",
        "on",
        "--metrics-names",
        "both",
        "--profile-dir",
        str(profile_dir),
    )
    with start_server(
        *options, "--max-n", "8", "--max-body-bytes", "200000", "--max-regex-size", "512"
    ) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Any) -> Any:
    import openai

    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
