"""One row's time on this GPU, by the calls that the engine makes: a graph of calls over rotated
data, as in bench/kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rorqual.bench.kernel_times.rows import TimedRow
from rorqual.bench.kernels import attention
from rorqual.bench.kernels import gemm_and_experts as cases
from rorqual.ops.activation import NormOutput
from rorqual.ops.interface import Ops
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.quantized import rounded_direct

KINDS = {"bfloat16": "bf16", "fp8": "fp8", "int4": "int4"}
Calls = list[Callable[[], Any]]


class RowTimer:
    """microseconds(row). `ops`: the engine's; a test's may be another device's."""

    def __init__(self, ops: Ops, device: torch.device):
        self.ops = ops
        self.device = device
        self._held: tuple[tuple[Any, ...], ExpertWeights] | None = None

    def microseconds(self, row: TimedRow) -> float:
        torch.manual_seed(0)
        if row.family in ATTENTION:
            setup = ATTENTION[row.family](row, self.device)
            return attention.measure(setup, setup.configs[0])
        us = cases.median_us(self.calls(row))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return us

    def calls(self, row: TimedRow) -> Calls:
        if row.family.startswith("experts"):
            return self._experts(row)
        return self._bmm(row) if row.family == "bmm" else self._product(row)

    def _product(self, row: TimedRow) -> Calls:
        n, k, m = row.key
        if row.dtype == "fp8":
            weights, wide, packed = cases.linear_data(n, k, m, self.device)
            # as norms leave them: rounding is timed only where the product does it
            alone = m == 1 and rounded_direct.takes(weights[0])
            rows = wide if alone else NormOutput(wide, packed)
            return [partial(self.ops.linear, rows, weight) for weight in weights]
        if row.dtype == "int4":
            held, x = cases.int4_data(n, k, m, self.device)
            for weight in held:
                self.ops.prepare_weight(weight, row.name)
            return [partial(self.ops.linear, x, weight) for weight in held]
        plain, x = cases.small_data(n, k, m, self.device)
        return [partial(self.ops.linear, x, Weight(weight)) for weight in plain]

    def _bmm(self, row: TimedRow) -> Calls:
        """Into the latent's space: 128 columns of a head to 512."""
        heads, m = row.key
        new = partial(torch.randn, device=self.device, dtype=torch.bfloat16)
        copies = min(16, max(2, int(cases.ROTATE // (heads * 128 * 512 * 2))))
        matrices = new(copies, heads, 128, 512)
        x = new(m, heads, 128)
        return [partial(self.ops.heads_matmul, x, each) for each in matrices]

    def _experts(self, row: TimedRow) -> Calls:
        """Experts drawn uniformly from all; those of other ranks have the id -1."""
        hidden, inner, experts, local, top_k, tokens = row.key
        shape = (row.dtype, local, hidden, inner)
        if self._held is None or self._held[0] != shape:
            self._held = None  # one set at a time
            new = partial(cases.random_weight, KINDS[row.dtype], self.device, local)
            held = (new(2 * inner, hidden), new(hidden, inner))
            self._held = (shape, ExpertWeights(*held, local_fraction=local / experts))
            self.ops.prepare_experts(self._held[1], row.name)
        weights = self._held[1]
        calls: Calls = []
        for _ in range(8 if tokens <= 16 else 2):
            ids = torch.rand(tokens, experts, device=self.device).topk(top_k).indices
            ids = torch.where(ids < local, ids, -1)
            x = torch.randn(tokens, hidden, device=self.device, dtype=torch.bfloat16)
            shares = torch.rand(tokens, top_k, device=self.device)
            calls.append(partial(self.ops.experts, x, ids, shares, weights))
        return calls


def _mla_decode(row: TimedRow, device: torch.device) -> attention.AttentionSetup:
    heads, requests, context = row.key
    shape = attention.MlaShape(requests, context, heads, 1, False, False)
    return attention.MlaSetup(shape, device).setup()


def _gqa_decode(row: TimedRow, device: torch.device) -> attention.AttentionSetup:
    heads, groups, requests, context = row.key
    shape = attention.GqaShape(requests, context, 1, False, heads=heads, groups=groups)
    return attention.GqaSetup(shape, device).setup()


def _mla_prefill(row: TimedRow, device: torch.device) -> attention.AttentionSetup:
    heads, requests, tokens, *cached = row.key
    prefix = sum(cached)
    shape = attention.PrefillShape(requests, tokens, prefix, heads, heads, (192, 128), False)
    return attention.PrefillSetup(shape, device).setup()


def _gqa_prefill(row: TimedRow, device: torch.device) -> attention.AttentionSetup:
    heads, groups, requests, tokens, *cached = row.key
    prefix = sum(cached)
    shape = attention.PrefillShape(requests, tokens, prefix, heads, groups, (128, 128), True)
    return attention.PrefillSetup(shape, device).setup()


ATTENTION: dict[str, Callable[[TimedRow, torch.device], attention.AttentionSetup]] = {
    "mla_decode": _mla_decode,
    "gqa_decode": _gqa_decode,
    "mla_prefill": _mla_prefill,
    "gqa_prefill": _gqa_prefill,
}
