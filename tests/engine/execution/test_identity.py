"""Greedy output does not depend on how it was computed. fp32, tiny checkpoints, real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.config.model import MLAConfig
from rorqual.ops import stretch
from rorqual.ops.cpu.backend import CpuOps
from tests.models.checkpoints import VOCAB, save

pytestmark = pytest.mark.exhaustive(but_first=True)

OUTPUT = 24


@pytest.fixture(scope="module", params=["v3", "v2-grouped", "qwen"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(request.param, path)
    return path


def prompts(count: int = 32) -> list[list[int]]:
    """Mixed lengths, some sharing a long prefix."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(VOCAB, (40,), generator=generator).tolist()
    made = []
    for index in range(count):
        length = int(torch.randint(1, 70, (1,), generator=generator))
        own = torch.randint(VOCAB, (length,), generator=generator).tolist()
        made.append(shared + own if index % 3 == 0 else own)
    return made


def engine(folder: Path, **options) -> LLM:
    settings = {
        "dtype": "float32",
        "page_size": 8,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "skip_tokenizer_init": True,
    }
    return LLM(folder, **{**settings, **options})


def greedy(llm: LLM, batch: list[list[int]], one_by_one: bool = False) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    groups = [[prompt] for prompt in batch] if one_by_one else [batch]
    return [out.outputs[0].token_ids for group in groups for out in llm.generate(group, params)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """One request at a time, whole prompts, no prefix cache."""
    llm = engine(folder, enable_prefix_caching=False)
    return greedy(llm, prompts(), one_by_one=True)


def assert_same(folder: Path, got: list[list[int]], want: list[list[int]]) -> None:
    """Equal, but for tokens that follow a tie: where the reference's two best logits lie within
    1e-4. Ties are counted and printed."""
    ties = 0
    llm = None
    for prompt, ours, theirs in zip(prompts(), got, want, strict=True):
        if ours == theirs:
            continue
        llm = llm or engine(folder, enable_prefix_caching=False)
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, ignore_eos=True)
        entry = llm.generate(prompt + theirs[:at], params)[0].outputs[0].logprobs[0]
        best = sorted((item.logprob for item in entry.values()), reverse=True)
        assert best[0] - best[1] < 1e-4, (at, ours[at], theirs[at], entry)
        ties += 1
    print(f"ties: {ties} of {len(want)}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"chunked_prefill_size": 1},
        {"chunked_prefill_size": 7},
        {"max_num_batched_tokens": 33, "max_num_seqs": 32},
        {"steps_in_flight": 2},
        {"num_pages": 30},
        {"num_pages": 30, "steps_in_flight": 2, "chunked_prefill_size": 5},
        {"mla_prefill": "A_CC", "mla_decode": "A_CC_ME"},
        {"mla_prefill": "CD", "mla_decode": "CD"},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "default",
)
def test_batch_of_32_gives_the_tokens_of_one(
    folder: Path, expected: list[list[int]], options: dict
):
    llm = engine(folder, **options)
    assert_same(folder, greedy(llm, prompts()), expected)
    scheduler = llm.engine.scheduler.schedulers[0]
    if "num_pages" in options:
        assert scheduler.num_preemptions > 0
    assert scheduler.prefix.available == scheduler.allocator.capacity
    # Once more: now the prefix cache holds these very prompts.
    assert_same(folder, greedy(llm, prompts()), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7},
        {"mla_decode": "CC", "max_num_batched_tokens": 33},
        pytest.param(
            {
                "mla_decode": "CC",
                "num_speculative_tokens": 2,
                "drafter": "ngram",
                "chunked_prefill_size": 30,
            },
            marks=[pytest.mark.longest],
        ),
    ],
    ids=str,
)
def test_contexts_longer_than_what_is_decompressed_at_once(
    folder: Path,
    expected: list[list[int]],
    options: dict,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two pages at once: most prompts, whole, in chunks, or behind a cached prefix, are cut. The
    prefix cache holds them the second time."""
    monkeypatch.setitem(stretch.STRETCH_BYTES, "cpu", 2 * 8 * 1664)
    cut = []
    plain = CpuOps.stretch_attention

    def counting(*given) -> None:
        cut.append(given[4].query_lens)
        plain(*given)

    monkeypatch.setattr(CpuOps, "stretch_attention", counting)
    llm = engine(folder, **options)
    assert_same(folder, greedy(llm, prompts()), expected)
    assert_same(folder, greedy(llm, prompts()), expected)
    assert bool(cut) == isinstance(llm.engine.model_config.attention, MLAConfig)


def test_repeated_prompt_recomputes_at_most_a_page(folder: Path):
    llm = engine(folder)
    prompt = prompts()[0] + prompts()[3]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first = llm.generate(prompt, params)[0]
    before = llm.engine.stats.prompt_tokens
    second = llm.generate(prompt, params)[0]
    assert llm.engine.stats.prompt_tokens - before <= 8
    assert second.num_cached_tokens >= len(prompt) - 8
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_transformers_generates_the_same_text(folder: Path, expected: list[list[int]]):
    """Against transformers without its cache: every step is a forward pass over the whole
    sequence."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, want in list(zip(prompts(), expected, strict=True))[:6]:
        ids = list(prompt)
        for _ in range(OUTPUT):
            with torch.no_grad():
                ids.append(
                    int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
                )
        assert ids[len(prompt) :] == want
