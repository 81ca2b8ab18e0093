"""Recorded decode steps on a platform that 'replays' by calling again: padding, buckets and variants change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.engine.graphs import bucket_sizes
from rorqual.platforms.cpu import CpuPlatform
from tests.models.checkpoints import VOCAB, save


class ReplayingPlatform(CpuPlatform):
    """Takes the reference ops, as its name has none of its own; `record` warms up as a card does and keeps one output tensor."""

    name = "replaying"
    has_graphs = True
    steps_in_flight = 2

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.replays = 0

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()
        out = work().clone()

        def replay() -> Tensor:
            self.replays += 1
            return out.copy_(work())

        return replay

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        copied = tensor.clone()  # as on a card: the copy is ordered before the next replay overwrites its source
        return lambda: copied


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save("v3", tmp_path)
    return tmp_path


def batch() -> tuple[list[list[int]], list[SamplingParams]]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (3 + 4 * i,), generator=generator).tolist() for i in range(7)]
    kinds = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0, "presence_penalty": 0.5}]
    params = [SamplingParams(**{"max_tokens": 6 + 3 * i, "seed": i, "ignore_eos": True, **kinds[i % 4]}) for i in range(7)]
    return prompts, params


def test_replayed_steps_give_the_eager_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch):
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 5, "max_model_len": 64, "page_size": 8}
    prompts, params = batch()
    eager = [out.outputs[0].token_ids for out in LLM(folder, **options).generate(prompts, params)]
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.engine.make_platform", lambda device: platform)
    llm = LLM(folder, **options)
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == eager
    assert platform.replays > 5
    before = platform.replays
    assert [out.outputs[0].token_ids for out in llm.generate(prompts[:1], params[:1])] == eager[:1]
    assert platform.replays > before


def test_a_padded_row_writes_nowhere_that_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.engine.make_platform", lambda device: platform)
    llm = LLM(folder, dtype="float32", skip_tokenizer_init=True, max_num_seqs=8, max_model_len=64, page_size=8)
    runner = llm.engine.runner
    plane = runner.pool.layers[0]["latent"]
    before = plane.clone()
    with torch.inference_mode():
        runner.graphs.graphs[8, next(iter(runner.graphs.graphs))[1], 0]()
    assert torch.equal(plane[1:], before[1:])
    assert runner.rows.length[runner.rows.padding] == 0


def test_buckets():
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(5) == [1, 2, 4, 5]
    assert bucket_sizes(256)[-1] == 256
    assert all(b - a <= 64 for a, b in zip(bucket_sizes(1024), bucket_sizes(1024)[1:], strict=False))


def test_graphs_are_refused_where_there_are_none():
    from rorqual.errors import ConfigError

    with pytest.raises(ConfigError, match="acl_graph"):
        LLM(exe_mode="acl_graph")
