"""What README and docs tell a reader to type runs, and what they point at exists.

Commands are the lines of shell blocks and inline code that begins like one; snippets are Python
blocks. Each command is parsed by the real command line first, with the values as documented. Then
the first of RULES that matches says what happens: it runs with SMALL sizes, asks one server that
all share, ends at the check for a GPU, or is parsed alone. A command without a rule fails.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from rorqual.bench.kernel_times.run import run as measure_kernels
from rorqual.bench.step_times.rows import steps
from rorqual.bench.step_times.run import run as measure_steps
from rorqual.cli.app import app
from rorqual.cli.options import numbers
from rorqual.config.hf import read_config_file
from rorqual.config.parallel import check_parallel
from rorqual.engine.config import EngineConfig
from rorqual.errors import RorqualError
from rorqual.models.hub import BUNDLED
from rorqual.planner.costs.catalog import shape_of
from rorqual.planner.validation.questions import QUESTIONS
from tests.bench.kernel_times.fake_engine import RATES, FakeEngine
from tests.demo_script import load_demo

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
DOCS.append(ROOT / "demo" / "README.md")

# What stands for something else in a documented command.
PLACEHOLDERS = {
    "TEXT": "heldout.txt",
    "NAME": "kv-tokens",
    "WORDS": "router",
    "N": "2",
    "/models/deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "...": "parameters",
}
MODEL = {"plan": "qwen3-30b-a3b", "simulate": "qwen3-30b-a3b", "bench layers": "tiny"}
ADDRESS = "http://127.0.0.1:8000"

# Options added to a command that runs; of an option given twice the last counts.
SMALL = {
    "generate": "--max-tokens 4 --threads 1",
    "chat": "--max-tokens 4",
    "info": "",
    "plan": "--top 1 --no-splits",
    "eplb": "",
    "simulate": "--requests 4 --input-len 64 --output-len 4",
    "bench layers": "--modules embed_tokens,mla --tokens 1 --repeats 1 --device cpu",
    "bench comm": "--ranks 2 --rows 1 --hidden 128 --experts 4 --top-k 2 --repeats 1",
    "bench hop": "--repeats 1 --rows 1 --hidden 128 --experts 4 --top-k 2",
    "bench cpu": "--shapes 1 --seed 2 --prompt-len 8 --context 8 --steps 1 --turns 1 --seconds 0 "
    "--threads 1",
    "bench offline": "--concurrency 1 --prompt-len 8 --output-len 3 --repeats 1 --threads 1",
    "bench serve": "--num-prompts 2 --input-len 8 --output-len 3 --num-warmups 0 --prefix-len 8",
}
# More of them, by an option that is there.
SMALLER = {
    "--data": "--data heldout.txt --weights random --layers 2 --groups 1",
    "--weights random": "--layers 2",
    "--single-rank-bench": "--tp 2 --max-num-batched-tokens 64",
    "--next-n 0,1,2,3": "--next-n 0,3",
    "--sweep": "--sweep 1,2",
    "--slo": "--slo-start 1 --slo-max 1 --slo-probes 1",
    "--ramp-seconds": "--ramp-seconds 0.2",
    "--request-rate": "--request-rate 100",
    "--prefix-groups": "--prefix-groups 1 --prompts-per-group 1",
    "--validate": "--group a3-decode",  # groups of stale tables end with 1
    "--clients": "--clients 2",
    "--gantt": "--gantt-at 0",
}


# ---- what the documents say


@dataclass(frozen=True)
class Command:
    """`text` is one line, without what explains it. inline: code within a sentence."""

    where: str
    text: str
    inline: bool = False

    @property
    def words(self) -> list[str]:
        """Split as a shell does, without leading assignments and a trailing &."""
        found = [word for word in shlex.split(self.text, comments=True) if word != "&"]
        while found and re.match(r"[A-Z_]+=", found[0]):
            found.pop(0)
        return found


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    text: str


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    return [Block(m[1], text[: m.start()].count("\n") + 2, m[2]) for m in found]


def prose(path: Path) -> str:
    """Everything but blocks, on the same lines."""
    blank = re.compile(r"^```.*?^```$", flags=re.S | re.M)
    return blank.sub(lambda m: "\n" * m[0].count("\n"), path.read_text())


def inline_code(path: Path) -> Iterator[tuple[int, str]]:
    text = prose(path)
    for match in re.finditer(r"`([^`]+)`", text):
        yield text[: match.start()].count("\n") + 1, " ".join(match[1].split())


def shell_lines(block: Block) -> Iterator[tuple[int, str]]:
    """Lines joined where they go on, without what stands behind three spaces and explains."""
    joined = ""
    start = 0
    for number, line in enumerate(block.text.split("\n"), block.line):
        said = re.split(r"\s{3,}", line.strip())[0]
        start = start if joined else number
        joined += said.removesuffix("\\")
        if said.endswith("\\") or joined.count("'") % 2:
            joined += " "
            continue
        if joined and not joined.startswith("#"):
            yield start, joined
        joined = ""
    assert not joined, f"a command without an end: {joined!r}"


BEGINNING = re.compile(r"(?:[A-Z_]+=\S+ )*(?:rorqual|bench|python3?|pytest|make|pip) [\w./-]")


def commands() -> Iterator[Command]:
    for path in DOCS:
        for block in blocks(path):
            if block.language in ("", "sh"):
                for line, text in shell_lines(block):
                    yield Command(f"{name_of(path)}:{line}", text)
        for line, text in inline_code(path):
            if BEGINNING.match(text):
                text = f"rorqual {text}" if text.startswith("bench ") else text
                yield Command(f"{name_of(path)}:{line}", text, inline=True)


def jobs() -> Iterator[Command]:
    """Commands of demo/gpu_jobs.toml, where results and files have names of their own."""
    runner = load_demo("gpu_jobs")
    for plan in tomllib.loads(runner.JOBS.read_text()):
        for job in runner.read_jobs(plan):
            for number, text in enumerate((*job.beside, *job.run)):
                filled = text.format(out="out", files=".")
                yield Command(f"demo/gpu_jobs.toml:{plan}/{job.name}/{number}", filled)


def snippets() -> Iterator[tuple[str, str]]:
    for path in DOCS:
        for block in blocks(path):
            if block.language == "python":
                yield f"{name_of(path)}:{block.line}", block.text


# ---- the real parser


def find(words: list[str]) -> tuple[str, Any, list[str]]:
    """(name, command, its arguments) of what follows `rorqual`."""
    command: Any = get_command(app)
    name = []
    rest = list(words)
    while hasattr(command, "commands"):
        assert rest, f"{' '.join(words)!r} names no command"
        assert rest[0] in command.commands, f"rorqual has no command {rest[0]!r}"
        name.append(rest.pop(0))
        command = command.commands[name[-1]]
    return " ".join(name), command, rest


def parse(words: list[str]) -> dict[str, Any]:
    """The parameters that the command gets. Raises for a mistake."""
    name, command, rest = find(words)
    with command.make_context(name, rest) as context:
        return dict(context.params)


def check_engine(params: dict[str, Any]) -> None:
    """Values that an engine would refuse, and layouts that its model cannot be cut into."""
    known = {item.name for item in fields(EngineConfig)} - {"model"}
    given = {key: value for key, value in params.items() if key in known and value is not None}
    rates = given.pop("simulated_acceptance", None)
    for count in numbers(str(given.pop("num_speculative_tokens", 0)), least=0):
        asked = {**given, "num_speculative_tokens": count}
        if rates:
            asked["simulated_acceptance"] = rates[:count]
        config = EngineConfig.from_dict({"model": "", **asked})
        shape = shape_of(params["model"] or "")
        check_parallel(read_config_file(shape[0] if shape else BUNDLED), config.parallel)


def documented(command: Command) -> tuple[str, list[str]]:
    """(name, words) of a rorqual command with placeholders filled in, checked as it stands."""
    words = command.words[1:]
    assert not set(words) & {"|", "[", "]"}, f"{command.text!r}: one command a line"
    name, _, _ = find(words)
    fill = {**PLACEHOLDERS, "MODEL": MODEL.get(name, str(BUNDLED))}
    words = [fill.get(word, word) for word in words]
    params = parse(words)
    if name in ("generate", "serve", "chat", "bench offline"):
        check_engine(params)
    return name, words


# ---- what the rules do


@dataclass
class Place:
    """A folder with the files that documented commands read, and a server for all of them."""

    folder: Path
    request: pytest.FixtureRequest

    @property
    def server(self) -> Any:
        return self.request.getfixturevalue("server")


@functools.cache
def invoke(words: tuple[str, ...]) -> str:
    """Once for commands that are the same when they are small. Returns what was printed."""
    done = CliRunner().invoke(app, list(words), input="Good morning\n", catch_exceptions=False)
    assert done.exit_code == 0, f"rorqual {' '.join(words)}\n{done.output}"
    return done.output


def small(name: str, words: list[str]) -> tuple[str, ...]:
    """Sizes cut, and published models that get random weights replaced by a tiny one."""
    text = f" {' '.join(words)} "
    more = [sizes for key, sizes in SMALLER.items() if f" {key} " in text]
    extra = " ".join([SMALL[name], *more]).split()
    engine = name in ("generate", "chat", "bench offline", "bench layers")
    found = ["tiny" if engine and shape_of(word) else word for word in words]
    # What is overridden goes, so that more commands become the same.
    for option in {word for word in extra if word.startswith("--")} & set(found):
        place = found.index(option)
        del found[place : place + 2]
    return (*found, *extra)


def only_parse(command: Command, place: Place) -> None:
    documented(command)


def run(command: Command, place: Place) -> None:
    assert invoke(small(*documented(command)))


def judge(command: Command, place: Place) -> None:
    """The shipped tables may be older than the kernels, and of some figures it is not known; both
    is said and ends with 1."""
    _, words = documented(command)
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "mean absolute error" in done.output
    notes = ("stale tables", "older steps", "unrecorded kernels")
    assert done.exit_code == any(note in done.output for note in notes)


def needs_a_card(command: Command, place: Place) -> None:
    """Where there is none (or no vLLM), one clear sentence; where there is, parsing must do."""
    _, words = documented(command)
    if not torch.cuda.is_available():
        with pytest.raises(RorqualError, match=r"cuda|CUDA|vllm is not installed"):
            CliRunner().invoke(app, words, catch_exceptions=False)


def ask_server(command: Command, place: Place) -> None:
    name, words = documented(command)
    there = ("--url" if name == "chat" else "--base-url", place.server.url)
    if "--compare" in words:
        results = ("--num-prompts", "2", "--input-len", "8", "--output-len", "3", "--json")
        invoke(("bench", "serve", *there, *results, "out/main.json"))
        shutil.copy("out/main.json", "out/vllm.json")
        there = ()
    assert invoke((*small(name, words), *there))


def curl(command: Command, place: Place) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-H", dest="header")
    parser.add_argument("-d", dest="data")
    parser.add_argument("-X", dest="method")
    given = parser.parse_args(command.words[1:])
    assert given.url.startswith(ADDRESS + "/")
    path = given.url.removeprefix(ADDRESS)
    assert given.method in (None, "POST")
    if path == "/stop_profile":  # of one that runs
        place.server.request("POST", "/start_profile", {})
        body = {"model": "rorqual-bundled", "prompt": "A", "max_tokens": 4}
        place.server.request("POST", "/v1/completions", body)
    data = json.loads(given.data) if given.data else None
    status, answer = place.server.request("POST", path, data)
    assert status == 200, answer


class Parsed(Exception):
    """A script has read its arguments."""


def script(command: Command, place: Place) -> None:
    """A Python script up to where its arguments are read."""
    patch = place.request.getfixturevalue("monkeypatch")
    path, *arguments = (PLACEHOLDERS.get(word, word) for word in command.words[1:])
    assert "__main__" in (ROOT / path).read_text(), f"{path} is no script"
    if "argparse" not in (ROOT / path).read_text():
        return
    read = argparse.ArgumentParser.parse_known_args

    def parsed(self: Any, *given: Any) -> Any:
        found = read(self, *given)
        known_alone = sys._getframe(1).f_code.co_name == "parse_args"
        assert not known_alone or not found[1], f"{path} does not know {found[1]}"
        raise Parsed

    patch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    patch.setattr(sys, "argv", [path, *arguments])
    patch.syspath_prepend(str((ROOT / path).parent))
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / path), run_name="__main__")


def module(command: Command, place: Place) -> None:
    """`python -m NAME`: the file behind the name, as a script."""
    name, *arguments = command.words[2:]
    path = name.replace(".", "/") + ".py"
    script(Command(command.where, shlex.join(["python", path, *arguments])), place)


def selects_tests(command: Command, place: Place) -> None:
    words = command.words[command.words.index("pytest") + 1 :]
    path = next(word for word in words if word.startswith("tests/"))
    assert (ROOT / path).exists(), path
    options = [word for word in words if word != path]
    if "-k" not in options:
        return
    wanted = options[options.index("-k") + 1]
    nodes = [*ast.walk(ast.parse((ROOT / path).read_text()))]
    found = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    tests = [name for name in found if name.startswith("test")]
    words = re.findall(r"[\w:]+", wanted)
    # of an expression each word is in a test's name or in a string, as parameters are
    strings = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    places = tests if len(words) == 1 else tests + strings
    for word in set(words) - {"and", "or", "not"}:
        assert [place for place in places if word in place], word


def make_target(command: Command, place: Place) -> None:
    _, target = command.words
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M), target


def pip_extra(command: Command, place: Place) -> None:
    extras = [one for some in re.findall(r"\[([\w,]+)\]", command.text) for one in some.split(",")]
    text = (ROOT / "pyproject.toml").read_text()
    assert extras
    for extra in extras:
        assert re.search(rf"^{extra} = \[", text, flags=re.M), extra


def torchrun(command: Command, place: Place) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(command.words[1:])
    assert (given.module, given.training_script) == (True, "rorqual")
    inner = shlex.join(["rorqual", *given.training_script_args])
    documented(Command(command.where, inner))


def elsewhere(command: Command, place: Place) -> None:
    """Not ours to run: a shell's own, or another package's."""


RULES: list[tuple[str, Callable[[Command, Place], None]]] = [
    (r"make ", make_target),
    (r"pip install ", pip_extra),
    (r"curl ", curl),
    (r"torchrun ", torchrun),
    (r"(export|ray start|head -c) ", elsewhere),
    (r"python3? -m pytest ", selects_tests),
    (r"python3? -m rorqual\.", module),
    (r"python3? ", script),
    (r"pytest ", selects_tests),
    (r"rorqual experts\b", only_parse),  # tests/disagg starts it
    (r"rorqual .*--experts ", only_parse),  # and what calls it
    (r"rorqual serve\b", only_parse),  # the server of all other commands is started so
    (r"rorqual route\b", only_parse),  # tests/route/test_real_servers.py starts it
    (r"rorqual .*--launcher ", only_parse),  # hosts or a cluster
    (r"rorqual .*--fixed-experts", only_parse),  # the small model's dense layer cannot be cut so
    (r"rorqual .*--device cuda", needs_a_card),
    (r"rorqual .*--compare vllm", needs_a_card),
    (r"rorqual .*--compare transformers-compiled", only_parse),  # minutes of compiling
    (
        r"rorqual (?!.*--single-rank-bench)(generate|bench offline) .*--[tdpe]p ",
        only_parse,
    ),  # many ranks
    (r"rorqual bench offline .*--rank ", only_parse),  # all experts of a layer on one rank
    (r"rorqual bench kernels", needs_a_card),
    (r"rorqual (bench calibrate|quantize)", only_parse),  # minutes of measuring or rounding
    (r"rorqual bench steps", needs_a_card),
    (r"rorqual plan .*--validate", judge),
    (r"rorqual bench peers", only_parse),  # another engine's server
    (r"rorqual bench (cpu|llama-cpp|micro-batches|pages)", only_parse),  # minutes of measuring
    (r"rorqual bench serve", ask_server),
    (r"rorqual chat --url", ask_server),
    (r"rorqual (generate|chat|info|plan|eplb|simulate|bench (offline|layers|comm|hop))\b", run),
]


def rule_of(command: Command) -> Callable[[Command, Place], None]:
    text = shlex.join(command.words)
    if command.inline and re.fullmatch(r"rorqual( [a-z]+)+", text):
        return only_parse  # a sentence about a command, not one to type
    for pattern, action in RULES:
        if re.match(pattern, text):
            return action
    pytest.fail(f"{command.where}: no rule covers {command.text!r}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What documented commands read, under the names that they use."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("demo", "configs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "out").mkdir()
    (folder / "heldout.txt").symlink_to(ROOT / "demo" / "heldout-sample.txt")
    line = {"timestamp": 0, "input_length": 8, "output_length": 3, "hash_ids": [1]}
    for name in ("requests.jsonl", "mooncake_trace.jsonl"):
        (folder / name).write_text(f"{json.dumps(line)}\n" * 2)
    for number, name in enumerate(("load.json", "other.json", "morning.json", "evening.json")):
        counts = [[1 + (7 * i * i + number) % 50 for i in range(256)]] * 2
        (folder / name).write_text(json.dumps({"logical_count": counts}))
    transports = [{"transport": "tcp", "pages": [0.06, 0.07]}]
    figures = {"bytes": 75e6, "transports": transports}
    (folder / "pages.json").write_text(json.dumps({"runs": [{"figures": figures}]}))
    same = dict.fromkeys(("card", "torch", "triton", "driver"), "here")
    given = ("h200", folder / "h200.json", 60, None, lambda row: 9.0, same)
    measure_kernels(*given, FakeEngine, RATES)
    asked = steps(learnt=False)
    measure_steps("h200", folder / "steps.json", 60, asked, FakeEngine, same, RATES)
    tiny = folder / "tiny"
    tiny.mkdir()
    config = json.loads((BUNDLED / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As the documents start it, but for sizes."""
    pytest.importorskip("fastapi")
    from tests.serve.running import start_server

    folder = str(tmp_path_factory.mktemp("profiles"))
    options = ("--max-model-len", "96", "--max-num-seqs", "4", "--profile-dir", folder)
    with start_server(*options) as running:
        yield running


