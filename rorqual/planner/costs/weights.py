"""Inventory of a model's weights as the engine stores them, from its configuration. No torch;
costs.py sums it up.

Layouts: arXiv 2405.04434 (MLA, DeepSeek-V2), 2412.19437 (DeepSeek-V3, multi-token prediction),
2505.09388 (Qwen3-MoE).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from rorqual.cache.spec import DTYPE_BYTES
from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig
from rorqual.config.quant import WIDE, WeightScheme, scheme_of
from rorqual.errors import ConfigError

OWN = "dtype"  # a weight held in the model's own dtype
SCHEME = "scheme"  # or as its scheme says
DEFAULT_FORM = "A_CC_ME"


@dataclass(frozen=True)
class WeightShape:
    """`count` equal matrices, each of parts of `rows` merged into one [sum of rows, columns]; a
    vector has one column.

    `checkpoint` and `memory` name the dtype it has in the file and in the engine, or leave it to
    the `scheme`.
    """

    part: str
    name: str
    rows: tuple[int, ...]
    columns: int = 1
    count: int = 1
    checkpoint: str = OWN
    memory: str = OWN
    scheme: WeightScheme = WIDE

    @property
    def parameters(self) -> int:
        return sum(self.rows) * self.columns * self.count

    @property
    def flops_per_token(self) -> int:
        """Of one of the `count` matrices; a vector multiplies nothing."""
        return 2 * sum(self.rows) * self.columns if self.columns > 1 else 0

    def bytes(self, dtype: str, where: str = "memory") -> int:
        """`where`: memory | checkpoint. A scheme adds its scales and zero points."""
        kind = self.checkpoint if where == "checkpoint" else self.memory
        if kind != SCHEME:
            return self.parameters * DTYPE_BYTES[dtype if kind == OWN else kind]
        scales = self._scales(where) * self.count
        return (
            self.parameters * self.scheme.bits // 8
            + scales * (DTYPE_BYTES[dtype] if self.scheme.kind == "int4" else 4)
            + self._zeros(scales, where)
        )

    def math(self, dtype: str) -> str:
        """The type in which a product multiplies."""
        if self.memory != SCHEME:
            return dtype if self.memory == OWN else self.memory
        rounded = self.scheme.activation.partition("_")[0]
        return dtype if rounded == "wide" else rounded

    def _scales(self, where: str) -> int:
        rows = self.scheme.block[0]
        across = self.scheme.groups(self.columns)
        if where == "checkpoint":
            return sum(-(-part // rows) for part in self.rows) * across
        # Merged parts that do not end on a block keep one scale a row (layers/weight_format).
        aligned = all(part % rows == 0 for part in self.rows[:-1])
        return (-(-sum(self.rows) // rows) if aligned else sum(self.rows)) * across

    def _zeros(self, scales: int, where: str) -> int:
        """Bytes of zero points: half a byte each in a file, one in memory."""
        if self.scheme.symmetric:
            return 0
        return scales // 2 if where == "checkpoint" else scales


def _matrix(
    config: ModelConfig, part: str, name: str, rows: dict[str, int], columns: int, count: int = 1
) -> WeightShape:
    """Quantized where the checkpoint is; `rows` of each module merged into `name`."""
    scheme = scheme_of(config.quant, rows, columns)
    if scheme is None:
        raise ConfigError(f"{name}: its parts {', '.join(rows)} are of different formats")
    checkpoint = OWN if scheme.layout == "wide" else SCHEME
    memory = OWN if scheme.is_wide else SCHEME
    return WeightShape(part, name, tuple(rows.values()), columns, count, checkpoint, memory, scheme)


def _mla_weights(config: ModelConfig, mla: MLAConfig, at: str) -> list[WeightShape]:
    queries = mla.num_heads * mla.qk_dim
    out = f"{at}.o_proj"
    first = (
        {f"{at}.q_proj": queries}
        if mla.q_lora_rank is None
        else {f"{at}.q_a_proj": mla.q_lora_rank}
    )
    rows = {**first, f"{at}.kv_a_proj_with_mqa": mla.latent_dim}
    found = [
        _matrix(config, "attention", f"{at}.fused_qkv_a_proj_with_mqa", rows, config.hidden_size)
    ]
    if mla.q_lora_rank is not None:
        found.append(WeightShape("attention", f"{at}.q_a_layernorm", (mla.q_lora_rank,)))
        found.append(
            _matrix(
                config, "attention", f"{at}.q_b_proj", {f"{at}.q_b_proj": queries}, mla.q_lora_rank
            )
        )
    up = _matrix(
        config,
        "attention",
        f"{at}.kv_b_proj",
        {f"{at}.kv_b_proj": mla.num_heads * (mla.nope_dim + mla.v_dim)},
        mla.kv_lora_rank,
    )
    found += [
        WeightShape("attention", f"{at}.kv_a_layernorm", (mla.kv_lora_rank,)),
        # the absorbed products read it head by head, so loading dequantizes it
        replace(up, memory=OWN),
        _matrix(config, "attention", out, {out: config.hidden_size}, mla.num_heads * mla.v_dim),
    ]
    if mla.bias:
        found.append(
            WeightShape(
                "attention",
                f"{at}.bias",
                (mla.q_lora_rank or 0, mla.latent_dim, config.hidden_size),
            )
        )
    return found


def materialized(config: ModelConfig, mla: MLAConfig, at: str) -> list[WeightShape]:
    """AM_CC_ME's products: W_UK^T W_UQ, the rope rows of W_UQ, W_O W_UV. Made at loading, in the
    model's dtype."""
    shapes = {
        "absorbed_q": (mla.num_heads * mla.kv_lora_rank, mla.q_lora_rank or config.hidden_size),
        "rope_q": (mla.num_heads * mla.rope_dim, mla.q_lora_rank or config.hidden_size),
        "merged_o": (config.hidden_size, mla.num_heads * mla.kv_lora_rank),
    }
    return [
        WeightShape("attention", f"{at}.{name}", (rows,), columns)
        for name, (rows, columns) in shapes.items()
    ]


