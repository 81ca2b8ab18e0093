"""Expert servers on a card, and an engine on the same card that calls them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM
from tests.disagg.expert_processes import ExpertProcess, write_secret
from tests.engine.mixed_batch import COMMON, TEXTS, params

OPTIONS: dict[str, Any] = {**COMMON, "device": "cuda"}


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_secret(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def servers(secret_file: str) -> Iterator[list[ExpertProcess]]:
    """Every expert has a holder if one of these ends."""
    made = [
        ExpertProcess(slots, secret_file, more=("--device", "cuda")) for slots in ("all", "all")
    ]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.kill()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM(**OPTIONS)
    try:
        return tokens(llm)
    finally:
        llm.engine.close()


@pytest.mark.parametrize("more", [{}, {"micro_batches": 2, "num_speculative_tokens": 1}])
def test_tokens_are_one_process_s_also_when_a_server_is_killed(
    more: dict[str, Any],
    servers: list[ExpertProcess],
    secret_file: str,
    expected: list[list[int]],
) -> None:
    ports = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    llm = LLM(**OPTIONS, **more, experts=(ports,), expert_secret_file=secret_file)
    try:
        assert tokens(llm) == expected
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 5))
        servers[0].kill()
        assert [token for delta in [*begun, *stream] for token in delta.token_ids] == expected[0]
        assert tokens(llm) == expected
        servers[0].start()
        servers[0].wait()
        assert tokens(llm) == expected
    finally:
        llm.engine.close()
