"""demo/apart_on_gpus.py with gpu_layouts.py and layout_loads.py: which servers it starts, what fits
into its time, what another call measures, and that no process is left."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rorqual.errors import TargetError
from tests.child_process import ROOT, environment
from tests.demo_script import load_demo

TINY = ("--device", "cpu", "--shapes", "24x16@4", "--shares", "0.5", "--run-seconds", "0.5")


@pytest.fixture
def demo() -> ModuleType:
    return load_demo("apart_on_gpus")


@pytest.fixture
def layouts(demo: ModuleType) -> ModuleType:
    return sys.modules["gpu_layouts"]


@pytest.fixture
def loads(demo: ModuleType) -> ModuleType:
    return sys.modules["layout_loads"]


def fake_server(options: list[str]) -> Any:
    """Started by its module's name: other tests look for processes by the name of its file."""
    script = (
        f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "runpy.run_module('tests.bench.serving.fake_openai', run_name='__main__')"
    )
    return lambda port: [sys.executable, "-c", script, "--itl", "0.005", "--port", str(port)]


# ---- what is started


def test_pages_go_by_handles_on_gpus_and_by_tcp_on_a_cpu(
    layouts: ModuleType, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    prefill, decode = layouts.layout_options("apart", "cuda", secret)
    assert prefill[:4] == ["--device", "cuda:0", "--role", "prefill"]
    assert decode[:4] == ["--device", "cuda:1", "--role", "decode"]
    for options in (prefill, decode):
        assert options[-4:] == ["--kv-transport", "handles", "--kv-secret-file", str(secret)]
    assert layouts.layout_options("replicas", "cuda", secret) == [
        ["--device", "cuda:0"],
        ["--device", "cuda:1"],
    ]
    assert layouts.layout_options("tp2", "cuda", secret) == [["--tp", "2"]]
    for options in layouts.layout_options("apart", "cpu", secret):
        assert "--device" not in options
        assert options[options.index("--kv-transport") + 1] == "tcp"


def test_shapes(demo: ModuleType) -> None:
    assert demo.Shape.parse("1000x128") == demo.Shape(1000, 128, 64)
    assert demo.Shape.parse("8000x128") == demo.Shape(8000, 128, 16)
    assert demo.Shape.parse("32000x128") == demo.Shape(32000, 128, 8)
    assert demo.Shape.parse("8000x128@5") == demo.Shape(8000, 128, 5)
    for wrong in ("8000", "8000x", "x8", "8x0", "8x8@0", "8x8@many"):
        with pytest.raises(demo.argparse.ArgumentTypeError, match=re.escape(wrong)):
            demo.Shape.parse(wrong)


def test_a_steady_rate_counts_what_came_meanwhile(loads: ModuleType) -> None:
    record = loads.RequestRecord(1, 8, 0.0, completion_tokens=8)
    record.chunks.extend([0.5, 1.0, 1.5, 2.0])
    assert loads.steady_rate([record], 1.0, 2.0) == 4.0


# ---- time, and other calls


class FakeRun:
    """Layouts that take `start` seconds to start and `cell` seconds a load, by a clock of their
    own."""

    def __init__(self, demo: ModuleType, monkeypatch: pytest.MonkeyPatch):
        self.demo = demo
        self.now = 1000.0
        self.start = 30.0
        self.cell = 12.0
        self.started: list[str] = []
        self.measured: list[tuple[str, str, float | None, float | None]] = []
        self.faulty: dict[str, Any] = {}
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(demo, "time", clock)
        monkeypatch.setattr(demo, "running", self.running)
        monkeypatch.setattr(demo, "greedy_answers", lambda url, shapes, left: ["a", "b"])
        monkeypatch.setattr(demo, "warm_up", lambda where, shapes, left: None)
        monkeypatch.setattr(demo, "measure", self.measure)

    @contextmanager
    def running(self, layout: str, *_: Any) -> Iterator[Any]:
        self.started.append(layout)
        self.now += self.start
        yield self.demo.Running(layout, "http://nowhere", (), None, "tcp")

    def measure(
        self, cell: Any, where: Any, run_seconds: float, most: float, peak: float | None
    ) -> dict[str, Any]:
        took = min(self.cell, most)
        self.now += took
        self.measured.append((*cell.key, peak))
        values = dict.fromkeys(self.demo.COLUMNS, 100.0 if cell.layout == "replicas" else 50.0)
        more = {"seconds": took, "failed": int(took < self.cell), "failures": {}, "commit": "a1"}
        counts = {"moved": 0, "computed_by_decode": 0}
        return {"key": cell.key, **counts, **values, **more, **self.faulty}


@pytest.fixture
def fake(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    return FakeRun(demo, monkeypatch)


def arguments(file: Path, seconds: float, *more: str) -> list[str]:
    shapes = ("--shapes", "1000x128,8000x128", "--shares", "0.5,0.9")
    own = ("--seconds", str(seconds), "--json", str(file))
    return ["--device", "cpu", "--layouts", "tp2,apart,replicas", *shapes, *own, *more]


def test_replicas_are_first_and_others_get_shares_of_their_peak(
    demo: ModuleType, loads: ModuleType, fake: FakeRun, tmp_path: Path
) -> None:
    assert demo.main(arguments(tmp_path / "file.json", 1000)) == 0
    assert fake.started == ["replicas", "apart", "tp2"]
    measured = [(shape, share) for layout, shape, share, _ in fake.measured if layout == "apart"]
    assert measured == [
        (shape, share) for share in (None, 0.5, 0.9) for shape in ("1000x128@64", "8000x128@16")
    ]
    peaks = {peak for _, _, share, peak in fake.measured if share is not None}
    assert peaks == {100.0}
    load, count = loads.load_of(loads.Cell("tp2", loads.Shape(8, 20, 4), 0.5), 10.0, 20.0, 100.0)
    assert (load.rate, count) == (2.5, 25)


def test_nothing_is_begun_that_does_not_fit(
    demo: ModuleType, fake: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of calls of 200 s none is longer, and together they measure every cell once."""
    file = tmp_path / "file.json"
    for call in range(2):
        began = fake.now
        status = demo.main(arguments(file, 200))
        assert fake.now - began <= 200 - demo.STOP_SECONDS
        assert status == (0 if call else 1)
    assert fake.started == ["replicas", "apart", "apart", "tp2"]
    assert len(fake.measured) == len(set(fake.measured)) == 18
    said = capsys.readouterr().out
    assert "no time is left" in said
    assert "18 of 18 cells measured" in said
    cells = json.loads(file.read_text())["cells"]
    assert len(cells) == 18
    demo.main(arguments(file, 200))
    assert len(fake.measured) == 18


def test_a_layout_is_not_started_for_nothing(
    demo: ModuleType, fake: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(arguments(tmp_path / "file.json", 60)) == 1
    assert fake.started == []
    assert "s are too few to start it" in capsys.readouterr().out


def test_a_cell_that_the_end_cut_is_not_kept(
    demo: ModuleType, fake: FakeRun, tmp_path: Path
) -> None:
    """The second of its kind is expected to take as long as the first one."""
    file = tmp_path / "file.json"
    given = arguments(file, 110, "--shapes", "1000x128", "--shares", "0.5,0.7,0.9,1.1")
    takes = iter((12.0, 12.0, 12.0, 40.0))
    measure = fake.measure

    def slower(*given: Any) -> dict[str, Any]:
        fake.cell = next(takes)
        return measure(*given)

    demo.measure = slower
    assert demo.main([*given, "--layouts", "replicas", "--run-seconds", "20"]) == 1
    assert len(fake.measured) == 4
    assert len(json.loads(file.read_text())["cells"]) == 3


@pytest.mark.parametrize("what", ["failed", "moved", "computed_by_decode"])
def test_a_cell_with_a_fault_is_measured_again(
    demo: ModuleType,
    fake: FakeRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    given = arguments(tmp_path / "file.json", 1000, "--layouts", "replicas,apart")
    fake.faulty = {what: 2, "failures": {"HTTP 500": 2}}
    assert demo.main(given) == 1
    said = capsys.readouterr().out
    assert "2 failed: HTTP 500" in said
    assert "the replicas' peak is not known" in said
    fake.faulty = {"commit": "b2"}
    assert demo.main([*given, "--layouts", "replicas"]) == 0
    fake.faulty = {}
    assert demo.main(given) == 0
    assert "several commits: a1, b2" in capsys.readouterr().out
    cells = json.loads((tmp_path / "file.json").read_text())["cells"]
    assert len(cells) == 12
    assert {cell[what] for cell in cells} == {0}


def test_a_layout_that_does_not_start_leaves_the_others(
    demo: ModuleType,
    fake: FakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = fake.running

    @contextmanager
    def broken(layout: str, *more: Any) -> Iterator[Any]:
        if layout == "apart":
            raise TargetError("the server ended with 1")
        with running(layout, *more) as where:
            yield where

    monkeypatch.setattr(demo, "running", broken)
    assert demo.main(arguments(tmp_path / "file.json", 1000)) == 1
    assert fake.started == ["replicas", "tp2"]
    said = capsys.readouterr().out
    assert "    apart: the server ended with 1" in said
    assert "12 of 18 cells measured" in said


def test_a_file_of_another_setup_is_refused(
    demo: ModuleType, fake: FakeRun, tmp_path: Path
) -> None:
    file = tmp_path / "file.json"
    demo.main(arguments(file, 100))
    with pytest.raises(SystemExit, match=r"another setup \(run_seconds: 10.0, now 5.0\)"):
        demo.main(arguments(file, 100, "--run-seconds", "5"))
    with pytest.raises(SystemExit, match=r"server_options: \[\], now \['--itl-ms', 'auto'\]"):
        demo.main(arguments(file, 100, "--", "--itl-ms", "auto"))


def test_two_gpus_are_needed(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = ["NVIDIA H100 80GB HBM3, 580.1", "NVIDIA H100 80GB HBM3, 580.1"]
    monkeypatch.setattr(demo.provenance, "local_cards", lambda: cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert demo.gpu_names() == ["NVIDIA H100 80GB HBM3"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(SystemExit, match="1 of 2 GPUs are visible"):
        demo.gpu_names()
    monkeypatch.setattr(demo.provenance, "local_cards", lambda: None)
    with pytest.raises(SystemExit, match="of 0 GPUs are visible"):
        demo.gpu_names()


def test_answers_are_compared(demo: ModuleType) -> None:
    answers = {"tp2": ["a", "c"], "replicas": ["a", "b"], "apart": ["a", "b"]}
    assert demo.compared(answers) == [
        "greedy answers of replicas and apart: 2 of 2 are the same",
        "greedy answers of replicas and tp2: 1 of 2 are the same",
    ]


def test_prompts_that_the_decode_server_computed(loads: ModuleType) -> None:
    pages = {"prefilled": 8, "fetched": 7, "failures": 2, "bytes": 1e6}
    assert loads.computed_by_decode(pages, 10) == 5
    assert loads.computed_by_decode({}, 10) == 0


# ---- processes


@pytest.mark.longest
@pytest.mark.exhaustive
def test_loads_of_servers_behind_a_router(
    demo: ModuleType,
    layouts: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By servers that answer by the clock: rates are theirs. They know nothing of pages, which
    is no pair of servers."""
    monkeypatch.setattr(layouts, "serve_command", fake_server)
    file = tmp_path / "file.json"
    assert demo.main([*TINY, "--seconds", "100", "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "apart: pages do not come by tcp" in said
    assert "4 of 6 cells measured" in said
    found = json.loads(file.read_text())
    assert set(found["answers"]) == {"replicas", "tp2"}
    cells = {(cell["key"][0], cell["key"][2]): cell for cell in found["cells"]}
    for layout in ("replicas", "tp2"):
        peak = cells[layout, None]
        assert peak["failed"] == peak["short_outputs"] == 0
        assert peak["token_source"] == "usage"
        assert 0 < peak["tokens_s"] <= 1.1 * 4 / 0.005
        assert peak["itl_p50"] > 3
        share = cells[layout, 0.5]
        assert share["requests_s"] == pytest.approx(cells["replicas", None]["tokens_s"] / 32)
    assert cells["replicas", 0.5]["completed"] == cells["tp2", 0.5]["completed"] > 0


def descendants(pid: int) -> set[int]:
    try:
        text = " ".join(p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return set()
    children = {int(child) for child in text.split()}
    return children.union(*(descendants(child) for child in children))


def still_running(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.add(pid)
    return found


def interrupted(command: list[str], number: int, processes: int, file: Path) -> str:
    """Its output, after the signal came during a load. Fails where a process is left."""
    with subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "warm after" in line:
                break
        started = descendants(process.pid)
        assert len(started) >= processes
        process.send_signal(number)
        lines += list(process.stdout)
        status = process.wait(60)
    deadline = time.monotonic() + 30
    while (left := still_running(started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    if number != signal.SIGKILL:
        assert status == 1
    assert set(json.loads(file.read_text())["starts"]) == {"replicas"}
    return "".join(lines)


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "file.json"
    given = [*TINY, "--run-seconds", "30", "--layouts", "replicas", "--json", str(file)]
    script = (
        "import runpy, signal, sys\n"
        "from tests.demo_script import load_demo\n"
        "from tests.disagg.test_apart_on_gpus import fake_server\n"
        "demo = load_demo('apart_on_gpus')\n"
        "sys.modules['gpu_layouts'].serve_command = fake_server\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(demo.main(sys.argv[1:]))\n"
    )
    said = interrupted([sys.executable, "-u", "-c", script, *given], number, 3, file)
    if number != signal.SIGKILL:
        assert "0 of 2 cells measured\n    interrupted" in said


@pytest.mark.exhaustive
def test_servers_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    script = str(ROOT / "demo" / "apart_on_gpus.py")
    given = [*TINY, "--run-seconds", "30", "--layouts", "replicas", "--json", str(file)]
    interrupted([sys.executable, "-u", script, *given], signal.SIGTERM, 5, file)


@pytest.mark.longest
def test_all_layouts_answer_alike(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real servers; twice, of which the second call measures nothing."""
    file = tmp_path / "file.json"
    shapes = ("--shapes", "96x12@3,40x16@4", "--shares", "0.5", "--run-seconds", "2")
    given = ["--device", "cpu", *shapes, "--seconds", "500", "--json", str(file)]
    assert demo.main([*given, "--", "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert said.count("4 of 4 are the same") == 2
    found = json.loads(file.read_text())
    assert found["setup"]["transport"] == "tcp"
    assert len(found["cells"]) == 12
    for cell in found["cells"]:
        assert cell["failed"] == cell["computed_by_decode"] == cell["short_outputs"] == 0
        assert cell["tokens_s"] > 0
        assert bool(cell["pages"]) == (cell["key"][0] == "apart")
        if cell["pages"]:
            assert cell["pages"]["fetched"] == cell["completed"]
            assert cell["pages"]["bytes"] > 0
    assert demo.main([*given, "--", "--dtype", "float32"]) == 0
    assert "ready after" not in capsys.readouterr().out


@pytest.mark.longest
def test_random_weights_without_a_tokenizer(demo: ModuleType, tmp_path: Path) -> None:
    """Every step streams a chunk, although the model has no tokenizer."""
    file = tmp_path / "file.json"
    shape = ("--shapes", "64x8@2", "--shares", "", "--run-seconds", "3", "--layouts", "replicas")
    given = ["deepseek-v2-lite", "--weights", "random", "--layers", "2", "--device", "cpu", *shape]
    assert demo.main([*given, "--seconds", "500", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert all(found["answers"]["replicas"])
    (cell,) = found["cells"]
    assert cell["failed"] == cell["short_outputs"] == 0
    assert cell["token_source"] == "usage"
    assert cell["itl_p50"] > 0
    with pytest.raises(SystemExit, match="deepseek-v2-lite-2-layers has no weights"):
        demo.main([*given[:1], *given[3:], "--seconds", "9", "--json", str(file)])
