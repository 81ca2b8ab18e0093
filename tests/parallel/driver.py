"""One rank's part of a model, driven by hand: every rank walks through the same schedule and
computes what its sequences bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.overlap import chain, run, run_one

CPU = torch.device("cpu")
PAGE = 4
WAYS = {"straight": lambda passes: [run_one(one) for one in passes], "run": run, "chain": chain}


@dataclass(frozen=True)
class Turn:
    """What one step computes of some requests: {request: (start, stop)}."""

    spans: dict[int, tuple[int, int]]
    decode: bool


def schedule(lengths: Sequence[int], prompts: Sequence[int]) -> list[Turn]:
    """Two prompt chunks of uneven length for each request, then one token a step until its
    length is reached."""
    cut = [max(1, prompt // 2 - index % 3) for index, prompt in enumerate(prompts)]
    turns = [
        Turn({i: (0, stop) for i, stop in enumerate(cut)}, False),
        Turn(
            {i: (start, stop) for i, (start, stop) in enumerate(zip(cut, prompts, strict=True))},
            False,
        ),
    ]
    for position in range(
        max(length - prompt for length, prompt in zip(lengths, prompts, strict=True))
    ):
        ahead = {
            i: prompts[i] + position
            for i in range(len(lengths))
            if prompts[i] + position < lengths[i]
        }
        turns.append(Turn({i: (start, start + 1) for i, start in ahead.items()}, True))
    return turns


def split(turn: Turn, parts: int) -> list[Turn]:
    """Micro-batches: requests in turn."""
    return [
        Turn({i: span for i, span in turn.spans.items() if i % parts == part}, turn.decode)
        for part in range(parts)
    ]


def tokens_of(turn: Turn, home: Sequence[int], dp: int) -> list[int]:
    """Tokens of each data-parallel rank."""
    return [
        sum(stop - start for i, (start, stop) in turn.spans.items() if home[i] == rank)
        for rank in range(dp)
    ]


def homes(requests: int, dp: int) -> list[int]:
    """Uneven on purpose: the first data-parallel rank has most requests, and with four the last
    one has none."""
    shares = {1: [requests], 2: [requests - 1, 1], 4: [requests - 2, 1, 1, 0]}[dp]
    return [rank for rank, share in enumerate(shares) for _ in range(share)]


class RankDriver:
    """Unused cache is NaN, so that a stray read shows."""

    def __init__(self, model: Transformer, requests: int, max_len: int):
        self.model = model
        mesh = model.mesh
        self.home = homes(requests, mesh.sizes.dp)
        self.dp = mesh.sizes.dp
        pages = -(-max_len // PAGE)
        form = next(
            (
                layer.attention.decode_form
                for layer in model.layers
                if hasattr(layer.attention, "decode_form")
            ),
            "A_CC_ME",
        )
        whole = kv_spec(model.config, PAGE, "float32", form, model.config.num_mtp_layers)
        spec = whole.shard(mesh.sizes.tp, model.cache_layers)
        self.pool = KVPool(spec, requests * pages + 1, CPU)
        for planes in self.pool.layers:
            for plane in planes.values():
                plane.fill_(float("nan"))
        order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.view(requests, pages)

    def step(self, ids: Tensor, turn: Turn) -> tuple[ForwardBatch, list[int]]:
        """This rank's step of the turn, and every data-parallel rank's tokens."""
        tokens = tokens_of(turn, self.home, self.dp)
        layout = self.model.layout(tokens, turn.decode)
        mine = {
            i: span for i, span in turn.spans.items() if self.home[i] == self.model.mesh.dp_rank
        }
        positions = torch.cat(
            [torch.arange(*span) for span in mine.values()] or [torch.empty(0, dtype=torch.int64)]
        )
        owner = torch.tensor(
            [i for i, (start, stop) in mine.items() for _ in range(start, stop)], dtype=torch.int64
        )
        slots = self.tables[owner, positions // PAGE] * PAGE + positions % PAGE
        segment = None
        if mine:
            lengths, stops = zip(
                *((stop - start, stop) for start, stop in mine.values()), strict=True
            )
            segment = AttentionMetadata(
                self.tables[list(mine)], torch.tensor(stops), lengths, stops
            )
        places = TokenPlaces(*self.model.rotary.rows(positions), slots)
        kind = {"decode": segment} if turn.decode else {"prefill": segment}
        everything = torch.arange(len(positions))
        return ForwardBatch(
            ids[owner, positions],
            positions,
            places,
            everything,
            self.pool,
            layout=layout,
            **kind,
        ), tokens

    @torch.inference_mode()
    def predict(self, ids: Tensor, turn: Turn) -> dict[tuple[int, int], Tensor]:
        """Logits of the prediction module by (request, position), on the last stage."""
        step, counts = self.step(ids, turn)
        hidden = run_one(self.model.forward(step, every_row=True))
        if not self.model.mesh.last_stage:
            return {}
        mine = self.own(turn)
        following = ids[[i for i, _ in mine], [p + 1 for _, p in mine]]
        embedded = self.model.embed.forward(following, step.layout)
        out = run_one(self.model.mtp[0].forward(embedded, hidden, step))
        return dict(zip(mine, self.model.logits(out, counts), strict=True))

    def own(self, turn: Turn) -> list[tuple[int, int]]:
        """This rank's tokens in their order: (request, position)."""
        return [
            (i, p)
            for i, span in turn.spans.items()
            if self.home[i] == self.model.mesh.dp_rank
            for p in range(*span)
        ]

    @torch.inference_mode()
    def turn(
        self, ids: Tensor, turn: Turn, micro_batches: int, way: str
    ) -> dict[tuple[int, int], Tensor]:
        """Logits by (request, position), on the last stage."""
        parts = split(turn, micro_batches)
        built = [self.step(ids, part) for part in parts]
        found: dict[tuple[int, int], Tensor] = {}
        for part, (_, counts), hidden in zip(
            parts, built, WAYS[way]([self.model.forward(step) for step, _ in built]), strict=True
        ):
            if self.model.mesh.last_stage:
                logits = self.model.logits(hidden, counts)
                found.update(zip(self.own(part), logits, strict=True))
        self.model.mesh.pp.flush()
        return found
