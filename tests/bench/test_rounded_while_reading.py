"""A wide checkpoint with --quantization: rounded as it is read, never held wide, and the bundled
model still knows its text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.config.hf import read_config_file
from rorqual.config.quant import QUANTIZATIONS, quantization_named
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.worker import read_model, weight_bytes
from rorqual.errors import ConfigError, LoadError
from rorqual.layers.parameter import Build
from rorqual.layers.weight_format.rounding import round_matrix
from rorqual.models import weight_reader
from rorqual.models.hub import BUNDLED
from rorqual.models.loader import load_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import Ops
from rorqual.ops.reference import Weight, dequantize
from rorqual.planner.costs.weights import head_weight
from tests.layers.weight_format.writers import save_quantized
from tests.models.checkpoints import rewrite_config, save
from tests.models.driver import all_logits

CPU = torch.device("cpu")


def model_in(folder: Path, name: str) -> Transformer:
    config = read_config_file(folder)
    quant = quantization_named(name)
    model = make_model(config, Build(CpuOps(), torch.bfloat16, CPU, quant), 64)
    load_weights(model, folder)
    return model


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("name", ["w4a16", *(name for name in QUANTIZATIONS if name != "w4a16")])
def test_the_bundled_model_is_rounded_matrix_by_matrix(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few rows give what whole matrices give."""
    whole = model_in(BUNDLED, name)
    monkeypatch.setattr(weight_reader, "STAGE", 4 * 192 * 128)
    pieces = model_in(BUNDLED, name)
    for one, other in zip(whole.targets(), pieces.targets(), strict=True):
        for view, same in zip(one.views, other.views, strict=True):
            assert torch.equal(view.view(torch.uint8), same.view(torch.uint8)), one.name
    wide = make_model(read_config_file(BUNDLED), Build(CpuOps(), torch.bfloat16, CPU), 64)
    load_weights(wide, BUNDLED)
    given = wide.layers[3].mlp.exchange.experts.down[2].data.float()
    held = whole.layers[3].mlp.exchange.experts.down[2]
    scheme = quantization_named(name).of("model.layers.3.mlp.experts.2.down_proj", given.shape[1])
    expected, _ = round_matrix(given, scheme, torch.bfloat16)
    assert torch.equal(dequantize(held, torch.float32), dequantize(expected, torch.float32))
    assert isinstance(held, Weight)
    share = weight_bytes(whole) / weight_bytes(wide)
    assert share < (0.62 if name.startswith("w4") else 0.72), "embedding and head stay wide"


def test_the_bundled_model_in_four_bits_knows_its_text() -> None:
    llm = LLM(quantization="w4a16", max_num_seqs=4, kv_cache_bytes=2**23)
    prompt = "It was a dark and stormy night, and the captain stood upon the deck"
    (out,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0))
    assert len(out.outputs[0].token_ids) == 8
    found = [next(iter(entry.values())) for entry in out.prompt_logprobs[1:]]
    nats = [-getattr(value, "logprob", value) for value in found]
    wide = LLM(max_num_seqs=4, kv_cache_bytes=2**23)
    (same,) = wide.generate(
        [prompt], SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0)
    )
    known = [next(iter(entry.values())) for entry in same.prompt_logprobs[1:]]
    before = [-getattr(value, "logprob", value) for value in known]
    assert sum(nats) < 1.15 * sum(before)


@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_the_compiled_kernels_give_the_references_logits(name: str) -> None:
    """Of the bundled model, whose experts' 48 columns are no block of the kernels."""
    config = read_config_file(BUNDLED)
    ids = torch.randint(3, config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(3))
    found = []
    ops = CpuOps()
    if ops.native is None:
        pytest.skip("no compiler")
    for table in (ops, Ops()):
        model = make_model(config, Build(table, torch.float32, CPU, quantization_named(name)), 64)
        load_weights(model, BUNDLED)
        found.append(all_logits(model, ids, [20]))
    assert not ops.told, "a kernel takes every matrix"
    compiled, reference = found
    if name == "w4a16":
        assert (compiled - reference).abs().max() < 1e-3
        assert torch.equal(compiled.argmax(-1), reference.argmax(-1))
    else:  # a step of a rounded row may fall to the other side
        likeness = torch.cosine_similarity(compiled, reference, dim=-1)
        assert likeness.median() > 0.9999, likeness


def config_of(folder: Path, **fields: object) -> EngineConfig:
    return EngineConfig(str(folder), **fields)


def test_a_quantized_checkpoint_is_not_rounded_again(tmp_path: Path) -> None:
    save_quantized(tmp_path, "int8-channel")
    words = "quantization='w4a16': the checkpoint's weights are int8, a scale a row already"
    with pytest.raises(ConfigError, match=words):
        read_model(config_of(tmp_path, quantization="w4a16"))
    assert read_model(config_of(tmp_path)).quant is not None


@pytest.mark.parametrize(("name", "quantization"), [("w8a8", "w4a16"), ("w4a16", "auto")])
def test_the_head_is_rounded_where_it_is_asked_for(name: str, quantization: str) -> None:
    """And the planner counts its bytes."""
    config = read_model(config_of(BUNDLED, quantization=quantization, quantize_head=name))
    model = make_model(config, Build(CpuOps(), torch.bfloat16, CPU, config.quant), 64)
    load_weights(model, BUNDLED)
    wide = read_model(config_of(BUNDLED, quantization=quantization))
    plain = make_model(wide, Build(CpuOps(), torch.bfloat16, CPU, wide.quant), 64)
    load_weights(plain, BUNDLED)
    assert model.head is not None
    assert model.head.linear is not None
    assert plain.head is not None
    assert plain.head.linear is not None
    given = plain.head.linear.weight
    held = model.head.linear.weight
    assert not given.quantized
    scheme = quantization_named(name).of("a head", given.columns)
    expected, _ = round_matrix(given.data.float(), scheme, torch.bfloat16)
    assert torch.equal(dequantize(held, torch.float32), dequantize(expected, torch.float32))
    saved = weight_bytes(plain) - weight_bytes(model)
    assert saved == head_weight(wide).bytes("bfloat16") - head_weight(config).bytes("bfloat16") > 0
    ids = torch.randint(3, config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(3))
    rounded, before = (all_logits(each, ids, [20]) for each in (model, plain))
    assert not torch.equal(rounded, before)
    likeness = torch.cosine_similarity(rounded, before, dim=-1)
    assert likeness.min() > 0.98, likeness


def test_a_head_that_is_the_embeddings_table_stays_wide(tmp_path: Path) -> None:
    save("v3", tmp_path)
    rewrite_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="quantize_head='w8a8': this model's head is"):
        read_model(config_of(tmp_path, quantize_head="w8a8"))


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="w4a15"):
        config_of(tmp_path, quantization="w4a15")


def test_a_cut_inside_a_group_is_refused(tmp_path: Path) -> None:
    save("v3", tmp_path, max_shard_size="1GB")
    # 80 columns of the attention output have groups of 16
    with pytest.raises(ConfigError, match=r"tp=2 cuts .* inside an int4 group of 16"):
        read_model(config_of(tmp_path, quantization="w4a16-g64", tp=2))


def test_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = save("v3", tmp_path)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, 3] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"layers\.1\.self_attn\.o_proj\.weight .* not finite"):
        model_in(tmp_path, "w8a8")