def _gqa_weights(config: ModelConfig, gqa: GQAConfig, at: str) -> list[WeightShape]:
    heads = gqa.num_heads
    groups = gqa.num_kv_heads
    dim = gqa.head_dim
    rows = {f"{at}.q_proj": heads * dim, f"{at}.k_proj": groups * dim, f"{at}.v_proj": groups * dim}
    bias = (
        [WeightShape("attention", f"{at}.bias", (*rows.values(), config.hidden_size))]
        if gqa.bias
        else []
    )
    return [
        _matrix(config, "attention", f"{at}.qkv_proj", rows, config.hidden_size),
        _matrix(
            config, "attention", f"{at}.o_proj", {f"{at}.o_proj": config.hidden_size}, heads * dim
        ),
        WeightShape("attention", f"{at}.qk_norm", (dim, dim)),
        *bias,
    ]


def attention_weights(
    config: ModelConfig, layer: int = 0, form: str = DEFAULT_FORM
) -> list[WeightShape]:
    """What the form multiplies by; AM_CC_ME replaces the query's second product, kv_b and the
    output."""
    at = f"model.layers.{layer}.self_attn"
    attention = config.attention
    if isinstance(attention, GQAConfig):
        return _gqa_weights(config, attention, at)
    found = _mla_weights(config, attention, at)
    if form != "AM_CC_ME":
        return found
    kept = [
        weight for weight in found if not weight.name.endswith(("q_b_proj", "kv_b_proj", "o_proj"))
    ]
    if attention.q_lora_rank is None:
        # q_proj itself is what was multiplied out
        kept[0] = replace(kept[0], rows=kept[0].rows[1:])
    return kept + materialized(config, attention, at)


