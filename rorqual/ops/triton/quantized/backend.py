"""The op table of NVIDIA GPUs for weights in int8, int4, or e4m3 with a scale per row: TritonOps
plus the kernels of this folder (operands.supported).

Supported int4 weights are repacked after loading (int4_order.py): linear layers one by one, experts
if both GEMMs support it. Other weights are unchanged: int4 with unquantized activations uses
TritonOps' kernels, the rest the reference.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from rorqual.ops.activation import Activation, hidden_of, room_of
from rorqual.ops.deferred_sum import DeferredMoESum, NormInput
from rorqual.ops.interface import MLAWeights
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight
from rorqual.ops.triton.backend import TritonOps, _router
from rorqual.ops.triton.moe import combine
from rorqual.ops.triton.moe.align import empty_blocks
from rorqual.ops.triton.moe.grouped_gemm import FUSED_SHARED_TOKENS, sorts_while_routing
from rorqual.ops.triton.quantized import experts as experts_kernels
from rorqual.ops.triton.quantized import int4_order, operands
from rorqual.ops.triton.quantized.linear import linear, plan_for
from rorqual.ops.triton.quantized.rows import rounded_rows


class QuantizedTritonOps(TritonOps):
    def prepare_weight(self, weight: Weight, name: str) -> None:
        if not weight.turned and operands.takes_int4(weight):
            int4_order.turn(weight)

    def prepare_experts(self, w: ExpertWeights, name: str) -> None:
        pair = (w.gate_up, w.down)
        if all(not weight.turned and operands.takes_int4(weight) for weight in pair):
            for weight in pair:
                int4_order.turn(weight)

    def prepare_mla(self, w: MLAWeights, hidden: int) -> None:
        for weight in (w.down, w.q_b):
            if weight is not None:
                self.prepare_weight(weight, f"layers.{w.layer}.self_attn")

    def linear(self, x: Activation, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if not operands.supported(weight):
            return super().linear(x, weight, bias)
        return linear(hidden_of(x), weight, bias)

    def mlp(self, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        """8-bit activations between the GEMMs are quantized by the SwiGLU kernel, those of one
        token by the second GEMM's."""
        first, second = operands.supported(gate_up), operands.supported(down)
        if not (first or second):
            return super().mlp(x, gate_up, down)
        rows = hidden_of(x)
        both = self.linear(x, gate_up)
        if not second or down.activation == "wide" or plan_for(down, rows.shape[0]).direct:
            return self.linear(self.swiglu(both), down)
        return linear(rounded_rows(both, down.activation, gated=True), down, dtype=rows.dtype)

    def experts(
        self,
        x: Activation,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None = None,
    ) -> Tensor:
        if not experts_kernels.supported(w):
            return super().experts(x, ids, weights, w, base)
        shared = w.num_fused_shared_experts
        if shared and ids.shape[0] > FUSED_SHARED_TOKENS["int4"]:
            ids, weights = (topk[:, :-shared].contiguous() for topk in (ids, weights))
            base = self._add_fused_shared(x, w, base)
            w = replace(w, num_fused_shared_experts=0)
        return experts_kernels.experts(hidden_of(x), ids, weights, w, base)

    def experts_deferred(
        self,
        x: Activation,
        router: RouterWeights,
        w: ExpertWeights,
        base: Tensor | None = None,
        padded: PaddedRows | None = None,
    ) -> NormInput:
        """As TritonOps': the router's kernel sorts, and the norm does the sum. A few pairs are not
        sorted."""
        rows = room_of(x)
        tokens = rows.shape[0]
        if not tokens or not experts_kernels.supported(w):
            return super().experts_deferred(x, router, w, base, padded)
        shared = w.num_fused_shared_experts
        num_picks = tokens * router.config.top_k
        plan = experts_kernels.plan_of(w, tokens, num_picks, num_picks)
        apart = shared and tokens > FUSED_SHARED_TOKENS["int4"]
        if apart or experts_kernels.widens(plan, w, rows.dtype):
            return self.experts(x, *_router(x, router, padded=padded), w, base)
        picks = num_picks + tokens * shared
        sorts = plan.sorts(num_picks)
        blocks = None
        if sorts and sorts_while_routing(w.down, picks):
            slots = w.down.data.shape[0]
            blocks = empty_blocks(picks, slots, plan.rows, rows.device, buckets=True)
        ids, weights = _router(x, router, blocks, padded)
        rows = hidden_of(x)
        if sorts and blocks is None:
            blocks = experts_kernels.sorted_picks(ids, w, plan)
        y = experts_kernels.products(rows, w, plan, blocks, ids)
        gave = DeferredMoESum(y, None, weights, base, combine.combine, padded)
        return gave if tokens <= combine.NORM_SUMS_TOKENS else gave.total()
