"""What one token costs to remember: plain data that the pool, page transfer and the planner's memory model all read. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from rorqual.config import GQAConfig, MLAConfig, ModelConfig
from rorqual.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
MLA_FORMS = ("CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME")


@dataclass(frozen=True)
class Plane:
    """One tensor of a layer's cache: `shape` is per token; `shard_axis` indexes shape, or is None where every rank holds it all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard_axis: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def shard(self, ranks: int) -> Plane:
        """What each of `ranks` ranks holds: its share of the shard axis, at least one entry (which several ranks then hold alike)."""
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
        """The cache of one rank: `tp` ranks share the heads, and a pipeline stage holds the planes of its `layers` alone."""
        held = self.layers if layers is None else self.layers[layers.start : layers.stop]
        return replace(self, layers=tuple(tuple(plane.shard(tp) for plane in layer) for layer in held))


def mla_planes(mla: MLAConfig, form: str, dtype: str) -> tuple[Plane, ...]:
    """CD keeps decompressed keys and values for each head, the other forms the latent and the shared rope key in one row."""
    if form == "CD":
        heads = mla.num_heads
        return Plane("k", dtype, (heads, mla.qk_dim), 0), Plane("v", dtype, (heads, mla.v_dim), 0)
    return (Plane("latent", dtype, (mla.latent_dim,)),)


def gqa_planes(gqa: GQAConfig, dtype: str) -> tuple[Plane, ...]:
    shape = (gqa.num_kv_heads, gqa.head_dim)
    return Plane("k", dtype, shape, 0), Plane("v", dtype, shape, 0)


def check_forms(prefill: str, decode: str) -> None:
    for name, form in (("mla_prefill", prefill), ("mla_decode", decode)):
        if form not in MLA_FORMS:
            raise ConfigError(f"{name}={form!r} is not an MLA form; accepted: {', '.join(MLA_FORMS)}")
    if (prefill == "CD") != (decode == "CD"):
        raise ConfigError(f"mla_prefill={prefill} and mla_decode={decode} keep different caches; CD goes with CD alone")


def kv_spec(model: ModelConfig, page_size: int, dtype: str, mla_form: str = "A_CC_ME", mtp_layers: int = 0) -> KVSpec:
    """The cache of every layer of `model`, then of `mtp_layers` prediction modules; `mla_form` matters to MLA models only."""
    attention = model.attention
    planes = mla_planes(attention, mla_form, dtype) if isinstance(attention, MLAConfig) else gqa_planes(attention, dtype)
    return KVSpec((planes,) * (model.num_layers + mtp_layers), page_size)
