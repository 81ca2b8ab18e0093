"""Time of a step and its bottlenecks: each operation's time is from measured kernels if there are
any, else from its roofline.

`StepModel(...).step(work)` is the cost function of the planner's search and of simulations. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from rorqual.cache.spec import DTYPE_BYTES, kv_dtype
from rorqual.config.hardware import DeviceSpec, load_device
from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig
from rorqual.config.parallel import ParallelConfig, check_parallel
from rorqual.config.quant import WIDE, WeightScheme
from rorqual.engine.scheduling.buckets import bucket_of, piecewise_tokens, token_buckets
from rorqual.errors import ConfigError
from rorqual.ops.stretch import workspace_bytes
from rorqual.parallel.exchange_policy import captured_prompt_tokens
from rorqual.planner.costs.costs import DEFAULT_FORMAT, Format, GroupWork
from rorqual.planner.costs.messages import CostedMessage
from rorqual.planner.costs.parallel_costs import RankOp, RankStep, rank_step
from rorqual.planner.costs.routing import UNIFORM, Routing
from rorqual.planner.costs.shards import (
    rank_weight_bytes,
    stage_kv_bytes_per_token,
    stage_weight_bytes,
)
from rorqual.planner.timing import digests
from rorqual.planner.timing.profiles import Profile
from rorqual.planner.timing.tables import RENEWAL, KernelTables, curve_seconds, held_dtype

PAGE = 64  # of an engine on a device, if nothing else is asked for
# Computed eagerly between captured pieces, without padding rows.
PROMPTS_ALONE = ("lm_head", "kv_b_proj")
LIMITERS = ("compute", "memory", "network", "launch")


@dataclass(frozen=True)
class Timed:
    """One operation's share of a step: seconds over all its layers, and what limits it."""

    name: str
    part: str
    seconds: float
    limiter: str
    measured: bool = False


@dataclass(frozen=True)
class StepTime:
    """`seconds`: of a whole step, through all pipeline stages. `stage`: of the fullest stage alone,
    the time per step of a full pipeline."""

    seconds: float
    stage: float
    items: tuple[Timed, ...] = field(repr=False)

    def by(self, key: str) -> dict[str, float]:
        """Seconds by `limiter`, `part` or `name`, largest first."""
        sums: dict[str, float] = {}
        for item in self.items:
            sums[getattr(item, key)] = sums.get(getattr(item, key), 0.0) + item.seconds
        return dict(sorted(sums.items(), key=lambda pair: -pair[1]))

    @property
    def measured_share(self) -> float:
        """The fraction of the time that is from measured kernels."""
        return sum(item.seconds for item in self.items if item.measured) / max(
            sum(item.seconds for item in self.items), 1e-30
        )


