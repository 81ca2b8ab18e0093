"""An engine that measures its expert servers, and decides into how many parts steps are cut."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from rorqual import LLM
from tests.disagg.expert_processes import ExpertProcess
from tests.engine.mixed_batch import COMMON, TEXTS, everything


@pytest.mark.longest
@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [{"num_speculative_tokens": 1}, {"dp": 2}])
def test_tokens_are_those_of_one_process(tmp_path: Path, more: dict[str, Any]) -> None:
    expected = everything(LLM(**COMMON), TEXTS)
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(16))
    secret.chmod(0o600)
    servers = [ExpertProcess(slots, str(secret)) for slots in ("0-7", "8-15")]
    try:
        for server in servers:
            server.wait()
        llm = LLM(
            **COMMON,
            experts=tuple(f"127.0.0.1:{server.port}" for server in servers),
            expert_secret_file=str(secret),
            micro_batches="auto",
            keep_step_times=False,
            **more,
        )
        times = llm.engine.worker.step_times
        assert times is not None
        assert {size.exchange for size in times.decode.sizes} == {"remote"}
        assert len(times.prompts.sizes[0].passes) == 4
        assert everything(llm, TEXTS) == expected
        llm.engine.close()
    finally:
        for server in servers:
            server.kill()
