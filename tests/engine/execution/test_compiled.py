"""exe_mode: compile. Tiny models of two layers in fp32; one cache folder for the whole module,
so that little is compiled twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config

from rorqual import LLM, SamplingParams
from rorqual.config.model import MoEConfig, cache_folder
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.compiled import CompiledForward, code_folder
from rorqual.errors import ConfigError
from rorqual.ops.custom_ops import TracedOps
from rorqual.ops.interface import Ops
from tests.child_process import environment
from tests.engine.execution.test_cuda_graphs import ReplayingPlatform
from tests.models.checkpoints import QWEN, V3, VOCAB

ROOT = Path(__file__).resolve().parents[3]
FAMILIES: dict[str, dict[str, Any]] = {
    "v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **V3,
        "num_nextn_predict_layers": 1,
    },
    "qwen": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **QWEN},
}
DRAFTER = {"v3": "mtp", "qwen": "ngram"}
LIKE_EAGER = {"exe_mode": "eager"}

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache folder with the native kernels and no compiled graph."""
    folder = tmp_path_factory.mktemp("cache")
    for kernels in cache_folder().glob("kernels-*.so"):
        shutil.copy(kernels, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RORQUAL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model") / request.param)


def write_config(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(FAMILIES[path.name]))
    return path


def engine(folder: Path, exe_mode: str = "compile", **options: Any) -> LLM:
    sizes = {"page_size": 8, "max_num_seqs": 6, "max_model_len": 64}
    fixed = {
        "dtype": "float32",
        "weights": "random",
        "num_layers": 2,
        "skip_tokenizer_init": True,
        "device": "cpu",
    }
    return LLM(folder, exe_mode=exe_mode, **{**fixed, **sizes, **options})


def generate(llm: LLM) -> list[list[int]]:
    """Every batch size from 6 down to 1, new requests beside old ones, and a seeded one."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (2 + 3 * i,), generator=generator).tolist() for i in range(9)]
    params = [
        SamplingParams(temperature=0.9 * (i == 3), seed=i, max_tokens=5 + 2 * i, ignore_eos=True)
        for i in range(9)
    ]
    outs = llm.generate(prompts, params)
    alone = llm.generate(prompts[:1], params[4])
    return [out.outputs[0].token_ids for out in outs + alone]


@pytest.fixture(scope="module")
def compiled(folder: Path, home: Path) -> LLM:
    """The first to compile this model."""
    with torch._inductor.config.patch(compile_threads=1):
        return engine(folder)


@pytest.fixture(scope="module")
def tokens(compiled: LLM) -> list[list[int]]:
    return generate(compiled)


@pytest.mark.longest
def test_tokens_of_eager(folder: Path, compiled: LLM, tokens: list[list[int]]) -> None:
    stats = compiled.engine.stats.compiled
    assert stats is not None
    assert (stats.variants, stats.from_cache) == (2, 0), "one token, and any other number"
    assert tokens == generate(engine(folder, **LIKE_EAGER))


@pytest.mark.longest
def test_a_second_process_compiles_nothing(
    folder: Path, compiled: LLM, tokens: list[list[int]], home: Path
) -> None:
    """Though it has another number of cache pages, as an engine has that finds more memory free."""
    script = """
import dataclasses, json, sys
from pathlib import Path
from tests.engine.execution.test_compiled import engine, generate
llm = engine(Path(sys.argv[1]), num_pages=70)
print(json.dumps({"tokens": generate(llm), **dataclasses.asdict(llm.engine.stats.compiled)}))
"""
    if folder.name != "v3":
        pytest.skip("one model shows it")
    found = run_script(script, folder, home, home.parent)
    first = compiled.engine.stats.compiled
    assert (found["variants"], found["from_cache"]) == (2, 2)
    assert found["tokens"] == tokens
    assert found["seconds"] < first.seconds / 2, first
    assert not [path for path in home.parent.glob("torchinductor_*/**/*") if path.is_file()], (
        "all is kept in the cache folder"
    )


@pytest.mark.longest
def test_nothing_is_kept_where_nothing_shall_be(
    folder: Path, tokens: list[list[int]], home: Path, tmp_path: Path
) -> None:
    """Neither in the cache folder nor in the temporary one; and what is kept is not found, so the
    second engine compiles all again."""
    if folder.name != "v3":
        pytest.skip("one model shows it")
    script = """
import dataclasses, json, sys
from pathlib import Path
from tests.engine.execution.test_compiled import engine, generate
llm = engine(Path(sys.argv[1]), enable_cache_compile=False)
print(json.dumps({"tokens": generate(llm), **dataclasses.asdict(llm.engine.stats.compiled)}))
"""
    before = sorted(home.rglob("*"))
    found = run_script(script, folder, home, tmp_path)
    assert (found["variants"], found["from_cache"]) == (2, 0)
    assert found["tokens"] == tokens
    assert sorted(home.rglob("*")) == before
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def run_script(script: str, folder: Path, home: Path, temporary: Path) -> dict[str, Any]:
    """What a process of its own prints last."""
    names = {
        "RORQUAL_CACHE": str(home),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env=environment(**names),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_case_has_a_folder_of_its_own() -> None:
    assert code_folder("cpu", "decode-16").parent == code_folder("cpu").parent / "decode-16"
    assert code_folder("cpu", "decode-16").name == code_folder("cpu").name


def test_tokens_of_eager_with_drafts(folder: Path) -> None:
    """Verified rows are rows of the same step, and the function for several tokens serves them."""
    options = {"num_speculative_tokens": 2, "drafter": DRAFTER[folder.name]}
    llm = engine(folder, **options)
    assert generate(llm) == generate(engine(folder, **LIKE_EAGER))
    assert sum(llm.engine.stats.drafted) > 0
    assert llm.engine.stats.compiled.variants == 1


# ---- traced and not compiled: what follows is about the graph


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        self: CompiledForward, graph: torch.fx.GraphModule, inputs: list[Any]
    ) -> Callable[..., Any]:
        self.stats.variants += 1
        return graph.forward

    monkeypatch.setattr(CompiledForward, "_inductor", forward)


RANKS: list[Any] = [
    ("v3", {"tp": 2, "num_speculative_tokens": 1}),
    *(
        pytest.param(name, options, marks=[pytest.mark.longest])
        for name, options in (
            ("qwen", {"dp": 2, "ep": 2}),
            ("qwen", {"tp": 2, "ep": 2}),
            ("qwen", {"dp": 2, "ep": 2, "exchange": "low_latency"}),
            ("qwen", {"dp": 2, "ep": 2, "redundant_experts": 2}),
            ("v3", {"tp": 2, "sequence_parallel": True}),
            ("v3", {"tp": 2, "dp": 2, "ep": 4, "num_speculative_tokens": 1}),
        )
    ),
]


@pytest.mark.longest
@pytest.mark.parametrize(("name", "options"), RANKS)
def test_several_ranks(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Collectives are operators of the graph. Where all ranks hold the same rows there are two
    variants as ever, or with drafts one, else one for each batch size that steps are padded to."""
    folder = write_config(tmp_path / name)
    wanted = generate(engine(folder, **LIKE_EAGER))
    llm = engine(folder, **options)
    try:
        assert generate(llm) == wanted
        stats = llm.engine.stats.compiled
    finally:
        llm.engine.close()
    assert stats is not None
    same_rows = options.keys() <= {"tp", "ep", "num_speculative_tokens"}
    assert stats.variants == (2 - ("num_speculative_tokens" in options) if same_rows else 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pp": 2}, "does not go with pp=2"),
        ({"dp": 2, "ep": 2, "micro_batches": 2}, "does not go with micro_batches=2"),
        ({"dp": 2, "ep": 2, "enable_eplb": True}, "does not go with enable_eplb=True"),
        ({"dp": 2, "ep": 2, "exchange": "alltoall"}, "does not go with exchange='alltoall'"),
    ],
)
def test_what_a_compiled_step_of_several_ranks_cannot_hold(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(write_config(tmp_path / "qwen"), **options)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("form", ["CD", "AM_CC_ME"])
def test_forms_of_mla(tmp_path: Path, form: str) -> None:
    folder = write_config(tmp_path / "v3")
    forms = {"mla_decode": form, "mla_prefill": "CD" if form == "CD" else "CC"}
    assert generate(engine(folder, **forms)) == generate(engine(folder, **forms, **LIKE_EAGER))


@pytest.mark.usefixtures("uncompiled")
def test_compiled_steps_are_recorded_where_there_are_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the reference ops: whatever can be traced is."""
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    options = {"max_num_seqs": 3, "num_speculative_tokens": 1, "drafter": "ngram"}
    llm = engine(folder, **options)
    assert generate(llm) == generate(engine(folder, **LIKE_EAGER, **options))
    assert platform.replays > 5
    assert llm.engine.stats.compiled.variants == 1


@pytest.mark.usefixtures("uncompiled")
def test_engines_of_a_process_do_not_share_code(tmp_path: Path) -> None:
    """More of them than Dynamo compiles variants of one function, alive at once, with other
    weights each."""
    folder = write_config(tmp_path / "qwen")
    options = {"num_layers": 1, "max_num_seqs": 2, "max_model_len": 16}
    with torch._dynamo.config.patch(recompile_limit=2):
        engines = [engine(folder, seed=seed, **options) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens_of(llm: LLM) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in llm.generate([[1, 2, 3], [4]], params)]

    got = [tokens_of(llm) for llm in engines]
    for seed, tokens in enumerate(got):
        assert tokens_of(engine(folder, seed=seed, **options, **LIKE_EAGER)) == tokens


def test_a_failing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        self: CompiledForward, graph: torch.fx.GraphModule, inputs: list[Any]
    ) -> Callable[..., Any]:
        raise OSError("no such compiler")

    monkeypatch.setattr(CompiledForward, "_inductor", forward)
    with pytest.raises(ConfigError, match=r"exe_mode='compile'.*no such compiler"):
        engine(write_config(tmp_path / "qwen"), max_num_seqs=1)


def test_outside_of_compilation_every_entry_is_the_backends() -> None:
    """An entry that a table gains later must not fall through to the reference."""
    entries = [
        name
        for name, method in vars(Ops).items()
        if callable(method) and not name.startswith("_") and name != "opaque"
    ]
    backend = type("Named", (Ops,), {name: lambda *given, name=name: name for name in entries})()
    table = TracedOps(backend, MoEConfig(4, 2, 8))
    assert len(entries) > 20
    assert [getattr(table, name)() for name in entries] == entries


def test_modes() -> None:
    for alias in ("ge_graph", "max-autotune"):
        EngineConfig("m", exe_mode=alias)
        with pytest.raises(ConfigError, match="A_CC_ME"):
            EngineConfig("m", exe_mode=alias, mla_decode="CC")
        EngineConfig("m", exe_mode=alias, tp=2)
