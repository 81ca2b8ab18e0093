"""The cache layout per token: plain data that the pool, page transfer and the planner's memory
model all read. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig
from rorqual.errors import ConfigError

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
    "int8": 1,
}
FP8 = "float8_e4m3fn"
INT8 = "int8"
KV_DTYPES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "float8_e4m3fn": FP8,
    "int8": INT8,
}
# storage of an 8-bit cache: torch's index operations do not support e4m3, so its planes are bytes
EIGHT_BITS = {FP8: "uint8", INT8: "int8"}
LATENT_GROUP = 128  # latent columns that share a scale in an 8-bit cache
MLA_FORMS = ("CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME")


@dataclass(frozen=True)
class Plane:
    """One tensor of a layer's cache: `shape` is per token; `shard_axis` indexes shape, or is
    None where every rank holds it all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard_axis: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def shard(self, ranks: int) -> Plane:
        """The plane of each of `ranks` ranks: its share of the shard axis, at least one entry
        (which several ranks then replicate)."""
        if self.shard_axis is None:
            return self
        shape = list(self.shape)
        shape[self.shard_axis] = max(1, shape[self.shard_axis] // ranks)
        return replace(self, shape=tuple(shape))


@dataclass(frozen=True)
class KVSpec:
    """Planes of each layer, and how many tokens a page holds."""

    layers: tuple[tuple[Plane, ...], ...]
    page_size: int

    @property
    def bytes_per_token(self) -> int:
        return sum(plane.bytes_per_token for layer in self.layers for plane in layer)

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size

    def shard(self, tp: int, layers: range | None = None) -> KVSpec:
        """The cache of one rank: `tp` ranks split the heads, and a pipeline stage holds only the
        planes of its `layers`."""
        held = self.layers if layers is None else self.layers[layers.start : layers.stop]
        return replace(
            self, layers=tuple(tuple(plane.shard(tp) for plane in layer) for layer in held)
        )


def kv_dtype(name: str | None) -> str | None:
    """The cache's dtype by any of its names; None where it is the model's (`auto`). Raises
    ConfigError for an unknown name."""
    if name is not None and name not in KV_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype={name!r} is not supported; accepted: {', '.join(KV_DTYPES)}"
        )
    return KV_DTYPES[name or "auto"]


def short_name(dtype: str) -> str:
    """The user-facing name of an 8-bit cache's dtype."""
    return "fp8" if dtype == FP8 else dtype


def check_8bit_cache(model: ModelConfig, form: str, dtype: str) -> None:
    """Raises ConfigError where the model's cache does not support the 8-bit `dtype`."""
    mla = model.attention
    if not isinstance(mla, MLAConfig):
        return
    name = f"kv_cache_dtype={short_name(dtype)}"
    if form == "CD":
        raise ConfigError(
            f"{name} does not go with MLA form CD, which caches no latent; "
            "accepted: CC, A_CC, A_CC_ME, AM_CC_ME"
        )
    if mla.kv_lora_rank % 4 or mla.rope_dim % 2:
        sizes = f"kv_lora_rank={mla.kv_lora_rank} and qk_rope_head_dim={mla.rope_dim}"
        raise ConfigError(
            f"{name} wants a latent of a multiple of 4 columns, not {sizes}; "
            "accepted here: auto, bfloat16, float16, float32"
        )


def packed_latent_plane(mla: MLAConfig, rope_dtype: str, dtype: str) -> Plane:
    """One token as one row of bytes: latent [C] e4m3 or int8 | scales [C / 128, rounded up] fp32 |
    rope key [rope] in the activations' dtype.

    656 bytes at 512 + 64 columns in bf16, the row of FlashMLA: a page is one piece of memory, moved
    and addressed as one.
    """
    scales = -(-mla.kv_lora_rank // LATENT_GROUP) * DTYPE_BYTES["float32"]
    width = mla.kv_lora_rank + scales + mla.rope_dim * DTYPE_BYTES[rope_dtype]
    return Plane("latent", EIGHT_BITS[dtype], (width,))


def mla_planes(
    mla: MLAConfig, form: str, dtype: str, activations: str, split: bool = False
) -> tuple[Plane, ...]:
    """CD keeps decompressed keys and values for each head, the other forms the latent and the
    shared rope key: in one row, or `split` into a plane each, as an NPU requires. A split int8
    cache has one scale per layer, and its rope keys stay in the activations' dtype."""
    if form == "CD":
        heads = mla.num_heads
        return Plane("k", dtype, (heads, mla.qk_dim), 0), Plane("v", dtype, (heads, mla.v_dim), 0)
    if split:
        rope = activations if dtype in EIGHT_BITS else dtype
        return Plane("latent", dtype, (mla.kv_lora_rank,)), Plane("rope", rope, (mla.rope_dim,))
    return (
        packed_latent_plane(mla, activations, dtype)
        if dtype in EIGHT_BITS
        else Plane("latent", dtype, (mla.latent_dim,)),
    )


def gqa_planes(gqa: GQAConfig, dtype: str) -> tuple[Plane, ...]:
    """In 8 bits a third plane holds a scale for each token's key and value of each head: it is part
    of the page, so that a transferred page is complete."""
    shape = (gqa.num_kv_heads, gqa.head_dim)
    held = EIGHT_BITS.get(dtype, dtype)
    planes = Plane("k", held, shape, 0), Plane("v", held, shape, 0)
    scales = Plane("scales", "float32", (gqa.num_kv_heads, 2), 0)
    return (*planes, scales) if dtype in EIGHT_BITS else planes


def check_forms(prefill: str, decode: str) -> None:
    for name, form in (("mla_prefill", prefill), ("mla_decode", decode)):
        if form not in MLA_FORMS:
            raise ConfigError(
                f"{name}={form!r} is not an MLA form; accepted: {', '.join(MLA_FORMS)}"
            )
    if (prefill == "CD") != (decode == "CD"):
        raise ConfigError(
            f"mla_prefill={prefill} and mla_decode={decode} keep different caches; CD goes "
            "with CD alone"
        )


def kv_spec(
    model: ModelConfig,
    page_size: int,
    dtype: str | None,
    mla_form: str = "A_CC_ME",
    mtp_layers: int = 0,
    activations: str | None = None,
    split_latent: bool = False,
) -> KVSpec:
    """The cache of every layer of `model`, then of `mtp_layers` prediction modules; `mla_form`
    matters to MLA models only.

    dtype: any name in KV_DTYPES; `auto` or None is that of the `activations`, and these are the
    model's dtype unless it was overridden. split_latent: see mla_planes.
    """
    attention = model.attention
    activations = activations or model.dtype
    dtype = kv_dtype(dtype) or activations
    if dtype in EIGHT_BITS:
        check_8bit_cache(model, mla_form, dtype)
    planes = (
        mla_planes(attention, mla_form, dtype, activations, split_latent)
        if isinstance(attention, MLAConfig)
        else gqa_planes(attention, dtype)
    )
    return KVSpec((planes,) * (model.num_layers + mtp_layers), page_size)
