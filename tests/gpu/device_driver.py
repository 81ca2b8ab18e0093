"""tests/models/driver.py on any device and page size: a model driven by hand through a paged
cache with scattered pages, in which everything unused is NaN and page 0, where padded rows
write, is zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.config.hf import read_config
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.parameter import Build
from rorqual.models.loader import random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import AttentionMetadata, Ops, TokenPlaces
from rorqual.parallel.overlap import run_one

Forms = tuple[str, str]  # MLA form of prefill, of decode


def random_model(
    config: dict[str, Any],
    ops: Ops,
    dtype: str,
    device: torch.device,
    forms: Forms = ("CC", "A_CC_ME"),
    gain: float = 1.0,
) -> Transformer:
    """gain: of the random weights that write to the residual stream; the engine takes
    RESIDUAL_GAIN / sqrt(2 layers)."""
    parsed = read_config(config)
    model = make_model(
        parsed, Build(ops, getattr(torch, dtype), device, parsed.quant, gain), 4096, *forms
    )
    random_weights(model, 0)
    return model


def with_ops(model: Transformer, ops: Ops) -> Transformer:
    """The same weights under another backend, in place."""
    seen: set[int] = set()

    def visit(part: Any) -> None:
        if id(part) in seen or not type(part).__module__.startswith("rorqual."):
            return
        seen.add(id(part))
        if isinstance(getattr(part, "ops", None), Ops):
            part.ops = ops
        if hasattr(part, "compute"):  # an exchange holds its expert function
            part.compute = ops.experts
        for value in vars(part).values() if hasattr(part, "__dict__") else ():
            for item in value if isinstance(value, list | tuple) else (value,):
                visit(item)

    visit(model)
    return model


class DeviceDriver:
    def __init__(
        self, model: Transformer, requests: int, max_len: int, page: int, kv_dtype: str = "auto"
    ):
        self.model = model
        self.page = page
        self.device = model.embedding.device
        decode = getattr(model.layers[0].attention, "decode_form", "A_CC_ME")
        pages = -(-max_len // page)
        dtype = str(model.dtype).removeprefix("torch.")
        self.pool = KVPool(
            kv_spec(model.config, page, kv_dtype, decode, activations=dtype),
            requests * pages + 1,
            self.device,
        )
        for planes in self.pool.layers:
            for plane in planes.values():
                if plane.itemsize == 1:  # e4m3, and the scales beside numbers of int8
                    plane.view(torch.uint8)[1:] = 255
                else:
                    plane[1:] = float("nan")
        order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.view(requests, pages)

    def step(self, tokens: list[Tensor], starts: list[int], slack: int = 0) -> ForwardBatch:
        """One chunk for each request; a decode step where all chunks are equally long and at
        most 4, with bounds `slack` too high."""
        rows = [
            torch.arange(start, start + len(part))
            for part, start in zip(tokens, starts, strict=True)
        ]
        positions = torch.cat(rows)
        owner = torch.cat([torch.full_like(row, index) for index, row in enumerate(rows)])
        slots = self.tables[owner, positions // self.page] * self.page + positions % self.page
        stops = [start + len(part) for part, start in zip(tokens, starts, strict=True)]
        lens = tuple(map(len, tokens))
        decode = max(lens) == min(lens) <= 4
        bounds = tuple(stop + slack for stop in stops) if decode else tuple(stops)
        segment = AttentionMetadata(
            self.tables.to(self.device), torch.tensor(stops).to(self.device), lens, bounds
        )
        positions = positions.to(self.device)
        places = TokenPlaces(*self.model.rotary.rows(positions), slots.to(self.device))
        ids = torch.cat(tokens).to(self.device)
        parts = {"decode": segment} if decode else {"prefill": segment}
        everything = torch.arange(len(ids), device=self.device)
        return ForwardBatch(ids, positions, places, everything, self.pool, **parts)

    @torch.inference_mode()
    def logits(self, step: ForwardBatch) -> Tensor:
        return self.model.logits(run_one(self.model.forward(step)))


def all_logits(
    model: Transformer,
    ids: Tensor,
    filters: list[int],
    page: int,
    queries: int = 1,
    kv_dtype: str = "auto",
) -> Tensor:
    """ids [requests, length]: chunks that end at `cuts` (the second request's one token
    earlier), the rest `queries` tokens a step. Logits of the positions after the last cut and of
    all before it, [requests, length, V] on the host."""
    requests, length = ids.shape
    driver = DeviceDriver(model, requests, length, page, kv_dtype)
    out = torch.empty(requests, length, model.config.vocab_size)
    done = [0] * requests
    for cut in [*filters, *range(filters[-1] + queries, length + 1, queries)]:
        stops = [cut - (row % 2) * (cut <= filters[-1] and cut < length) for row in range(requests)]
        parts = [row[start:stop] for row, start, stop in zip(ids, done, stops, strict=True)]
        split = (
            driver.logits(driver.step(parts, done, slack=7))
            .float()
            .cpu()
            .split(list(map(len, parts)))
        )
        for row, (start, stop, values) in enumerate(zip(done, stops, split, strict=True)):
            out[row, start:stop] = values
        done = stops
    assert done == [length] * requests, done
    return out
