"""The command line as a user meets it: text on success, one clear sentence and a non-zero status
otherwise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.errors import ConfigError
from rorqual.models.hub import BUNDLED
from tests import forked

pytestmark = pytest.mark.exhaustive(but_first=True)


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return forked.completed("rorqual", [*arguments], text)


def run_anew(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a shell would start it."""
    return subprocess.run(
        [sys.executable, "-m", "rorqual", *arguments], capture_output=True, text=True, timeout=300
    )


def test_generate_prints_text():
    done = run_anew("generate", "-n", "12", "--temperature", "0", "-p", "The king went")
    assert done.returncode == 0
    assert done.stdout.startswith("The king went")
    assert len(done.stdout.split()) > 6
    assert "tokens/s" in done.stderr


@pytest.mark.exhaustive
def test_generate_is_repeatable_with_a_seed():
    first, second = (run_anew("generate", "-q", "-n", "16", "--seed", "4").stdout for _ in range(2))
    assert first == second


@pytest.mark.exhaustive
def test_chat_says_that_the_model_is_a_base_model():
    done = run("chat", "-n", "8", "--seed", "1", text="Good morning\n")
    assert done.returncode == 0
    assert "base model" in done.stderr
    assert len(done.stdout) > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", ["generate -q -n 4 --temperature 0 -p -", "chat -n 4"])
