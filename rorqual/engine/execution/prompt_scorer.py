"""Log probabilities of prompt tokens (prompt_logprobs).

They need the logits of every row of a prompt. These are computed in chunks of rows, so that logits
never take more than SCORED_BYTES, plus what is derived from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.engine.execution.forward_batch_builder import BuiltBatch
from rorqual.engine.execution.logits_processor import Logprobs
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.scheduling.scheduler_output import (
    SchedulerOutput,
    StepMetadata,
    TokenLogprobs,
)
from rorqual.models.transformer import Transformer

SCORED_BYTES = 128 * 2**20  # of fp32 logits at a time


@dataclass
class PromptScores:
    """Prompt scores of one step. `fetched` waits for the columns of Logprobs; then (rows, entries a
    row) of each chunk."""

    fetched: list[Callable[[], Tensor]]
    chunks: list[tuple[int, int]]

    def finish(self) -> list[list[TokenLogprobs]]:
        """One list a chunk."""
        columns = Logprobs(*(fetch() for fetch in self.fetched))
        found = []
        start = 0
        for rows, count in self.chunks:
            found.append(columns.rows(start, start + rows, count))
            start += rows
        return found


class PromptScorer:
    def __init__(self, model: Transformer, rows: RequestState):
        self.model = model
        self.rows = rows
        self.most_rows = max(1, SCORED_BYTES // (4 * model.config.vocab_size))

    def score(
        self, output: SchedulerOutput, batch: BuiltBatch, hidden: Tensor, metadata: StepMetadata
    ) -> PromptScores | None:
        """`hidden` [T, hidden] of all rows of the step. Collective: every rank takes part in each
        product with the head, with or without rows of its own."""
        chunks = [chunk for chunk in output.chunks if chunk.num_scored]
        counts = [
            self.rows.sampling_params([chunk.slot])[0].prompt_logprobs or 0 for chunk in chunks
        ]
        rows, targets = self._rows(batch)
        parts = []
        for start in range(0, max(metadata.scored), self.most_rows):
            sizes = tuple(min(max(n - start, 0), self.most_rows) for n in metadata.scored)
            part = slice(start, start + self.most_rows)
            logits = self.model.logits(hidden.index_select(0, rows[part]), sizes)
            if chunks and logits.shape[0]:
                parts.append(Logprobs.of(logits, targets[part], max(counts)))
        if not chunks:
            return None
        columns = zip(*(part.tensors() for part in parts), strict=True)
        fetched = [self.rows.platform.fetch(torch.cat(column)) for column in columns]
        sizes_and_counts = zip((chunk.num_scored for chunk in chunks), counts, strict=True)
        return PromptScores(fetched, list(sizes_and_counts))

    def _rows(self, batch: BuiltBatch) -> tuple[Tensor, Tensor]:
        """Rows of the step to score, and the tokens after them."""
        prefill = batch.prefill
        if prefill is None or prefill.scored is None or prefill.following is None:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.rows.platform.device)
            return nothing, nothing
        first = batch.decode.ids.shape[0] if batch.decode else 0
        return prefill.scored + first, prefill.following.index_select(0, prefill.scored)