@pytest.fixture
def place(
    files: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    monkeypatch.chdir(files)
    for name in ("RORQUAL_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return Place(files, request)


COMMANDS = list(commands())
JOBS = list(jobs())
SNIPPETS = list(snippets())


@pytest.mark.parametrize("command", [*COMMANDS, *JOBS], ids=lambda command: command.where)
def test_a_documented_command_has_a_rule(command: Command) -> None:
    assert rule_of(command)


@pytest.mark.exhaustive(every=True)
@pytest.mark.parametrize("command", [*COMMANDS, *JOBS], ids=lambda command: command.where)
def test_a_documented_command_works(command: Command, place: Place) -> None:
    rule_of(command)(command, place)


@pytest.mark.parametrize(("where", "text"), SNIPPETS, ids=[where for where, _ in SNIPPETS])
def test_a_documented_snippet_runs(where: str, text: str, place: Place) -> None:
    if ADDRESS in text:
        pytest.importorskip("openai")
        text = text.replace(ADDRESS, place.server.url)
    text = text.replace("max_tokens=64", "max_tokens=4")
    exec(compile(text, where, "exec"), {"__name__": "snippet"})


def test_there_is_something_to_check() -> None:
    """Extraction that finds nothing would pass everything."""
    ours = {command.where.split(":")[0] for command in COMMANDS}
    how_to = {path for path in DOCS if path.parent.name != "design"}
    without = {"architecture.md", "glossary.md"}
    assert ours >= {name_of(path) for path in how_to if path.name not in without}
    assert len(COMMANDS) > 70
    assert len(JOBS) > 20
    assert len(SNIPPETS) > 2
    every = [b for path in DOCS for b in blocks(path)]
    lines = sum(len(re.findall("^rorqual ", b.text, flags=re.M)) for b in every if b.language == "")
    found = [c for c in COMMANDS if not c.inline and c.text.startswith("rorqual ")]
    assert len(found) == lines, "a line of its own each"
    assert {block.language for block in every} <= {"", "sh", "python", "text"}


# ---- what the documents point at


def slugs(path: Path) -> set[str]:
    """Anchors of a document's headings, as its host makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(path), flags=re.M)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


def broken_links(path: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        if not there.exists() or (anchor and anchor not in slugs(there)):
            found.append(target)
    return found


NO_FILES = {"utils.py"}  # CONTRIBUTING says that there are none
ENDINGS = r"\.(?:py|md|json|ya?ml|cpp|h|html|png|csv|txt|toml)\b"
FILE = re.compile(rf"(?<![\w/.~*-])(?:[\w-]+/)*[\w.-]+{ENDINGS}")
FOLDER = re.compile(r"`((?:[\w-]+/){2,})`")


@functools.cache
def every_file() -> frozenset[str]:
    tops = (ROOT / name for name in ("rorqual", "tests", "demo"))
    return frozenset(path.name for top in tops for path in top.rglob("*.py"))


def missing_paths(path: Path, text: str) -> list[str]:
    """Files and folders that are not there. A Python file may be named without its folder."""
    text = re.sub(r"https?://\S+", "", text)
    named = {m[0] for m in FILE.finditer(text)} | {m[1] for m in FOLDER.finditer(text)}
    roots = (path.parent, ROOT, ROOT / "rorqual")
    bare = {name for name in named if "/" not in name}
    missing = {name for name in bare if name.endswith(".py")} - every_file() - NO_FILES
    for name in named - bare:
        pattern = name.rstrip("/").replace("NAME", "*")
        if not any(any(root.glob(pattern)) for root in roots):
            missing.add(name)
    return sorted(missing)


def missing_modules(text: str) -> list[str]:
    missing = []
    for name in sorted(set(re.findall(r"\brorqual(?:\.[a-z_]\w*)+", text))):
        try:
            resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    return missing


@functools.cache
def known_options() -> frozenset[str]:
    """Of every command of ours, and of torchrun, which the documents name beside them."""
    from torch.distributed.run import get_args_parser

    found = set(get_args_parser()._option_string_actions)
    todo: list[Any] = [get_command(app)]
    while todo:
        command = todo.pop()
        todo += getattr(command, "commands", {}).values()
        for item in command.params:
            found |= {*item.opts, *item.secondary_opts}
    return frozenset(found)


FOREIGN_OPTIONS = {"--clock-control"}  # of ncu


def unknown_options(text: str) -> list[str]:
    text = re.sub(r"`python3? [^`]+`", "", text)  # scripts have a rule of their own
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
    return sorted(named - known_options() - FOREIGN_OPTIONS)


def unknown_variables(text: str) -> list[str]:
    files = (path for top in ("rorqual", "tests") for path in (ROOT / top).rglob("*.py"))
    source = "".join(path.read_text() for path in files)
    return [name for name in set(re.findall(r"RORQUAL_[A-Z]+", text)) if name not in source]


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_what_a_document_names_exists(path: Path) -> None:
    others = [b.text for b in blocks(path) if b.language == "text"]
    text = "\n".join([prose(path), *others])
    assert broken_links(path) == []
    assert missing_paths(path, text) == []
    assert missing_modules(text) == []
    assert unknown_options(text) == []
    assert unknown_variables(path.read_text()) == []


def test_every_question_of_the_table_is_one() -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    table = text.split("| question | command")[1].split("\n\n")[0]
    named = re.findall(r"^\| [^|]+ \| `([\w-]+)` \|", table, flags=re.M)
    assert len(named) > 9
    assert set(named) <= set(QUESTIONS)


# ---- that all this can fail


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rorqual simulate MODEL --gpu h20-96 --counts 16", "--counts"),
        ("rorqual simulates MODEL", "simulates"),
        ("rorqual bench offline --prompt-len many", "valid integer"),
        ("rorqual bench offline --kv-cache-dtype fp4", "fp4"),
        ("rorqual serve deepseek-v3 --tp 3", "tp=3"),
        ("rorqual info MODEL | bench layers", "one command a line"),
        ("rorqual plan MODEL --gpu h20", "'h20' is not known"),
        ("rorqual version", "no rule covers"),
        ("wget http://127.0.0.1:8000", "no rule covers"),
        ("make coffee", "coffee"),
        ("python demo/train.py data run --minutes soon", "2"),
        ("pip install 'rorqual[gold]'", "gold"),
    ],
)
def test_a_wrong_command_is_found(text: str, said: str, place: Place) -> None:
    command = Command("here", text)
    kinds = (Exception, SystemExit, pytest.fail.Exception)
    with pytest.raises(kinds, match=re.escape(said)):
        rule_of(command)(command, place)


def test_a_wrong_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# A title\n[a](none.md) [b](#a-title) [c](#another)\n")
    assert broken_links(path) == ["none.md", "#another"]
    text = (
        "`planner/costs/weights.py`, perf/none.py and none.py, `ops/none/`, --no-such, "
        "rorqual.none.x"
    )
    assert missing_paths(path, text) == ["none.py", "ops/none/", "perf/none.py"]
    assert unknown_options(text) == ["--no-such"]
    assert missing_modules(text) == ["rorqual.none.x"]
    assert unknown_variables("RORQUAL_" + "NONE") == ["RORQUAL_" + "NONE"]
