"""`rorqual bench llama-cpp`: the weights that both sides get, the process that has llama.cpp (here
a stand-in), and where they are installed llama.cpp and gguf themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rorqual.bench.llama_cpp import check, gguf_file
from rorqual.bench.llama_cpp.drawn_weights import DrawnWeights
from rorqual.bench.llama_cpp.peer import LlamaCpp, PeerSetting
from rorqual.bench.llama_cpp.run import LlamaCppRow
from rorqual.bench.llama_cpp.sides import LlamaSide
from rorqual.bench.llama_cpp.work import LlamaCppWork, kind_of
from rorqual.config.hf import read_config
from rorqual.engine.execution.worker import RESIDUAL_GAIN
from rorqual.errors import ConfigError, EngineError, TargetError
from rorqual.layers.parameter import Build
from rorqual.models.hub import SHAPES
from rorqual.models.loader import random_weights
from rorqual.models.registry import make_model
from rorqual.ops.select import ops_for

NAMES = ("deepseek-v2-lite", "deepseek-v3", "qwen3-30b-a3b")
# the interpreter that has llama-cpp-python, for the tests with the real one
PYTHON = os.environ.get("RORQUAL_TEST_LLAMA_PYTHON", "")
has_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")
has_llama = pytest.mark.skipif(
    not shutil.which(PYTHON), reason="RORQUAL_TEST_LLAMA_PYTHON names no interpreter"
)

# llama.h's functions as far as they are called. The next token is the last one and 1.
STAND_IN = """
import ctypes
import os

__version__ = "stand-in"
VOCABULARY = 11
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

class Struct:
    def __init__(self, **given): self.__dict__.update(given)

def llama_log_set(log, data): log(4, b"something went wrong\\n", None)
def llama_backend_init(): print("a line of the library's own")
def llama_model_default_params(): return Struct(use_extra_bufts=None, n_gpu_layers=99)
def llama_model_load_from_file(path, params):
    assert params.n_gpu_layers == 0
    if path.endswith(b"asserts.gguf"):
        lines = ["backend.cpp:1: GGML_ASSERT(id != -1) failed", *["#0 a frame"] * 900]
        os.write(2, "\\n".join(lines).encode())
        os._exit(134)
    return Struct() if path.endswith(b"good.gguf") else None
def llama_model_get_vocab(model): return None
def llama_vocab_n_tokens(vocab): return VOCABULARY
def llama_model_size(model): return 1234
def llama_print_system_info(): return b"SOME = 1"
def llama_model_free(model): pass
def llama_context_default_params(): return Struct()
def llama_init_from_model(model, params):
    assert params.n_ctx == params.n_seq_max * 256
    return Struct()
def llama_free(context): pass
def llama_batch_init(count, embd, sequences):
    return Struct(n_tokens=0, token=[0] * count, pos=[0] * count, n_seq_id=[0] * count,
                  seq_id=[[0] for _ in range(count)], logits=[0] * count)
def llama_batch_free(batch): pass
def llama_get_memory(context): return context
def llama_memory_clear(memory, data): memory.cached = {}
def llama_decode(context, batch):
    for i in range(batch.n_tokens):
        if batch.token[i] >= VOCABULARY:
            return -1
        sequence = context.cached.setdefault(batch.seq_id[i][0], 0)
        assert batch.pos[i] == sequence and batch.n_seq_id[i] == 1
        context.cached[batch.seq_id[i][0]] += 1
    context.tokens = list(batch.token[: batch.n_tokens])
    return 0
def llama_get_logits_ith(context, place):
    row = (ctypes.c_float * VOCABULARY)()
    row[(context.tokens[place] + 1) % VOCABULARY] = 1.0
    return row
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """An interpreter that has the stand-in."""
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    return _interpreter(tmp_path, f'PYTHONPATH="{tmp_path}"')


