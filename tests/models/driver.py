"""Drive a model by hand through the paged cache, without scheduler or sampler: logits of every
position."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.config.hf import read_config_file
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import AttentionMetadata, Ops, TokenPlaces
from rorqual.parallel.overlap import run, run_one

CPU = torch.device("cpu")
PAGE = 4
FORMS = [
    ("CD", "CD"),
    ("CC", "CC"),
    ("A_CC", "A_CC"),
    ("A_CC_ME", "A_CC_ME"),
    ("AM_CC_ME", "AM_CC_ME"),
    ("CC", "A_CC_ME"),
]


def load(
    folder: Path, ops: Ops, dtype: str = "float32", forms: tuple[str, str] = ("CC", "A_CC_ME")
) -> Transformer:
    config = read_config_file(folder)
    model = make_model(config, Build(ops, getattr(torch, dtype), CPU, config.quant), 256, *forms)
    load_weights(model, folder)
    return model


class Driver:
    """Several requests share one pool with scattered pages; unused memory is NaN so that a stray
    read shows."""

    def __init__(
        self,
        model: Transformer,
        requests: int,
        max_len: int,
        dtype: str = "float32",
        kv_dtype: str = "auto",
    ):
        decode = getattr(model.layers[0].attention, "decode_form", "A_CC_ME")
        self.model = model
        pages = -(-max_len // PAGE)
        self.pool = KVPool(
            kv_spec(model.config, PAGE, kv_dtype, decode, activations=dtype),
            requests * pages + 1,
            CPU,
        )
        for planes in self.pool.layers:
            for plane in planes.values():
                # NaN as fp8, bf16 and fp32 alike
                if plane.is_floating_point():
                    plane.fill_(float("nan"))
                else:
                    plane.view(torch.uint8).fill_(255)
        order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.view(requests, pages)

    def step(
        self, tokens: list[Tensor], starts: list[int], decode: bool, request: int = 0
    ) -> ForwardBatch:
        """One chunk for each of the requests `request`, `request` + 1, ..."""
        tables = self.tables[request : request + len(tokens)]
        rows = [
            torch.arange(start, start + len(part))
            for part, start in zip(tokens, starts, strict=True)
        ]
        positions = torch.cat(rows)
        owner = torch.cat([torch.full_like(row, index) for index, row in enumerate(rows)])
        slots = tables[owner, positions // PAGE] * PAGE + positions % PAGE
        stops = [start + len(part) for part, start in zip(tokens, starts, strict=True)]
        segment = AttentionMetadata(
            tables, torch.tensor(stops), tuple(map(len, tokens)), tuple(stops)
        )
        places = TokenPlaces(*self.model.rotary.rows(positions), slots)
        ids = torch.cat(tokens)
        parts = {"decode": segment} if decode else {"prefill": segment}
        return ForwardBatch(ids, positions, places, torch.arange(len(ids)), self.pool, **parts)

    @torch.inference_mode()
    def logits(self, step: ForwardBatch) -> Tensor:
        return self.model.logits(run_one(self.model.forward(step)))

    @torch.inference_mode()
    def interleaved(self, steps: list[ForwardBatch]) -> list[Tensor]:
        return [
            self.model.logits(hidden)
            for hidden in run([self.model.forward(step) for step in steps])
        ]


def all_logits(
    model: Transformer, ids: Tensor, cuts: list[int], dtype: str = "float32", kv_dtype: str = "auto"
) -> Tensor:
    """ids [requests, length]: the prompt in chunks that end at `cuts`, the rest token by token
    as decode steps. [requests, length, V]."""
    requests, length = ids.shape
    driver = Driver(model, requests, length, dtype, kv_dtype)
    bounds = [0, *cuts]
    outs = []
    for start, stop in pairwise(bounds):
        chunk = driver.step([row[start:stop] for row in ids], [start] * requests, decode=False)
        outs.append(driver.logits(chunk).view(requests, stop - start, -1))
    for position in range(bounds[-1], length):
        step = driver.step(
            [row[position : position + 1] for row in ids], [position] * requests, decode=True
        )
        outs.append(driver.logits(step).view(requests, 1, -1))
    return torch.cat(outs, 1)
