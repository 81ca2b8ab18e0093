"""Many requests through a prefill and a decode server, some cancelled, while the prefill engine is
killed now and then: no wrong token, and nothing is held in the end."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.disagg.test_pages_travel import figure, prompt, tokens
from tests.disagg.test_transport_libraries import skip_without
from tests.disagg.test_transport_serving import server
from tests.serve.running import Running

pytestmark = pytest.mark.exhaustive

REQUESTS = 240
CLIENTS = 8
PROMPTS = 12
KILLS = 3
OPTIONS = ("--num-speculative-tokens", "1", "--max-num-seqs", "4", "--num-pages", "100")


class Caller:
    """Answers over one connection each, which may be dropped midway."""

    def __init__(self, where: Running):
        self.where = where

    def ask(self, ids: list[int], patience: float | None, **more: Any) -> Any:
        """None where the server said no, or the caller went away."""
        body = {
            "model": "rorqual-bundled",
            "prompt": ids,
            "max_tokens": 16,
            "temperature": 0.8,
            "seed": ids[0],
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.where.port, timeout=patience)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            data = answer.read()
            return json.loads(data) if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def other_rank(engine: int) -> int:
    """A process that computes a rank other than 0 of an engine; the engine's own where it has
    none."""
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"worker_process" in command(pid)]
    return ranks[0] if ranks else engine


def command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.longest
@pytest.mark.parametrize(
    ("transport", "prefill_layout", "decode_layout"),
    [
        ("tcp", (), ()),
        ("tcp", ("--tp", "2", "--kv-overlap"), ("--dp", "2", "--page-size", "16")),
        ("tcp", ("--kv-by-layer",), ("--kv-host-memory", "0.01")),
        ("nixl", (), ()),
    ],
    ids=["alone", "ranks", "by-layer", "nixl"],
)
def test_no_wrong_token_and_no_page_lost(
    tmp_path: Path,
    transport: str,
    prefill_layout: tuple[str, ...],
    decode_layout: tuple[str, ...],
) -> None:
    if transport != "tcp":
        skip_without(transport)
    chunks = ("--chunked-prefill-size", "24", "--restart")
    with (
        server("prefill", tmp_path, transport, *OPTIONS, *chunks, *prefill_layout) as prefill,
        server("decode", tmp_path, transport, *OPTIONS, *decode_layout) as decode,
    ):
        want = {}
        for number in range(PROMPTS):
            found = Caller(decode).ask(prompt(10 + number), 60, cache_salt="alone")
            want[number] = tokens(found)
        ended: Counter[str] = Counter()
        wrong: list[int] = []
        todo = list(range(REQUESTS))
        lock = threading.Lock()

        def work(seed: int) -> None:
            chance = random.Random(seed)
            while True:
                with lock:
                    if not todo:
                        return
                    request = todo.pop()
                number = chance.randrange(PROMPTS)
                ids = prompt(10 + number)
                salt = {"cache_salt": str(request // 5)}
                first = Caller(prefill).ask(
                    ids, 10, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **salt
                )
                given = first and first["kv_transfer_params"]
                patience = chance.choice((0.002, 0.02, 0.1)) if chance.random() < 0.3 else 60
                found = Caller(decode).ask(ids, patience, kv_transfer_params=given, **salt)
                with lock:
                    ended["apart" if given else "alone"] += found is not None
                    ended["cancelled"] += found is None
                    if found is not None and tokens(found) != want[number]:
                        wrong.append(request)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for kill in range(KILLS):
            while len(todo) > REQUESTS * (KILLS - kill) // (KILLS + 1):
                time.sleep(0.05)
            prefill.wait_until(prefill.healthy)
            os.kill(other_rank(prefill.engine_pids()[0]), signal.SIGKILL)
        for thread in threads:
            thread.join(240)
        assert not wrong
        assert ended["apart"] > 20
        assert sum(ended.values()) == REQUESTS
        assert decode.process.poll() is None
        prefill.wait_until(prefill.healthy)
        for where in (prefill, decode):
            where.wait_until(lambda where=where: where.held_pages() == 0)
        assert figure(prefill, "kv_transfer_pages_held") == 0
        assert figure(decode, "kv_transfer_requests_waiting") == 0
        assert figure(decode, "kv_transfer_pages_received_total") > 0
