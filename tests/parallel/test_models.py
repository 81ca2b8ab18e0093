"""Whole tiny models on several ranks: the logits of one process within fp32 rounding, and the
same greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rorqual.config.hf import read_config, read_config_file
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.layers.fixed_experts import check_fixed_experts
from rorqual.models.hub import BUNDLED
from rorqual.ops.cpu.backend import CpuOps
from tests.emulation.triton_interpreter import DEVICE, needs_triton
from tests.models.checkpoints import CLASSES, OPTIONS, OPTIONS_FP8, VOCAB, save, save_fp8
from tests.models.driver import all_logits, load
from tests.parallel import jobs, matrix
from tests.parallel.driver import homes
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.exhaustive(but_first=True)

BOUND = 1e-4
ARCHITECTURES = {
    "v3": "DeepseekV3ForCausalLM",
    "v2": "DeepseekV2ForCausalLM",
    "qwen": "Qwen3MoeForCausalLM",
}
PROMPTS = [7, 5, 9, 6]
LENGTHS = [10, 9, 11, 8]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """(folder, file of token ids and one process's logits) of an option, made once."""
    known: dict[Any, tuple[str, str]] = {}

    def get(option: str, forms: tuple[str, str] = ("CC", "A_CC_ME")) -> dict[str, Any]:
        if (option, forms) not in known:
            folder = tmp_path_factory.mktemp(option)
            (save_fp8 if option in OPTIONS_FP8 else save)(option, folder)
            ids = torch.randint(
                0, VOCAB, (len(PROMPTS), max(LENGTHS)), generator=torch.Generator().manual_seed(5)
            )
            logits = all_logits(load(folder, CpuOps(), forms=forms), ids, [max(LENGTHS)])
            save_file({"ids": ids, "logits": logits}, folder / "answers")
            known[option, forms] = str(folder), str(folder / "answers")
        folder_, answers = known[option, forms]
        return {
            "folder": folder_,
            "answers": answers,
            "prompts": PROMPTS,
            "lengths": LENGTHS,
            "forms": forms,
        }

    return get


def check(
    pool: RankPool, sizes: dict[str, Any], given: dict[str, Any], **options: Any
) -> list[dict[str, Any]]:
    world = sizes.get("tp", 1) * sizes.get("dp", 1) * sizes.get("pp", 1)
    results = pool.run("compare", world, sizes=sizes, **given, **options)
    for rank, result in enumerate(results):
        assert result["worst"] < BOUND, (rank, result)
        assert result["differ"] == 0, (rank, result)
    # Every rank of the last stage has the logits of its data-parallel rank.
    share = [
        homes(len(PROMPTS), sizes.get("dp", 1)).count(rank) > 0
        for rank in range(sizes.get("dp", 1))
    ]
    seen = sum(result["positions"] for result in results)
    assert seen == sum(LENGTHS) * sizes.get("tp", 1), (seen, share)
    return results


def way_of(case: dict[str, Any]) -> str:
    if case["micro_batches"] == 1:
        return "straight"
    return "chain" if case["pp"] > 1 else "run"


def cases(option: str, choose: bool, worlds: tuple[int, ...] = (2, 4)) -> list[Any]:
    """Parameters of both numbers of ranks: all valid combinations, or those in which every pair
    of settings occurs."""
    family, changes = OPTIONS[option]
    kind, _, base = CLASSES[family]
    config = read_config(
        {**kind(**{**base, **changes}).to_dict(), "architectures": [ARCHITECTURES[family]]}
    )
    found = [list(matrix.valid(config, world)) for world in worlds]
    return [case for valid in found for case in (matrix.pairwise(valid) if choose else valid)]


def parameters(
    options: tuple[str, ...], choose: bool, worlds: tuple[int, ...] = (2, 4)
) -> list[Any]:
    found = [(option, case) for option in options for case in cases(option, choose, worlds)]
    return [
        pytest.param(option, case, id=f"{option}-{matrix.name_of(case)}") for option, case in found
    ]


CHOSEN = [
    *parameters(("v3-narrow-latents",), choose=True),
    *parameters(("qwen",), choose=True, worlds=(4,)),
]


@pytest.mark.parametrize(("option", "case"), CHOSEN)
def test_every_pair_of_settings(pool: RankPool, saved, option: str, case: dict[str, Any]) -> None:
    check(pool, matrix.sizes_of(case), saved(option), way=way_of(case))


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    ("option", "case"), parameters(("v3-narrow-latents", "qwen"), choose=False)
)
def test_every_valid_combination(pool: RankPool, saved, option: str, case: dict[str, Any]) -> None:
    check(pool, matrix.sizes_of(case), saved(option), way=way_of(case))


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    ("option", "case"),
    parameters(("v2-no-q-lora", "v3-bias", "v3-tied", "qwen-tied", "qwen-bias"), choose=True),
)
def test_every_pair_of_settings_of_other_options(
    pool: RankPool, saved, option: str, case: dict[str, Any]
) -> None:
    check(pool, matrix.sizes_of(case), saved(option), way=way_of(case))


