"""Disaggregation: attention and experts, or prefill and decode, on separate devices. No torch.

Attention devices hold everything but the routed experts and are data-parallel; expert devices hold
whole experts and serve all attention devices (arXiv 2507.19427 and 2504.02263 describe such
splits). A layer is a pipeline of attention, network and experts; N batches in flight keep its
busiest resource busy if N times one batch's time on it is at least the time of the whole pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rorqual.config.hardware import DeviceSpec
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.planner.costs.shards import rank_kv_bytes_per_token, rank_weight_bytes
from rorqual.planner.costs.weights import weights
from rorqual.planner.timing.roofline import StepModel, decompressed_bytes


@dataclass(frozen=True)
class SplitStep:
    """Seconds of a whole pass of one micro-batch through all layers, by stage, and what the pass
    occupies of one expert device, where several micro-batches can be on different expert devices at
    once; `batches` in flight."""

    attention: float
    experts: float
    network: float
    expert_gpu: float
    batches: int = 1

    @property
    def longest(self) -> float:
        """One micro-batch's time on the busiest resource."""
        return max(self.attention, self.expert_gpu, self.network)

    @property
    def needed(self) -> int:
        """Batches in flight that keep the busiest resource busy: the pass over its share,
        rounded up."""
        return max(
            1, math.ceil((self.attention + self.experts + self.network) / self.longest - 1e-9)
        )

    @property
    def seconds(self) -> float:
        """Between two tokens of one request: the pass itself, or where the pipeline is full, all
        batches through the busiest resource."""
        return max(self.attention + self.experts + self.network, self.batches * self.longest)


# an expert device holds some experts of every layer, or every expert of some layers
PLACEMENTS = ("experts", "layers")


def split_step(
    model: StepModel,
    work: GroupWork,
    attention: int,
    experts: int,
    placement: str = "experts",
    batches: int = 1,
) -> SplitStep:
    """`work` is one micro-batch of one of `attention` devices; `experts` devices serve them all."""
    alone = replace(model, sizes=ParallelConfig())
    timed = alone.step(work)
    own = timed.seconds - sum(item.seconds for item in timed.items if item.part == "routed_experts")
    pass_seconds = _expert_pass(model, work.tokens * attention, experts, placement)
    device = (
        pass_seconds
        if placement == "experts"
        else pass_seconds
        * -(-sum(model.config.moe_layers) // experts)
        / sum(model.config.moe_layers)
    )
    return SplitStep(
        own,
        pass_seconds,
        exchange_seconds(model, work.tokens, attention, experts, placement),
        device,
        batches,
    )


def _expert_pass(model: StepModel, tokens: int, gpus: int, placement: str) -> float:
    """All MoE layers one after another for `tokens` tokens."""
    if placement == "experts" and model.config.moe.num_experts % gpus:
        raise ConfigError(
            f"{model.config.moe.num_experts} experts cannot lie evenly on {gpus} GPUs"
        )
    sizes = ParallelConfig(dp=gpus, ep=gpus) if placement == "experts" else ParallelConfig()
    wide = replace(model, sizes=sizes)
    work = GroupWork(BatchShape(max(tokens, 1), 1), stage_tokens=tokens)
    return wide.time_of(
        op
        for op in rank_step(wide.config, sizes, work, wide.fmt, wide.routing).ops
        if op.kind == "experts"
    )


def exchange_seconds(
    model: StepModel, tokens: int, attention: int, experts: int, placement: str = "experts"
) -> float:
    """Both directions of all MoE layers for the busier side. A token goes once to each device that
    holds one of its experts, or to the one device that holds its layer."""
    moe = model.config.moe
    config = model.config
    device = model.device
    copies = 1.0 if placement == "layers" else experts * (1 - (1 - 1 / experts) ** moe.top_k)
    link = device.link if attention + experts <= device.link.span else device.network
    busier = float(attention) if placement == "layers" else max(1.0, attention / experts)
    sent = tokens * copies * busier * config.hidden_size * 2 * 2
    return sum(config.moe_layers) * (
        2 * link.latency + sent / (link.bandwidth * model.profile.link_reached)
    )


@dataclass(frozen=True)
class SplitMemory:
    """Bytes a device: weights of each side, and what is left for the cache on an attention
    device."""

    attention: float
    experts: float
    left: float
    experts_left: float

    @property
    def fits(self) -> bool:
        return min(self.left, self.experts_left) > 0


def split_memory(
    model: StepModel,
    experts: int,
    placement: str = "experts",
    step_tokens: int = 0,
    host_embedding: bool = False,
) -> SplitMemory:
    """host_embedding: the table stays in host memory, and rows are copied to the device."""
    dtype = model.fmt.dtype or model.config.dtype
    config = model.config
    sums = dict.fromkeys(("routed_experts", "embedding"), 0.0)
    for weight in weights(config):
        if weight.part in sums:
            sums[weight.part] += weight.bytes(dtype)
    routed = sums["routed_experts"]
    layers = sum(config.moe_layers)
    own = (
        rank_weight_bytes(config, ParallelConfig(), model.fmt)
        - routed
        - (sums["embedding"] if host_embedding else 0.0)
    )
    held = routed / experts if placement == "experts" else routed / layers * -(-layers // experts)
    room = model.device.memory * model.utilization
    step = 8.0 * step_tokens * config.hidden_size
    step += decompressed_bytes(config, ParallelConfig(), step_tokens, model.fmt, model.longest)
    return SplitMemory(own, held, room - own - step, room - held)


def transfer_seconds(model: StepModel, tokens: int, device: DeviceSpec | None = None) -> float:
    """Moving a prompt's cache from a prefill to a decode group: each rank sends its own planes
    over its own network link."""
    device = device or model.device
    size = tokens * rank_kv_bytes_per_token(model.config, model.sizes, model.fmt)
    if model.config.is_mla:
        size /= model.sizes.tp  # replicas of a latent need sending once
    return device.network.latency + size / (device.network.bandwidth * model.profile.link_reached)
