"""An embedding table in pinned host memory, read by a GPU's kernel: same tokens, captured steps
included, and less device memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from rorqual import LLM, SamplingParams
from tests.gpu.choice import rarely
from tests.ops.triton.test_triton_backend import DEEPSEEK

OPTIONS = {
    "dtype": "float32",
    "weights": "random",
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "num_pages": 40,
}


@pytest.mark.parametrize("exe_mode", ["graph", *rarely("compile", "eager")])
def test_tokens_do_not_depend_on_where_the_table_lies(tmp_path: Path, exe_mode: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for embed_device in ("auto", "cpu"):
        llm = LLM(tmp_path, exe_mode=exe_mode, embed_device=embed_device, **OPTIONS)
        table = llm.engine.model.embedding
        assert (table.device.type, table.is_pinned()) == (
            ("cuda", False) if embed_device == "auto" else ("cpu", True)
        )
        found.append(
            [out.outputs[0].token_ids for out in llm.generate([[1, 2, 3], [9], [4] * 11], params)]
        )
    eager = LLM(tmp_path, exe_mode="eager", **OPTIONS)
    assert (
        found[0]
        == found[1]
        == [out.outputs[0].token_ids for out in eager.generate([[1, 2, 3], [9], [4] * 11], params)]
    )
