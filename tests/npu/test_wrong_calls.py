"""The generator of wrong calls, over a handful of right ones with emulations of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401  (registers its operators)
from torch._ops import OpOverload

from tests.npu.wrong_calls import Call, by_name, differ, judge, mutations, table, verdicts

npu = torch.ops.npu


def rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Any:
    assert self.shape[-1:] == gamma.shape
    assert self.dtype == gamma.dtype
    scale = torch.rsqrt(self.float().square().mean(-1, keepdim=True) + epsilon)
    return (self.float() * scale * gamma.float()).to(self.dtype), scale


def rotary_mul(input: Any, r1: Any, r2: Any, rotary_mode: str = "half", rotate: Any = None) -> Any:
    assert rotary_mode in ("half", "interleave")
    assert input.dtype == r1.dtype == r2.dtype
    if rotary_mode == "half":
        a, b = input.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
    else:
        turned = torch.stack([-input[..., 1::2], input[..., ::2]], -1).flatten(-2)
    return input * r1 + turned * r2


def grouped_matmul(x: Any, weight: Any, *, group_list: Any = None, **rest: Any) -> Any:
    assert rest.get("split_item", 0) in (2, 3)
    assert rest.get("group_type") == 0
    assert x[0].shape[1] == weight[0].shape[1]
    assert x[0].dtype == weight[0].dtype
    assert group_list.dtype == torch.int64
    ends = group_list if rest.get("group_list_type", 0) == 0 else group_list.cumsum(0)
    assert ends[-1] == x[0].shape[0]
    rows = torch.split(x[0], ends.diff(prepend=ends.new_zeros(1)).tolist())
    return [torch.cat([r @ w for r, w in zip(rows, weight[0], strict=True)])]


def quant_matmul(x1: Any, x2: Any, scale: Any, *, pertoken_scale: Any = None, **rest: Any) -> Any:
    assert x1.dtype == x2.dtype == torch.int8
    assert scale.shape == x2.shape[1:]
    assert pertoken_scale is None or pertoken_scale.shape == x1.shape[:1]
    assert scale.dtype in (torch.float32, torch.bfloat16)
    assert pertoken_scale is None or pertoken_scale.dtype == torch.float32
    out = (x1.double() @ x2.double()) * scale.double()
    out = out if pertoken_scale is None else out * pertoken_scale[:, None]
    return out.to(rest.get("output_dtype") or torch.int8)


def gating_top_k_softmax(x: Any, finished: Any = None, k: int = 1) -> Any:
    weight, index = x.float().softmax(-1).topk(k, -1)
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).T
    return weight.to(x.dtype), index.to(torch.int32), rows


def scatter_nd_update_(self: Any, indices: Any, updates: Any) -> Any:
    assert self.dtype == updates.dtype
    assert int(indices.max()) < self.shape[0]
    self[indices.flatten().long()] = updates
    return self


def attention(query: Any, key: Any, value: Any, **given: Any) -> Any:
    """Decode over pages: [tokens, heads, 1, width] against [pages, 1, page, width]."""
    heads, page, pages = given["num_heads"], given["block_size"], given["block_table"]
    assert given.get("input_layout") == "BNSD"
    assert query.shape[1] == heads
    assert key.shape[1] == value.shape[1] == given["num_key_value_heads"]
    assert given.get("sparse_mode", 0) == 0
    assert pages.dtype == torch.int32
    assert key.shape[2] == page
    assert (
        query.dtype
        == key.dtype
        == value.dtype
        == given["query_rope"].dtype
        == given["key_rope"].dtype
    )
    q = torch.cat([query, given["query_rope"]], -1).float()
    k = torch.cat([key, given["key_rope"]], -1).float()
    outs = []
    for row, length in enumerate(given["actual_seq_lengths_kv"]):
        assert length <= pages.shape[1] * page
        keys = k[pages[row].long()].flatten(0, 2)[:length]
        scores = (q[row, :, 0] @ keys.T) * given["scale"]
        outs.append(scores.softmax(-1) @ value[pages[row].long()].flatten(0, 2)[:length].float())
    return torch.stack(outs)[:, :, None].to(query.dtype), torch.zeros(1)


# Changes that are no fault: documented as just as good.
HARMLESS = {("npu_scatter_nd_update_", "indices as int32")}

EMULATED: dict[str, Callable[..., Any]] = {
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_rotary_mul": rotary_mul,
    "npu::npu_grouped_matmul": grouped_matmul,
    "npu::npu_quant_matmul": quant_matmul,
    "npu::npu_moe_gating_top_k_softmax": gating_top_k_softmax,
    "npu::npu_scatter_nd_update_": scatter_nd_update_,
    "npu::npu_fused_infer_attention_score": attention,
}


def emulate(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By name: some emulations call an argument what the schema calls self."""
    return EMULATED[operator._schema.name](*args, **kwargs)