def _swiglu(
    config: ModelConfig, part: str, at: str, size: int, module: str | None = None
) -> list[WeightShape]:
    """module: whose format they have, if that is not `at`."""
    module = module or at
    rows = {f"{module}.gate_proj": size, f"{module}.up_proj": size}
    down = {f"{module}.down_proj": config.hidden_size}
    return [
        _matrix(config, part, f"{at}.gate_up_proj", rows, config.hidden_size),
        _matrix(config, part, f"{at}.down_proj", down, size),
    ]


def _moe_weights(config: ModelConfig, at: str) -> list[WeightShape]:
    moe = config.moe
    hidden = config.hidden_size
    experts = f"{at}.experts"
    found = [
        WeightShape(
            "router",
            f"{at}.gate",
            (moe.num_experts,),
            hidden,
            memory="float32" if moe.router_fp32 else OWN,
        )
    ]
    if moe.has_bias:
        found.append(
            WeightShape(
                "router",
                f"{at}.e_score_correction_bias",
                (moe.num_experts,),
                checkpoint="float32",
                memory="float32",
            )
        )
    if moe.num_shared:
        found += _swiglu(
            config, "shared_experts", f"{at}.shared_experts", moe.num_shared * moe.intermediate_size
        )
    # checkpoints name each expert; all have one format
    routed = _swiglu(config, "routed_experts", experts, moe.intermediate_size, f"{experts}.0")
    return found + [replace(weight, count=moe.num_experts) for weight in routed]


def ffn_weights(config: ModelConfig, layer: int, moe: bool) -> list[WeightShape]:
    at = f"model.layers.{layer}.mlp"
    return (
        _moe_weights(config, at)
        if moe
        else _swiglu(config, "dense_ffn", at, config.dense_intermediate)
    )


def layer_weights(
    config: ModelConfig, layer: int, moe: bool, form: str = DEFAULT_FORM
) -> list[WeightShape]:
    norms = WeightShape(
        "norms", f"model.layers.{layer}.layernorms", (config.hidden_size, config.hidden_size)
    )
    return [norms, *attention_weights(config, layer, form), *ffn_weights(config, layer, moe)]


def _mtp_weights(config: ModelConfig, layer: int) -> list[WeightShape]:
    """One prediction module: two norms, the projection of both their outputs, an MoE layer, the
    head's norm (2412.19437, section 2.2)."""
    at = f"model.layers.{layer}"
    hidden = config.hidden_size
    own = [
        WeightShape("mtp", f"{at}.norms", (hidden, hidden, hidden)),
        WeightShape("mtp", f"{at}.eh_proj", (hidden,), 2 * hidden),
    ]
    return own + [replace(weight, part="mtp") for weight in layer_weights(config, layer, moe=True)]


@lru_cache(maxsize=64)
def head_weight(config: ModelConfig) -> WeightShape:
    """Quantized checkpoints do not quantize the head; it may be quantized while loading."""
    own = replace(config, quant=config.quant.of_head if config.quant else None)
    return _matrix(own, "lm_head", "lm_head", {"lm_head": config.vocab_size}, config.hidden_size)


def mtp_weights(config: ModelConfig) -> list[WeightShape]:
    """Of all prediction modules; the embedding and the head are the model's own."""
    return [
        weight
        for extra in range(config.num_mtp_layers)
        for weight in _mtp_weights(config, config.num_layers + extra)
    ]


@lru_cache(maxsize=64)
def weights(config: ModelConfig, form: str = DEFAULT_FORM) -> tuple[WeightShape, ...]:
    """Every weight of the model, in the order of the forward pass, the multi-token prediction
    modules last."""
    found = [
        WeightShape("embedding", "model.embed_tokens", (config.vocab_size,), config.hidden_size)
    ]
    for layer, moe in enumerate(config.moe_layers):
        found += layer_weights(config, layer, moe, form)
    found.append(WeightShape("norms", "model.norm", (config.hidden_size,)))
    if not config.tie_embeddings:
        found.append(head_weight(config))
    return (*found, *mtp_weights(config))
