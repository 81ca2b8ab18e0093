"""Cases of rorqual.bench.kernels.run: drawing tokens from logits. Timed as those of
gemm_and_experts.py.

floor: the bytes of the logits, read once. error: the largest distance, as a share of the whole
mass, between a number and the interval of the token it drew, under the fp64 definition cut at the
kernel's own threshold.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rorqual.bench.kernels.gemm_and_experts import ROTATE, KernelCase, KernelSetup
from rorqual.ops import reference
from rorqual.ops.triton.sampling import argmax, sampling

VOCABULARIES = {"V3": 129_280, "Qwen3": 151_936}
OFF = (1.0, 0.0, 0.0)  # top_p, min_p, top_k
SETTINGS = {
    "plain": (0.8, *OFF),
    "top_k 40": (0.8, 1.0, 0.0, 40.0),
    "top_p .9": (0.8, 0.9, 0.0, 0.0),
    "both": (0.8, 0.95, 0.0, 40.0),
    # almost every token stays: the search reads the logits again and again
    "flat": (100.0, 0.9, 0.0, 0.0),
}


def random_logits(rows: int, vocab: int, device: torch.device) -> list[Tensor]:
    """Logits distributed like a model's: normal, with a few hundred larger outliers."""
    made = []
    for _ in range(min(32, max(2, int(-(-ROTATE // (rows * vocab * 4)))))):
        x = torch.randn(rows, vocab, device=device).mul_(2)
        some = torch.randint(vocab, (rows, 300), device=device)
        made.append(x.scatter_add_(1, some, torch.randn(rows, 300, device=device).abs_().mul_(5)))
    return made


def distance(given: reference.Distribution, numbers: Tensor, tokens: Tensor) -> float:
    worst = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for row in range(min(8, tokens.shape[0])):
        at = torch.tensor([row], device=tokens.device)
        probs = given.probs(at)[0]
        passed = probs.cumsum(0) / probs.sum()
        end = passed[tokens[row]]
        start = passed[tokens[row]] - probs[tokens[row]] / probs.sum()
        worst = torch.maximum(worst, torch.maximum(start - numbers[row], numbers[row] - end))
    return worst.item()


def sample_setup(
    rows: int, vocab: int, kind: str, library: bool, device: torch.device
) -> KernelSetup:
    """The kernels, or the definition in torch's operations."""
    settings = torch.tensor([SETTINGS[kind]] * rows, dtype=torch.float64, device=device)
    numbers = torch.rand(rows, dtype=torch.float64, device=device)
    sets = random_logits(rows, vocab, device)
    filters = kind != "plain"
    where: Any = reference if library else sampling

    def call(logits: Tensor) -> Tensor:
        return where.sample_from(where.distribution(logits, settings, filters), numbers)

    def error() -> float:
        given = where.distribution(sets[0], settings, filters)
        return distance(given, numbers, where.sample_from(given, numbers))

    return KernelSetup([partial(call, logits) for logits in sets], error, rows * vocab * 4)


def rest_setup(rows: int, vocab: int, device: torch.device) -> KernelSetup:
    """What refused drafts leave over: logits and the drafts' probabilities are read."""
    settings = torch.tensor([SETTINGS["top_p .9"]] * rows, dtype=torch.float64, device=device)
    numbers = torch.rand(rows, dtype=torch.float64, device=device)
    index = torch.arange(rows, device=device)
    pairs = [
        (sampling.distribution(x, settings, True), x.roll(1, 1).softmax(-1))
        for x in random_logits(rows, vocab, device)
    ]

    def call(given: reference.Distribution, q: Tensor) -> Tensor:
        return sampling.sample_residual(given, index, numbers, index, q, index)

    def error() -> float:
        return float(
            (
                call(*pairs[0])
                != reference.sample_residual(pairs[0][0], index, numbers, index, pairs[0][1], index)
            )
            .double()
            .mean()
        )

    return KernelSetup([partial(call, *pair) for pair in pairs], error, rows * vocab * 8)


def best_setup(rows: int, vocab: int, library: bool, device: torch.device) -> KernelSetup:
    """The best token of a row, which greedy decoding draws; or by torch's reduction."""
    sets = random_logits(rows, vocab, device)
    find = (lambda logits: logits.argmax(-1)) if library else argmax.argmax
    return KernelSetup(
        [partial(find, x) for x in sets],
        lambda: float((find(sets[0]) != sets[0].argmax(-1)).double().mean()),
        rows * vocab * 4,
    )


def cases() -> Iterator[KernelCase]:
    for rows in (1, 2, 8, 64, 128, 512):
        yield KernelCase(
            f"best V3 B{rows}", "bf16", partial(best_setup, rows, VOCABULARIES["V3"], False)
        )
        yield KernelCase(
            f"best torch V3 B{rows}", "bf16", partial(best_setup, rows, VOCABULARIES["V3"], True)
        )
    for rows in (1, 8, 64, 256):
        for kind in SETTINGS:
            yield KernelCase(
                f"sample V3 {kind} B{rows}",
                "bf16",
                partial(sample_setup, rows, VOCABULARIES["V3"], kind, False),
            )
        yield KernelCase(
            f"sample torch V3 both B{rows}",
            "bf16",
            partial(sample_setup, rows, VOCABULARIES["V3"], "both", True),
        )
        yield KernelCase(
            f"sample_residual V3 B{rows}", "bf16", partial(rest_setup, rows, VOCABULARIES["V3"])
        )
    yield KernelCase(
        "sample Qwen3 both B64",
        "bf16",
        partial(sample_setup, 64, VOCABULARIES["Qwen3"], "both", False),
    )