def _interpreter(folder: Path, environment: str) -> str:
    path = folder / "python-with-it"
    path.write_text(f'#!/bin/sh\n{environment} exec "{sys.executable}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def config_of(name: str) -> dict[str, object]:
    data = json.loads((SHAPES / name / "config.json").read_text())
    for field in ("quantization_config", "num_nextn_predict_layers"):
        data.pop(field, None)
    return check.smaller(data)


def test_weights_are_those_of_the_engine() -> None:
    config = read_config(config_of("deepseek-v2-lite"))
    gain = RESIDUAL_GAIN * (2 * config.num_layers) ** -0.5
    build = Build(ops_for("cpu"), torch.bfloat16, torch.device("cpu"), None, gain)
    model = make_model(config, build, 64)
    views = {target.name: target.view for target in model.targets() if not target.covers}
    random_weights(model, seed=5)
    weights = DrawnWeights(config, seed=5)
    assert weights.shapes.keys() == views.keys()
    for name in weights.shapes:
        assert torch.equal(weights.draw(name).float(), views[name].float()), name
    other = DrawnWeights(config, seed=6)
    assert not torch.equal(other.draw("lm_head.weight"), weights.draw("lm_head.weight"))


def test_steps_are_counted_and_tokens_go_on(stand_in: str) -> None:
    with LlamaCpp(stand_in) as peer:
        assert peer.version == "stand-in"
        peer.use(Path("good.gguf"), PeerSetting(threads=2), sequences=2, length=20)
        assert peer.ask("prompt", tokens=[[1, 2], [4, 9]])["tokens"] == [3, 10]
        found = peer.ask("decode", steps=3)
        assert found["tokens"] == [[4, 0], [5, 1], [6, 2]]
        assert found["seconds"] > 0
        logits = torch.tensor(peer.ask("logits", tokens=[7, 3])["logits"])
        assert logits.argmax(-1).tolist() == [8, 4]


def test_the_fastest_setting_is_taken(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are faster without flash attention, prompts with it and in small pieces."""

    def probe(peer: LlamaSide, setting: PeerSetting, prompts: object) -> tuple[float, float]:
        slow = (1 if setting.repack else 2) / setting.threads
        return slow * (2 if setting.flash else 1), slow * (setting.ubatch if setting.flash else 999)

    monkeypatch.setattr(LlamaSide, "_probe", probe)
    config = read_config(config_of("deepseek-v2-lite"))
    messages: list[str] = []
    prompts = [[1, 2, 3, 4]] * 3
    with LlamaCpp(stand_in) as process:
        work = LlamaCppWork(prompt=40, output=5)
        peer = LlamaSide(process, Path("good.gguf"), [], config, work, threads=2)
        peer.prepare(prompts, messages.append)
        assert peer.setting("decode", 3) == PeerSetting(threads=2, flash=False)
        assert peer.setting("prompt", 3) == PeerSetting(threads=2, ubatch=128)
        assert len(messages) == 6  # the default, no flash, a thread, ubatch, as in the file twice
        with peer.decoding(prompts):
            assert process.open_as is not None
            assert process.open_as[0] == peer.setting("decode", 3)
            assert peer.steps(2) > 0


def test_failures_are_told(stand_in: str, tmp_path: Path) -> None:
    with LlamaCpp(stand_in) as peer:
        with pytest.raises(EngineError, match=r"cannot load bad\.gguf.*something went wrong"):
            peer.use(Path("bad.gguf"), PeerSetting(threads=2), 1, 20)
        peer.use(Path("good.gguf"), PeerSetting(threads=2), 1, 20)
        with pytest.raises(EngineError, match="llama_decode ended with -1"):
            peer.prompt_seconds([[50]])
        assert peer.prompt_seconds([[5]]) > 0  # it goes on
        peer.process.kill()
        with pytest.raises(EngineError, match=r"llama\.cpp has ended"):
            peer.ask("decode", steps=1)
    with LlamaCpp(stand_in) as peer:
        said = r"llama\.cpp has ended: backend\.cpp:1: GGML_ASSERT\(id != -1\) failed$"
        with pytest.raises(EngineError, match=said):
            peer.use(Path("asserts.gguf"), PeerSetting(threads=2), 1, 20)
    with pytest.raises(ConfigError, match=r"llama_python='/no/such' does not start"):
        LlamaCpp("/no/such")
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('built for another machine')")
    with pytest.raises(ConfigError, match=r"no llama-cpp-python that works.*for another machine"):
        LlamaCpp(stand_in)


def test_what_cannot_be_compared_is_refused() -> None:
    assert [kind_of(name) for name in ("bf16", "w8a8", "w4a16", "w4a16-g32")] == [
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q4_0",
    ]
    for given, said in (
        ({"formats": "fp8"}, "formats='fp8': a GGUF file has no weights like these"),
        ({"formats": "w3"}, "quantization='w3' is not known"),
        ({"output": 3, "turns": 5}, "output=3 steps do not fill turns=5"),
        ({"processor_time": True, "threads": 2}, "accepted: threads=1"),
        ({"threads": 0}, "threads=0 must be an integer of at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            LlamaCppWork(**given)


def test_the_verdict_is_the_documented_one() -> None:
    row = LlamaCppRow(
        "w4a16",
        "Q4_0",
        1,
        "decode",
        1.0,
        1.1,
        1e3,
        909.0,
        1.1,
        1.0,
        1.0,
        0.5,
        0.5,
        9.0,
        "",
        0.0,
        True,
    )
    assert row.verdict == "met"
    assert replace(row, ratio=1.05).verdict == "missed"
    assert replace(row, ratio=1.05, ours_share=0.8).verdict == "met"
    assert replace(row, ratio=0.99, ours_share=0.9).verdict == "missed"
    assert replace(row, work="prompt", ours_share=None).verdict == ""


def test_without_gguf_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rorqual\[gguf\]'"):
        gguf_file.gguf_package()


@pytest.mark.exhaustive
@has_gguf
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", NAMES)
def test_the_file_holds_the_weights(name: str, kind: str, tmp_path: Path) -> None:
    """Every tensor, read again and made wide, within the rounding of its type."""
    import gguf

    config = read_config(config_of(name))
    weights = DrawnWeights(config, 1, torch.float32 if kind == "F32" else torch.bfloat16)
    path = tmp_path / "small.gguf"
    tensors = gguf_file.write(path, weights, kind, threads=2)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert found.keys() == {tensor.name for tensor in tensors}
    # Q4_0 has 16 steps between the largest of 32 numbers and its opposite
    bound = {"F32": 0, "BF16": 0, "Q8_0": 1 / 127, "Q4_0": 1 / 7}[kind]
    for tensor in tensors:
        kept = found[tensor.name]
        assert kept.n_bytes == tensor.nbytes
        wide = torch.from_numpy(gguf.quants.dequantize(kept.data, kept.tensor_type).copy())
        drawn = [weights.draw(source) for source in tensor.sources]
        changed = [tensor.change(part) if tensor.change else part for part in drawn]
        wanted = (torch.stack(changed) if len(changed) > 1 else changed[0]).float()
        assert wide.shape == wanted.shape == tensor.shape
        largest = float(wanted.abs().max())
        assert float((wide - wanted).abs().max()) <= (
            0 if tensor.kind == "F32" else bound * largest
        )


@pytest.mark.exhaustive
@has_gguf
def test_rows_that_no_block_divides_are_refused(tmp_path: Path) -> None:
    config = read_config(config_of("deepseek-v2-lite") | {"moe_intermediate_size": 80})
    with pytest.raises(ConfigError, match=r"down_proj.weight has rows of 80; Q4_0 takes multiples"):
        gguf_file.tensors_of(DrawnWeights(config, 0), "Q4_0")


@pytest.mark.exhaustive
@has_gguf
@has_llama
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_computes_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the check finds weights of another seed, and another base of the rotation."""
    data = config_of(name)
    with LlamaCpp(PYTHON) as peer:
        found = check.check(data, peer)
        assert found.greedy == found.positions == check.TOKENS - 1
        describe = gguf_file._describe_rope
        other = replace(read_config(data).rope, theta=500.0)
        monkeypatch.setattr(
            gguf_file,
            "_describe_rope",
            lambda writer, gguf, config: describe(writer, gguf, replace(config, rope=other)),
        )
        with pytest.raises(TargetError, match=r"llama\.cpp computes another model"):
            check.check(data, peer)
