"""One start of an engine with compiled decode steps, on stubs of CANN.

    STUB_DEVICES=1 python -m tests.npu.engine_graph_worker MODEL FOLDER OPTIONS

Prints, as one line of JSON, what torchair was given, what it made of it, and what it kept: see
tests/npu/test_engine_graphs.py. The engine's session computes nothing: its results are zeros here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.emulation import npu_platform
from tests.npu.graph_worker import Watch, kept
from tests.npu.npu_models import MODELS, write_model


def main(name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    os.environ["RORQUAL_CACHE"] = str(folder / "cache")
    from rorqual.engine.npu import compiled

    torchair_step = compiled.torchair_step
    npu_platform.install(wide=False)
    compiled.torchair_step = torchair_step
    from rorqual.llm.llm import LLM

    # It asks CANN which inputs and attributes of late operators it knows: a new one knows all.
    importlib.import_module("torchair._ge_concrete_graph.compat_ir")._torchair.check_cann_compat = (
        lambda *asked: ""
    )
    watch = Watch("torchair")
    rows = options.get("num_speculative_tokens", 0) + 1
    hidden = MODELS[name]["hidden_size"]
    watch.engine_runs(lambda: [torch.zeros(rows, hidden, dtype=torch.bfloat16)])
    llm = LLM(
        write_model(folder, name),
        skip_tokenizer_init=True,
        weights="random",
        dtype="bfloat16",
        device="npu",
        exe_mode="ge_graph",
        **{"num_pages": 8, "max_num_seqs": 1, "max_model_len": 256, **options},
    )
    llm.engine.close()
    graphs = folder / "cache" / "npu-graphs"
    return {
        "nodes": watch.nodes,
        "engine": watch.engine,
        "traced": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "folders": sorted(path.name for path in graphs.iterdir()) if graphs.exists() else [],
        "kept": kept("torchair", str(graphs)) if graphs.exists() else {},
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    print(json.dumps(result))
