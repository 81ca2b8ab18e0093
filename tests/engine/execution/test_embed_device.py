"""embed_device: cpu. The table is made, filled and shared in host memory, and is not counted
against the device's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.engine.execution.worker import weight_bytes
from rorqual.errors import CapacityError, ConfigError
from rorqual.platforms.cpu import CpuPlatform
from tests.models.checkpoints import V3, save

OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 3,
    "max_model_len": 48,
    "kv_cache_bytes": 2**20,
}


class Card(CpuPlatform):
    """A device with memory of its own as far as the engine can see. Its ops are the reference."""

    name = "card"

    def __init__(self, free: int | None = None):
        super().__init__(torch.device("cpu"))
        self.free = free
        self.host: list[Tensor] = []

    def available_memory(self) -> int:
        return super().available_memory() if self.free is None else self.free

    def total_memory(self) -> int:
        return self.available_memory()

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.host.append(super().host_empty(shape, dtype))
        return self.host[-1]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(platform: Card, folder: Path, **options: Any) -> LLM:
        monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
        return LLM(folder, **{**OPTIONS, **options})

    return make


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [out.outputs[0].token_ids for out in llm.generate([[1, 2, 3], [9], [4] * 11], params)]


def test_the_table_lies_where_it_is_asked_for(tmp_path: Path, on: Any) -> None:
    save("v3", tmp_path)
    here = Card()
    there = Card()
    llm = on(there, tmp_path, embed_device="cpu")
    assert [llm.engine.model.embedding is table for table in there.host] == [True]
    assert generate(llm) == generate(on(here, tmp_path))
    assert not here.host


def test_prediction_modules_share_it(tmp_path: Path, on: Any) -> None:
    config = {
        **V3,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    card = Card()
    llm = on(card, tmp_path, embed_device="cpu", num_speculative_tokens=2, weights="random")
    got = generate(llm)
    assert len(card.host) == 1
    assert sum(llm.engine.stats.drafted) > 0
    assert got == generate(on(Card(), tmp_path, weights="random"))


def test_it_is_not_counted_against_the_device(tmp_path: Path, on: Any) -> None:
    model = save("v3", tmp_path)
    table = model.get_input_embeddings().weight
    llm = LLM(tmp_path, **OPTIONS)
    whole = weight_bytes(llm.engine.model)
    free = whole - table.numel() * table.element_size()
    on(Card(free), tmp_path, embed_device="cpu")
    with pytest.raises(CapacityError, match="the weights need"):
        on(Card(free - 1), tmp_path, embed_device="cpu")
    with pytest.raises(CapacityError, match="the weights need"):
        on(Card(free), tmp_path)


def test_a_cpu_is_its_own_host(tmp_path: Path) -> None:
    save("qwen", tmp_path)
    assert generate(LLM(tmp_path, embed_device="cpu", **OPTIONS)) == generate(
        LLM(tmp_path, **OPTIONS)
    )


def test_refused(tmp_path: Path, on: Any) -> None:
    save("qwen-tied", tmp_path)
    with pytest.raises(ConfigError, match="head is its embedding"):
        on(Card(), tmp_path, embed_device="cpu")
    with pytest.raises(ConfigError, match=r"embed_device='host'.*auto, cpu"):
        LLM(tmp_path, embed_device="host", **OPTIONS)
