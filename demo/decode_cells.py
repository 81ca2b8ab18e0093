"""Decode steps of several contexts and numbers of requests in one engine: what `rorqual bench
offline` prints as its step, without its other figures, for which it computes the prompts of each
size four times. Here they are computed once.

    python demo/decode_cells.py deepseek-v2-lite --cells 1x1000,8x1000,8x32000 --set weights=random
    python demo/decode_cells.py --cells 1x100,4x100 --steps 20 --set threads=1

A cell is REQUESTSxPROMPT, in tokens. Engine options are `--set name=value`, as the command line has
them. Cells that do not fit in the cache are printed as such. `demo/split_predictions.py --measured`
reads the JSON files.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rorqual
from rorqual import LLM
from rorqual.bench.offline.run import make_prompts, provenance, steady_step
from rorqual.bench.offline.steady_state import enough_tokens
from rorqual.bench.offline.work import OfflineWork
from rorqual.errors import ConfigError
from rorqual.models.hub import model_folder

LATER = 256  # tokens that the first request may generate before the last one's prompt is computed


@dataclass(frozen=True)
class Cell:
    requests: int
    prompt: int

    @classmethod
    def of(cls, text: str) -> Cell:
        requests, _, prompt = text.partition("x")
        return cls(int(requests), int(prompt))


def value_of(text: str) -> Any:
    """As JSON where it is JSON, else the text itself; a list becomes a tuple."""
    try:
        found = json.loads(text)
        return tuple(found) if isinstance(found, list) else found
    except json.JSONDecodeError:
        return text


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="A folder or a shape's name; bundled if left out.")
    parser.add_argument("--cells", required=True, help="Comma-separated REQUESTSxPROMPT.")
    parser.add_argument("--steps", type=int, default=64, help="Of a cell, at least.")
    parser.add_argument("--repeats", type=int, default=1, help="Medians are taken over these.")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measured(llm: LLM, cell: Cell, steps: int, repeats: int) -> dict[str, Any] | None:
    """The row of one cell. None if the cache of a data-parallel rank does not hold its requests at
    their longest. Raises ConfigError if the requests never decode together."""
    engine = llm.engine
    prompts = make_prompts(llm, cell.requests, OfflineWork(prompt=cell.prompt))
    output = enough_tokens(engine, prompts, steps)
    pages = -(-(cell.prompt + output) // engine.worker.spec.page_size)
    if -(-cell.requests // engine.config.dp) * pages > engine.worker.num_pages:
        return None
    work = OfflineWork(prompt=cell.prompt, output=output, repeats=repeats)
    found = [steady_step(llm, prompts, work) for _ in range(repeats)]
    milliseconds = statistics.median(1e3 * seconds / steps for seconds, steps in found)
    return {
        "concurrency": cell.requests,
        "prompt": cell.prompt,
        "output": output,
        "step_ms": milliseconds,
        "steps": min(steps for _, steps in found),
    }


def main() -> None:
    wanted = asked()
    cells = [Cell.of(text) for text in wanted.cells.split(",")]
    pairs = (one.partition("=") for one in wanted.set)
    options = {name: value_of(value) for name, _, value in pairs}
    dp = options.get("dp", 1)
    sizes = {
        "max_num_seqs": max(-(-cell.requests // dp) for cell in cells),
        "max_model_len": max(cell.prompt for cell in cells) + wanted.steps + LATER,
        "skip_tokenizer_init": True,
    }
    llm = LLM(model_folder(wanted.model), **{**sizes, **options})
    rows = []
    try:
        for cell in cells:
            start = f"{cell.requests} requests of {cell.prompt} tokens:"
            try:
                row = measured(llm, cell, wanted.steps, wanted.repeats)
            except ConfigError as error:
                print(start, error, flush=True)
                continue
            if row is None:
                print(start, "do not fit", flush=True)
                continue
            rows.append(row)
            print(start, f"{row['step_ms']:.3f} ms a step ({row['steps']} steps)", flush=True)
            if wanted.json:
                found = {"rows": rows, "options": options, "version": rorqual.__version__}
                wanted.json.write_text(json.dumps({**found, **provenance(llm)}, indent=1) + "\n")
    finally:
        llm.engine.close()


if __name__ == "__main__":
    main()
