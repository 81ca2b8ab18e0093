"""How much later the first token comes where one engine computes a prompt and another answers: from
the end of the prompt on one device to the token on the other, its pages' way included.

    python demo/first_token_apart.py --prompt 1000 --threads 1
    python demo/first_token_apart.py deepseek-v2-lite --weights random --page-size 64 \
        --prompt 8000 --transport handles --devices cuda:0,cuda:1

This process answers, another one computes prompts. Each prompt is new to both. Beside it: the same
number of tokens computed by the engine that answers, and its steps of one request. The first step
of the answer is one that an engine alone makes as well, for its second token; so what is added is
the time to the first token less such a step. Wanted: at most a tenth of the prompt's time, or 8 ms.
"""

from __future__ import annotations

import json
import secrets
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from child_process import ChildProcess, options_of_both

from rorqual.disagg.kv_transfers import KVTransfers
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.engine.config import EngineConfig
from rorqual.engine.engine import Engine
from rorqual.models.hub import model_folder
from rorqual.request import Request, SamplingParams

TOKENS = 16  # of an answer
LEASE_SECONDS = 600.0
MAX_SHARE = 0.1  # of the prompt's time, as it is wanted
MAX_SECONDS = 0.008


@dataclass(frozen=True)
class Trial:
    """model: a folder, a shape's name or an id; the bundled checkpoint if None. layers: all if
    None. devices: that compute prompts, and answer."""

    model: str | None = None
    weights: str = "checkpoint"
    layers: int | None = None
    prompt: int = 1000
    repeats: int = 7
    page_size: int = 16
    threads: int | None = None
    transport: str = "tcp"
    staging_mb: int = 256
    devices: tuple[str, str] = ("auto", "auto")
    seed: int = 1


@dataclass
class Measured:
    """Seconds of each repetition. apart: from a prompt's pages being offered to the first token of
    the answer; pages: of these until all pages are in the cache. alone: of a prompt, by the engine
    that answers; prefill: by the other; step: the median of an answer's further steps."""

    apart: list[float] = field(default_factory=list)
    pages: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


