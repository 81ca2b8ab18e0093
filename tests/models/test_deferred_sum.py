"""MoE layers that leave the sum over a token's experts to the next norm: every consumer of a
layer's output takes such a value, or its sum.

On a CPU, with an op table that defers wherever it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.config.hf import read_config_file
from rorqual.config.parallel import ParallelConfig
from rorqual.layers.moe import MoE, run_stages
from rorqual.layers.norm import Norm
from rorqual.layers.parameter import Build
from rorqual.models.loader import random_weights
from rorqual.models.registry import make_model
from rorqual.ops import reference
from rorqual.ops.activation import Activation
from rorqual.ops.deferred_sum import DeferredMoESum, NormInput, summed
from rorqual.ops.interface import Ops
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import ExpertWeights, RouterWeights
from rorqual.parallel.collectives import Axis
from rorqual.parallel.mesh import SINGLE_LAYOUT, Mesh
from rorqual.parallel.overlap import run_one
from tests.models.checkpoints import VOCAB, save, save_with_mtp
from tests.models.driver import Driver
from tests.parallel.fake_axes import place

CPU = torch.device("cpu")


def plain_sum(
    y: Tensor,
    ids: Tensor | None,
    weights: Tensor,
    base: Tensor | None,
    padded: PaddedRows | None,
) -> Tensor:
    assert ids is None
    assert padded is None
    total = (y.view(*weights.shape, -1) * weights[..., None]).sum(1)
    return total if base is None else total + base


class Deferring(Ops):
    """Counts how often a layer left its sum, and how often a norm took it."""

    def __init__(self) -> None:
        self.left = self.taken = 0

    def experts_deferred(
        self,
        x: Tensor,
        router: RouterWeights,
        w: ExpertWeights,
        base: Tensor | None = None,
        padded: PaddedRows | None = None,
    ) -> NormInput:
        assert padded is None
        self.left += 1
        ids, weights = self.router(x, router)
        one = torch.ones_like(weights[:, :1])
        y = torch.stack(
            [reference.experts(x, ids[:, k : k + 1], one, w) for k in range(ids.shape[1])],
            1,
        )
        return DeferredMoESum(y.flatten(0, 1), None, weights, base, plain_sum)

    def sum_add_norm(
        self,
        gave: DeferredMoESum,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        self.taken += 1
        return super().sum_add_norm(gave, residual, weight, eps)


@pytest.fixture
def deferring(monkeypatch: pytest.MonkeyPatch) -> Deferring:
    """The op table of every engine made in the test."""
    ops = Deferring()
    monkeypatch.setattr("rorqual.engine.execution.worker.ops_for", lambda name: ops)
    monkeypatch.setattr("rorqual.engine.execution.request_state.ops_for", lambda name: ops)
    return ops


def tokens(llm: LLM) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (3 + 5 * i,), generator=generator).tolist() for i in range(4)]
    return [
        out.outputs[0].token_ids
        for out in llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )
    ]


SIZES: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "page_size": 8,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 4},
        {"num_speculative_tokens": 2, "drafter": "mtp"},
        {"num_speculative_tokens": 2, "drafter": "ngram"},
    ],
    ids=str,
)
def test_engines_give_the_same_tokens(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whole and in chunks, decode steps, verification and prediction modules."""
    save_with_mtp(tmp_path, agreement=2.0)
    with monkeypatch.context() as patch:
        patch.setattr("rorqual.engine.execution.worker.ops_for", lambda name: Ops())
        want = tokens(LLM(tmp_path, **SIZES, **options))
    ops = Deferring()
    monkeypatch.setattr("rorqual.engine.execution.worker.ops_for", lambda name: ops)
    assert tokens(LLM(tmp_path, **SIZES, **options)) == want
    assert ops.left >= ops.taken > 0


