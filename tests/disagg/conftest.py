"""Expert servers in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rorqual.disagg.experts.server import ExpertServer, serve_experts
from tests.disagg.expert_caller import FLOAT, SECRET, Start


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(SECRET + b"\n")
    return str(path)


@pytest.fixture(scope="module")
def start(secret_file: str) -> Iterator[Start]:
    """Starts a server of the bundled model in this process."""
    made: list[ExpertServer] = []

    def begin(
        slots: str = "all",
        layers: str = "all",
        port: int = 0,
        max_rows: int = 4096,
        max_slots: int = 0,
        **options: Any,
    ) -> ExpertServer:
        server = serve_experts(
            None,
            {**FLOAT, **options},
            layers,
            slots,
            f"127.0.0.1:{port}",
            secret_file,
            max_rows,
            max_slots,
        )
        made.append(server)
        return server

    yield begin
    for server in made:
        server.close()
