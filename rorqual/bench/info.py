"""`rorqual info`: what a model holds, what it weighs, what a token of its cache costs, and what
fits where. One screen, no weights read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rorqual.cache.spec import MLA_FORMS, kv_spec
from rorqual.config.hf import read_config_file
from rorqual.config.model import MLAConfig, ModelConfig
from rorqual.engine.config import MAX_HOST_MEMORY
from rorqual.errors import ConfigError
from rorqual.models.hub import model_folder
from rorqual.planner.costs import costs
from rorqual.planner.costs.costs import DEFAULT_FORM, Format

CARD_GIB = (24, 48, 80, 96, 141)
GPUS = (1, 2, 4, 8, 16)
USABLE = 0.9  # of a GPU: the engine's default; the rest is activations, graphs and the driver
LABELS = {"lm_head": "LM head", "dense_ffn": "dense FFN"}


def info(
    model: str | None = None,
    memory_gib: float | None = None,
    ignore_fields: Iterable[str] = (),
    console: Console | None = None,
    host_gib: float | None = None,
) -> None:
    """Print a model given by folder or Hugging Face id (None: the bundled one); `memory_gib`
    adds a GPU of that size, `host_gib` what so much host memory holds of evicted prefixes. Raises
    ConfigError."""
    if memory_gib is not None and not 0 < memory_gib <= MAX_HOST_MEMORY:
        raise ConfigError(
            f"--memory={memory_gib} is out of range; accepted: above 0, up to {MAX_HOST_MEMORY} "
            "(GiB)"
        )
    if host_gib is not None and not 0 <= host_gib <= MAX_HOST_MEMORY:
        raise ConfigError(
            f"--kv-host-memory={host_gib} is out of range; accepted: 0 to {MAX_HOST_MEMORY} (GiB)"
        )
    folder = model_folder(model, weights=False)
    (console or Console()).print(
        render(read_config_file(folder, ignore_fields), folder, memory_gib, host_gib)
    )


def render(
    config: ModelConfig,
    folder: str | Path,
    memory_gib: float | None = None,
    host_gib: float | None = None,
) -> RenderableType:
    sections = {
        "Weights": parts_table(config),
        "Cache of all layers, attention of one": cache_table(config),
        f"Tokens of cache beside weights ({USABLE:.0%} of each GPU, spread evenly)": fit_table(
            config, memory_gib
        ),
    }
    if host_gib:
        title = f"Tokens of evicted prefixes in {host_gib:g} GiB of each rank's host memory"
        sections[title] = host_table(config, host_gib)
    titled = [
        item
        for title, table in sections.items()
        for item in (Text(f"\n{title}", style="bold"), table)
    ]
    return Group(heading(config, folder), *titled)


def count(value: float) -> str:
    """1234567 as 1.23 M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} B"


def heading(config: ModelConfig, folder: str | Path) -> Text:
    moe = config.moe
    sparse = sum(config.moe_layers)
    shared = f" + {moe.num_shared} shared" if moe.num_shared else ""
    attention = (
        f"MLA, {config.attention.num_heads} heads"
        if config.is_mla
        else f"GQA, {config.attention.num_heads} heads"
    )
    held = config.dtype if config.quant is None else f"{config.quant.describe()}, {config.dtype}"
    facts = (
        f"{config.num_layers} layers ({config.num_layers - sparse} dense, {sparse} MoE), "
        f"hidden {config.hidden_size}, {attention}, "
        f"{moe.num_experts} experts top-{moe.top_k}{shared}, {config.max_position:,} "
        f"positions, {held}"
    )
    return Text.assemble((config.architecture, "bold"), f"  {folder}\n{facts}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def parts_table(config: ModelConfig) -> Table:
    """Parameters and weight bytes by part; `a token uses` counts the whole embedding table, as
    the models' authors do."""
    parts = costs.parameters(config)
    disk = costs.weight_bytes(config, "checkpoint")
    held = costs.weight_bytes(config)
    table = _table("part", "parameters", "a token uses", "checkpoint", "in memory")
    for name in (item.name for item in fields(parts)):
        value = getattr(parts, name)
        if value and name != "mtp":
            used = (
                value * config.moe.top_k / config.moe.num_experts
                if name == "routed_experts"
                else value
            )
            label = LABELS.get(name, name.replace("_", " "))
            table.add_row(
                label,
                count(value),
                count(used),
                size(getattr(disk, name)),
                size(getattr(held, name)),
            )
    table.add_row(
        "total",
        count(parts.total),
        count(costs.active_parameters(config)),
        size(disk.total),
        size(held.total),
        style="bold",
    )
    if parts.mtp:  # not loaded for plain decoding
        table.add_row("multi-token prediction", count(parts.mtp), "", size(disk.mtp), "")
    return table


def cache_table(config: ModelConfig) -> Table:
    """One row a form of MLA, one row for GQA."""
    table = _table("form", "bytes a token", "tokens a GiB", "FLOPs a cached token", "parameters")
    for form in MLA_FORMS if isinstance(config.attention, MLAConfig) else ("GQA",):
        fmt = Format(form=form)
        flops = costs.decode_flops_per_cached_token(config, form)
        held = costs.attention_parameters(config, form)
        cache = (
            f"{costs.kv_bytes_per_token(config, fmt):,}",
            f"{costs.kv_tokens(config, 2**30, fmt):,}",
        )
        table.add_row(form, *cache, count(flops), count(held))
    return table


def fit_table(config: ModelConfig, memory_gib: float | None = None) -> Table:
    table = _table("GPU", *(f"x{gpus}" for gpus in GPUS))
    for memory in sorted({*CARD_GIB, *([memory_gib] if memory_gib else [])}):
        table.add_row(f"{memory:g} GiB", *(_fit(config, memory * gpus * 2**30) for gpus in GPUS))
    return table


def host_table(config: ModelConfig, host_gib: float) -> Table:
    """By ranks that share the heads: each holds its part of a token. A latent is in every part."""
    attention = config.attention
    heads = attention.num_heads if isinstance(attention, MLAConfig) else attention.num_kv_heads
    sizes = [tp for tp in GPUS if tp <= heads]
    spec = kv_spec(config, 1, "auto", DEFAULT_FORM)
    table = _table("tensor parallel", *map(str, sizes))
    bytes_per_token = [spec.shard(tp).bytes_per_token for tp in sizes]
    table.add_row("tokens", *(count(host_gib * 2**30 // one) for one in bytes_per_token))
    return table


def _fit(config: ModelConfig, memory: float) -> str:
    tokens = costs.kv_tokens(config, memory * USABLE - costs.weight_bytes(config).total)
    return count(tokens) if tokens else "-"
