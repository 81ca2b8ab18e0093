"""Requests of another kind on four ranks: experts follow them, and then stay where they are."""

from __future__ import annotations

import random

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.distributed.executor import DistributedExecutor

RANKS = 4
WINDOW = 10
THRESHOLD = 0.8
LENGTH = 128  # of a prompt; a step has two of each rank, so 4,096 picks a layer
FEW = (11, 57, 300, 701)


@pytest.mark.exhaustive
@pytest.mark.longest
def test_balance_is_back_within_a_hundred_steps_and_nothing_moves_after() -> None:
    """First tokens at random, over all of which the router is even enough; then prompts of four
    tokens, which it is not."""
    llm = LLM(
        dtype="float32",
        max_model_len=LENGTH + 8,
        max_num_seqs=4,
        page_size=8,
        threads=1,
        num_pages=120,
        max_num_batched_tokens=2 * LENGTH,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        dp=RANKS,
        ep=RANKS,
        redundant_experts=4,
        enable_eplb=True,
        eplb_window=WINDOW,
        eplb_threshold=THRESHOLD,
    )
    executor = llm.engine.executor
    assert isinstance(executor, DistributedExecutor)
    balancer = executor.balancer
    assert balancer is not None
    stats = balancer.stats
    draw = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    step = llm.engine.step
    seen: list[tuple[int, float | None, int]] = []

    def counted() -> object:
        found = step()
        seen.append((balancer.steps, stats.balancedness, stats.moves))
        return found

    llm.engine.step = counted  # type: ignore[assignment, method-assign]

    def serve(steps: int, vocabulary: tuple[int, ...] | range) -> None:
        count = steps * RANKS * 2
        prompts = [[draw.choice(vocabulary) for _ in range(LENGTH)] for _ in range(count)]
        llm.generate(prompts, params)

    try:
        serve(4 * WINDOW, range(3, llm.engine.model_config.vocab_size))
        assert stats.balancedness is not None
        assert stats.balancedness > THRESHOLD
        assert stats.moves == 0
        changed = len(seen)
        serve(12 * WINDOW, FEW)
    finally:
        llm.engine.close()
    after = seen[changed:]
    detected = next(number for number, value, _ in after if value and value < THRESHOLD)
    assert detected - after[0][0] <= 2 * WINDOW + 2
    back = next(
        number for number, value, _ in after if number > detected and value and value > THRESHOLD
    )
    assert back - detected <= 100
    assert stats.moves > 0
    # constant load from here on
    settled = [(value, moves) for number, value, moves in after if number >= back]
    assert len(settled) > 5 * WINDOW, "time enough to flap"
    assert all(value and value > THRESHOLD for value, _ in settled)
    assert {moves for _, moves in settled} == {stats.moves}
