"""No rank may decide by its own plan which collectives run: ranks with plans as different as can be
start the same ones, in the same order and of the same sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from rorqual.config.hf import read_config_file
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.request import StructuredOutput
from tests.engine.execution.test_speculative_requests import GRAMMARS, Automata
from tests.models.checkpoints import rewrite_config, save, save_with_mtp
from tests.parallel.lockstep import Lockstep, Settings, prompt_of
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.exhaustive(but_first=True)


def asks(most: int = 8, **changes: Any) -> SamplingParams:
    settings = {"temperature": 0, "max_tokens": most, "ignore_eos": True, "seed": 1}
    return SamplingParams(**{**settings, **changes})


GREEDY = asks()
PLAIN = asks(temperature=0.8)
FILTERED = asks(temperature=1.0, top_p=0.9)
GRAMMAR = asks(ignore_eos=False, structured=StructuredOutput("grammar", "cycle"))
# (before which step, data-parallel rank, prompt length, parameters)
SCENES: dict[str, list[tuple[int, int, int, SamplingParams]]] = {
    "a chunk of prompt on one rank": [(0, 0, 5, asks(20)), (3, 1, 30, GREEDY), (9, 1, 9, GREEDY)],
    "greedy and plain": [(0, 0, 5, GREEDY), (0, 1, 6, PLAIN)],
    "greedy and top-p": [(0, 0, 5, GREEDY), (0, 1, 6, FILTERED)],
    "plain and top-p": [(0, 0, 5, FILTERED), (0, 1, 6, PLAIN)],
    "a row that draws joins": [(0, 0, 5, asks(16)), (0, 1, 6, asks(16)), (3, 1, 3, FILTERED)],
    "log probabilities on one rank": [(0, 0, 5, GREEDY), (0, 1, 6, asks(4, logprobs=2))],
    "a scored prompt on one rank": [
        (0, 0, 5, asks(20)),
        (3, 1, 30, asks(prompt_logprobs=2)),
        (8, 1, 3, PLAIN),
    ],
    "edited logits on one rank": [(0, 0, 5, asks(4, presence_penalty=1.0)), (0, 1, 6, PLAIN)],
    "a grammar on one rank": [(0, 0, 5, asks(12)), (2, 1, 6, GRAMMAR)],
    "an idle rank": [(0, 0, 5, GREEDY)],
    "the first rank idle": [(0, 1, 5, FILTERED)],
    "an idle rank beside a chunk": [(0, 1, 30, GREEDY)],
    "an idle rank beside log probabilities": [(0, 1, 5, asks(logprobs=0))],
    "more requests on one": [(0, 0, 5, asks(12)), *[(0, 1, 4, asks(3 + i)) for i in range(6)]],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp2-vocabulary": {"dp": 2, "embed_tp": 2, "head_tp": 2, "ep": 2, "exchange": "low_latency"},
    "dp2-tp2": {"dp": 2, "tp": 2, "ep": 2, "dense_tp": 1},
    "dp2-pp2": {"dp": 2, "pp": 2},
}
TP: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-sequence-parallel": {"tp": 2, "sequence_parallel": True},
}
# Every draft is taken, so that ranks which hold the same requests, but see other sums, go on alike.
ALL = (1.0, 1.0)
SETTINGS: dict[str, Settings] = {
    "eager": Settings(),
    "graphs": Settings(cudagraph_capture_sizes=(1, 2, 4, 8)),
    "graphs-when-needed": Settings(cudagraph_capture_sizes=(1,)),
    "mtp": Settings(num_speculative_tokens=2, rates=ALL),
    "mtp-last-row": Settings(num_speculative_tokens=2, window=False, rates=ALL),
    "mtp-last-row-graphs-when-needed": Settings(2, "mtp", False, (1,), rates=ALL),
    "mtp-next_n-changes-graphs-when-needed": Settings(2, "mtp", True, (1,), (2, 0, 1), rates=ALL),
    "ngram-graphs-when-needed": Settings(2, "ngram", cudagraph_capture_sizes=(1,), rates=ALL),
}
PIECES: dict[str, Settings] = {
    "pieces": Settings(cudagraph_capture_sizes=(1, 2, 4, 8), piecewise_tokens=64),
    "mtp-pieces": Settings(2, "mtp", True, (1, 2, 4, 8), rates=ALL, piecewise_tokens=64),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Two prediction modules, and few layers: what is asked of layers is the same of all."""
    folder = tmp_path_factory.mktemp("lockstep")
    save("v3", folder)
    rewrite_config(folder, num_nextn_predict_layers=2, num_hidden_layers=2)
    return read_config_file(folder)


