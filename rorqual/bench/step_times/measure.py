"""Steps of a whole engine with random weights, timed while nothing but they run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rorqual.bench.layers.timing import DeviceRates
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.llm.llm import LLM
from rorqual.planner.timing.timed_steps import BUDGET, StepMeasurement, TimedStep
from rorqual.platforms.base import Platform
from rorqual.request import Request, SamplingParams

BLOCKS = 3  # medians are taken over so many
MOST_BLOCKS = 9  # where they differ by more than SPREAD
SPREAD = 0.03
STEPS = 16  # of a block
MIXED_STEPS = 8
MIXED_WARM_UPS = 4  # until as many steps are in flight as there ever are
ROUNDS = 4  # of prompts that fill a step
BURSTS = 15  # of what the GPU reaches
REST = 0.1  # seconds before each
SPARE = 8  # request slots in addition to the decoding requests


class DoesNotFit(Exception):
    """The GPU's cache, next to these weights, is too small for so many tokens."""


class StepTimer:
    """Times steps of one engine. `options`: passed to LLM in addition to those that the rows
    need."""

    def __init__(self, rows: list[TimedStep], **options: Any):
        model, quant, layers = rows[0].engine
        shape: dict[str, Any] = {} if layers is None else {"num_layers": layers}
        if quant != "auto":
            shape["quantization"] = quant
        decoding = sorted({row.requests for row in rows if row.requests})
        longest = max(max(row.context, row.prompt) for row in rows)
        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            weights="random",
            max_num_seqs=max([*decoding, 32]) + SPARE,
            max_model_len=longest + 1024,
            max_num_batched_tokens=BUDGET,
            enable_prefix_caching=False,
            cudagraph_capture_sizes=tuple(decoding) or None,
            **{**shape, **options},
        )
        self.engine = self.llm.engine
        self._drawn = 0

    def close(self) -> None:
        platform = self.engine.platform
        self.engine.close()
        del self.engine, self.llm
        gc.collect()  # engines hold themselves in circles
        platform.release_memory()

    def measure(self, row: TimedStep) -> StepMeasurement:
        """Raises DoesNotFit."""
        config = self.engine.scheduler.config
        longest = row.context + MOST_BLOCKS * STEPS
        held = row.requests * longest + row.prompts * row.prompt
        room = (config.num_pages - 1) * config.page_size
        if held > room:
            raise DoesNotFit(f"{held:,} tokens of {room:,}")
        return self._decoding(row) if row.requests else self._prompts(row)

    def _decoding(self, row: TimedStep) -> StepMeasurement:
        waiting = row.requests * row.context // BUDGET
        each = MIXED_STEPS + MIXED_WARM_UPS if row.prompts else STEPS
        timed = BLOCKS * (each + 4)
        prompts = [self._draw(row.context - waiting // 2 - timed // 2) for _ in range(row.requests)]
        params = _greedy(waiting + MOST_BLOCKS * (each + 4) + 16)
        with steady_state_steps(self.engine, prompts, params) as count:
            before = self._context()
            seconds = settled(lambda: self._block(row, each))
            decoding = self.engine.scheduler.decoding
            assert len(decoding) == count, "a request ended while it was timed"
            after = self._context()
        return StepMeasurement(seconds * 1e3, (before + after) / 2)

    def _context(self) -> float:
        return statistics.fmean(
            len(sequence.tokens) for sequence in self.engine.scheduler.decoding.values()
        )

    def _block(self, row: TimedStep, steps: int) -> float:
        """Seconds of one step: of so many one behind the other. Where prompts are computed each
        step has its own, and the median counts: the host launches their pieces, and where other
        programs disturb it single steps take half as long again."""
        if not row.prompts:
            self.engine.step()
            return _timed(self.engine.step, steps) / steps

        def once() -> None:
            for _ in range(row.prompts):
                self._add(row.prompt)
            self.engine.step()

        for _ in range(MIXED_WARM_UPS):
            once()
        seconds = statistics.median(_timed(once) for _ in range(MIXED_STEPS))
        while (
            self.engine.scheduler.prefilling or len(self.engine.scheduler.decoding) > row.requests
        ):
            self.engine.step()
        return seconds

    def _prompts(self, row: TimedStep) -> StepMeasurement:
        together = ROUNDS if row.prompts * row.prompt % BUDGET == 0 else 1

        def once() -> None:
            for _ in range(row.prompts * together):
                self._add(row.prompt)
            while self.engine.has_work:
                self.engine.step()

        once()
        rounds = ROUNDS // together
        return StepMeasurement(settled(lambda: _timed(once, rounds) / ROUNDS) * 1e3, 0.0)

    def _add(self, tokens: int) -> None:
        prompt = self._draw(tokens)
        self.engine.add(Request(f"timed-{self._drawn}", tuple(prompt), _greedy(1)))

    def _draw(self, tokens: int) -> list[int]:
        self._drawn += 1
        generator = torch.Generator().manual_seed(self._drawn)
        vocab = self.engine.model_config.vocab_size
        return torch.randint(vocab, (max(1, tokens),), generator=generator).tolist()


def settled(block: Callable[[], float]) -> float:
    """The median of BLOCKS times that agree: the fastest of up to MOST_BLOCKS. Other programs of
    the host can delay the launches of steps with prompts by half for some seconds."""
    found = sorted(block() for _ in range(BLOCKS))
    while found[BLOCKS - 1] > (1 + SPREAD) * found[0] and len(found) < MOST_BLOCKS:
        found = sorted([*found, block()])
    return statistics.median(found[:BLOCKS])


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def _timed(work: Callable[[], Any], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - start


def rates(platform: Platform) -> dict[str, float]:
    """What this GPU reaches: GB/s of a large sum, TFLOP/s of a large bf16 product. Medians of short
    bursts with rests between them: after a second of such products without a rest, a GPU at its
    power limit has been seen at 570 TFLOP/s, and reached 780 in the steps that followed."""
    found = []
    for _ in range(BURSTS):
        time.sleep(REST)
        found.append(DeviceRates.measured(platform))
    return {
        "bandwidth_gb_s": round(statistics.median(each.bandwidth for each in found) / 1e9, 1),
        "bf16_tflops": round(statistics.median(each.operations for each in found) / 1e12, 1),
    }
