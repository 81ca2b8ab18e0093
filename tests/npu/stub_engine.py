"""An engine on the stubs' device, as a user starts it: `device="npu"`, the real platform,
torch_npu's own host code. Kernels do nothing, so tokens mean nothing.

STUB_DEVICES=1 STUB_OPERATORS=1 python -m tests.npu.stub_engine MODEL FOLDER OPTIONS

Prints as JSON how many tokens came, and the lengths that each replay of a captured step was given.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from rorqual.llm.llm import LLM
from rorqual.platforms.npu import UpdatedGraph
from rorqual.request import SamplingParams
from tests.npu.npu_models import write_model

PROMPTS = [[5, 6, 7], [8] * 20, [9] * 5]
TOKENS = 6


def main(name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        write_model(folder, name),
        skip_tokenizer_init=True,
        weights="random",
        dtype="bfloat16",
        device="npu",
        num_pages=8,
        max_num_seqs=4,
        max_model_len=256,
        **options,
    )
    lengths: list[list[int]] = []
    plain = UpdatedGraph.set_lengths

    def watched(graph: UpdatedGraph, given: list[int]) -> None:
        lengths.append(given)
        plain(graph, given)

    UpdatedGraph.set_lengths = watched  # type: ignore[method-assign]
    wanted = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, wanted)
    llm.engine.close()
    graphs = llm.engine.executor.worker.runner.graphs
    return {
        "device": torch.npu.get_device_name(0),
        "tokens": [len(one.outputs[0].token_ids) for one in outputs],
        "lengths": lengths,
        "captured": graphs is not None,
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    print(json.dumps(result))
