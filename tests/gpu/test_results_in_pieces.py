"""Two GPUs that send results of experts in pieces of columns: the tokens of one GPU in fp32, with
steps in two micro-batches that are captured and that are launched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("needs at least two CUDA devices", allow_module_level=True)
pytest.importorskip("triton")

from demo.throttled_wire import MODEL
from rorqual import LLM, SamplingParams
from rorqual.ops.triton.moe import column_pieces

LENGTH = 2100  # of four prompts a rank: half of a step is 4,200 rows, of both ranks 17.2 MB
STEP = 4 * LENGTH


def answers(folder: Path, **options: Any) -> list[list[int]]:
    llm = LLM(
        folder,
        weights="random",
        seed=5,
        device="cuda",
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=LENGTH + 64,
        max_num_seqs=16,
        max_num_batched_tokens=STEP,
        enable_prefix_caching=False,
        **options,
    )
    random = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(MODEL["vocab_size"], (LENGTH,), generator=random).tolist() for _ in range(8)
    ]
    try:
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        parts = llm.engine.worker.runner.parts
        if "piecewise_tokens" in options:
            captured = parts is not None and bool(parts.graphs)
            assert captured == (options["piecewise_tokens"] > 0)
        return [list(one.outputs[0].token_ids) for one in found]
    finally:
        llm.engine.close()


@pytest.mark.parametrize("piecewise_tokens", [4096, 0], ids=["captured", "launched"])
def test_tokens_are_those_of_one_card(
    piecewise_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {**MODEL, "hidden_size": 512, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    expected = answers(tmp_path)
    in_pieces = column_pieces.experts_in_pieces
    computed: list[int] = []

    def noted(x: Tensor, *given: Any) -> Iterator[Tensor]:
        computed.append(x.shape[0])
        return in_pieces(x, *given)

    monkeypatch.setattr(column_pieces, "experts_in_pieces", noted)
    found = answers(
        tmp_path,
        dp=2,
        ep=2,
        micro_batches=2,
        p2p_memory=False,
        piecewise_tokens=piecewise_tokens,
    )
    assert max(computed) >= STEP
    assert found == expected
