"""Captured decode steps on a platform that 'replays' by calling again: padding, buckets and
variants change no token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.config.parallel import ParallelConfig
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution import cuda_graphs
from rorqual.engine.execution.model_runner import ModelRunner
from rorqual.engine.execution.sampler import PendingStep
from rorqual.engine.scheduling.buckets import bucket_of, bucket_sizes, part_buckets
from rorqual.engine.scheduling.scheduler_output import (
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
)
from rorqual.errors import ConfigError
from rorqual.ops.interface import Ops
from rorqual.parallel.exchange_policy import captured_prompt_tokens
from rorqual.planner.costs.catalog import published
from rorqual.request import Logprob, StructuredOutput
from tests.demo_script import load_demo
from tests.engine.execution.replaying import ReplayingPlatform
from tests.engine.execution.test_speculative_requests import GRAMMARS, Automata
from tests.models.checkpoints import VOCAB, save, save_with_mtp

pytestmark = pytest.mark.exhaustive(but_first=True)

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 5,
    "max_model_len": 64,
    "page_size": 8,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save("v3", tmp_path)
    return tmp_path


def batch() -> tuple[list[list[int]], list[SamplingParams]]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (3 + 4 * i,), generator=generator).tolist() for i in range(7)]
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0, "presence_penalty": 0.5},
    ]
    params = [
        SamplingParams(**{"max_tokens": 6 + 3 * i, "seed": i, "ignore_eos": True, **kinds[i % 4]})
        for i in range(7)
    ]
    return prompts, params


def test_replayed_steps_give_the_eager_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch):
    options = SIZES
    prompts, params = batch()
    eager = [out.outputs[0].token_ids for out in LLM(folder, **options).generate(prompts, params)]
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    llm = LLM(folder, **options, piecewise_tokens=128)
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == eager
    assert platform.replays > 5
    assert platform.pieces > 0
    assert platform.replayed_between > 0, "decoding requests were attended to eagerly"
    before = platform.replays
    assert [out.outputs[0].token_ids for out in llm.generate(prompts[:1], params[:1])] == eager[:1]
    assert platform.replays > before


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "mtp"},
        {"drafter": "mtp", "draft_window": False},
        {"drafter": "ngram"},
        {"drafter": "mtp", "speculative_policy": "adaptive"},
        {"drafter": "mtp", "num_pages": 14},
    ],
    ids=str,
)
def test_replayed_steps_with_drafts_give_the_eager_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict
):
    """Greedy, seeded and unseeded requests; verification, drafting and drawing are all in the
    capturing."""
    save_with_mtp(tmp_path, agreement=2.0)
    sizes = SIZES
    prompts, params = batch()
    params = [replace(p, speculate=i != 3) for i, p in enumerate(params)]
    if (
        "speculative_policy" not in options
        # there the drafts, and with them the tokens of unseeded requests, depend on the time steps
        # take
    ):
        params = [replace(p, seed=None) if i % 3 == 1 else p for i, p in enumerate(params)]
    eager = LLM(tmp_path, num_speculative_tokens=2, steps_in_flight=2, **sizes, **options)
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    llm = LLM(tmp_path, num_speculative_tokens=2, piecewise_tokens=128, **sizes, **options)
    assert llm.engine.depth == 2
    found = []
    for each in (eager, llm):
        each.engine.scheduler.schedulers[0]._seeds = random.Random(0)
        found.append(
            [out.outputs[0].token_ids for _ in range(2) for out in each.generate(prompts, params)]
        )
    assert found[0] == found[1]
    assert platform.replays > 10
    if "speculative_policy" not in options:
        assert llm.engine.stats.accepted == eager.engine.stats.accepted
        assert llm.engine.stats.drafted == eager.engine.stats.drafted
    assert sum(llm.engine.stats.accepted) > 0
    recorded = {
        num_speculative_tokens
        for _, _, num_speculative_tokens in llm.engine.worker.runner.graphs.graphs
    }
    assert recorded == ({0, 1, 2} if "speculative_policy" in options else {2}), (
        "nothing was recorded while serving"
    )
    assert int(llm.engine.worker.runner.rows.length[-1]) == 0


HOST: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0},
    {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"temperature": 0, "logit_bias": {11: 4.0, 12: -50.0}, "logprobs": 0},
    {"temperature": 0, "min_tokens": 6, "stop_token_ids": list(range(0, VOCAB, 2))},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0, "structured": StructuredOutput("grammar", "cycle")},
    {"temperature": 1.0, "structured": StructuredOutput("grammar", "branch"), "logprobs": 1},
    {"temperature": 0, "repetition_penalty": 1.3, "speculate": False},
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_speculative_tokens": 2},
        {"num_speculative_tokens": 2, "draft_window": False},
        {"num_speculative_tokens": 2, "drafter": "ngram"},
        {"num_speculative_tokens": 2, "speculative_policy": "adaptive"},
        {"num_speculative_tokens": 2, "num_pages": 16},
        {"cudagraph_capture_sizes": (1,)},
    ],
    ids=str,
)
def test_steps_that_need_the_host_replay_the_forward_pass(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
):
    """Of a mixed batch, all that decodes is replayed; tokens and log probabilities are the eager
    ones."""
    save_with_mtp(tmp_path, agreement=2.0)
    sizes = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 6, "page_size": 8}
    sizes |= {"max_model_len": 64, "steps_in_flight": 2}
    prompts = [[(5 * i + 3 * j) % VOCAB for j in range(3 + 2 * i)] for i in range(len(HOST))]
    asked = [{"seed": 3, "ignore_eos": "structured" not in asks, **asks} for asks in HOST]
    params = [SamplingParams(max_tokens=6 + 2 * i, **asks) for i, asks in enumerate(asked)]
    eager = LLM(tmp_path, **sizes, **options)
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    llm = LLM(tmp_path, **sizes, **options)
    launches = []
    launch = llm.engine.worker.runner.launch

    def launched(output: SchedulerOutput, metadata: StepMetadata) -> PendingStep:
        launches.append(output)
        return launch(output, metadata)

    monkeypatch.setattr(llm.engine.worker.runner, "launch", launched)
    found = []
    for each in (eager, llm):
        each.engine.grammars = Automata(GRAMMARS)
        outs = [out.outputs[0] for _ in range(2) for out in each.generate(prompts, params)]
        found.append([(out.token_ids, comparable(out.logprobs), out.finish_reason) for out in outs])
    assert found[0] == found[1]
    assert platform.replays == sum(not output.chunks for output in launches) > 20
    if "num_speculative_tokens" in options and "speculative_policy" not in options:
        assert llm.engine.stats.accepted == eager.engine.stats.accepted
        assert llm.engine.stats.drafted == eager.engine.stats.drafted
        assert sum(llm.engine.stats.accepted) > 0


def comparable(logprobs: list[dict[int, Logprob]] | None) -> Any:
    """Of each token, the ids and ranks of the best, and rounded values."""
    steps = [step.items() for step in logprobs or ()]
    return [[(token, one.rank, round(one.logprob, 3)) for token, one in step] for step in steps]


def test_a_padded_row_with_drafts_writes_nowhere_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_with_mtp(tmp_path)
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    llm = LLM(
        tmp_path,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_model_len=64,
        page_size=8,
        num_speculative_tokens=3,
    )
    runner = llm.engine.worker.runner
    before = [layer["latent"].clone() for layer in runner.pool.layers]
    with torch.inference_mode():
        for variant in (SamplingVariant.GREEDY, SamplingVariant.FILTERED, SamplingVariant.FULL):
            runner.graphs.graphs[8, variant, 3]()
    assert len(before) == 4
    assert all(
        torch.equal(layer["latent"][1:], old[1:])
        for layer, old in zip(runner.pool.layers, before, strict=True)
    )
    assert runner.rows.length[runner.rows.padding] == 0


def test_a_padded_row_writes_nowhere_that_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_model_len=64,
        page_size=8,
    )
    runner = llm.engine.worker.runner
    plane = runner.pool.layers[0]["latent"]
    before = plane.clone()
    with torch.inference_mode():
        runner.graphs.graphs[8, next(iter(runner.graphs.graphs))[1], 0]()
    assert torch.equal(plane[1:], before[1:])
    assert runner.rows.length[runner.rows.padding] == 0


@pytest.mark.parametrize("one_graph", [8, 0])
def test_sizes_left_out_are_recorded_when_they_are_needed(
    one_graph: int, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Capturing computes steps of its own: they may not move the requests that wait for it. What
    was not compiled ahead runs once before it is captured, sampling too."""
    monkeypatch.setattr(cuda_graphs, "ONE_GRAPH", one_graph)
    warm: list[bool] = []
    capture = ReplayingPlatform.capture

    def noted(self: ReplayingPlatform, work: Any, warm_up: bool = True) -> Any:
        warm.append(warm_up)
        return capture(self, work, warm_up)

    monkeypatch.setattr(ReplayingPlatform, "capture", noted)
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "page_size": 8,
    }
    prompts = [[5, 3 + i, 9] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [
        out.outputs[0].token_ids for out in LLM(folder, **options).generate(prompts, params)
    ]
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    llm = LLM(folder, **options, cudagraph_capture_sizes=(1, 7))
    graphs = llm.engine.worker.runner.graphs
    assert {size for size, _, _ in graphs.graphs} == {1, 8}
    assert len(warm) == len(graphs.graphs)
    assert not any(warm)
    warm.clear()
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == expected
    assert {size for size, _, _ in graphs.graphs} == {1, 4, 8}
    assert warm == ([False] if one_graph else [False, True])  # a few layers ran before the others


@pytest.mark.parametrize("options", [{}, {"drafter": "mtp", "num_speculative_tokens": 2}], ids=str)
def test_greedy_steps_of_two_graphs_give_the_eager_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    save_with_mtp(tmp_path, agreement=2.0)
    sizes = {**SIZES, **options}
    prompts, _ = batch()
    params = [
        SamplingParams(temperature=0, max_tokens=6 + 3 * i, ignore_eos=True) for i in range(7)
    ]
    expected = [
        out.outputs[0].token_ids for out in LLM(tmp_path, **sizes).generate(prompts, params)
    ]
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    replays = []
    for one_graph in (8, 0):
        monkeypatch.setattr(cuda_graphs, "ONE_GRAPH", one_graph)
        llm = LLM(tmp_path, **sizes)
        before = platform.replays
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == expected
        replays.append(platform.replays - before)
    assert replays[1] == 2 * replays[0] > 20


@pytest.mark.parametrize(("num_speculative_tokens", "one_graph"), [(0, 0), (0, 8), (2, 0), (2, 8)])
def test_kernels_compiled_ahead(
    num_speculative_tokens: int, one_graph: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The forward pass of every step that is captured is computed once before, inside what
    compiles, and so is its sampling; tokens stay what they are."""
    save_with_mtp(tmp_path)
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "page_size": 8,
        "num_speculative_tokens": num_speculative_tokens,
    }
    prompts = [[5, 3 + i, 9] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [
        out.outputs[0].token_ids for out in LLM(tmp_path, **options).generate(prompts, params)
    ]
    monkeypatch.setattr(
        "rorqual.engine.executor.make_platform",
        lambda device: ReplayingPlatform(torch.device("cpu")),
    )
    monkeypatch.setattr(cuda_graphs, "ONE_GRAPH", one_graph)
    inside = [False]
    computed = []

    @contextmanager
    def compiling(self: Ops) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def noted(name: str) -> None:
        plain = getattr(ModelRunner, name)

        def body(
            self: ModelRunner, slots: Tensor, variant: SamplingVariant, num_speculative_tokens: int
        ) -> Tensor:
            computed.append((inside[0], name, (len(slots), variant, num_speculative_tokens)))
            return plain(self, slots, variant, num_speculative_tokens)

        monkeypatch.setattr(ModelRunner, name, body)

    noted("_decode_body")
    noted("_sample_body")
    monkeypatch.setattr(Ops, "compiling", compiling)
    llm = LLM(tmp_path, **options, precompile_kernels=True)
    graphs = set(llm.engine.worker.runner.graphs.graphs)
    forward = {key for key in graphs if key[1] is SamplingVariant.FULL}
    ahead = [(name, key) for before, name, key in computed if before]
    assert len(ahead) == len(set(ahead))
    assert {key for name, key in ahead if name == "_decode_body"} == forward
    assert {key for name, key in ahead if name == "_sample_body"} == graphs - forward
    assert all(before for before, _, _ in computed[: len(ahead)])
    # the forward pass is captured for greedy steps, and once for all others; else a few layers
    # run with greedy sampling before it is captured
    captured = {key for before, name, key in computed if not before and name == "_decode_body"}
    assert captured == forward | {key for key in graphs if key[1] is SamplingVariant.GREEDY}
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == expected


def test_the_demo_of_sampling_graphs(tmp_path: Path) -> None:
    demo = load_demo("sampling_graphs")
    path = tmp_path / "rows.json"
    words = ["--device", "cpu", "--requests", "1,3", "--layers", "3", "--steps", "2"]
    rows = demo.main([*words, "--turns", "1", "--json", str(path)])
    names = ["greedy", "plain", "filtered"]
    assert [(row.variant, row.requests) for row in rows] == list(product(names, (1, 3)))
    assert all(row.equal and row.ms > 0 and row.one_graph_ms > 0 for row in rows)
    assert [row["requests"] for row in json.loads(path.read_text())] == [1, 3] * 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0,), "at least 1"), ((9,), "max_num_seqs=8"), (4, "list"), (("a",), "at least 1")],
)
def test_graph_sizes_that_cannot_be(folder: Path, sizes: object, message: str):
    with pytest.raises(ConfigError, match=message):
        LLM(folder, max_num_seqs=8, cudagraph_capture_sizes=sizes)


def test_steps_with_prompts_are_captured_up_to_the_exchange_that_counts_rows():
    moe = published("deepseek-ai/DeepSeek-V3").moe
    for sizes in (
        {},
        {"tp": 2},
        {"tp": 4, "sequence_parallel": True},
        {"dp": 2},
        {"tp": 2, "ep": 2},
    ):
        assert captured_prompt_tokens(ParallelConfig(**sizes), moe, 4096) == 4096
    wide = ParallelConfig(dp=32, ep=32)
    assert captured_prompt_tokens(wide, moe, 4096) == 511
    assert captured_prompt_tokens(wide, moe, 64) == 64
    for sizes in ({"pp": 2}, {"dp": 2, "ep": 2, "exchange": "alltoall"}):
        assert captured_prompt_tokens(ParallelConfig(**sizes), moe, 4096) == 0


def test_buckets():
    assert all(bucket_of(n) in bucket_sizes(1024) for n in range(1, 1025))
    assert all(bucket_of(n) == min(b for b in bucket_sizes(1024) if b >= n) for n in range(1, 1025))
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(5) == [1, 2, 4, 5]
    assert bucket_sizes(256)[-1] == 256
    assert all(
        b - a <= 64 for a, b in zip(bucket_sizes(1024), bucket_sizes(1024)[1:], strict=False)
    )


LONE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "max_model_len": 64,
    "page_size": 8,
    "weights": "random",
    "single_rank_bench": True,
    "dp": 2,
    "ep": 2,
    "cudagraph_capture_sizes": (1,),
}


def test_an_exchange_that_no_graph_can_hold(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Graphs that were asked for are not left out in silence; left to the engine, they are."""
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    for mode in ("graph", "acl_graph"):
        message = f"{mode}.*exchange='alltoall'.*: exchange auto, allgather_ep, low_latency, or exe"
        with pytest.raises(ConfigError, match=message):
            LLM(folder, **LONE, exe_mode=mode, exchange="alltoall")
    assert LLM(folder, **LONE, exchange="alltoall").engine.worker.runner.graphs is None
    assert LLM(folder, **LONE, exe_mode="graph", exchange="low_latency").engine.worker.runner.graphs
    assert LLM(folder, **LONE, exe_mode="graph").engine.worker.runner.graphs


def test_it_is_refused_before_ranks_are_started(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def launcher(config: EngineConfig) -> None:
        raise AssertionError("nobody should be started")

    monkeypatch.setattr("rorqual.engine.distributed.executor.make_launcher", launcher)
    options = {name: value for name, value in LONE.items() if name != "single_rank_bench"}
    with pytest.raises(ConfigError, match="exchange='alltoall'"):
        LLM(folder, **options, exe_mode="graph", exchange="alltoall")


def test_graphs_are_refused_where_there_are_none():
    with pytest.raises(ConfigError, match="acl_graph"):
        LLM(exe_mode="acl_graph")


@pytest.mark.parametrize(
    ("model", "options", "captured"),
    [
        ("qwen", {}, True),
        ("v3", {"mla_decode": "CD", "mla_prefill": "CD"}, True),
        ("v3", {"mla_decode": "A_CC", "mla_prefill": "A_CC_ME"}, True),
        ("v3", {"mla_decode": "AM_CC_ME"}, False),
        ("v3", {"max_num_seqs": 7, "max_num_batched_tokens": 9}, True),
        ("qwen", {"max_num_seqs": 7, "max_num_batched_tokens": 9, "piecewise_tokens": 9}, True),
    ],
    ids=str,
)
def test_decoding_requests_of_mixed_steps_are_replayed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    options: dict[str, Any],
    captured: bool,
):
    """Small steps have fewer tokens than the captured requests."""
    save(model, tmp_path)
    given = {
        **SIZES,
        "piecewise_tokens": 128,
        **options,
    }
    prompts, params = batch()
    eager = LLM(tmp_path, **{**given, "piecewise_tokens": 0}).generate(prompts, params)
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    llm = LLM(tmp_path, **given)
    replayed = llm.generate(prompts, params)
    for one, other in zip(eager, replayed, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert platform.pieces > 0
    assert (platform.replayed_between > 0) == captured
    pieces = llm.engine.worker.runner.pieces
    assert bool(pieces.attention.decodes) == captured
    if captured:
        sizes = {requests for requests, _ in pieces.attention.decodes}
        assert sizes == {n for n in (1, 2, 4, given["max_num_seqs"]) if n <= pieces.sizes[-1]}


def test_parts_of_full_steps_have_little_padding() -> None:
    for most in (1, 64, 100, 600, 4608, 9216):
        sizes = part_buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for tokens in range(1, most + 1):
            size = next(size for size in sizes if size >= tokens)
            assert size - tokens < max(256, tokens // 8 + 64)
    for half in (1024, 2048, 4096, 8192):
        sizes = part_buckets(9216)
        assert next(size for size in sizes if size > half) == half + min(64, half // 64)
