"""An engine whose kernels are compiled ahead: its tokens, and nothing left to compile when steps
are captured."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from rorqual import LLM, SamplingParams
from rorqual.engine.execution.cuda_graphs import DecodeGraphs
from tests.gpu.choice import rarely

TEXTS = ["The captain of the ship", "In the beginning", "It was a dark night and the"]


@pytest.mark.parametrize("dtype", ["bfloat16", *rarely("float32")])
@pytest.mark.parametrize("num_speculative_tokens", [2, *rarely(0)])
@pytest.mark.parametrize("weights", ["checkpoint", "random"])  # random: by no second model
def test_kernels_compiled_ahead(
    weights: str, num_speculative_tokens: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels() -> int:
        return sum(len(cache) for made in seen for cache, *_ in made.device_caches.values())

    seen: set[JITFunction] = set()
    run = JITFunction.run
    capture = DecodeGraphs.capture
    counts = []

    def noted(self: JITFunction, *args: object, **kwargs: object) -> object:
        seen.add(self)
        return run(self, *args, **kwargs)

    def recorded(self: DecodeGraphs, *args: object) -> None:
        counts.append(kernels())
        capture(self, *args)
        counts.append(kernels())

    monkeypatch.setattr(JITFunction, "run", noted)
    monkeypatch.setattr(DecodeGraphs, "capture", recorded)
    options = {
        "device": "cuda",
        "dtype": dtype,
        "max_num_seqs": 4,
        "max_model_len": 256,
        "num_speculative_tokens": num_speculative_tokens,
        "weights": weights,
    }
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for ahead in (True, False):
        llm = LLM(**options, precompile_kernels=ahead)
        found.append([out.outputs[0].token_ids for out in llm.generate(TEXTS, params)])
    assert found[0] == found[1]
    assert counts[0] == counts[1], "kernels were left to compile"
