"""Sampling that needs the host: penalties, bias, bans and minimum length on the logits, grammar
masks, output token counts, log probabilities.

Done row by row and outside captured graphs, for the rows that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rorqual.engine.execution.grammar import Matcher, mask_words
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.token_bans import NEVER, RecentTokens
from rorqual.engine.scheduling.scheduler_output import (
    NewRequest,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from rorqual.request import SamplingParams


@dataclass
class LogitRow:
    """One row of logits as the host knows it: its request, and the drafts [j] between the request's
    newest token and it."""

    slot: int
    ahead: Tensor | None = None


def apply_logits_processors(
    logits: Tensor, places: list[LogitRow], positions: Tensor, rows: RequestState
) -> Tensor:
    """Penalties, bias, bans and the minimum length, for the rows that ask for them."""
    logits = logits.clone()
    for i, place in enumerate(places):
        row = rows.params[place.slot]
        if row is not None and row.params.edits_logits:
            _edit_row(logits[i], row, place, positions[i], rows)
    return logits


def _edit_row(
    logits: Tensor, row: NewRequest, place: LogitRow, position: Tensor, rows: RequestState
) -> None:
    assert rows.counts is not None
    assert rows.in_prompt is not None
    counts = rows.counts[place.slot]
    if place.ahead is not None and place.ahead.numel():
        counts = counts.index_add(0, place.ahead, torch.ones_like(place.ahead, dtype=counts.dtype))
    penalize(logits, counts, rows.in_prompt[place.slot], row.params)
    for token, bias in (row.params.logit_bias or {}).items():
        logits[token] += bias
    bans = rows.bans.get(place.slot)
    if bans is not None:
        assert rows.recent is not None
        recent = rows.recent.tokens[place.slot]
        bans.apply(logits, recent if place.ahead is None else torch.cat((recent, place.ahead)))
    if row.stop_ids and row.params.min_tokens:
        banned = torch.tensor(sorted(row.stop_ids), device=logits.device)
        early = position - row.prompt_len < row.params.min_tokens
        logits[banned] = torch.where(early, NEVER, logits[banned])


def penalize(logits: Tensor, counts: Tensor, in_prompt: Tensor, params: SamplingParams) -> None:
    """In place on one row. Repetition after arXiv 1909.05858 (prompt and output), frequency and
    presence on the output alone."""
    if params.repetition_penalty != 1.0:
        seen = in_prompt | (counts > 0)
        scaled = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits.copy_(torch.where(seen, scaled, logits))
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """Keep only tokens whose bit is set in mask [M, words] int32: bit i % 32 of word i // 32."""
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, NEVER)


@dataclass
class Logprobs:
    """Of M sampled tokens under the unmodified distribution: logprob and rank [M], the best ids and
    their values [M, most]."""

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.logprob, self.rank, self.top_ids, self.top]

    @staticmethod
    def of(raw: Tensor, token_ids: Tensor, most: int) -> Logprobs:
        logprobs = raw.log_softmax(-1)
        chosen = logprobs.gather(1, token_ids[:, None])
        rank = (logprobs > chosen).sum(-1) + 1
        top, top_ids = logprobs.topk(min(most, raw.shape[1]), -1)
        return Logprobs(chosen.squeeze(1), rank, top_ids, top)

    def row(self, row: int, count: int) -> TokenLogprobs:
        """One row, on the host, with `count` of the best."""
        ids = self.top_ids[row, :count].tolist()
        values = self.top[row, :count].tolist()
        return TokenLogprobs(
            float(self.logprob[row]), int(self.rank[row]), tuple(ids), tuple(values)
        )

    def rows(self, start: int, stop: int, count: int) -> list[TokenLogprobs]:
        """`row` for many."""
        columns = (
            self.logprob[start:stop].tolist(),
            self.rank[start:stop].tolist(),
            map(tuple, self.top_ids[start:stop, :count].tolist()),
            map(tuple, self.top[start:stop, :count].tolist()),
        )
        return list(map(TokenLogprobs, *columns))