OTHERS = [
    ("v3-no-q-lora", {"tp": 2}),
    ("v3-no-q-lora", {"tp": 2, "sequence_parallel": True}),
    ("v3", {"tp": 4, "sequence_parallel": True}),
    ("v3-bias", {"tp": 4}),
    ("qwen-bias", {"tp": 2, "dp": 2, "sequence_parallel": True}),
    ("v3-tied", {"pp": 2, "tp": 2}),
    ("qwen-tied", {"dp": 2, "embed_tp": 2, "head_tp": 2}),
    ("v3-all-dense", {"dp": 2, "dense_tp": 2}),
    ("v3-two-shared", {"tp": 2, "dense_tp": 1}),
    ("v2-grouped", {"dp": 2, "ep": 2, "exchange": "alltoall"}),
    ("qwen-mlp-only", {"tp": 4, "ep": 2}),
]


@pytest.mark.parametrize(
    ("option", "sizes"),
    OTHERS,
    ids=[f"{option}{'-sp' * ('sequence_parallel' in sizes)}" for option, sizes in OTHERS],
)
def test_options_of_the_architectures(
    pool: RankPool, saved, option: str, sizes: dict[str, Any]
) -> None:
    """Biases, tied heads, no query latent or a wide one, dense layers: what a cut could get
    wrong."""
    check(pool, sizes, saved(option))


@pytest.mark.parametrize(
    "forms", [("CD", "CD"), ("A_CC", "A_CC"), ("AM_CC_ME", "AM_CC_ME")], ids="-".join
)
@pytest.mark.parametrize("sharded", [False, True], ids=["", "sp"])
def test_mla_forms_over_heads(pool: RankPool, saved, forms: tuple[str, str], sharded: bool) -> None:
    """With tokens sharded the forms start from gathered latents: query input, entries to
    decompress."""
    check(pool, {"tp": 2, "sequence_parallel": sharded}, saved("v3-narrow-latents", forms))


REDUNDANT = [
    ("v3", {"dp": 2, "ep": 2, "redundant_experts": 4}),
    ("v3", {"dp": 4, "ep": 4, "redundant_experts": 8, "exchange": "alltoall"}),
    ("v3", {"dp": 4, "ep": 4, "redundant_experts": 4, "exchange": "low_latency"}),
    ("v3", {"dp": 4, "ep": 2, "redundant_experts": 16}),
    ("v3", {"tp": 2, "ep": 2, "redundant_experts": 2}),
    ("v3", {"tp": 4, "ep": 4, "redundant_experts": 8, "sequence_parallel": True}),
    ("v2-grouped", {"tp": 2, "dp": 2, "ep": 4, "redundant_experts": 4}),
    ("qwen", {"dp": 2, "pp": 2, "ep": 2, "redundant_experts": 6}),
    ("fp8", {"dp": 2, "ep": 2, "redundant_experts": 4, "exchange": "alltoall"}),
    ("fp8", {"dp": 4, "ep": 4, "redundant_experts": 8, "exchange": "low_latency"}),
]


@pytest.mark.parametrize(
    ("option", "sizes"), REDUNDANT, ids=[f"{option}-{sizes}" for option, sizes in REDUNDANT]
)
def test_copies_of_experts(pool: RankPool, saved, option: str, sizes: dict[str, Any]) -> None:
    """Experts out of order, many twice, in each layer others: the same logits."""
    check(pool, sizes, saved(option))


FIXED: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "exchange": "alltoall"},
    {"dp": 2, "tp": 2, "ep": 2, "exchange": "low_latency"},
    {"tp": 2},
    {"tp": 2, "ep": 2, "redundant_experts": 2},
    {"tp": 2, "dp": 2, "ep": 2, "dense_tp": 4},
    {"dp": 2, "pp": 2},
]


