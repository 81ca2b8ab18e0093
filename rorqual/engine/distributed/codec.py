"""Step outputs and results as bytes, for ranks in other processes: JSON of plain lists, never
pickle. Prompt token ids, thousands a step, follow it in binary. No torch."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence as ReadOnly
from dataclasses import fields
from typing import Any

import numpy as np

from rorqual.cache.host_tier import PageCopy
from rorqual.engine.scheduling.dp_scheduler import DataParallelOutput
from rorqual.engine.scheduling.scheduler_output import (
    NewRequest,
    PrefillChunk,
    SamplingVariant,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from rorqual.request import SamplingParams, StructuredOutput

DEFAULTS = SamplingParams()
NUMBER = struct.Struct("!Q")
END = b"\0"  # ends the JSON, which contains no such byte
TOKEN = np.dtype("<i4")


def numbered(number: int, data: bytes) -> bytes:
    """Prefix `data` with the number of its step or request, by which responses are matched."""
    return NUMBER.pack(number) + data


def number_of(data: bytes) -> tuple[int, bytes]:
    """The inverse of `numbered`: (number, data)."""
    return NUMBER.unpack_from(data)[0], data[NUMBER.size :]


class _Tokens:
    """Reads the token ids after the JSON, one list after another."""

    def __init__(self, data: bytes):
        self.ids = array("q", np.frombuffer(data, TOKEN).astype(np.int64).tobytes())
        self.taken = 0

    def take(self, count: int) -> array[int]:
        start = self.taken
        self.taken += count
        found = self.ids[start : self.taken]
        if len(found) != count:
            raise ValueError(f"{count} token ids are announced where {len(found)} are left")
        return found


def encode_output(output: DataParallelOutput) -> bytes:
    tokens: list[bytes] = []
    parts = [_from_part(part, tokens) for part in output.parts]
    columns = [parts, output.sampling.value, output.host, output.switch, output.micro_batches]
    return END.join((json.dumps(columns, separators=(",", ":")).encode(), b"".join(tokens)))


def decode_output(data: bytes) -> DataParallelOutput:
    columns, _, ids = data.partition(END)
    parts, sampling, host, switch, micro_batches = json.loads(columns)
    tokens = _Tokens(ids)
    made = [_to_part(part, tokens) for part in parts]
    return DataParallelOutput(made, SamplingVariant(sampling), host, switch, micro_batches)


def encode_result(result: StepResult) -> bytes:
    logprobs = {row: _from_entries(entries) for row, entries in result.logprobs.items()}
    prompts = [_from_entries(entries) for entries in result.prompt_logprobs]
    columns = [result.tokens, result.drafted, logprobs, prompts]
    return json.dumps(columns, separators=(",", ":")).encode()


def decode_result(data: bytes) -> StepResult:
    tokens, drafted, logprobs, prompts = json.loads(data)
    entries = {int(row): _to_entries(found) for row, found in logprobs.items()}
    return StepResult(tokens, drafted, entries, [_to_entries(found) for found in prompts])


def _from_entries(entries: list[TokenLogprobs]) -> list[list[Any]]:
    return [[e.sampled, e.rank, e.top_ids, e.top] for e in entries]


def _to_entries(data: list[list[Any]]) -> list[TokenLogprobs]:
    return [TokenLogprobs(p, rank, tuple(ids), tuple(top)) for p, rank, ids, top in data]


def _from_tokens(ids: ReadOnly[int], tokens: list[bytes]) -> int:
    """Append them to `tokens`; returns their number."""
    tokens.append(np.asarray(ids, TOKEN).tobytes())
    return len(ids)


def _from_part(part: SchedulerOutput, tokens: list[bytes]) -> list[Any]:
    chunks = [_from_chunk(chunk, tokens) for chunk in part.chunks]
    rows = [
        [
            row.slot,
            _from_params(row.params),
            row.seed,
            row.pages,
            row.prompt_len,
            _from_tokens(row.tokens, tokens),
            sorted(row.stop_ids),
            row.last_token,
            row.length,
        ]
        for row in part.new_requests
    ]
    return [
        part.decode_slots,
        part.decode_bounds,
        chunks,
        rows,
        part.pages,
        part.num_speculative_tokens,
        part.copies,
        part.copies_first,
        part.copies_running,
        part.copies_settled,
        part.copies_by_layer,
    ]


def _from_chunk(chunk: PrefillChunk, tokens: list[bytes]) -> list[Any]:
    scores = (chunk.score_start, chunk.score_stop)
    count = _from_tokens(chunk.tokens, tokens)
    return [chunk.slot, chunk.start, count, chunk.sample, chunk.following, *scores]


def _to_part(data: list[Any], tokens: _Tokens) -> SchedulerOutput:
    """Reads the tokens in the order in which `_from_part` wrote them."""
    slots, bounds, chunks, rows, pages, num_speculative_tokens, copies, *how = data
    first, running, settled, by_layer = how
    made = [
        PrefillChunk(slot, start, tokens.take(count), sample, tuple(following), *scores)
        for slot, start, count, sample, following, *scores in chunks
    ]
    new_requests = [
        NewRequest(
            slot,
            _to_params(params),
            seed,
            tuple(held),
            prompt_len,
            tokens.take(count),
            frozenset(stops),
            *begins,
        )
        for slot, params, seed, held, prompt_len, count, stops, *begins in rows
    ]
    return SchedulerOutput(
        slots,
        bounds,
        made,
        new_requests,
        [tuple(page) for page in pages],
        num_speculative_tokens,
        [PageCopy(*copy) for copy in copies],
        first,
        tuple(running),
        settled,
        by_layer,
    )


def _from_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    found = {item.name: getattr(params, item.name) for item in fields(params)}
    changed = {name: value for name, value in found.items() if value != getattr(DEFAULTS, name)}
    if params.structured is not None:
        changed["structured"] = [params.structured.kind, params.structured.value]
    if "logit_bias" in changed:
        changed["logit_bias"] = list(changed["logit_bias"].items())
    return changed


def _to_params(data: dict[str, Any]) -> SamplingParams:
    if "structured" in data:
        data["structured"] = StructuredOutput(*data["structured"])
    if "logit_bias" in data:
        data["logit_bias"] = dict(data["logit_bias"])
    return SamplingParams(**data)
