"""Pages in pinned host memory and back on a GPU, beside steps in flight: the tokens of a cache that
holds all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM, SamplingParams
from rorqual.cache.host_memory import HostMemory, LayersToCome
from rorqual.cache.host_tier import PageCopy
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import KVSpec, Plane
from rorqual.platforms.cuda import CudaPlatform
from tests.models.checkpoints import VOCAB, rewrite_config, save


def answers(folder: Path, length: int, **options: Any) -> tuple[list[list[int]], int]:
    """(tokens, tokens found in host memory): eight prompts twice, first all at once, then one by
    one."""
    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=4,
        **options,
    )
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (length,), generator=random).tolist() for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    groups = [prompts, *([prompt] for prompt in prompts)]
    found = [out.outputs[0].token_ids for each in groups for out in llm.generate(each, params)]
    return found, llm.engine.scheduler.usage().host_hits


@pytest.mark.parametrize("length", [330, 321])  # 321: all but a token is loaded, so it decodes
@pytest.mark.parametrize("model", ["v3", "qwen"])
def test_tokens_are_those_of_a_large_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, length: int
) -> None:
    by_layer = []
    start = HostMemory.start

    def counted(self: HostMemory, copies: Any, wanted: bool = False) -> LayersToCome:
        coming = start(self, copies, wanted)
        by_layer.extend(coming.groups)
        return coming

    monkeypatch.setattr(HostMemory, "start", counted)
    save(model, tmp_path)
    rewrite_config(tmp_path, max_position_embeddings=512)
    wanted, _ = answers(tmp_path, length)
    tokens, hits = answers(tmp_path, length, num_pages=25, kv_host_memory=0.5)
    assert tokens == wanted
    assert hits > 1000
    assert len(by_layer) >= 6, "alone a request reads its pages while they come"
    assert not any(by_layer), "a layer did not wait for its pages"


def test_copies_wait_for_what_was_launched_and_are_waited_for() -> None:
    """Pages are written by slow kernels, copied out, overwritten, and copied back."""
    device = torch.device("cuda", torch.cuda.current_device())
    platform = CudaPlatform(device)
    pool = KVPool(KVSpec(((Plane("k", "float32", (1024,)),),) * 4, 64), 40, device)
    host = HostMemory(pool, platform, 32)
    assert all(block.is_pinned() for block in host.blocks)
    planes = [layer["k"] for layer in pool.layers]
    slow = torch.ones(4096, 4096, device=device)
    for value in range(1, 6):
        for _ in range(10):
            slow = slow @ slow / 4096
        for plane in planes:
            plane[:32].fill_(value).mul_(slow[0, 0])
        host.start([PageCopy(page, page, True) for page in range(32)])
        host.settle()
        for plane in planes:
            plane[:32].fill_(-1)
        host.start([PageCopy(page, page, False) for page in range(32)])
        host.settle()
        for plane in planes:
            assert torch.equal(plane[:32], torch.full_like(plane[:32], value))


def test_results_do_not_wait_for_pages_that_are_copied_out() -> None:
    """Small tensors of any kind arrive while a gigabyte is on its way to the host."""
    device = torch.device("cuda", torch.cuda.current_device())
    platform = CudaPlatform(device)
    pool = KVPool(KVSpec(((Plane("k", "float32", (2**17,)),),) * 4, 8), 65, device)
    host = HostMemory(pool, platform, 64)
    results = [
        torch.arange(300, device=device),
        torch.randn(64, 7, device=device)[:, 1:],
        torch.tensor([True, False, True], device=device)[1:],
        torch.zeros(0, 5, device=device),
        torch.full((40_000,), 2.5, device=device),  # larger ones are copied
    ]
    copies = [PageCopy(page, page, True) for page in range(64)]
    for turn in range(2):
        torch.cuda.synchronize(device)
        host.start(copies)
        found = [platform.fetch(tensor)() for tensor in results[:4]]
        assert turn == 0 or not platform.second.query(), "the pages were copied first"
        found.append(platform.fetch(results[4])())
        host.settle()
        for got, wanted in zip(found, results, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted.cpu())
