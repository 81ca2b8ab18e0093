"""Compares the speed of two commits of this project, given as two checkout folders.

Each side is one child process that imports `rorqual` from its own folder and builds its engine
once. The parent lets the two run one timed repetition in turn and swaps who goes first from pair to
pair, so that a machine that drifts drifts for both. The child uses only what both commits have:
names of options that changed are looked up in the fields of EngineConfig.

    python demo/compare_commits.py --before ../old --after . --concurrency 1,16

Without a MODEL: the bundled checkpoint; a repetition generates the whole answers, as `rorqual bench
offline` does. With the name of a shape (or a folder with a config.json): random weights; a
repetition is the median of so many decode steps while every request is decoding.

Exits with 1 where a side's median is slower by more than --within and lies outside the spread of
the other's repetitions, and where tokens differ on a CPU (on a GPU ties of bf16 may fall either
way).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

CAPTURE_SIZES = ("cudagraph_capture_sizes", "graph_sizes")  # newest name first
WARM_UP = 8  # steps that are not counted, after the last prompt


# ---- the child


class Measurement:
    """The engine of one checkout, and what is measured on it."""

    def __init__(self, job: dict[str, Any]):
        import rorqual

        found = Path(rorqual.__file__).resolve()
        if Path(job["folder"]).resolve() not in found.parents:
            raise SystemExit(f"rorqual was imported from {found}, not from {job['folder']}")
        from rorqual.engine.config import EngineConfig

        try:
            from rorqual.llm.llm import LLM
        except ImportError:  # where it was before
            from rorqual.serve.llm import LLM

        self.job = job
        concurrency = job["concurrency"]
        options = {
            "max_num_seqs": max(concurrency),
            "max_num_batched_tokens": job["max_num_batched_tokens"],
            "device": job["device"],
            "exe_mode": job["exe_mode"],
            "threads": job["threads"],
            # the cache then holds max_num_seqs requests of full length and no more, and does not
            # ask for a share of a GPU that the other side has taken
            "kv_cache_bytes": 1 << 50,
        }
        if job["model"]:
            waiting = max(concurrency) * job["prompt"] // job["max_num_batched_tokens"] + 1
            self.output = waiting + WARM_UP + job["steps"] + 8
            options |= {
                "weights": "random",
                "num_layers": job["num_layers"],
                "max_model_len": job["prompt"] + max(self.output, job["output"]) + 8,
            }
            known = {field.name for field in fields(EngineConfig)}
            name = next(name for name in CAPTURE_SIZES if name in known)
            options[name] = tuple(sorted(set(concurrency)))
        self.llm = LLM(job["model"], skip_tokenizer_init=True, **options)
        self.engine = self.llm.engine

    def prompts(self, count: int) -> list[list[int]]:
        """Those of `rorqual bench offline`: random ids, different and of equal length."""
        import torch

        generator = torch.Generator().manual_seed(count)
        vocab = self.engine.model_config.vocab_size
        shape = (count, self.job["prompt"])
        found: list[list[int]] = torch.randint(vocab, shape, generator=generator).tolist()
        return found

    def params(self, tokens: int) -> Any:
        from rorqual.request import SamplingParams

        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def tokens(self, count: int) -> list[list[int]]:
        """Greedy, and the warm-up of this batch size."""
        self.engine.scheduler.prefix.clear()
        found = self.llm.generate(self.prompts(count), self.params(self.job["output"]))
        self.seconds(count)
        gc.collect()
        gc.freeze()  # a collection in the middle of a run would look through all that is loaded
        return [list(result.outputs[0].token_ids) for result in found]

    def seconds(self, count: int) -> float:
        """One repetition: seconds of all answers, or of a decode step."""
        self.engine.scheduler.prefix.clear()
        if self.job["model"]:
            return self.step_seconds(count)
        prompts = self.prompts(count)
        params = self.params(self.job["output"])
        clock = time.process_time if self.job["processor_time"] else time.perf_counter
        start = clock()
        self.llm.generate(prompts, params)
        return clock() - start

    def step_seconds(self, count: int) -> float:
        from rorqual.request import Request

        engine = self.engine
        names = [f"request-{number}" for number in range(count)]
        for name, prompt in zip(names, self.prompts(count), strict=True):
            engine.add(Request(name, tuple(prompt), self.params(self.output)))
        while len(engine.scheduler.decoding) < count or engine.scheduler.prefilling:
            engine.step()
        for _ in range(WARM_UP):
            engine.step()
        engine.platform.synchronize()
        times = []
        for _ in range(self.job["steps"]):
            start = time.perf_counter()
            engine.step()  # returns when the tokens of the oldest step are on the host
            times.append(time.perf_counter() - start)
        if len(engine.scheduler.decoding) != count:
            raise SystemExit(f"{count} requests ended before {self.job['steps']} steps were timed")
        for name in names:
            engine.abort(name)
        while engine.has_work:
            engine.step()
        engine.platform.synchronize()
        return statistics.median(times)


def child() -> None:
    """Answers each JSON line of stdin with one on stdout, which nothing else may write to."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measurement = Measurement(json.loads(sys.stdin.readline()))
    print(json.dumps(measurement.engine.platform.name), file=answers)
    for line in sys.stdin:
        name, count = json.loads(line)
        call = {"tokens": measurement.tokens, "seconds": measurement.seconds}[name]
        print(json.dumps(call(count)), file=answers)


