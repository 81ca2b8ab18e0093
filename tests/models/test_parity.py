"""The same logits as transformers, in fp32, for every option, MLA form, and way of cutting a
prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual.layers.forward_batch import ForwardBatch
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import Ops, TokenPlaces
from rorqual.planner.costs.costs import attention_parameters
from tests.models.checkpoints import (
    OPTIONS,
    VOCAB,
    make_reference,
    merge,
    rewrite_config,
    save,
    save_fp8,
)
from tests.models.driver import FORMS, Driver, all_logits, load

pytestmark = pytest.mark.exhaustive(but_first=True)

BOUND = 1e-4
LENGTH = 23
# whole prefill; chunked prefill then decode; one page-aligned chunk then decode
CUTS = [[LENGTH], [1, 9, 17], [16]]


def tokens(requests: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCAB, (requests, LENGTH), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """(folder, reference logits) of an option, made once."""
    known: dict[str, tuple[Path, torch.Tensor]] = {}

    def get(option: str) -> tuple[Path, torch.Tensor]:
        if option not in known:
            folder = tmp_path_factory.mktemp(option)
            reference = save(option, folder)
            with torch.no_grad():
                known[option] = folder, reference(tokens()).logits
        return known[option]

    return get


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "ops", [Ops(), CpuOps(native=False), CpuOps()], ids=["reference", "torch", "native"]
)
def test_logits_equal_transformers(saved, option: str, ops: Ops):
    folder, want = saved(option)
    model = load(folder, ops)
    for cuts in CUTS:
        got = all_logits(model, tokens(), cuts)
        assert (got - want).abs().max() < BOUND, (option, cuts)


@pytest.mark.parametrize("forms", FORMS, ids="-".join)
@pytest.mark.parametrize(
    "option",
    ["v3", "v3-no-q-lora", "v3-yarn-mscales", "v3-half-rope", "v3-bias", "v2", "v2-no-q-lora"],
)
@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["reference", "native"])
def test_mla_forms_agree(saved, option: str, forms: tuple[str, str], ops: Ops):
    folder, want = saved(option)
    model = load(folder, ops, forms=forms)
    for cuts in CUTS:
        assert (all_logits(model, tokens(), cuts) - want).abs().max() < BOUND, cuts


@pytest.mark.parametrize("form", ["CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME"])
@pytest.mark.parametrize("option", ["v3", "v2-no-q-lora"])
def test_a_form_multiplies_by_the_parameters_that_costs_counts(saved, option: str, form: str):
    """The matrices the layer really reads, and its two latent norms, beside
    planner/costs/costs.py."""
    model = load(saved(option)[0], Ops(), forms=(form, form))
    matrices = sum(weight.numel() for weight in model.layers[0].attention.form_weights(form))
    norms = model.config.attention.kv_lora_rank + (model.config.attention.q_lora_rank or 0)
    assert matrices + norms == attention_parameters(model.config, form)


def test_mixed_step_equals_separate_steps(saved):
    """A step with decode rows and prompt chunks gives what each gives alone."""
    folder, want = saved("v3")
    ids = tokens()
    driver = Driver(load(folder, CpuOps()), 2, LENGTH)
    driver.logits(driver.step([ids[0, :10]], [0], decode=False))
    first = driver.step([ids[0, 10:11]], [10], decode=True)
    second = driver.step([ids[1, :6]], [0], decode=False, request=1)
    pairs = [
        (getattr(first.places, name), getattr(second.places, name))
        for name in ("cos", "sin", "slots")
    ]
    step = ForwardBatch(
        token_ids=torch.cat((first.token_ids, second.token_ids)),
        positions=torch.cat((first.positions, second.positions)),
        places=TokenPlaces(*map(torch.cat, pairs)),
        logit_rows=torch.arange(7),
        pool=driver.pool,
        decode=first.decode,
        prefill=second.prefill,
    )
    got = driver.logits(step)
    assert (got[0] - want[0, 10]).abs().max() < BOUND
    assert (got[1:] - want[1, :6]).abs().max() < BOUND


def test_interleaved_micro_batches_equal_separate_ones(saved):
    folder, want = saved("v3")
    ids = tokens()
    driver = Driver(load(folder, CpuOps()), 2, LENGTH)
    steps = [driver.step([ids[0]], [0], decode=False)]
    other = Driver(driver.model, 2, LENGTH)
    steps.append(other.step([ids[1]], [0], decode=False))
    for got, expected in zip(driver.interleaved(steps), want, strict=True):
        assert (got - expected).abs().max() < BOUND


BF16 = (0.999, 0.99)
FP8 = (0.99, 0.9)  # three mantissa bits on every activation: a rounding error of 3 % each


def assert_near(got: torch.Tensor, want: torch.Tensor, bounds: tuple[float, float]) -> None:
    """Bounds for rounded arithmetic, on the logits' cosine at the median position and at the
    worst of nine in ten. (A rounding that tips a near tie of the router changes a token's
    experts altogether, so the very worst position says little.)"""
    cosine = torch.cosine_similarity(got, want, dim=-1).flatten()
    assert cosine.median() > bounds[0], cosine
    assert cosine.quantile(0.1) > bounds[1], cosine


@pytest.mark.parametrize("option", ["v3", "v2", "qwen"])
@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["reference", "native"])
def test_bf16_stays_near_fp32(saved, option: str, ops: Ops):
    folder, want = saved(option)
    assert_near(
        all_logits(load(folder, ops, "bfloat16"), tokens(), CUTS[1], "bfloat16"), want, BF16
    )


def test_old_config_spellings_mean_the_same(saved, tmp_path: Path):
    """rope_scaling, torch_dtype and topk_method as transformers 4 and DeepSeek's own files write
    them."""
    save("v3-yarn-mscales", tmp_path)
    _, want = saved("v3-yarn-mscales")
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
    scaling.update(beta_fast=32, beta_slow=1)
    rewrite_config(
        tmp_path,
        rope_parameters=None,
        rope_scaling=scaling,
        rope_theta=10000.0,
        dtype=None,
        torch_dtype="float32",
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        ep_size=1,
    )
    assert (all_logits(load(tmp_path, CpuOps()), tokens(), [LENGTH]) - want).abs().max() < BOUND


def test_sharded_checkpoint(tmp_path: Path):
    reference = save("v3", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    with torch.no_grad():
        want = reference(tokens()).logits
    assert (all_logits(load(tmp_path, CpuOps()), tokens(), [LENGTH]) - want).abs().max() < BOUND


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_load_exactly(tmp_path: Path, dtype: str):
    """A 16-bit checkpoint computed in fp32 equals transformers on the same rounded weights."""
    reference = make_reference("v3")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
        want = reference(tokens()).logits
    # The router's correction bias stays fp32 in published checkpoints.
    state = {
        name: t if "bias" in name else t.to(getattr(torch, dtype))
        for name, t in reference.state_dict().items()
    }
    reference.save_pretrained(tmp_path, state_dict=state)
    assert (all_logits(load(tmp_path, CpuOps()), tokens(), CUTS[1]) - want).abs().max() < BOUND


@pytest.mark.parametrize("option", ["fp8", "fp8-aligned", "fp8-qwen"])
def test_fp8_checkpoint(tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch):
    """128x128 block scales: exact against the dequantized weights while activations stay fp32,
    and near them with fp8 activations."""
    reference = save_fp8(option, tmp_path)
    with torch.no_grad():
        want = reference(tokens()).logits
    model = load(tmp_path, CpuOps())
    assert_near(all_logits(model, tokens(), CUTS[1]), want, FP8)
    monkeypatch.setattr("rorqual.ops.reference.rounded_to_fp8", lambda x: x.float())
    assert (all_logits(model, tokens(), CUTS[1]) - want).abs().max() < BOUND


@pytest.mark.parametrize("option", ["v3", "qwen"])
def test_merged_tensors_load(tmp_path: Path, option: str):
    """gate_up_proj, qkv_proj and all experts of a layer in one tensor mean the same as their
    parts."""
    reference = save(option, tmp_path)
    with torch.no_grad():
        want = reference(tokens()).logits
    merge(tmp_path)
    assert (all_logits(load(tmp_path, CpuOps()), tokens(), [LENGTH]) - want).abs().max() < BOUND
