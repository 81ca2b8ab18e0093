"""Disaggregation: attention and experts, or prefill and decode, on separate devices. No torch.

Attention devices hold everything but the routed experts and are data-parallel; expert devices hold
whole experts and serve all attention devices (arXiv 2507.19427 and 2504.02263 describe such
splits). What a step's seconds are, with several micro-batches in flight: split_schedule.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rorqual.config.hardware import DeviceSpec
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.planner.costs.shards import rank_kv_bytes_per_token, rank_weight_bytes
from rorqual.planner.costs.weights import weights
from rorqual.planner.timing.roofline import StepModel, decompressed_bytes
from rorqual.planner.timing.split_schedule import SplitPass, SplitStep

# an expert device holds some experts of every layer, or every expert of some layers
PLACEMENTS = ("experts", "layers")


# what a step has once, after its micro-batches: they are joined before the head
ONCE = ("lm_head", "engine")


def split_step(
    model: StepModel,
    work: GroupWork,
    attention: int,
    experts: int,
    placement: str = "experts",
    batches: int = 1,
) -> SplitStep:
    """`work` is one of `batches` equal micro-batches of one of `attention` devices; `experts`
    devices serve them all."""
    decode = work.decode
    if decode is not None:
        decode = replace(decode, requests=decode.requests * batches)
    whole = replace(work, decode=decode, prefill=work.prefill * batches)
    return SplitStep(
        (split_pass(model, work, attention, experts, placement),) * batches,
        once_seconds(model, whole),
        layer_devices(model, experts) if placement == "layers" else None,
    )


def decode_step(
    model: StepModel,
    rows: Sequence[int],
    context: int,
    attention: int,
    experts: int,
    placement: str = "experts",
) -> SplitStep:
    """A decode step of micro-batches of so many requests each, with `context` entries each."""
    kinds = {
        count: split_pass(
            model, GroupWork(BatchShape.decode(count, context)), attention, experts, placement
        )
        for count in set(rows)
    }
    return SplitStep(
        tuple(kinds[count] for count in rows),
        once_seconds(model, GroupWork(BatchShape.decode(sum(rows), context))),
        layer_devices(model, experts) if placement == "layers" else None,
    )


def split_pass(
    model: StepModel, work: GroupWork, attention: int, experts: int, placement: str = "experts"
) -> SplitPass:
    """One micro-batch through all layers."""
    own, last, shared = _attention_layers(model, replace(work, drafts=0))
    latency, sent = message_seconds(model, work.tokens, attention, experts, placement)
    seconds, exclusive = _expert_layer(model, work.tokens * attention, experts, placement)
    return SplitPass(own, last, shared, latency, sent, seconds, exclusive)


def layer_devices(model: StepModel, experts: int) -> tuple[int, ...]:
    """The expert device of each MoE layer, where each holds whole layers."""
    layers = sum(model.config.moe_layers)
    return tuple(index * experts // layers for index in range(layers))


def once_seconds(model: StepModel, work: GroupWork) -> float:
    """The head and sampling for a whole step, and the passes of a prediction module after them,
    without its routed experts."""
    alone = _alone(model)
    plain = alone.step(replace(work, drafts=0))
    found = sum(item.seconds for item in plain.items if item.part in ONCE)
    return found + (_own(alone, work) - _own(alone, replace(work, drafts=0)))


def _alone(model: StepModel) -> StepModel:
    """On one device; the same object where it is, as it remembers steps."""
    one = ParallelConfig()
    return model if model.sizes == one else replace(model, sizes=one)


def _own(alone: StepModel, work: GroupWork) -> float:
    """All of a step but the routed experts."""
    timed = alone.step(work)
    return timed.seconds - sum(
        item.seconds for item in timed.items if item.part == "routed_experts"
    )


def _attention_layers(model: StepModel, work: GroupWork) -> tuple[tuple[float, ...], float, float]:
    """SplitPass.own, last and shared: operations by part where they are computed; what lies between
    kernels, and what the host's launches take longer, evenly over all layers."""
    timed = _alone(model).step(work)
    sums = dict.fromkeys(("embedding", "dense_ffn", "router", "shared_experts"), 0.0)
    left = timed.seconds
    for item in timed.items:
        if item.part in sums:
            sums[item.part] += item.seconds
        if item.part in (*sums, *ONCE, "routed_experts"):
            left -= item.seconds
    sparse = model.config.moe_layers
    moe = max(1, sum(sparse))
    each = left / len(sparse)
    dense = sums["dense_ffn"] / max(1, len(sparse) - sum(sparse))
    own: list[float] = []
    waiting = sums["embedding"]
    for has_experts in sparse:
        waiting += each + (sums["router"] / moe if has_experts else dense)
        if has_experts:
            own.append(waiting)
            waiting = 0.0
    return tuple(own), waiting, sums["shared_experts"] / moe


def _expert_layer(model: StepModel, tokens: int, gpus: int, placement: str) -> tuple[float, float]:
    """SplitPass.experts and exclusive of `tokens` tokens.

    Lanes (micro-batches) of shared memory and of a group run on streams of their own
    (disagg/experts/steps_in_flight.py). While a lane's kernels start, sort rows, or run out of
    blocks, another lane's can read. But all lanes read through one memory, which gives them no more
    together than it gives a single kernel: the bytes at the rate that kernels reach, or the
    operations at theirs, add up. The memory's data-sheet rate would be too much, as no kernel gets
    it. Calls over tcp are computed one at a time (under a lock); this is not about them."""
    if placement == "experts" and model.config.moe.num_experts % gpus:
        raise ConfigError(
            f"{model.config.moe.num_experts} experts cannot lie evenly on {gpus} GPUs"
        )
    sizes = ParallelConfig(dp=gpus, ep=gpus) if placement == "experts" else ParallelConfig()
    wide = replace(model, sizes=sizes)
    work = GroupWork(BatchShape(max(tokens, 1), 1), stage_tokens=tokens)
    ops = [
        op
        for op in rank_step(wide.config, sizes, work, wide.fmt, wide.routing).ops
        if op.kind == "experts"
    ]
    layers = max(1, sum(model.config.moe_layers))
    seconds = wide.time_of(ops) / layers
    exclusive = sum(wide.reached(op)[0] * op.layers for op in ops) / layers
    return seconds, min(seconds, exclusive)


def message_seconds(
    model: StepModel, tokens: int, attention: int, experts: int, placement: str = "experts"
) -> tuple[float, float]:
    """One direction of one MoE layer for the busier side: (latency, seconds at the bandwidth). A
    token goes once to each device that holds one of its experts, or to the one device that holds
    its layer."""
    moe = model.config.moe
    device = model.device
    copies = 1.0 if placement == "layers" else experts * (1 - (1 - 1 / experts) ** moe.top_k)
    link = device.link if attention + experts <= device.link.span else device.network
    busier = float(attention) if placement == "layers" else max(1.0, attention / experts)
    sent = tokens * copies * busier * model.config.hidden_size * 2
    return link.latency, sent / (link.bandwidth * model.profile.link_reached)


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