# ---- the parent


class Side:
    def __init__(self, name: str, folder: Path, job: dict[str, Any]):
        self.name = name
        self.folder = folder.resolve()
        if not (self.folder / "rorqual" / "__init__.py").is_file():
            raise SystemExit(f"--{name} {folder}: no checkout of this project")
        described = subprocess.run(
            ["git", "-C", str(self.folder), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
        )
        self.commit = described.stdout.strip() or "unknown"
        # -P: this script's folder is not on the path of imports
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder)},
        )
        self.send({**job, "folder": str(self.folder)})  # both load at once; see `device`

    @cached_property
    def device(self) -> str:
        """The child's first answer: its engine is there."""
        return str(self.answer())

    def ask(self, question: object) -> Any:
        self.send(question)
        return self.answer()

    def send(self, question: object) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has ended, which `answer` says
            self.process.stdin.write(json.dumps(question) + "\n")

    def answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"--{self.name}: its process ended with {self.process.wait()}")
        return json.loads(line)


@dataclass
class Comparison:
    """Seconds of repetitions, a pair of them one after the other. ratio: after / before."""

    concurrency: int
    before: list[float]
    after: list[float]
    different: str | None  # where tokens first differ

    @property
    def ratio(self) -> float:
        return statistics.median(self.after) / statistics.median(self.before)

    @property
    def paired_ratio(self) -> float:
        pairs = zip(self.after, self.before, strict=True)
        return statistics.median(after / before for after, before in pairs)

    def verdict(self, within: float) -> str:
        after = statistics.median(self.after)
        if self.ratio > 1 + within and after > max(self.before):
            return "slower"
        if self.ratio < 1 / (1 + within) and after < min(self.before):
            return "faster"
        return "as fast" if abs(self.ratio - 1) <= within else "within the spread"

    def line(self, unit: str, within: float, tokens: int) -> str:
        def shown(times: list[float]) -> str:
            ms = [1e3 * found for found in (statistics.median(times), min(times), max(times))]
            rate = f", {tokens / statistics.median(times):,.0f} tok/s" if tokens else ""
            return f"{ms[0]:.3f} {unit} ({ms[1]:.3f}..{ms[2]:.3f}){rate}"

        return (
            f"batch {self.concurrency}: before {shown(self.before)}; after {shown(self.after)}; "
            f"ratio {self.ratio:.3f}, of pairs {self.paired_ratio:.3f}: {self.verdict(within)}; "
            f"{self.different or 'same tokens'}"
        )


