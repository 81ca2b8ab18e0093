"""Forward passes of decode steps on a CPU, captured as compiled calls (ops/cpu/captured.py). At few
tokens Python between the calls would take longer than the calls themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import AttentionMetadata, Replay, TokenPlaces

MEMORY_BYTES = 64 * 2**20  # for the tensors of one kind of pass; a larger pass is not captured
Work = Callable[..., Tensor]  # (step, *more)


@dataclass
class _Kind:
    """One kind of pass: `replays` by number of tokens, None for those that are not made of
    compiled calls alone. more: what the pass reads besides the step, a row a token. memory:
    of its tensors."""

    more: tuple[Tensor, ...]
    memory: Tensor
    replays: dict[int, Replay | None] = field(default_factory=dict)


class CapturedForward:
    """One captured pass a kind and number of tokens, made by the first step that has so many.
    Passes that are not made of compiled calls alone are computed as if this were not there.

    most_tokens: of a step. max_len: positions that a request may reach."""

    def __init__(self, model: Transformer, pool: KVPool, most_tokens: int, max_len: int):
        self.ops = model.ops
        self.pool = pool
        self.moe = model.moe_layers()
        planes = [plane for layer in pool.layers for plane in layer.values()]
        self.wide_cache = all(plane.dtype == model.dtype for plane in planes)
        self.most_tokens = most_tokens
        self.max_len = max_len
        self.inputs: _Inputs | None = None
        self.kinds: dict[str, _Kind] = {}

    def takes(self, step: ForwardBatch) -> bool:
        """Whether a step is one of few tokens that decode, all alike but for their places."""
        return (
            self.wide_cache
            and 0 < step.num_tokens <= self.most_tokens
            and step.decode is not None
            and step.prefill is None
            and not step.parts
            and step.layer_written is None
            and all(layer.is_one_op for layer in self.moe)
        )

    def run(self, name: str, work: Work, step: ForwardBatch, *more: Tensor) -> Tensor:
        """work(step, *more), [T, hidden], for a step that `takes` accepts; of one `name` always
        the same work, of other tensors. Valid until the next call with this name."""
        tokens = step.num_tokens
        kind = self.kinds.get(name)
        if kind is None:
            kind = self.kinds[name] = self._kind(more)
        replay = kind.replays.get(tokens)
        if replay is None and tokens in kind.replays:
            return work(step, *more)
        if self.inputs is None:
            self.inputs = _Inputs(step, self)
        self.inputs.fill(step)
        for fixed, given in zip(kind.more, more, strict=True):
            fixed[:tokens] = given
        if replay is not None:
            return replay()
        same = self.inputs.step(tokens, max(step.decode.max_kv_lens) if step.decode else 1)
        rows = [fixed[:tokens] for fixed in kind.more]
        out, kind.replays[tokens] = self.ops.capture_calls(lambda: work(same, *rows), kind.memory)
        return out

    def _kind(self, more: tuple[Tensor, ...]) -> _Kind:
        rows = [given.new_empty(self.most_tokens, *given.shape[1:]) for given in more]
        return _Kind(tuple(rows), torch.empty(MEMORY_BYTES, dtype=torch.uint8))

    def forget(self) -> None:
        self.kinds.clear()


class _Inputs:
    """Where captured passes read what differs from step to step: rows for the tokens of the
    largest step, of which others use the first."""

    def __init__(self, step: ForwardBatch, forward: CapturedForward):
        most = forward.most_tokens
        pages = -(-forward.max_len // forward.pool.spec.page_size)
        self.forward = forward
        self.layout = step.layout
        self.ids, self.positions, self.slots, self.lens = torch.empty(4, most, dtype=torch.int64)
        self.tables = torch.zeros(most, pages, dtype=torch.int64)
        self.cos = step.places.cos.new_empty(most, step.places.cos.shape[1])
        self.sin = torch.empty_like(self.cos)

    def fill(self, step: ForwardBatch) -> None:
        """Of drafts under verification each token is a request of its own, as the compiled
        attention wants it."""
        segment = step.decode
        assert segment is not None
        segment = segment if segment.tokens == len(segment) else segment.by_token()
        tokens = slice(step.num_tokens)
        self.ids[tokens] = step.token_ids
        self.cos[tokens] = step.places.cos
        self.sin[tokens] = step.places.sin
        self.slots[tokens] = step.places.slots
        self.lens[tokens] = segment.kv_lens
        self.tables[tokens, : segment.tables.shape[1]] = segment.tables

    def step(self, tokens: int, bound: int) -> ForwardBatch:
        """So many tokens that decode. bound: cached entries that no request exceeds now; compiled
        calls read lengths from memory and do not see it."""
        bounds = (bound,) * tokens
        segment = AttentionMetadata(
            self.tables[:tokens], self.lens[:tokens], (1,) * tokens, bounds, exact=False
        )
        return ForwardBatch(
            self.ids[:tokens],
            self.positions[:tokens],
            TokenPlaces(self.cos[:tokens], self.sin[:tokens], self.slots[:tokens]),
            torch.arange(tokens),
            self.forward.pool,
            segment,
            layout=self.layout,
        )