def right_calls() -> list[Call]:
    generator = torch.Generator().manual_seed(0)

    def r(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    def i8(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)

    given = {"num_heads": 4, "num_key_value_heads": 1, "input_layout": "BNSD", "block_size": 128}
    given |= {"scale": 192**-0.5, "actual_seq_lengths_kv": [130, 200], "sparse_mode": 0}
    given |= {"query_rope": r(2, 4, 1, 64), "key_rope": r(8, 1, 128, 64)}
    given |= {"block_table": torch.tensor([[3, 1], [0, 6]], dtype=torch.int32)}
    latent = r(8, 1, 128, 512)
    groups = torch.tensor([3, 0, 5, 4])
    grouped = {"group_list": groups, "split_item": 3, "group_type": 0, "group_list_type": 1}
    scales = {"pertoken_scale": torch.rand(5, generator=generator), "output_dtype": torch.bfloat16}
    rows = torch.tensor([[4], [9], [2]])
    softmax = npu.npu_moe_gating_top_k_softmax.default
    return [
        (npu.npu_rms_norm.default, (r(5, 64), r(64), 1e-6), {}),
        (npu.npu_rotary_mul.default, (r(5, 1, 4, 64), r(5, 1, 1, 64), r(5, 1, 1, 64), "half"), {}),
        (npu.npu_grouped_matmul.default, ([r(12, 64)], [r(4, 64, 48)]), grouped),
        (npu.npu_quant_matmul.default, (i8(5, 64), i8(64, 32), torch.rand(32)), scales),
        (softmax, (r(5, 16), None, 4), {}),
        (npu.npu_scatter_nd_update_.default, (r(16, 32), rows, r(3, 32)), {}),
        (
            npu.npu_fused_infer_attention_score.default,
            (r(2, 4, 1, 512), latent, latent),
            given,
        ),
    ]


def test_right_calls_are_right() -> None:
    for call in right_calls():
        operator, args, kwargs = call
        first, second = (emulate(operator, args, kwargs) for _ in range(2))
        flat = [list(o) if isinstance(o, (list, tuple)) else [o] for o in (first, second)]
        assert not differ(flat[0], flat[1], 0.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wrong_calls_are_caught(seed: int) -> None:
    calls = right_calls()
    wrong = mutations(calls, seed, 60)
    assert len({(w.operator, w.change) for w in wrong}) == 60
    assert len({w.kind for w in wrong}) == 10
    judged = verdicts(calls, wrong, emulate)
    print("\n" + table(judged))
    missed = {(w.operator, w.change) for w, caught in judged if caught == "nobody"}
    assert missed <= HARMLESS
    assert {caught for _, caught in judged} >= {"schema", "emulation", "values"}


def test_seeds_repeat_and_differ() -> None:
    def names(seed: int) -> list[str]:
        return [f"{w.operator} {w.change}" for w in mutations(right_calls(), seed, 40)]

    assert names(3) == names(3)
    assert names(3) != names(4)


def test_a_harmless_change_is_nobody_s() -> None:
    calls = right_calls()
    for wrong in mutations(calls, 0, 10_000):
        if (
            wrong.operator == "npu_fused_infer_attention_score"
            and wrong.change == "scale times 1.5"
        ):
            assert judge(wrong, calls[wrong.right], emulate) == "values"
            assert judge(wrong, wrong.call, emulate) == "nobody"
            return
    raise AssertionError("the change was not generated")


def test_recorded_calls_are_left_as_they_were() -> None:
    calls = right_calls()
    before = [t.clone() for call in calls for t in by_name(call).values() if torch.is_tensor(t)]
    verdicts(calls, mutations(calls, 0, 80), emulate)
    after = [t for call in calls for t in by_name(call).values() if torch.is_tensor(t)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
