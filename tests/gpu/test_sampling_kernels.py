"""Sampling on the GPU: a captured step draws what an eager one draws, and the same twice. What
is drawn: tests/ops/triton/sampling/test_sampling.py."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual.ops.triton.sampling import sampling
from tests.gpu.choice import rarely

SETTINGS = [
    (0.0, 1.0, 0.0, 0),
    (0.8, 1.0, 0.0, 0),
    (0.8, 0.9, 0.0, 0),
    (1.0, 0.95, 0.01, 40),
    (100.0, 0.9, 0.0, 0),
    (1.0, 1.0, 0.0, 1),
]


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("vocab", [4096, 151_936, *rarely(129_280)])
def test_a_graph_draws_the_eager_tokens(vocab: int, filters: bool) -> None:
    torch.manual_seed(vocab)
    settings = torch.tensor(SETTINGS * 8, dtype=torch.float64, device="cuda")
    count = settings.shape[0]
    logits = torch.empty(count, vocab, device="cuda")
    numbers = torch.empty(count, dtype=torch.float64, device="cuda")

    def step() -> torch.Tensor:
        return sampling.sample_from(sampling.distribution(logits, settings, filters), numbers)

    logits.normal_(0, 3)
    numbers.uniform_()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        logits.normal_(0, 3)
        numbers.uniform_()
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)
        assert torch.equal(out, step())
        greedy = settings[:, 0] == 0
        assert torch.equal(out[greedy], logits[greedy].argmax(-1))