def run(config: ModelConfig, layout: dict[str, Any], settings: Settings) -> Lockstep:
    """The scenes one after the other, in one engine: what one captures, the next finds."""
    loop = Lockstep.of(config, ParallelConfig(**layout), settings)
    for member in loop.members:
        member.runner.rows.grammars = Automata(GRAMMARS)
    for scene in SCENES:
        before = len(loop.plans)
        try:
            dp = loop.sizes.dp
            loop.run((before + step, rank % dp, *rest) for step, rank, *rest in SCENES[scene])
        except AssertionError as error:
            raise AssertionError(f"{scene}: {error}") from error
    return loop


def check(config: ModelConfig, layout: str, settings: str) -> None:
    loop = run(config, {**LAYOUTS, **TP}[layout], {**SETTINGS, **PIECES}[settings])
    assert all(len(member.log) > 80 for member in loop.members)
    assert len(set(loop.replays)) == 1
    assert (loop.replays[0] > 20) == (loop.settings.cudagraph_capture_sizes is not None)
    assert len(set(loop.pieces)) == 1
    assert (loop.pieces[0] > 5) == (loop.settings.piecewise_tokens > 0)


CASES = [("dp2", name) for name in SETTINGS]
CASES += [
    ("dp2-vocabulary", "mtp-last-row-graphs-when-needed"),
    ("dp2-tp2", "graphs-when-needed"),
    ("dp2-pp2", "mtp-last-row-graphs-when-needed"),
    *((layout, name) for layout in (*TP, "dp2", "dp2-tp2") for name in PIECES),
    ("dp2-vocabulary", "mtp-pieces"),
]
MORE = [(layout, name) for layout in LAYOUTS for name in SETTINGS if (layout, name) not in CASES]


@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_ranks_start_the_same_collectives(config: ModelConfig, layout: str, settings: str) -> None:
    check(config, layout, settings)


@pytest.mark.full_matrix
@pytest.mark.parametrize(("layout", "settings"), MORE)
def test_more_of_the_same(config: ModelConfig, layout: str, settings: str) -> None:
    if layout == "dp2-tp2" and "ngram" in settings:
        pytest.skip("ranks of an attention group see other sums here, and look up what they drew")
    check(config, layout, settings)


def test_the_exchange_that_counts_its_tokens(config: ModelConfig) -> None:
    layout = {"dp": 2, "ep": 2, "exchange": "alltoall"}
    run(config, layout, SETTINGS["mtp-last-row"])


def test_processes_end_with_the_tokens_of_one(pool: RankPool, tmp_path: Path) -> None:
    """Over gloo: a call that another rank does not make would wait until the pool gives up."""
    save_with_mtp(tmp_path, agreement=2.0)
    scenes = ("a chunk of prompt on one rank", "greedy and top-p", "log probabilities on one rank")
    arrivals = []
    for index, scene in enumerate(scenes):
        arrivals += [(12 * index + step, *rest) for step, *rest in SCENES[scene]]
    arrivals.sort(key=lambda arrival: arrival[0])
    asked = [(length, params) for _, _, length, params in arrivals]
    prompts = [prompt_of(number, length) for number, (length, _) in enumerate(asked)]
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
    llm = LLM(tmp_path, **options)
    outs = llm.generate(prompts, [params for _, params in asked])
    wanted = {f"r{number}": out.outputs[0].token_ids for number, out in enumerate(outs)}
    for settings in (
        {"cudagraph_capture_sizes": (1,)},
        {"num_speculative_tokens": 2, "window": False, "cudagraph_capture_sizes": (1,)},
    ):
        given = {"folder": str(tmp_path), "settings": settings, "arrivals": arrivals}
        assert pool.run("in_step", 2, sizes={"dp": 2}, **given) == [wanted] * 2
    given["settings"] = {"cudagraph_capture_sizes": (1, 2, 4, 8), "piecewise_tokens": 64}
    for sizes in ({"dp": 2}, {"dp": 2, "ep": 2}):
        assert pool.run("in_step", 2, sizes=sizes, **given) == [wanted] * 2
    given["arrivals"] = [(step, 0, *rest) for step, _, *rest in arrivals]
    for sizes in ({"tp": 2}, {"tp": 2, "ep": 2}):
        assert pool.run("in_step", 2, sizes=sizes, **given) == [wanted] * 2
