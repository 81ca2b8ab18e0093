"""How a model is split over ranks: independent sizes for its parts, validated in one place. No
torch.

A world has `pp` pipeline stages of `stage = tp * dp` ranks each. Within a stage a rank's number is
dp_rank * tp + tp_rank. Each part of a layer groups the same ranks differently:

| part      | groups of a stage                                             | what a group shares  |
| --------- | ------------------------------------------------------------- | -------------------- |
| attention | dp groups of tp ranks: a group owns its sequences             | heads are split over |
|           |                                                               | tp                   |
| dense FFN | groups of dense_tp ranks                                      | columns are split    |
|           |                                                               | over dense_tp        |
| experts   | ep groups of expert_tp = stage / ep ranks: whole experts each | columns of an expert |
|           |                                                               | split over expert_tp |
| embedding | groups of embed_tp ranks                                      | rows of the          |
|           |                                                               | vocabulary           |
| LM head   | groups of head_tp ranks                                       | rows of the          |
|           |                                                               | vocabulary           |

Groups are blocks of consecutive ranks, so a dense_tp, embed_tp or head_tp group is inside an
attention group or consists of whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

from rorqual.config.model import GQAConfig, ModelConfig
from rorqual.config.option import option
from rorqual.errors import ConfigError

MAX_MICRO_BATCHES = 8
AUTO = "auto"
MAX_AUTO_MICRO_BATCHES = 4  # that micro_batches="auto" chooses
EXCHANGES = ("auto", "local", "allgather_tp", "allgather_ep", "alltoall", "low_latency")
REMOTE = "remote"  # experts in other processes (parallel/remote)

NO_SIZES = (
    "exchange",
    "micro_batches",  # may be "auto"
    "sequence_parallel",
    "fp8_dispatch",
    "redundant_experts",  # may be 0
    "enable_eplb",
)

_parallel = partial(option, group="Parallel")


def read_micro_batches(value: object) -> int | str:
    """A number of micro-batches, or "auto". Raises ConfigError."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number == AUTO:
        return AUTO
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"micro_batches={value!r} must be an integer of at least 1, or {AUTO!r}")
    if number > MAX_MICRO_BATCHES:
        raise ConfigError(
            f"micro_batches={number} is out of range; accepted: 1 to {MAX_MICRO_BATCHES}, {AUTO}"
        )
    return number


