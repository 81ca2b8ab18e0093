"""Every recipe in configs/ascend is read, fits its model, and passes the checks that an engine on
an NPU makes before it loads anything; wrong variants are refused in a sentence that names the
field. No NPU, and no torch_npu, is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.engine.config import EngineConfig, read_recipe
from rorqual.engine.execution.worker import read_model
from rorqual.engine.npu.checks import check_npu
from rorqual.errors import ConfigError
from rorqual.platforms.base import Platform
from rorqual.platforms.npu import NpuPlatform

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "ascend"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SHAPES = {
    "DeepSeek-R1-W8A8": "",  # wide_v3
    "Kimi-K2-W8A8": "kimi-k2",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
}
PLATFORM = cast(
    Platform, SimpleNamespace(name="npu", default_page_size=NpuPlatform.default_page_size)
)
DIES_OF_A_NODE = 16
# name: (world_size, attn_tp, moe_tp, dense_tp, embed_tp, lmhead_tp, batch_size), as published
PUBLISHED = {
    "deepseek-r1-decode-128-ep": (128, 1, 1, 1, 1, 1, 128),
    "deepseek-r1-decode-128-ep-c8-mtp1": (128, 1, 1, 1, 1, 1, 512),
    "deepseek-r1-decode-128-ep-c8-mtp1-benchmark": (128, 1, 1, 1, 1, 1, 6144),
    "deepseek-r1-decode-128-ep-c8-mtp3-64k": (128, 1, 1, 4, 1, 16, 256),
    "deepseek-r1-decode-16-ep": (16, 1, 1, 1, 16, 16, 64),
    "deepseek-r1-decode-16-ep-c8-mtp1": (16, 1, 1, 1, 16, 16, 64),
    "deepseek-r1-decode-16-tp": (16, 16, 16, 16, 16, 16, 1),
    "deepseek-r1-pd-decode": (16, 1, 1, 1, 16, 16, 16),
    "deepseek-r1-pd-prefill": (16, 16, 16, 16, 16, 16, 8),
    "deepseek-r1-prefill-32-dp": (32, 1, 1, 1, 32, 32, 64),
    "deepseek-r1-prefill-32-sp": (32, 32, 1, 32, 32, 32, 2),
    "kimi-k2-decode-128-ep": (128, 1, 1, 1, 1, 1, 128),
    "kimi-k2-prefill-32-sp": (32, 32, 1, 32, 32, 32, 1),
    "qwen3-235b-decode-128-ep": (128, 1, 1, None, 1, 1, 128),
    "qwen3-235b-decode-16-tp": (16, 16, 16, None, 16, 16, 1),
    "qwen3-235b-16-ep": (16, 1, 1, None, 1, 1, 16),
    "qwen3-235b-32-tp4-dp8": (32, 4, 1, None, 1, 1, 32),
    "qwen3-235b-pd-decode": (16, 1, 1, None, 1, 1, 64),
    "qwen3-235b-pd-prefill": (16, 16, 16, None, 16, 16, 2),
}


@pytest.fixture(scope="module", autouse=True)
def wide_v3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DeepSeek-V3's shape as a bf16 checkpoint has it, which may be rounded to int8."""
    shape = ROOT / "rorqual" / "shapes" / "deepseek-v3"
    found = json.loads((shape / "config.json").read_text())
    del found["quantization_config"]
    folder = tmp_path_factory.mktemp("deepseek-v3")
    (folder / "config.json").write_text(json.dumps(found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "DeepSeek-R1-W8A8", str(folder))
        yield


def shape_of(model: str | None) -> dict[str, Any]:
    """The model's shape, with int8 weights where the recipe's folder holds such."""
    assert model is not None
    found: dict[str, Any] = {"model": str(ROOT / "rorqual" / "shapes" / SHAPES[Path(model).name])}
    if model.endswith("W8A8"):
        found["quantization"] = "w8a8"
    return found


def check(path: Path, **changed: Any) -> EngineConfig:
    """What an engine checks on the way to its weights. Raises ConfigError."""
    model, options = read_recipe(path)
    config = EngineConfig(**{**shape_of(model), **options, **changed})
    check_npu(config, read_model(config), PLATFORM)
    return config


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} == set(PUBLISHED)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_model_and_the_operators(path: Path) -> None:
    config = check(path)
    sizes = config.parallel
    assert config.device == "npu"
    assert config.page_size == 128
    assert f"--config configs/ascend/{path.name}" in path.read_text()
    assert (config.launcher == "torchrun") == (sizes.world > DIES_OF_A_NODE)
    assert config.exe_mode in ("ge_graph", "acl_graph", "eager"), "as the recipes name them"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_the_published_layout(path: Path) -> None:
    config = check(path)
    sizes = config.parallel
    world, attn_tp, moe_tp, dense_tp, embed_tp, head_tp, batch = PUBLISHED[path.stem]
    assert (sizes.world, sizes.tp, sizes.dp) == (world, attn_tp, world // attn_tp)
    assert (sizes.ep, sizes.expert_tp) == (world // moe_tp, moe_tp)
    assert (sizes.embed_tp, sizes.head_tp) == (embed_tp, head_tp)
    assert dense_tp in (None, sizes.dense_tp), "Qwen3 has no dense layers"
    assert config.max_num_seqs == batch // sizes.dp or config.max_num_seqs * sizes.dp == batch


def test_the_table_names_every_recipe() -> None:
    text = (FOLDER / "README.md").read_text()
    named = re.findall(r"^\| \S+ \| `(\S+\.yaml)` \|$", text, re.MULTILINE)
    assert sorted(named) == [path.name for path in RECIPES]


def test_options_are_read_as_written() -> None:
    for path in RECIPES:
        written = yaml.safe_load(path.read_text())
        config = check(path)
        for name in ("enable_cache_compile", "enable_superkernel", "enable_multi_streams"):
            if name in written:
                assert getattr(config, name) is written[name], f"{path.name}: {name}"


# (recipe, what is changed, what the sentence begins with or names)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    # sizes that do not divide one another
    ("deepseek-r1-decode-128-ep", {"ep": 48}, "ep=48 does not divide the 128"),
    ("deepseek-r1-decode-16-ep", {"embed_tp": 3}, "embed_tp=3 does not divide"),
    ("deepseek-r1-decode-16-ep", {"head_tp": 5}, "head_tp=5 does not divide"),
    ("deepseek-r1-decode-128-ep-c8-mtp3-64k", {"dense_tp": 6}, "dense_tp=6 does not divide"),
    ("qwen3-235b-32-tp4-dp8", {"tp": 6, "embed_tp": 4, "ep": 1}, "head_tp|embed_tp=4 neither"),
    # or the model
    ("deepseek-r1-decode-128-ep", {"dp": 96, "ep": 96}, "ep=96 does not divide the model's 256"),
    ("kimi-k2-decode-128-ep", {"dp": 256, "ep": 256}, "ep=256 does not divide the model's 384"),
    ("deepseek-r1-decode-16-tp", {"tp": 12}, "tp=12 does not divide the model's 128 attention"),
    ("deepseek-r1-decode-16-tp", {"tp": 256}, "tp=256 does not divide the model's 128 attention"),
    ("kimi-k2-prefill-32-sp", {"tp": 128, "ep": 128}, "tp=128 does not divide the model's 64"),
    ("qwen3-235b-decode-16-tp", {"tp": 6}, "tp=6 does not divide the model's 64 attention"),
    (
        "qwen3-235b-decode-16-tp",
        {"tp": 2, "dp": 5},
        "expert_tp=10 does not divide the model's 1536",
    ),
    # experts of this layout are cut by columns, and these ways send tokens to whole ones
    ("deepseek-r1-decode-16-tp", {"exchange": "low_latency"}, "exchange='low_latency'.*ep of"),
    ("deepseek-r1-decode-16-ep", {"exchange": "allgather_tp"}, "exchange='allgather_tp'.*ep=1"),
    ("deepseek-r1-decode-16-ep", {"exchange": "local"}, "exchange='local' needs dp=1"),
    ("deepseek-r1-decode-16-ep", {"exchange": "alltoall"}, "exe_mode.*exchange='alltoall'"),
    # drafts
    ("deepseek-r1-decode-128-ep-c8-mtp3-64k", {"num_speculative_tokens": 4}, "num_speculative_tok"),
    ("deepseek-r1-decode-128-ep", {"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
    (
        "deepseek-r1-decode-16-ep-c8-mtp1",
        {"exe_mode": "acl_graph", "enable_multi_streams": False, "enable_cache_compile": None},
        "exe_mode='acl_graph' does not go with num_speculative_tokens",
    ),
    # graphs
    ("kimi-k2-decode-128-ep", {"exe_mode": "eager"}, "enable_cache_compile=True.*exe_mode='eager'"),
    ("kimi-k2-decode-128-ep", {"exe_mode": "acl_graph"}, "enable_cache_compile=True.*'acl_graph'"),
    ("deepseek-r1-decode-128-ep", {"exe_mode": "eager"}, "enable_superkernel.*'eager'"),
    ("deepseek-r1-prefill-32-dp", {"exe_mode": "eager"}, "enable_multi_streams.*'eager'"),
    ("deepseek-r1-decode-16-ep", {"enable_multi_streams": True}, "enable_multi_streams.*'acl_gr"),
    (
        "qwen3-235b-decode-16-tp",
        {"enable_multi_streams": True},
        "enable_multi_streams=True needs sh",
    ),
    ("qwen3-235b-decode-16-tp", {"enable_superkernel": "yes"}, "enable_superkernel='yes' must be"),
    ("kimi-k2-decode-128-ep", {"enable_cache_compile": "no"}, "enable_cache_compile='no' must be"),
    ("kimi-k2-decode-128-ep", {"case_name": "../other"}, "case_name='../other'"),
    ("kimi-k2-decode-128-ep", {"case_name": ""}, "case_name=''"),
    # another device
    ("deepseek-r1-decode-128-ep", {"device": "cuda"}, "enable_superkernel=True needs"),
    ("deepseek-r1-decode-128-ep", {"device": "npu:3"}, "device='npu:3' names one device"),
    (
        "deepseek-r1-decode-128-ep",
        {"device": "cpu", "dp": 1, "ep": 1, "launcher": "local"},
        "enable_superkernel=True needs device='npu'",
    ),
    (
        "deepseek-r1-pd-decode",
        {"device": "auto", "dp": 1, "ep": 1, "embed_tp": 1, "head_tp": 1},
        "enable_multi_streams=True needs device='npu'",
    ),
    # the cache
    ("qwen3-235b-decode-16-tp", {"kv_cache_dtype": "int8"}, "kv_cache_dtype=int8.*fused MLA prol"),
    ("deepseek-r1-decode-16-ep", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
    ("deepseek-r1-decode-16-ep", {"page_size": 64}, "page_size=64"),
    ("deepseek-r1-decode-16-ep", {"mla_decode": "CD"}, "mla_decode=CD keep different"),
    ("deepseek-r1-decode-16-ep", {"mla_prefill": "A_CC"}, "mla_prefill='A_CC'"),
    # the rest
    ("deepseek-r1-decode-16-ep", {"enable_eplb": True}, "enable_eplb"),
    ("deepseek-r1-decode-16-ep", {"fp8_dispatch": True}, "fp8_dispatch"),
    ("deepseek-r1-decode-16-ep", {"embed_device": "cpu"}, "embed_device='cpu'"),
    ("deepseek-r1-prefill-32-dp", {"micro_batches": 9}, "micro_batches=9"),
]


@pytest.mark.parametrize(("name", "changed", "named"), WRONG)
def test_a_wrong_variant_is_refused(name: str, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check(FOLDER / f"{name}.yaml", **changed)


def test_an_int8_cache_needs_the_widths_of_the_fused_prologue() -> None:
    """DeepSeek-V2-Lite has no query latent and other widths."""
    config = EngineConfig(
        str(ROOT / "rorqual" / "shapes" / "deepseek-v2-lite"), device="npu", kv_cache_dtype="int8"
    )
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8.*hidden 7168, query latent 1536"):
        check_npu(config, read_model(config), PLATFORM)


def test_foreign_names_are_refused(tmp_path: Path) -> None:
    """Sizes of theirs that have no counterpart are not passed over."""
    for name in ("o_proj_tp_size: 8", "cp_size: 32", "moe_tp_size: 1", "enable_mla_prolog: true"):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"model: x\ndevice: npu\n{name}\n")
        with pytest.raises(ConfigError, match=f"'{name.split(':')[0]}' is not an engine option"):
            read_recipe(path)


def test_the_case_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line; nothing below it reads the variable."""
    monkeypatch.setenv("CASE_NAME", "../elsewhere")
    words = ["generate", "--exe-mode", "compile", "--prompt", "a"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError)
    assert "case_name='../elsewhere'" in str(done.exception)
    assert EngineConfig("x", exe_mode="compile").case_name is None