class HostSampling:
    """One step's rows of logits where some request needs the host. Call `process` before tokens are
    sampled, `record` after, and `finish` once they are on the host."""

    def __init__(self, output: SchedulerOutput, rows: RequestState):
        self.output = output
        self.rows = rows
        self.params = rows.sampling_params(output.sampled_slots)
        self.logit_rows = self._logit_rows()
        matchers = rows.matchers
        self.matchers: dict[int, Matcher] = {
            row: matchers[slot] for row, slot in enumerate(output.sampled_slots) if slot in matchers
        }
        self.logprobs: list[Callable[[], Tensor]] = []

    def _logit_rows(self) -> list[LogitRow]:
        output = self.output
        found = []
        if output.decode_slots:
            slots = torch.tensor(output.decode_slots)
            drafts = self.rows.drafts.index_select(0, self.rows.platform.to_device(slots))
            num_drafts = output.num_speculative_tokens
            for row, slot in enumerate(output.decode_slots):
                found += [
                    LogitRow(slot, drafts[row, :j] if num_drafts else None)
                    for j in range(num_drafts + 1)
                ]
        return found + [LogitRow(chunk.slot) for chunk in output.chunks if chunk.sample]

    def process(self, raw: Tensor, positions: Tensor) -> Tensor:
        """The logits to sample from, for raw [M, vocabulary] and the positions [M] of the tokens to
        sample; `raw` is not modified."""
        logits = apply_logits_processors(raw, self.logit_rows, positions, self.rows)
        if not self.matchers:
            return logits
        logits = apply_bitmask(logits, self.rows.platform.to_device(self._bitmask()))
        self._allow_eos(logits)
        return logits

    def _allow_eos(self, logits: Tensor) -> None:
        """Where a grammar and the request's bans allow no token, allow end of sequence."""
        width = self.output.num_speculative_tokens + 1
        for row in self.matchers:
            slot = self.output.sampled_slots[row]
            asked = self.rows.params[slot]
            if slot not in self.rows.bans or asked is None:
                continue
            end = min(asked.stop_ids - {*asked.params.stop_token_ids} or asked.stop_ids)
            first = self.output.logit_row(row)
            own = logits[first : first + (width if row < len(self.output.decode_slots) else 1)]
            nothing = (own == NEVER).all(1)
            own[:, end] = torch.where(nothing, 0.0, own[:, end])

    def _bitmask(self) -> Tensor:
        """[logits rows, words]: the tokens each grammar allows next, along the drafts as far as it
        accepts them. Waits for the drafts."""
        output = self.output
        rows = self.rows
        # numpy's, as torch would wake threads for so many numbers, which takes milliseconds where
        # processors are busy
        shape = (len(self.logit_rows), mask_words(rows.vocab))
        words = np.full(shape, -1, np.int32)
        mask = torch.from_numpy(words)
        drafts = self._drafts()
        for row, matcher in self.matchers.items():
            ahead = drafts[row] if row < len(output.decode_slots) else []
            first = output.logit_row(row)
            moved = 0
            matcher.fill(mask, first)
            for draft in ahead:
                # a draft may be any token of the prompt: xgrammar prints a warning for each special
                # one that it is asked to accept
                if not words[first + moved, draft // 32] >> draft % 32 & 1:
                    break
                if not matcher.accept(draft):
                    break
                moved += 1
                if matcher.done:
                    break
                matcher.fill(mask, first + moved)
            matcher.rollback(moved)
        return mask

    def _drafts(self) -> list[list[int]]:
        """Those of each decoding row, on the host. Places behind them hold 0, or drafts of an
        earlier step."""
        output = self.output
        rows = self.rows
        slots = rows.platform.to_device(torch.tensor(output.decode_slots, dtype=torch.int64))
        # in one copy, for which the host waits
        columns = torch.cat((rows.num_drafts[slots, None], rows.drafts[slots]), 1).tolist()
        most = output.num_speculative_tokens
        return [found[: min(count, most)] for count, *found in columns]

    def record(self, raw: Tensor, tokens: Tensor) -> None:
        """Count tokens [M] (-1: none) for penalties, and start to copy log probabilities."""
        platform = self.rows.platform
        slots = torch.tensor([row.slot for row in self.logit_rows])
        self.rows.count(platform.to_device(slots), tokens)
        if self.rows.recent is not None:
            self._add_recent(self.rows.recent, tokens)
        most = max((p.logprobs for p in self.params if p.logprobs is not None), default=None)
        if most is not None:
            found = Logprobs.of(raw, tokens.clamp(min=0), most)
            self.logprobs = [platform.fetch(tensor) for tensor in found.tensors()]

    def _add_recent(self, recent: RecentTokens, tokens: Tensor) -> None:
        output = self.output
        decoding = len(output.decode_slots)
        slots = self.rows.platform.to_device(torch.tensor(output.sampled_slots))
        split = output.logit_row(decoding)
        if decoding:
            recent.add(slots[:decoding], tokens[:split].view(decoding, -1))
        recent.add(slots[decoding:], tokens[split:, None])

    def finish(self, result: StepResult) -> None:
        """Advance the grammars by the sampled tokens, and add log probabilities to the result."""
        for row, matcher in self.matchers.items():
            for token in result.tokens[row]:
                matcher.accept(token)
        if not self.logprobs:
            return
        found = Logprobs(*(fetch() for fetch in self.logprobs))
        for row, params in enumerate(self.params):
            if params.logprobs is not None:
                first = self.output.logit_row(row)
                result.logprobs[row] = [
                    found.row(first + i, params.logprobs) for i in range(len(result.tokens[row]))
                ]