@dataclass(frozen=True)
class ParallelConfig:
    """Defaults: dense_tp, embed_tp and head_tp are tp; ep is 1 (experts split by columns over the
    whole stage); pipeline_turns is pp."""

    tp: int = _parallel(
        1,
        "Ranks that split attention, and all else that follows it.",
        aliases=("tensor_parallel_size",),
    )
    dp: int = _parallel(
        1,
        "Ranks with sequences of their own; experts are shared among them.",
        aliases=("data_parallel_size",),
    )
    pp: int = _parallel(1, "Pipeline stages.", aliases=("pipeline_parallel_size",))
    ep: int = _parallel(
        1, "Groups of ranks with whole experts of their own; 1 splits every expert."
    )
    dense_tp: int | None = _parallel(None, "Ranks that split a dense MLP; --tp if left out.")
    embed_tp: int | None = _parallel(None, "Ranks that split the embedding; --tp if left out.")
    head_tp: int | None = _parallel(None, "Ranks that split the LM head; --tp if left out.")
    pipeline_turns: int | None = _parallel(
        None,
        "Groups of requests that take turns in a pipeline; --pp if left out. 2 with --experts: two "
        "steps take turns, one computes while the other's rows are at the experts.",
    )
    micro_batches: int | str = _parallel(
        1,
        "Parts that a step is cut into: while one part's tokens travel to "
        "experts and back, another part computes. Two are two-batch overlap; auto measures at "
        "start and decides for each step.",
    )
    exchange: str = _parallel(
        "auto",
        "How tokens reach experts: auto picks by phase and size (parallel/exchange_policy.py).",
    )
    sequence_parallel: bool = _parallel(
        False,
        "Between attention and feed-forward each rank of an attention group keeps its share of the "
        "tokens (reduce-scatter and all-gather in place of all-reduces). Implied where dense_tp is "
        "smaller than tp, or a step's exchange needs it.",
    )
    fp8_dispatch: bool = _parallel(
        False,
        "The low-latency exchange, and calls of expert servers, send hidden states as e4m3 with "
        "one scale for 128 columns, which rounds them.",
    )
    redundant_experts: int = _parallel(
        0,
        "Slots for second copies of much used experts, in each layer on all its ranks together; "
        "experts and these are dealt out to --ep groups.",
        aliases=("num_redundant_experts",),
    )

    enable_eplb: bool = _parallel(
        False,
        "Watch how often experts are picked, and move them between ranks while the engine serves "
        "where that evens out the ranks' loads.",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in NO_SIZES or (value is None and item.default is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{item.name}={value!r} must be an integer of at least 1")
        if self.exchange not in (*EXCHANGES, REMOTE):
            raise ConfigError(
                f"exchange={self.exchange!r} is not known; accepted: {', '.join(EXCHANGES)}"
            )
        for name in ("dense_tp", "embed_tp", "head_tp", "pipeline_turns"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.pp if name == "pipeline_turns" else self.tp)
        for name in ("ep", "dense_tp", "embed_tp", "head_tp"):
            if self.stage % getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} does not divide the {self.stage} "
                    f"ranks of a stage (tp={self.tp} x dp={self.dp})"
                )
        for name in ("dense_tp", "embed_tp", "head_tp"):
            size = getattr(self, name)
            if size % self.tp and self.tp % size:
                raise ConfigError(
                    f"{name}={size} neither divides nor is a multiple of tp={self.tp}"
                )
        object.__setattr__(self, "micro_batches", read_micro_batches(self.micro_batches))
        if self.micro_batches != 1 and self.is_single and self.exchange != REMOTE:
            raise ConfigError(
                f"micro_batches={self.micro_batches} needs several ranks, or expert servers, "
                "between which tokens travel"
            )
        self._check_exchange()
        self._check_redundant()

    def _check_redundant(self) -> None:
        count = self.redundant_experts
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"redundant_experts={count!r} must be an integer of at least 0")
        if count and self.ep == 1:
            raise ConfigError(
                f"redundant_experts={count} needs ep of at least 2: with ep=1 every rank has a "
                "part of every expert"
            )
        if self.enable_eplb and self.ep == 1:
            raise ConfigError(
                "enable_eplb needs ep of at least 2: with ep=1 all ranks have equally much to do"
            )

    def _check_exchange(self) -> None:
        name = self.exchange
        if name == REMOTE and (self.ep > 1 or self.pp > 1 or self.places_experts):
            given = ", ".join(
                f"{item}={getattr(self, item)}"
                for item in ("ep", "pp", "redundant_experts", "enable_eplb")
                if getattr(self, item) not in (0, 1, False)
            )
            raise ConfigError(f"experts in other processes do not go with {given}")
        if name == "local" and self.dp > 1:
            raise ConfigError(
                f"exchange='local' needs dp=1, got dp={self.dp}: tokens of other ranks must "
                "reach this rank's experts"
            )
        if (
            name == "local"
            and self.tp > 1
            and (self.sequence_parallel or (self.dense_tp or 1) < self.tp)
        ):
            raise ConfigError(
                "exchange='local' needs every token on every rank: not with "
                "sequence_parallel, nor with dense_tp below tp"
            )
        if name == "allgather_tp" and self.ep > 1:
            raise ConfigError(
                "exchange='allgather_tp' cuts every expert and needs ep=1, got "
                f"ep={self.ep}; allgather_ep takes whole ones"
            )
        if name in ("allgather_ep", "alltoall", "low_latency") and self.ep == 1:
            raise ConfigError(
                f"exchange={name!r} sends tokens to whole experts and needs ep of at least 2"
            )

    @property
    def most_micro_batches(self) -> int:
        """Most micro-batches of a step."""
        return MAX_AUTO_MICRO_BATCHES if isinstance(self.micro_batches, str) else self.micro_batches

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.dp

    @property
    def world(self) -> int:
        return self.stage * self.pp

    @property
    def expert_tp(self) -> int:
        """Ranks that split the columns of one expert."""
        return self.stage // self.ep

    @property
    def is_single(self) -> bool:
        return self.world == 1

    @property
    def places_experts(self) -> bool:
        """Whether experts are placed by their load, not in order."""
        return self.redundant_experts > 0 or self.enable_eplb

    def expert_slots(self, num_experts: int) -> int:
        """Expert slots of a layer with `num_experts` experts, on all ranks together."""
        return num_experts + self.redundant_experts

    def stage_layers(self, num_layers: int, pp_rank: int) -> range:
        """The layers of one pipeline stage: as even as possible, longer stages first (the last one
        also has the head)."""
        each, more = divmod(num_layers, self.pp)
        start = pp_rank * each + min(pp_rank, more)
        return range(start, start + each + (pp_rank < more))