def first_difference(before: list[list[int]], after: list[list[int]]) -> str | None:
    for number, (left, right) in enumerate(zip(before, after, strict=True)):
        if left != right:
            place = next(
                (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
                min(len(left), len(right)),
            )
            return (
                f"different tokens: request {number}, token {place}: "
                f"{left[place : place + 4]} became {right[place : place + 4]}"
            )
    return None


def compare(sides: list[Side], count: int, pairs: int) -> Comparison:
    tokens = [side.ask(["tokens", count]) for side in sides]
    times: list[list[float]] = [[], []]
    for pair in range(pairs):
        for number in (0, 1) if pair % 2 == 0 else (1, 0):
            times[number].append(sides[number].ask(["seconds", count]))
    return Comparison(count, times[0], times[1], first_difference(*tokens))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the speed of two commits.")
    parser.add_argument("model", nargs="?", help="A shape's name or folder: random weights.")
    parser.add_argument("--before", type=Path, required=True, metavar="DIR")
    parser.add_argument("--after", type=Path, required=True, metavar="DIR")
    parser.add_argument("--concurrency", default="1,16", help="Batch sizes, comma-separated.")
    parser.add_argument("--pairs", type=int, default=9, help="Repetitions of each side.")
    parser.add_argument("--within", type=float, default=0.02, help="Accepted slowdown.")
    parser.add_argument("--prompt-len", type=int, default=128, dest="prompt")
    parser.add_argument("--output-len", type=int, default=128, dest="output")
    parser.add_argument("--steps", type=int, default=64, help="Decode steps of a repetition.")
    parser.add_argument("--num-layers", type=int, help="Cut the shape to this many layers.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--exe-mode", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="Count the process's seconds on processors: on a busy machine, with --threads 1.",
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="Write everything as JSON.")
    asked = parser.parse_args()
    asked.concurrency = [int(number) for number in asked.concurrency.split(",")]
    if min(*asked.concurrency, asked.pairs, asked.steps, asked.prompt, asked.output) < 1:
        parser.error("concurrency, pairs, steps and lengths are at least 1")
    if asked.processor_time and asked.model:
        parser.error("--processor-time goes with the bundled model")
    if asked.model and Path(asked.model).is_dir():
        asked.model = str(Path(asked.model).resolve())  # children run in their own folders
    return asked


def main() -> int:
    asked = arguments()
    job = {key: value for key, value in vars(asked).items() if not isinstance(value, Path)}
    sides = [Side("before", asked.before, job), Side("after", asked.after, job)]
    for side in sides:
        print(f"{side.name}: {side.commit}, {side.device}", flush=True)
    found = []
    for count in asked.concurrency:
        found.append(compare(sides, count, asked.pairs))
        unit, tokens = ("ms a step", 0) if asked.model else ("ms", count * asked.output)
        print(found[-1].line(unit, asked.within, tokens), flush=True)
    if asked.out:
        rows = [
            {
                **vars(row),
                "ratio": row.ratio,
                "paired_ratio": row.paired_ratio,
                "verdict": row.verdict(asked.within),
            }
            for row in found
        ]
        commits = {side.name: side.commit for side in sides}
        written = {"commits": commits, "device": sides[0].device, "job": job, "rows": rows}
        asked.out.write_text(json.dumps(written, indent=2) + "\n")
    slower = [row.concurrency for row in found if row.verdict(asked.within) == "slower"]
    wrong = [row.concurrency for row in found if row.different and sides[0].device == "cpu"]
    if slower:
        print(f"slower by more than {asked.within:.0%}: batch {', '.join(map(str, slower))}")
    if wrong:
        print(f"different tokens: batch {', '.join(map(str, wrong))}")
    return 1 if slower or wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
    else:
        sys.exit(main())