def test_a_closed_standard_input_is_an_empty_one(words: str):
    found = [
        subprocess.run(
            ["sh", "-c", f'exec "$0" -m rorqual {words} {closed}', sys.executable],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        for closed in ("", "<&-")
    ]
    assert [done.returncode for done in found] == [0, 0], found
    assert found[1].stdout == found[0].stdout.removeprefix("> ")  # there is no one to ask
    assert found[1].stderr == found[0].stderr


def test_info_names_the_parts():
    done = run_anew("info")
    assert done.returncode == 0
    for words in ("routed experts", "attention", "A_CC_ME", "total"):
        assert words in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("output", [4, 16])
def test_bench_offline_writes_json(output: int, tmp_path: Path):
    """Long outputs have steps of all requests together, on a clock of their own."""
    target = tmp_path / "out.json"
    sizes = (
        "--concurrency",
        "1,2",
        "--prompt-len",
        "8",
        "--output-len",
        str(output),
        "--repeats",
        "1",
    )
    done = run("bench", "offline", *sizes, "--json", str(target))
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [row["concurrency"] for row in rows] == [1, 2]
    assert all(row["tokens_per_s"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert all(("step: a difference" in row["settings"]) == (output == 4) for row in rows)
    assert output == 4 or all(row["step_ms"] > 0 for row in rows)


@pytest.mark.exhaustive
def test_bench_offline_of_an_fp8_cache(tmp_path: Path):
    target = tmp_path / "out.json"
    sizes = ("--concurrency", "1", "--prompt-len", "8", "--output-len", "4", "--repeats", "1")
    done = run(
        "bench",
        "offline",
        *sizes,
        "--kv-cache-dtype",
        "fp8",
        "--next-n",
        "1",
        "--json",
        str(target),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(target.read_text())["kv_cache_dtype"] == "fp8"


@pytest.mark.exhaustive
def test_bench_offline_of_one_rank_alone(tmp_path: Path):
    """Requests are those of the whole layout, of which the rank has its share; so is what it
    makes."""
    target = tmp_path / "out.json"
    sizes = (
        "--concurrency",
        "2,4",
        "--prompt-len",
        "8",
        "--output-len",
        "4",
        "--repeats",
        "1",
        "--weights",
        "random",
    )
    done = run(
        "bench",
        "offline",
        *sizes,
        "--single-rank-bench",
        "--dp",
        "2",
        "--ep",
        "2",
        "--next-n",
        "1",
        "--json",
        str(target),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(target.read_text())
    assert [row["concurrency"] for row in report["rows"]] == [2, 4]
    for row in report["rows"]:
        assert "dp2 ep2, SINGLE RANK: nothing is sent" in row["settings"]
        assert row["tokens_per_s"] == pytest.approx(
            row["concurrency"] * row["output"] / row["seconds"]
        )
    assert report["all2all_backend"] == "nowhere (one rank alone)"


@pytest.mark.exhaustive
def test_bench_layers_runs(tmp_path: Path):
    target = tmp_path / "out.json"
    done = run(
        "bench",
        "layers",
        "--modules",
        "mla,moe",
        "--tokens",
        "1,4",
        "--repeats",
        "1",
        "--json",
        str(target),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(target.read_text())


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    return folder


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


BREAKS = {
    "unknown architecture": (
        lambda folder: change(folder, architectures=["LlamaForCausalLM"]),
        "LlamaForCausalLM",
    ),
    "unsupported field": (lambda folder: change(folder, mlp_bias=True), "mlp_bias"),
    "wrong shape": (lambda folder: change(folder, kv_lora_rank=32), "shape"),
    "missing tensor": (lambda folder: change(folder, num_hidden_layers=15), "lacks"),
    "surplus tensor": (lambda folder: change(folder, num_nextn_predict_layers=0), "does not use"),
    "truncated file": (
        lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:-1000]),
        "truncated",
    ),
    "no weights": (
        lambda folder: [path.unlink() for path in folder.glob("*.safetensors*")],
        "safetensors",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config not JSON": (lambda folder: (folder / "config.json").write_text("{"), "JSON"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_bad_checkpoint_gets_one_sentence(broken: Path, case: str):
    spoil, word = BREAKS[case]
    spoil(broken)
    expect_sentence(run("generate", str(broken), "-n", "2"), word)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", "no/such/folder/here"], "neither a folder"),
        (["generate", "--temperature", "-1"], "temperature"),
        (["generate", "--top-p", "0"], "top_p"),
        (["generate", "-n", "0"], "max_tokens"),
        (
            [
                "generate",
                "--max-model-len",
                "8",
                "-p",
                "one two three four five six seven eight nine ten",
            ],
            "max_model_len=8",
        ),
        (["generate", "--dtype", "int3"], "int3"),
        (["generate", "--threads", "100000"], "accepted: 1 to "),
        (["generate", "--max-num-seqs", "2000000000"], "max_num_seqs=2000000000"),
        (["plan", "--validate", "--group", "a3-d, nope"], "no group begins with 'nope'; known: "),
        (["plan", "--group", "a3"], "group goes with --validate"),
        (["generate", "--mla-decode", "XX"], "XX"),
        (
            ["generate", "--kv-cache-dtype", "fp8", "--mla-prefill", "CD", "--mla-decode", "CD"],
            "accepted: CC, A_CC, A_CC_ME, AM_CC_ME",
        ),
        (
            ["bench", "offline", "--kv-cache-dtype", "fp4"],
            "accepted: auto, bfloat16, float16, float32, fp8",
        ),
        (["generate", "--device", "cuda:99"], "cuda:99"),
        (["bench", "offline", "--exe-mode", "warp"], "warp"),
        (
            ["bench", "offline", "--tp", "2", "--single-rank-bench"],
            "single_rank_bench needs weights='random'",
        ),
        (["generate", "--tp", "2", "--slow-link-gbits", "50"], "p2p_memory=False"),
        (["generate", "--slow-link-gbits", "-1"], "accepted: 0 or more"),
        (
            [
                *("generate", "--tp", "2", "--slow-link-gbits", "50", "--no-p2p-memory"),
                *("--exe-mode", "compile"),
            ],
            "compiled steps",
        ),
        (
            [
                *("bench", "offline", "--dp", "2", "--slow-link-gbits", "50", "--no-p2p-memory"),
                *("--single-rank-bench", "--weights", "random", "--concurrency", "2"),
            ],
            "neither with single_rank_bench",
        ),
        (
            [
                *("generate", "--tp", "2", "--device", "cpu", "--slow-link-gbits", "50"),
                "--no-p2p-memory",
            ],
            "slow_link_gbits is for GPUs",
        ),
        (
            [
                "bench",
                "offline",
                "--dp",
                "2",
                "--single-rank-bench",
                "--weights",
                "random",
                "--concurrency",
                "3",
            ],
            "accepted: multiples of dp",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(arguments: list[str], word: str):
    expect_sentence(run(*arguments), word)


def expect_sentence(done: subprocess.CompletedProcess[str], word: str) -> None:
    assert done.returncode == 2, done
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


# ---- simulate counts GPUs as plan does


def simulated(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Settings of a short run, as the command writes them."""
    target = tmp_path / "run.json"
    work = ("--requests", "2", "--arrivals", "at-once", "--input-len", "64", "--output-len", "4")
    arguments = ["simulate", "qwen3-30b-a3b", "--gpu", "h20-96", *options, *work]
    done = CliRunner().invoke(app, [*arguments, "--json", str(target)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(target.read_text())["settings"]


@pytest.mark.parametrize(
    ("options", "layout", "replicas"),
    [
        ("--count 16", "tp=8", 2),
        ("--count 4", "tp=4", 1),
        ("--count 12", "tp=4", 3),
        ("--count 4 --layout tp=2", "tp=2", 2),
        ("--count 4 --replicas 2 --layout dp=2,ep=2", "dp=2,ep=2", 2),
        ("--count 7 --layout tp=2 --prefill-replicas 3 --prefill-layout tp=1", "tp=2", 2),
        ("--count 12 --attention 2 --experts 4 --profile roofline", "tp=4", 2),
        ("--replicas 2", "tp=8", 2),
        ("", "tp=8", 1),
    ],
)
def test_simulate_takes_a_number_of_cards(
    tmp_path: Path,
    options: str,
    layout: str,
    replicas: int,
) -> None:
    settings = simulated(tmp_path, *options.split())
    assert (settings["layout"], settings["replicas"]) == (layout, replicas)


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ("--count 0", "count=0 is out of range; accepted: at least 1"),
        ("--count 12 --layout tp=8", "count=12.* accepted: a multiple of 8"),
        ("--count 16 --layout tp=4 --replicas 2", "count=16.* accepted: 2 x 4"),
        ("--count 4 --prefill-replicas 1", "count=4.* accepted: 4 for prompts and a multiple"),
    ],
)
def test_cards_that_make_no_replicas_are_named(tmp_path: Path, options: str, accepted: str) -> None:
    with pytest.raises(ConfigError, match=accepted):
        simulated(tmp_path, *options.split())


# ---- a config.json alone is enough for random weights, also where text is wanted


def bare(tmp_path: Path, **fields: object) -> Path:
    """A tiny shape: config.json and nothing else."""
    folder = tmp_path / "shape"
    folder.mkdir()
    shutil.copy(BUNDLED / "config.json", folder)
    small = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "vocab_size": 4200}
    change(folder, **{**small, **fields})
    return folder


@pytest.mark.exhaustive
def test_a_shape_without_a_tokenizer_is_served(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from tests.serve.running import start_server

    folder = bare(tmp_path)
    options = ("--weights", "random", "--dtype", "float32", "--max-model-len", "128")
    with start_server(str(folder), *options) as server:
        said = [line for line in server.text().splitlines() if "tokenizer" in line]
        assert len(said) == 1, server.text()
        assert "bundled" in said[0]
        body = {"prompt": "In the beginning", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        # An id that the tokenizer lacks, and one that it has: both come as text.
        beyond = {**body, "logit_bias": {"4150": 100}, "max_tokens": 2}
        status, answer = server.request("POST", "/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["text"]
        status, answer = server.request("POST", "/v1/completions", beyond)
        assert answer["choices"][0]["text"] == "<4150><4150>"
        status, answer = server.request("POST", "/v1/completions", {**beyond, "stream": True})
        assert answer.count("<4150>") == 2, answer
        chosen = {**body, "prompt": [4150, 7], "guided_choice": ["yes", "no"], "ignore_eos": False}
        status, answer = server.request("POST", "/v1/completions", chosen)
        assert answer["choices"][0]["text"] in ("yes", "no"), answer
        messages = [{"role": "user", "content": "Hello"}]
        chat = {"messages": messages, "max_tokens": 4}
        assert server.request("POST", "/v1/chat/completions", chat)[0] == 200


@pytest.mark.exhaustive
def test_a_shape_without_a_tokenizer_generates(tmp_path: Path) -> None:
    options = ("--weights", "random", "-n", "4", "-q", "-p", "Once")
    done = run("generate", str(bare(tmp_path)), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once")
    assert len(done.stderr.splitlines()) == 1
    assert "bundled" in done.stderr
    folder = str(tmp_path / "shape")
    done = run("chat", folder, "--weights", "random", "-n", "4", text="Good morning\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
def test_a_tokenizer_may_be_named(tmp_path: Path) -> None:
    folder = bare(tmp_path)
    named = ("--weights", "random", "-n", "2", "-q", "-p", "Once", "--tokenizer")
    done = run("generate", str(folder), *named, str(BUNDLED))
    assert done.returncode == 0
    assert "bundled" not in done.stderr
    expect_sentence(run("generate", str(folder), *named, str(folder)), "no tokenizer.json")


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path, command: str) -> None:
    """Its ids would be no rows of the embedding."""
    folder = bare(tmp_path, vocab_size=512)
    done = run(command, str(folder), "--weights", "random")
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done
    assert "vocab_size=512" in said
    assert "4096" in said
    assert "--tokenizer" in said
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_weights_from_files_need_the_model_s_own_tokenizer(broken: Path) -> None:
    (broken / "tokenizer.json").unlink()
    expect_sentence(run("generate", str(broken), "-n", "2"), "no tokenizer.json")


@pytest.mark.exhaustive
def test_a_launcher_gets_the_engine_s_options_alone() -> None:
    """What an LLM has beside its engine is no option of a rank: the mistake is a missing RANK."""
    named = ("--launcher", "torchrun", "--tp", "2")
    expect_sentence(run("bench", "offline", *named), "RANK")
    expect_sentence(run("generate", "--tokenizer", str(BUNDLED), *named), "RANK")
