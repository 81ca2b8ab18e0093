"""Takes the picture of the dashboard that README shows: a server with the bundled checkpoint, load
on it, and Chromium without a window.

    python tests/serve/picture.py [--out docs/images/dashboard.png] [--seconds 200]
        [server options]

Needs a Chromium (Debian: the package chromium). With options of the server's own, speculation and
the experts' load are as those say.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.serve import browser
from tests.serve.browser import Browser
from tests.serve.running import ROOT, Running, start_server

PICTURE = ROOT / "docs" / "images" / "dashboard.png"
SHOWN = ["--next-n", "2", "--record-expert-load"]
CLIENTS = 40
SPEAKERS = ("a sailor", "the captain", "a whale", "the cook")


def body(chance: random.Random) -> dict[str, Any]:
    """Half of the prompts begin alike; one in fifty is wrong."""
    if chance.random() < 0.02:
        return {"prompt": "a", "n": -1}
    begun = "In the beginning the ship was small and the sea was wide. " * 3
    words = f"{chance.choice(SPEAKERS)} said {chance.randrange(10_000)}: "
    tokens = chance.choice([16, 32, 64, 160])
    prompt = begun + words if chance.random() < 0.6 else words * chance.randint(1, 6)
    return {"prompt": prompt, "max_tokens": tokens, "temperature": chance.choice([0, 0.7])}


@contextmanager
def load(server: Running) -> Iterator[None]:
    """Clients that come one after the other and think a little between requests."""
    stop = threading.Event()

    def client(number: int) -> None:
        chance = random.Random(number)
        stop.wait(number * 1.5)
        while not stop.is_set():
            server.request("POST", "/v1/completions", body(chance))
            stop.wait(chance.expovariate(2))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


async def take(server: Running, out: Path, seconds: float, width: int) -> list[str]:
    """What the page's console complained of."""
    async with Browser() as tab:
        await tab.shape(width, 800)
        await tab.open(f"{server.url}/dashboard")
        await asyncio.sleep(seconds)
        await tab.until("document.getElementById('state').textContent === 'Healthy'")
        await tab.picture(out)
        return tab.errors


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--width", type=int, default=1280)
    given, options = parser.parse_known_args()
    if browser.PROGRAM is None:
        print("there is no Chromium on the path; Debian: apt install chromium", file=sys.stderr)
        return 2
    sizes = ("--dtype", "float32", "--max-num-seqs", "32", "--max-model-len", "1024")
    with start_server(*sizes, *(options or SHOWN)) as server, load(server):
        start = time.monotonic()
        errors = asyncio.run(take(server, given.out, given.seconds, given.width))
        print(f"{given.out}: after {time.monotonic() - start:.0f} s of load", *errors, sep="\n")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
