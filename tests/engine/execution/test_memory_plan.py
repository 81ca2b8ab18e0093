"""What the cache gets is what weights and the workspace of attention leave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rorqual.cache.spec import kv_spec
from rorqual.config.hf import read_config_file
from rorqual.config.parallel import ParallelConfig
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.worker import CPU_CACHE_SHARE, Worker
from rorqual.errors import CapacityError, ConfigError
from rorqual.ops.stretch import SCORE_BYTES, workspace_bytes
from rorqual.planner.costs.costs import Format
from rorqual.planner.timing.roofline import activation_bytes
from rorqual.platforms.cpu import CpuPlatform
from tests.engine.execution.test_identity import engine
from tests.models.checkpoints import save

GIB = 2**30


class Card:
    """As much of a platform as sizing asks for: 80 GiB, so many of them free."""

    name = "cuda"
    device = torch.device("cuda")
    default_batched_tokens = 8192

    def __init__(self, free: int):
        self.free = free

    def available_memory(self) -> int:
        return self.free

    def total_memory(self) -> int:
        return 80 * GIB


def rank_of(shape: str, free: int = 40 * GIB, tp: int = 8, **options: Any) -> Worker:
    """A rank whose weights are loaded."""
    rank = Worker.__new__(Worker)
    rank.config = EngineConfig(shape, tp=tp, max_num_seqs=64, **options)
    rank.platform = Card(free)  # type: ignore[assignment]
    rank.mesh = SimpleNamespace(sizes=ParallelConfig(tp=tp))  # type: ignore[assignment]
    rank.model_config = read_config_file(f"rorqual/shapes/{shape}")
    rank.dtype = "bfloat16"
    rank.spec = kv_spec(rank.model_config, 64, "auto", rank.config.mla_decode).shard(tp)
    rank.max_model_len = rank.max_row_len = 131072
    return rank


@pytest.mark.parametrize(("tp", "stretch"), [(1, 913 * 2**20), (8, 129 * 2**20)])
def test_the_cache_of_a_card_gets_what_the_workspace_leaves(tp: int, stretch: int) -> None:
    rank = rank_of("deepseek-v3", tp=tp)
    assert rank.batched_tokens == 8192
    sums = rank.batched_tokens * (128 // tp) * 129 * 4
    assert 0.95 * stretch < rank.workspace - sums - SCORE_BYTES < 1.05 * stretch
    left = int(40 * GIB - rank.workspace - (1 - 0.9) * 80 * GIB)
    assert abs(rank._cache_bytes() - left) <= 1
    assert rank._num_pages() == left // rank.spec.bytes_per_page + 1


@pytest.mark.parametrize(
    ("options", "large", "most"),
    [
        ({}, True, 1024),
        ({}, False, 256),
        ({"tp": 2}, True, 256),
        ({"num_speculative_tokens": 1, "drafter": "ngram"}, True, 256),
        ({"experts": ("10.0.0.1:7000",)}, True, 256),
        ({"experts_from": "http://10.0.0.1:7000"}, True, 256),
        ({"max_num_batched_tokens": 512}, True, 512),
        ({"max_num_batched_tokens": 2048}, True, 1024),
        ({"max_num_seqs": 300}, True, 300),
        ({"max_num_seqs": 2000}, False, 2000),
    ],
)
def test_sequences_that_run_at_once(options: dict[str, Any], large: bool, most: int) -> None:
    rank = Worker.__new__(Worker)
    rank.config = EngineConfig("qwen3-30b-a3b", **options)
    rank.platform = SimpleNamespace(  # type: ignore[assignment]
        has_large_memory=lambda share: large and share == 0.9
    )
    assert rank.max_num_seqs == most


def test_a_captured_size_above_the_default_names_it() -> None:
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes=257 .* it may be 256"):
        EngineConfig("qwen3-30b-a3b", cudagraph_capture_sizes=[257])


def test_shorter_chunks_need_less() -> None:
    whole = rank_of("deepseek-v3", max_num_batched_tokens=8192)
    chunked = rank_of("deepseek-v3", max_num_batched_tokens=8192, chunked_prefill_size=512)
    assert whole.workspace - chunked.workspace == (8192 - 512) * 16 * 129 * 4


def test_what_decompresses_nothing_reserves_nothing() -> None:
    forms = [("CD", "CD"), ("A_CC_ME", "A_CC_ME")]
    ranks = [rank_of("deepseek-v3", mla_prefill=one, mla_decode=other) for one, other in forms]
    ranks.append(rank_of("qwen3-30b-a3b", tp=1))
    assert [rank.workspace for rank in ranks] == [0, 0, 0]
    assert rank_of("deepseek-v3", mla_prefill="A_CC_ME", mla_decode="CC").workspace > 0


def test_a_card_without_room_for_both_is_refused() -> None:
    rank = rank_of("deepseek-v3", free=8 * GIB + 2**27)
    free = rf"{rank.workspace} bytes .*=0.9 is of 80.0 GiB .* 7\d.\d GiB are in use"
    with pytest.raises(CapacityError, match=rf"one cache page .* beside {free}"):
        rank._num_pages()


def test_a_given_size_is_kept() -> None:
    assert rank_of("deepseek-v3", kv_cache_bytes=GIB)._cache_bytes() == GIB


@pytest.mark.parametrize("longest", [1000, 131072])
def test_the_planner_reserves_what_the_engine_does(longest: int) -> None:
    rank = rank_of("deepseek-v3", max_num_batched_tokens=4096)
    rank.max_row_len = longest
    given = (rank.model_config, ParallelConfig(tp=8), 4096)
    formats = (Format(form=form) for form in ("A_CC_ME", "CD"))
    plain, other = (activation_bytes(*given, fmt, longest) for fmt in formats)
    assert plain - other == rank.workspace
    assert activation_bytes(rank.model_config, ParallelConfig(tp=8), 0) == 0


def test_an_engine_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("v3", tmp_path)
    model = read_config_file(tmp_path)
    step = workspace_bytes(model.attention, 4, "cpu", 8, 200, 256, 256)
    left = 2**24
    monkeypatch.setattr(CpuPlatform, "available_memory", lambda self: step + left)
    llm = engine(tmp_path, max_num_seqs=200, max_num_batched_tokens=256)
    page = kv_spec(model, 8, "auto", activations="float32").bytes_per_page
    assert llm.engine.worker.runner.pool.num_pages == int(left * CPU_CACHE_SHARE) // page + 1


class LargeHost(CpuPlatform):
    def available_memory(self) -> int:
        return 2**62


@pytest.mark.parametrize("platform", [CpuPlatform, LargeHost])
def test_more_requests_than_any_machine_holds(platform: type[CpuPlatform]) -> None:
    with pytest.raises(CapacityError) as caught:
        RequestState(2**55, 4, 128, platform(torch.device("cpu")))
    assert str(caught.value) == (
        f"no memory for the state of max_num_seqs={2**55} requests of up to 4 cache pages"
    )


def test_what_requests_take_is_asked_for_before_it_is_written() -> None:
    class Small(CpuPlatform):
        free = 0

        def available_memory(self) -> int:
            return self.free

    platform = Small(torch.device("cpu"))
    rows = RequestState(0, 6, 128, platform, 3)
    held = [item for item in vars(rows).values() if isinstance(item, torch.Tensor)]
    # of the row that pads steps
    size = sum(tensor.nbytes for tensor in held)
    platform.free = 1000 * size
    assert RequestState(900, 6, 128, platform, 3).padding == 900
    with pytest.raises(CapacityError, match="max_num_seqs=1000 "):
        RequestState(1000, 6, 128, platform, 3)