@pytest.mark.parametrize("sizes", FIXED, ids=str)
def test_dense_layers_as_fixed_experts(pool: RankPool, saved, sizes: dict[str, Any]) -> None:
    """A dense layer of 96 columns as one shared and two fixed experts of 32: the same logits."""
    check(pool, sizes, saved("v3"), fixed_experts=True)


def test_dense_layers_that_cannot_be_cut_into_experts(saved) -> None:
    folder = saved("v3")["folder"]
    for sizes, said in (
        ({"dp": 4, "ep": 4}, "ep=4 does not divide the 2 experts of a dense layer"),
        ({"dp": 3, "dense_tp": 3}, "dense_tp=3 cuts the shared 32 columns"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_fixed_experts(read_config_file(folder), ParallelConfig(**sizes))
    config = json.loads((Path(folder) / "config.json").read_text())
    with pytest.raises(ConfigError, match="a dense layer of 100 columns is no multiple"):
        check_fixed_experts(read_config(dict(config, intermediate_size=100)), ParallelConfig())


MTP_SIZES = [
    {"tp": 2},
    {"dp": 2, "ep": 2, "redundant_experts": 4},
    {"tp": 2, "dp": 2, "ep": 4, "sequence_parallel": True},
    {"dp": 4, "ep": 2, "embed_tp": 2, "head_tp": 4},
    {"tp": 2, "pp": 2},
]


@pytest.mark.parametrize("sizes", MTP_SIZES, ids=str)
def test_prediction_modules(pool: RankPool, saved, tmp_path: Path, sizes: dict[str, Any]) -> None:
    """The module's own layer, fed with embedding and hidden states of several ranks, and the
    head behind it."""
    config = {
        **json.loads((Path(saved("v3-narrow-latents")["folder"]) / "config.json").read_text()),
        "num_nextn_predict_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"folder": str(tmp_path), "prompts": PROMPTS, "lengths": LENGTHS}
    want = jobs.predict(1, {}, **given)
    results = pool.run(
        "predict",
        sizes.get("tp", 1) * sizes.get("dp", 1) * sizes.get("pp", 1),
        sizes=sizes,
        **given,
    )
    assert set().union(*results) == set(want)
    for result in results:
        for place, logits in result.items():
            assert (torch.tensor(logits) - torch.tensor(want[place])).abs().max() < BOUND, place


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "ep": 2}, pytest.param({"dp": 4, "ep": 2}, marks=pytest.mark.full_matrix)],
    ids=str,
)
def test_the_bundled_checkpoint(pool: RankPool, tmp_path: Path, sizes: dict[str, Any]) -> None:
    model = load(BUNDLED, CpuOps())
    ids = torch.randint(
        model.config.vocab_size,
        (len(PROMPTS), max(LENGTHS)),
        generator=torch.Generator().manual_seed(5),
    )
    save_file({"ids": ids, "logits": all_logits(model, ids, [max(LENGTHS)])}, tmp_path / "answers")
    check(
        pool,
        sizes,
        {
            "folder": str(BUNDLED),
            "answers": str(tmp_path / "answers"),
            "prompts": PROMPTS,
            "lengths": LENGTHS,
        },
    )


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.skipif(DEVICE != "cpu", reason="runs in the interpreter")
@pytest.mark.parametrize(
    ("exchange", "dense_tp", "taken"),
    [("low_latency", 1, True), ("allgather_ep", 1, True), ("allgather_ep", 2, False)],
)
def test_decode_steps_through_shared_memory(
    pool: RankPool, saved: Any, tmp_path: Path, exchange: str, dense_tp: int, taken: bool
) -> None:
    """Prompts take the process group, single tokens the kernels, unless shared experts want all
    rows; two micro-batches are under way at once."""
    sizes = {"dp": 2, "ep": 2, "dense_tp": dense_tp, "exchange": exchange, "micro_batches": 2}
    results = check(pool, sizes, saved("v3"), way="run", peers=str(tmp_path))
    assert all((result["taken"] > 0) is taken for result in results)
    words = (
        "memory shared by the GPUs"
        if taken
        else "process group: its rows are those of shared experts as well"
    )
    assert all(words in result["way"] for result in results)