def test_decode_steps_sum_nothing_but_in_norms(tmp_path: Path, deferring: Deferring) -> None:
    """The last layer's too: no row is selected if all are wanted."""
    save("v3", tmp_path)
    llm = LLM(tmp_path, **SIZES)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    deferring.left = deferring.taken = 0
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
    prompts = 1
    assert deferring.left - deferring.taken == prompts, "one sum a prompt, whose last row is picked"
    assert deferring.taken > 6


class Sent(Exception):
    """What a stage passed on."""


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_passes_on_sums(tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two stages: its inner layers leave their sums where nothing is added over
    ranks, and what it sends is a tensor."""
    save("v3", tmp_path)
    config = read_config_file(tmp_path)

    def sent(ops: Ops) -> Tensor:
        mesh = place(ParallelConfig(pp=2, tp=tp), 0)
        model = make_model(config, Build(ops, torch.float32, CPU, config.quant, mesh=mesh), 64)
        random_weights(model, 1)
        held: list[Tensor] = []
        monkeypatch.setattr(mesh.pp, "send", lambda x, to: held.append(x))
        driver = Driver(model, 1, 8)
        step = driver.step([torch.tensor([3, 1, 4, 1])], [0], decode=False)
        step.layout = model.layout([4])
        with torch.inference_mode():
            assert run_one(model.forward(step)).shape[0] == 0
        return held[0]

    ops = Deferring()
    got = sent(ops)
    want = sent(Ops())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (ops.left > 0) == (tp == 1)


def small_moe(ops: Ops, tmp_path: Path, mesh: Mesh | None = None) -> MoE:
    save("v3", tmp_path)
    config = read_config_file(tmp_path)
    model = make_model(
        config, Build(ops, torch.float32, CPU, config.quant, mesh=mesh or Mesh.single()), 64
    )
    random_weights(model, 1)
    return model.moe_layers()[0]


def test_who_asks_for_a_tensor_gets_one(tmp_path: Path) -> None:
    """Stages over an exchange always sum; the one op may defer the sum to a norm."""
    moe = small_moe(Deferring(), tmp_path)
    x = torch.randn(3, moe.local_experts.hidden)
    with torch.inference_mode():
        left = moe.forward(x)
        assert isinstance(left, DeferredMoESum)
        made = moe.combine(moe.run_experts(moe.dispatch(x, SINGLE_LAYOUT)))
        assert isinstance(made, Tensor)
        torch.testing.assert_close(made, summed(left), rtol=1e-5, atol=1e-5)
        assert moe.forward(x[:0]).shape == (0, moe.local_experts.hidden)


def test_counted_load_is_summed_at_once(tmp_path: Path) -> None:
    moe = small_moe(Deferring(), tmp_path)
    moe.exchange.record_load = True
    assert len(moe.stages()) == 3, "the exchange counts"
    assert isinstance(run_stages(moe.stages(), torch.randn(3, moe.local_experts.hidden)), Tensor)


def test_partial_sums_are_added_before_they_travel() -> None:
    """A norm over several ranks, or without a residual stream, gets the tensor."""
    ops = Deferring()
    norm = Norm(Build(ops, torch.float32, CPU), "norm", 8, 1e-6)
    norm.weight.fill_(1.0)
    gave = DeferredMoESum(torch.randn(6, 8), None, torch.rand(3, 2), None, plain_sum)
    residual = torch.randn(3, 8)
    reduced: list[Tensor] = []

    class Two:
        size = 2

        def add_norm(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            reduced.append(x)
            return rest[-1](x, *rest[:-1])

    axis: Any = Two()
    over: Axis = axis
    with torch.inference_mode():
        want = norm.add(gave.total(), residual)
        for found in (norm.add(gave, residual), norm.add(gave, residual, over)):
            for one, other in zip(found, want, strict=True):
                assert torch.equal(one, other)
        assert torch.equal(norm.add(gave, None)[1], gave.total())
    assert ops.taken == 1
    assert torch.equal(reduced[0], gave.total())