@dataclass(frozen=True)
class StepModel:
    """A model on a layout of devices under an engine. utilization: the part of a device's memory
    the engine may use.

    longest: tokens of a request, at most; None: as the model allows."""

    config: ModelConfig
    sizes: ParallelConfig
    device: DeviceSpec
    profile: Profile
    fmt: Format = DEFAULT_FORMAT
    routing: Routing = UNIFORM
    utilization: float = 0.9
    longest: int | None = None
    tables: KernelTables | None = None  # in place of the profile's

    def __post_init__(self) -> None:
        check_parallel(self.config, self.sizes)
        self.profile.check(self.device)
        if self.profile.tables and kv_dtype(self.fmt.kv_dtype) not in (None, "bfloat16", "float16"):
            raise ConfigError(
                f"profile {self.profile.name} has attention times for a bf16 cache alone, "
                f"not kv_dtype={self.fmt.kv_dtype}"
            )

    # ---- memory

    @cached_property
    def weight_bytes(self) -> float:
        return rank_weight_bytes(self.config, self.sizes, self.fmt)

    def memory_left(self, tokens: int = 0, mtp: bool = False) -> float:
        """Bytes of the fullest rank for the cache: what the engine may use, less weights and
        activations of a step of `tokens` tokens."""
        weights = (
            rank_weight_bytes(self.config, self.sizes, self.fmt, mtp) if mtp else self.weight_bytes
        )
        return self._room(tokens) - weights

    def _room(self, tokens: int) -> float:
        activations = activation_bytes(self.config, self.sizes, tokens, self.fmt, self.longest)
        return self.device.memory * self.utilization - activations

    def cache_tokens(self, tokens: int = 0, mtp: bool = False) -> int:
        """Tokens whose cache fits in one attention group, at a step of at most `tokens` tokens:
        the stage with the least room for them decides."""
        room = self._room(tokens)
        given = (self.config, self.sizes)
        stages = range(self.sizes.pp)
        left = [room - stage_weight_bytes(*given, stage, self.fmt, mtp) for stage in stages]
        each = [stage_kv_bytes_per_token(*given, stage, self.fmt, mtp) for stage in stages]
        return max(0, int(min(bytes_ // token for bytes_, token in zip(left, each, strict=True))))

    # ---- time

    @cached_property
    def _tables(self) -> KernelTables | None:
        found = self.tables or self.profile.kernel_tables()
        if found is None and self.profile.calibrated and self.device.gemm:
            meta = {"device": self.device.name, "source": "calibration"}
            return KernelTables({"meta": meta, "gemm": self.device.gemm})
        return found

    @cached_property
    def _cache(self) -> dict[GroupWork, StepTime]:
        return {}

    @cached_property
    def _bases(self) -> set[tuple[str, str]]:
        return set()

    def families(self, basis: str | None = None) -> tuple[str, ...]:
        """The kernels costed so far whose times are based on this, such as tables.STALE; or all."""
        return tuple(sorted({family for family, found in self._bases if basis in (None, found)}))

    def step(self, work: GroupWork) -> StepTime:
        """The time of one step of every group; remembered."""
        if work not in self._cache:
            self._cache[work] = self._step(work)
        return self._cache[work]

    def _step(self, work: GroupWork) -> StepTime:
        if not work.tokens:
            return StepTime(0.0, 0.0, ())
        found = self._rank_step(work)
        items = [self._timed(op) for op in found.ops if not self._folded(op)]
        items += self._learnt(found.ops, work) or self._assumed(found.ops, work)
        items += [self._sent(message, bool(work.prefill)) for message in found.messages]
        stage = sum(item.seconds for item in items)
        stage = max(stage, self._host_seconds(found.ops, work))
        stages = self.sizes.pp
        return StepTime(stage * stages if stages > 1 else stage, stage, tuple(items))

    def _rank_step(self, work: GroupWork) -> RankStep:
        copies = self.profile.dispatch == "picks"
        found = rank_step(self.config, self.sizes, work, self.fmt, self.routing, copies)
        more = self._padding(work)
        if more == 1:
            return found
        outside = PROMPTS_ALONE if work.prefill else ()
        ops = (op if op.name in outside else self._padded(op, more) for op in found.ops)
        return replace(found, ops=tuple(ops))

    def _padding(self, work: GroupWork) -> float:
        """Rows that a recorded step computes, over those that are asked for."""
        if not self.profile.padded:
            return 1.0
        if not work.prefill:
            return bucket_of(work.decode.requests) / work.decode.requests if work.decode else 1.0
        most = self._piecewise
        if work.tokens > most:
            return 1.0
        return next(size for size in token_buckets(most) if size >= work.tokens) / work.tokens

    @cached_property
    def _piecewise(self) -> int:
        """Tokens up to which steps with prompts are captured in pieces: the engine's default."""
        most = piecewise_tokens(self.weight_bytes / self.config.num_layers)
        if self.sizes.is_single:
            return most
        return min(most, captured_prompt_tokens(self.sizes, self.config.moe, most))

    def _padded(self, op: RankOp, more: float) -> RankOp:
        """With `more` times the rows: products compute those of padding, which attend to nothing
        and have no experts."""
        grown = replace(op, flops=op.flops * more, activation_bytes=op.activation_bytes * more)
        if op.kind == "gemm":
            return replace(grown, shape=(op.shape[0] * more, *op.shape[1:]))
        if op.kind == "bmm":
            return replace(grown, shape=(op.shape[0], op.shape[1] * more, *op.shape[2:]))
        return op

    def kernels(self, work: GroupWork) -> float:
        """Seconds of the operations in sequence, without anything in between."""
        ops = self._rank_step(work).ops
        return self.time_of(op for op in ops if not self._folded(op))

    def time_of(self, ops: Iterable[RankOp]) -> float:
        """Seconds of operations one after another."""
        return sum(self._timed(op).seconds for op in ops)

    def _folded(self, op: RankOp) -> bool:
        """Norms are among the small kernels; a fused shared expert is one of the routed ones."""
        return (op.kind == "gather" and op.part != "embedding") or (
            op.part == "shared_experts" and self._fused_shared()
        )

    def _host_seconds(self, ops: tuple[RankOp, ...], work: GroupWork) -> float:
        """Prompts run without graphs: the host must launch every kernel of every layer."""
        layers = sum(op.layers for op in ops if op.name == "layernorms")
        return (
            layers * self.profile.prefill_kernels * self.profile.prefill_launch_us * 1e-6
            if work.prefill
            else 0.0
        )

    def _kernel_seconds(self) -> float:
        """The shortest kernel, seconds: the device's own if the profile is calibrated."""
        return (self.profile.calibrated and self.device.kernel) or self.profile.small_us * 1e-6

    def between_of(
        self, ops: Iterable[RankOp], work: GroupWork
    ) -> tuple[int, tuple[str, str], str]:
        """(layers, (attention, the experts' weights), phase): what is between kernels goes by."""
        found = tuple(ops)
        layers = sum(op.layers for op in found if op.name == "layernorms")
        dtype = next((held_dtype(op) for op in found if op.kind == "experts"), "bfloat16")
        attention = "mla" if self.config.is_mla else "gqa"
        return layers, (attention, dtype), "prompts" if work.prefill else "decode"

    def _learnt(self, ops: tuple[RankOp, ...], work: GroupWork) -> list[Timed]:
        """Time of a measured engine's steps besides the operations; empty if none was measured."""
        if self._tables is None or not self._tables.own:
            return []
        layers, kind, phase = self.between_of(ops, work)
        found = self._tables.between(*kind, phase, work.tokens)
        self._bases.add(self._tables.basis_between(found is not None))
        if found is None:
            return []
        return [Timed("between kernels", "activations", layers * found, "launch", True)]

    def _assumed(self, ops: tuple[RankOp, ...], work: GroupWork) -> list[Timed]:
        """Norms, quantization, rope, activations, routing (kernels that only move activations), and
        the constant part of a step."""
        step = Timed("step", "engine", self.profile.step_us * 1e-6, "launch")
        return [*self._small(ops, work), step]

    def _small(self, ops: tuple[RankOp, ...], work: GroupWork) -> list[Timed]:
        profile = self.profile
        row = self.config.hidden_size * 2.0
        moved = (
            work.tokens
            * row
            * profile.small_bytes
            / (self.device.bandwidth * profile.bandwidth_reached)
        )
        items = []
        for kind in ("dense", "moe"):
            layers = sum(op.layers for op in ops if op.kind == "experts") if kind == "moe" else 0
            if kind == "dense":
                layers = sum(op.layers for op in ops if op.name == "layernorms") - sum(
                    op.layers for op in ops if op.kind == "experts"
                )
            if layers:
                started = profile.small.get(kind, 0) * self._kernel_seconds()
                items.append(Timed("small kernels", "activations", layers * started, "launch"))
                items.append(Timed("small kernels", "activations", layers * moved, "memory"))
        return items

    def floor(self, op: RankOp, device: DeviceSpec | None = None) -> tuple[float, str]:
        """No kernel is faster: operations over the peak, or bytes over the bandwidth."""
        device = device or self.device
        compute = op.flops / device.peak(op.dtype)
        memory = op.bytes / device.bandwidth
        return (compute, "compute") if compute > memory else (memory, "memory")

    def reached(self, op: RankOp) -> tuple[float, str]:
        """As `floor`, at the fractions of the peaks that kernels reach, by the profile or by the
        device's own measurement."""
        profile = self.profile
        device = self.device
        usual = profile.flops_by_dtype.get(op.dtype, profile.flops_reached)
        flops = device.achieved_flops.get(op.dtype, usual)
        compute = op.flops / (device.peak(op.dtype) * flops)
        memory = op.bytes / (
            device.bandwidth * (device.achieved_bandwidth or profile.bandwidth_reached)
        )
        return (compute, "compute") if compute > memory else (memory, "memory")

    def _timed(self, op: RankOp) -> Timed:
        if (
            op.kind != "gather"
            and self._tables is not None
            and self._tables.has(op, self.config.is_mla)
        ):
            return self._looked_up(op, self._tables)
        if op.kind != "gather" and self._tables is not None and self.profile.tables:
            raise self._unknown(op, self._tables)
        return self._derived(op)

    def _unknown(self, op: RankOp, tables: KernelTables) -> ConfigError:
        """A time from peaks among measured ones would look like one of them."""
        family = tables.family(op, self.config.is_mla)
        dtype = held_dtype(op)
        what = f"{family} with {dtype} weights" if op.kind == "experts" else family
        known = f"profile {self.profile.name} has no times of {what}"
        if self.profile.title.startswith("this engine") and family in digests.FAMILIES:
            command = f"{RENEWAL} --based-on {tables.device} --out FILE"
            return ConfigError(
                f"{known}; `{command}` on that GPU measures them for --kernels FILE where our "
                "kernels take them; --profile roofline gives lower bounds"
            )
        return ConfigError(f"{known}; --profile roofline gives lower bounds")

    def _derived(self, op: RankOp) -> Timed:
        """Without a table: at the fractions of the peaks that are reached, plus start-up."""
        start = self._kernel_seconds()
        if self.profile.product_us is not None and op.kind != "gather":
            start = self.profile.product_us * 1e-6
        seconds, limiter = self.reached(op)
        return Timed(
            op.name,
            op.part,
            (seconds + start) * op.layers,
            "launch" if start > seconds else limiter,
        )

    def _looked_up(self, op: RankOp, table: KernelTables) -> Timed:
        seconds = (
            self._experts(op, table)
            if op.kind == "experts"
            else table.seconds(op, self.config.is_mla)
        )
        self._bases.add(table.basis(op, self.config.is_mla))
        measured = self.device if table.device == self.device.name else _device(table.device)
        floor, limiter = self.floor(op)
        there, _ = self.floor(op, measured)
        if op.kind != "experts" and measured.name not in (self.device.name, self.device.measured):
            start = min(self.profile.small_us * 1e-6, seconds)
            seconds = _elsewhere(seconds, start, there, floor, limiter)
        # routers in fp32 are multiplied as three bf16 products or TF32, not at the fp32 rate
        if op.dtype != "float32":
            seconds = max(seconds, floor)
        return Timed(
            op.name,
            op.part,
            seconds * op.layers,
            limiter if floor > 0.3 * seconds else "launch",
            True,
        )

    def _experts(self, op: RankOp, table: KernelTables) -> float:
        """The nearest measured time, in proportion to the floors of what was read and multiplied
        there and is here."""
        found = table.expert_rows(op)
        tokens, pairs, distinct, hidden, inner, local = op.shape
        if (
            self.profile.routing == "table"
            and self.routing == UNIFORM
            and found.skewed
            and local == self.config.moe.num_experts
        ):
            distinct = min(distinct, found.distinct)  # the table's own routing
        # bytes of an element; scales count where they are a share of four bits
        width = 1.0 if op.dtype in ("fp8", "int8") else 2.0
        if held_dtype(op).startswith("int4"):
            width = op.weight_bytes / (3 * hidden * inner * op.shape[2])
        extra = float(self.config.moe.num_shared) if self._fused_shared() else 0.0
        measured = _device(table.device)
        shape = (hidden, inner, pairs + extra * tokens, distinct + extra, op)
        at_row = (found.hidden, found.inner, found.pairs, found.distinct, op)
        there, _ = self._expert_floor(*shape, measured, width)
        start = min(2 * self.profile.small_us * 1e-6, found.seconds)
        ratio = there / self._expert_floor(*at_row, measured, width)[0]
        seconds = start + (found.seconds - start) * ratio
        here, limiter = self._expert_floor(*shape, self.device, width)
        return _elsewhere(seconds, start, there, here, limiter) * self.profile.expert_factor

    def _fused_shared(self) -> bool:
        """Shared experts run as so many more routed experts: only where both are cut alike over
        the same ranks."""
        return (
            self.profile.shared_fused
            and self.config.moe.num_shared > 0
            and self.sizes.ep == 1
            and self.sizes.dense_tp == self.sizes.expert_tp
        )

    @staticmethod
    def _expert_floor(
        hidden: float,
        inner: float,
        pairs: float,
        distinct: float,
        op: RankOp,
        device: DeviceSpec,
        width: float,
    ) -> tuple[float, str]:
        memory = 3 * hidden * inner * distinct * width / device.bandwidth
        compute = 6 * hidden * inner * pairs / device.peak(op.dtype)
        return (compute, "compute") if compute > memory else (memory, "memory")

    def _sent(self, message: CostedMessage, prefill: bool) -> Timed:
        seconds, measured = self.message_seconds(message, prefill)
        return Timed(message.name, message.axis, seconds * message.layers, "network", measured)

    def message_seconds(self, message: CostedMessage, prefill: bool) -> tuple[float, bool]:
        """Measured where a table has the kind and the number of ranks, on a device with the same
        links; else latency and bytes."""
        fast = message.span <= self.device.link.span
        own = (
            self.device.collectives.get(message.kind, {}).get(message.ranks)
            if self.profile.tables or self.profile.calibrated
            else None
        )
        if own and fast:
            return curve_seconds(own, message.bytes), True
        if self._tables is not None and self.profile.tables:
            there = _device(self._tables.device)
            same = there.link == self.device.link and there.network == self.device.network
            looked = self._tables.collective(message, low_latency=not prefill) if same else None
            if looked is not None and (fast or message.kind == "all_to_all"):
                return looked * message.wide, True
        link = self.device.link if fast else self.device.network
        share = 1.0
        if not fast and message.kind == "all_to_all":
            # copies within the node use the fast link
            share = (message.ranks - self.device.link.span) / (message.ranks - 1)
        rounds = 2 if message.kind == "all_reduce" else 1
        return rounds * link.latency + share * message.wire_bytes / (
            link.bandwidth * self.profile.link_reached
        ), False


def _device(name: str) -> DeviceSpec:
    return load_device(name)


def _elsewhere(seconds: float, start: float, there: float, here: float, limiter: str) -> float:
    """A kernel that takes `seconds` on one device, on another: there, here: its floors on the two;
    limiter: of the latter. Where memory limits it, what it takes besides stays. Where computing
    does, it keeps the fraction of the peak that it reached, apart from `start` seconds."""
    if limiter == "memory":
        return seconds + here - there
    return start + (seconds - start) * here / there


def activation_bytes(
    config: ModelConfig,
    sizes: ParallelConfig,
    tokens: int,
    fmt: Format = DEFAULT_FORMAT,
    longest: int | None = None,
) -> float:
    """Largest live activations of a step of `tokens` tokens: the residual and its copy, the
    FFN's inside for every (token, expert) pair, queries, and logits of up to 256 rows in fp32; and
    what MLA prompts decompress of the cache."""
    moe = config.moe
    hidden = config.hidden_size
    pairs = tokens * sizes.dp * moe.top_k / sizes.ep
    experts = pairs * (hidden + 3 * moe.intermediate_size / sizes.expert_tp) * 2
    attention = config.attention
    width = attention.head_dim if isinstance(attention, GQAConfig) else attention.qk_dim
    heads = tokens * attention.num_heads / sizes.tp * width * 2 * 2
    logits = min(tokens, 256) * config.vocab_size * 4.0
    cached = decompressed_bytes(config, sizes, tokens, fmt, longest)
    return 4 * tokens * hidden * 2 + experts + heads + logits + cached


def decompressed_bytes(
    config: ModelConfig,
    sizes: ParallelConfig,
    tokens: int,
    fmt: Format,
    longest: int | None,
) -> int:
    """Memory of attention in form CC besides weights and cache, for any requests in a step of
    `tokens` tokens."""
    mla = config.attention
    if not tokens or not isinstance(mla, MLAConfig) or fmt.form == "CD":
        return 0
    own = replace(mla, num_heads=mla.num_heads // sizes.tp)
    width = DTYPE_BYTES[fmt.dtype or config.dtype]
    longest = longest or config.max_position
    return workspace_bytes(own, width, "cuda", PAGE, tokens, longest, min(tokens, longest))


# ---- critical sizes


def _expert_scheme(config: ModelConfig) -> WeightScheme:
    layer = config.moe_layers.index(True) if any(config.moe_layers) else 0
    name = f"model.layers.{layer}.mlp.experts.0.gate_proj"
    return config.quant.of(name, config.hidden_size) if config.quant else WIDE


def _expert_width(config: ModelConfig) -> float:
    """Bytes of an element of an expert, without scales."""
    scheme = _expert_scheme(config)
    return 2.0 if scheme.is_wide else scheme.bits / 8


def compute_bound_tokens(config: ModelConfig, device: DeviceSpec) -> tuple[float, float]:
    """(tokens per expert, tokens in all under even routing) at which reading an expert takes as
    long as multiplying with it: F w / 2 B rows for weights of w bytes per element, rate F and
    bandwidth B."""
    scheme = _expert_scheme(config)
    rounded = scheme.activation.partition("_")[0]
    kind = "bfloat16" if rounded == "wide" else rounded
    rows = device.peak(kind) * _expert_width(config) / (2 * device.bandwidth)
    return rows, rows * config.moe.num_experts / config.moe.top_k


def expert_seconds(config: ModelConfig, device: DeviceSpec) -> float:
    """Reading one expert once."""
    return (
        3
        * config.hidden_size
        * config.moe.intermediate_size
        * _expert_width(config)
        / device.bandwidth
    )


def rpc_seconds(config: ModelConfig, device: DeviceSpec, tokens: int, copies: float = 1.0) -> float:
    """Sending `tokens` hidden states there and back over the network in the model's dtype, each
    `copies` times."""
    return 2 * (
        device.network.latency + copies * tokens * config.hidden_size * 2 / device.network.bandwidth
    )


def largest_batch(model: StepModel, context: int, step_tokens: int = 0, mtp: bool = False) -> int:
    """Requests of `context` tokens whose cache fits in one attention group."""
    if context < 1:
        raise ConfigError(f"context={context} must be at least 1")
    return model.cache_tokens(step_tokens, mtp) // context


def with_link(device: DeviceSpec, network_gbit: float | None) -> DeviceSpec:
    """The same device on another network (Gbit/s a device)."""
    if network_gbit is None:
        return device
    if network_gbit <= 0:
        raise ConfigError(f"network={network_gbit} Gbit/s must be above 0")
    return replace(device, network=replace(device.network, bandwidth=network_gbit / 8 * 1e9))