class Side:
    """An engine that takes part."""

    def __init__(self, trial: Trial, role: str, secret: str):
        pages = 4 * (-(-(trial.prompt + TOKENS) // trial.page_size) + 1)
        options: dict[str, Any] = {
            "weights": trial.weights,
            "page_size": trial.page_size,
            "num_pages": pages,
            "max_num_seqs": 4,
            "max_model_len": trial.prompt + TOKENS + 1,
            "num_layers": trial.layers,
            "threads": trial.threads,
            "device": trial.devices[role == "decode"],
        }
        given = {name: value for name, value in options.items() if value is not None}
        self.engine = Engine(EngineConfig(str(model_folder(trial.model)), **given))
        self.came = threading.Event()
        config = TransferConfig(
            role,
            secret,
            lease_seconds=LEASE_SECONDS,
            transport=trial.transport,
            staging_mb=trial.staging_mb,
        )
        self.transfers = KVTransfers(self.engine, config, self.came.set)
        self.count = 0

    def request(self, prompt: list[int], tokens: int, given: dict[str, Any]) -> Request:
        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return Request(f"r{self.count}", tuple(prompt), params, kv_transfer_params=given)

    def run(self) -> list[tuple[float, Any]]:
        """Each step's end, and what it gave, until nothing is left."""
        found = []
        while self.engine.has_work:
            outs = self.engine.step()
            found.append((time.perf_counter(), outs))
            self.transfers.settle()
        return found

    def close(self) -> None:
        self.transfers.close()
        self.engine.close()


def keep() -> None:
    """The main of the process that computes prompts; they come as lines, and where their pages
    are, and how long it took, goes out as one."""
    settings = json.loads(sys.stdin.readline())
    given = settings["trial"]
    side = Side(
        Trial(**{**given, "devices": tuple(given["devices"])}), "prefill", settings["secret"]
    )
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        side.transfers.settle()
        start = time.perf_counter()
        side.engine.add(side.request(json.loads(line), 1, {"do_remote_decode": True}))
        where = None
        while side.engine.has_work:
            for out in side.engine.step():
                if out.finish is not None:
                    where = side.transfers.offer(out.sequence)
        print(json.dumps([where, time.perf_counter() - start]), flush=True)
        # until the next prompt its pages are fetched
    side.close()


def one_apart(side: Side, computing: ChildProcess, prompt: list[int], found: Measured) -> list[int]:
    """Its tokens."""
    computing.send(prompt)
    where, seconds = computing.receive()
    start = time.perf_counter()
    if where is None:
        raise SystemExit("pages of a prompt were not offered")
    request = side.request(prompt, TOKENS, where)
    side.transfers.check(request)
    if not side.transfers.fetch(request):
        raise SystemExit("pages of a new prompt are not to be fetched")
    while not (arrived := side.transfers.arrived()):
        side.came.wait(0.1)
        side.came.clear()
    ((request, error, rank),) = arrived
    if error:
        raise SystemExit(f"not all pages arrived: {error}")
    placed = time.perf_counter()
    side.engine.add(request, rank)
    sequence = side.engine.scheduler.sequences[request.id]
    ends = [end for end, outs in side.run() if outs]
    found.prefill.append(seconds)
    found.pages.append(placed - start)
    found.apart.append(ends[0] - start)
    found.step.append(statistics.median(np.diff(ends)))
    if sequence.num_cached_prompt != len(prompt) - 1:
        raise SystemExit(f"of {len(prompt)} tokens {sequence.num_cached_prompt} were cached")
    return list(sequence.outputs)


def one_alone(side: Side, prompt: list[int], found: Measured) -> list[int]:
    request = side.request(prompt, TOKENS, {})
    start = time.perf_counter()
    side.engine.add(request)
    sequence = side.engine.scheduler.sequences[request.id]
    ends = [end for end, outs in side.run() if outs]
    found.alone.append(ends[0] - start)
    return list(sequence.outputs)


def measure(trial: Trial) -> Measured:
    """Raises SystemExit where pages do not arrive."""
    secret = secrets.token_hex(16)
    computing = ChildProcess(__file__, {"trial": asdict(trial), "secret": secret})
    try:
        side = Side(trial, "decode", secret)
        computing.receive()
        random = np.random.default_rng(trial.seed)
        most = min(4000, side.engine.model_config.vocab_size)
        found = Measured()
        for number in range(-2, trial.repeats):  # the first ones warm up
            if not number:
                found = Measured()
            first, second = random.integers(10, most, (2, trial.prompt)).tolist()
            one_apart(side, computing, first, found)
            one_alone(side, second, found)
        side.close()
        return found
    finally:
        computing.close()


def show(found: Measured, trial: Trial) -> None:
    middle = {name: statistics.median(times) for name, times in asdict(found).items()}
    added = middle["apart"] - middle["step"]
    most = max(MAX_SHARE * middle["alone"], MAX_SECONDS)
    print(f"{trial.prompt} tokens by {trial.transport}, {' to '.join(trial.devices)}; medians, ms")
    for name, text in (
        ("prefill", "the prompt, by the engine that computes it for another"),
        ("alone", "the prompt and its first token, by the engine that answers"),
        ("pages", "pages: from the offer to all in the cache"),
        ("apart", "from the offer to the first token of the answer"),
        ("step", "a step of the answer"),
    ):
        times = asdict(found)[name]
        print(f"{text:60}{1e3 * middle[name]:10.2f}   ({1e3 * min(times):.2f} least)")
    held = "held" if added <= most else "not held"
    print(
        f"added: {1e3 * added:.2f} ms, {100 * added / middle['alone']:.1f} % of the prompt's time; "
        f"wanted at most {1e3 * most:.2f} ms: {held}"
    )


def main() -> None:
    if sys.argv[1:] == ["--keep"]:
        keep()
        return
    known = Trial()
    parser = options_of_both(__doc__.split("\n\n")[0], known)
    parser.add_argument("--prompt", type=int, default=known.prompt, help="tokens")
    parser.add_argument("--repeats", type=int, default=known.repeats)
    parser.add_argument("--staging-mb", type=int, default=known.staging_mb)
    parser.add_argument("--devices", default="auto,auto", help="who computes, and who answers")
    given = vars(parser.parse_args())
    file = given.pop("json")
    first, _, second = given.pop("devices").partition(",")
    trial = Trial(**given, devices=(first, second))
    found = measure(trial)
    show(found, trial)
    if file is not None:
        content = {"trial": asdict(trial), "seconds": asdict(found)}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