def check_parallel(model: ModelConfig, sizes: ParallelConfig) -> None:
    """Raises ConfigError, naming the rule, if `model` cannot be split that way."""

    def divides(name: str, size: int, what: str, count: int) -> None:
        if count % size:
            raise ConfigError(f"{name}={size} does not divide the model's {count} {what}")

    attention = model.attention
    moe = model.moe
    divides("tp", sizes.tp, "attention heads", attention.num_heads)
    if (
        isinstance(attention, GQAConfig)
        and sizes.tp % attention.num_kv_heads
        and attention.num_kv_heads % sizes.tp
    ):
        raise ConfigError(
            f"tp={sizes.tp} neither divides nor is a multiple of the model's "
            f"{attention.num_kv_heads} key-value heads"
        )
    if sizes.redundant_experts:
        _check_slots(moe.num_experts, sizes)
    else:
        divides("ep", sizes.ep, "experts", moe.num_experts)
    if sizes.exchange != REMOTE:
        divides("expert_tp", sizes.expert_tp, "columns of an expert", moe.intermediate_size)
    if moe.num_shared:
        divides(
            "dense_tp",
            sizes.dense_tp or 1,
            "columns of the shared experts",
            moe.num_shared * moe.intermediate_size,
        )
    if not all(model.moe_layers):
        divides(
            "dense_tp", sizes.dense_tp or 1, "columns of a dense layer", model.dense_intermediate
        )
    if model.tie_embeddings and sizes.embed_tp != sizes.head_tp:
        raise ConfigError(
            f"the model's head is its embedding: embed_tp={sizes.embed_tp} and "
            f"head_tp={sizes.head_tp} must be equal"
        )
    if sizes.pp > model.num_layers:
        raise ConfigError(f"pp={sizes.pp} exceeds the model's {model.num_layers} layers")
    if model.quant is not None:
        _check_blocks(model, sizes)


def _check_slots(experts: int, sizes: ParallelConfig) -> None:
    """All ranks must have equally many slots, and none an expert twice."""
    most = experts * (sizes.ep - 1)
    redundant = sizes.redundant_experts
    if sizes.expert_slots(experts) % sizes.ep or redundant > most:
        least = -experts % sizes.ep
        raise ConfigError(
            f"redundant_experts={redundant}: ep={sizes.ep} must divide the "
            f"{sizes.expert_slots(experts)} slots, and no rank needs an expert twice; accepted: "
            f"{least}, {least + sizes.ep}, {least + 2 * sizes.ep} ... up to {most}"
        )


def _check_blocks(model: ModelConfig, sizes: ParallelConfig) -> None:
    """Quantized weights can only be split between scale blocks."""
    attention = model.attention
    outputs = attention.num_heads * (
        attention.head_dim if isinstance(attention, GQAConfig) else attention.v_dim
    )
    moe = model.moe
    dense = sizes.dense_tp or 1
    shared = moe.num_shared * moe.intermediate_size
    cuts = [("tp", sizes.tp, "the attention output", "self_attn.o_proj", outputs)]
    if any(model.moe_layers):
        experts = ("mlp.experts.0.down_proj", moe.intermediate_size)
        cuts.append(("expert_tp", sizes.expert_tp, "an expert", *experts))
        if moe.num_shared:
            place = "mlp.shared_experts.down_proj"
            cuts.append(("dense_tp", dense, "the shared experts", place, shared))
    if not all(model.moe_layers):
        place = "mlp.down_proj"
        cuts.append(("dense_tp", dense, "a dense layer", place, model.dense_intermediate))
    for name, size, what, place, columns in cuts:
        if size > 1:
            _check_cut(model, name, size, what, place, columns)


def _check_cut(
    model: ModelConfig, name: str, size: int, what: str, place: str, columns: int
) -> None:
    assert model.quant is not None
    found = (
        model.quant.of(f"model.layers.{layer}.{place}", columns)
        for layer in range(model.num_layers)
    )
    for scheme in dict.fromkeys(found):
        unit = scheme.column_unit
        if scheme.ordered:
            raise ConfigError(
                f"{name}={size} cuts {what} of {columns} columns inside an order of their groups "
                "(desc_act)"
            )
        if (columns // size) % unit:
            group = f"an {scheme.kind} {'block' if scheme.block[0] > 1 else 'group'} of {unit}"
            raise ConfigError(f"{name}={size} cuts {what} of {columns} columns inside {group}")
