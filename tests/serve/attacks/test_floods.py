"""Attackers that come in numbers: clients that vanish, senders that dawdle, bodies of every
size, keys that are guessed."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.attacks.victim import BODY, COMPLETE, GUEST, OWNER, PATIENCE, Victim

pytestmark = pytest.mark.exhaustive

CROWD = 300
LIMIT = 4 << 20  # bytes of a body


def cut(sock: socket.socket) -> None:
    """At once, with a reset, as a machine that lost its network."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def vanish(victim: Victim, chance: random.Random) -> None:
    """CROWD clients at once: some go before their body is whole, some before the first token,
    some in the middle of a stream."""
    bodies = {"max_tokens": 400, "ignore_eos": True}
    socks = []
    for number in range(CROWD):
        more = {"stream": number % 2 == 0, "n": 1 + number % 3 // 2}
        prompt = f"Number {chance.random()} said"
        data = json.dumps({"prompt": prompt, **bodies, **more}).encode()
        sock = victim.connect()
        sock.sendall(victim.head(len(data)) + (data if number % 5 else data[: len(data) // 2]))
        socks.append(sock)
        if number % 3 == 0:
            cut(socks.pop(chance.randrange(len(socks))))
    time.sleep(0.5)
    chance.shuffle(socks)
    for sock in socks:
        cut(sock)


@pytest.mark.parametrize("turn", ["first", "again"])
def test_clients_that_vanish(victim: Victim, turn: str) -> None:
    vanish(victim, random.Random(turn))
    assert victim.honest() < PATIENCE


def heard(sock: socket.socket) -> bytes | None:
    """What has come; nothing (b"") where the other side has gone, None where it is silent."""
    sock.setblocking(False)
    try:
        return sock.recv(4096)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""


def drip(victim: Victim, parts: Callable[[int], bytes], count: int = 100) -> list[bytes]:
    """So many senders, each a byte at a time, until the server cuts all of them; what it said to
    each. An honest client is served meanwhile."""
    socks = [victim.connect() for _ in range(count)]
    said = [b""] * count
    open_ones = set(range(count))
    deadline = time.monotonic() + 30
    place = 0
    while open_ones:
        assert time.monotonic() < deadline, f"{len(open_ones)} are still listened to"
        for i in list(open_ones):
            part = heard(socks[i])
            said[i] += part or b""
            if part == b"":
                open_ones.discard(i)
                socks[i].close()
                continue
            # whoever sends to a closed connection may lose what was said there before
            with contextlib.suppress(BlockingIOError, ConnectionError):
                socks[i].send(parts(place))
        place += 1
        time.sleep(0.05)
        if place % 20 == 0:
            assert victim.honest() < PATIENCE
    return said


def test_senders_that_dawdle_over_headers(victim: Victim) -> None:
    data = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + b"x-a: 1\r\n" * 10_000
    assert set(drip(victim, lambda place: data[place : place + 1])) == {b""}


def test_senders_that_dawdle_over_bodies(victim: Victim) -> None:
    data = victim.head(100_000) + b'{"prompt": "' + b"a" * 10_000
    start = len(victim.head(100_000))

    def part(place: int) -> bytes:
        return data[:start] if place == 0 else data[start + place : start + place + 1]

    starts = [said[:12] for said in drip(victim, part)]
    assert {*starts} <= {b"HTTP/1.1 408", b""}
    assert starts.count(b"") < 10, "those who sent at the very moment it was said"


def test_connections_that_say_nothing(victim: Victim) -> None:
    socks = [victim.connect() for _ in range(200)]
    assert victim.honest() < PATIENCE
    for sock in socks:
        with contextlib.suppress(ConnectionError):
            assert sock.recv(10) == b""
        sock.close()


HUGE: dict[str, bytes] = {
    "text": b'{"prompt": "' + b"a " * (LIMIT // 2 - 20) + b'"}',
    "escapes": b'{"prompt": "' + b"\\u00e9" * (LIMIT // 6 - 20) + b'"}',
    "brackets": b'{"prompt": ' + b"[" * (LIMIT - 20),
    "objects": b'{"prompt": ' + b'{"a":' * (LIMIT // 5 - 20),
    "fields": json.dumps({"prompt": "a", **{f"x{i}": i for i in range(200_000)}}).encode(),
    "digits": b'{"prompt": "a", "seed": ' + b"9" * (LIMIT - 100) + b"}",
    "exponent": b'{"prompt": "a", "temperature": 1e' + b"9" * (LIMIT - 100) + b"}",
    "ids": json.dumps({"prompt": [[5] * 400] * 2000}).encode(),
    "stops": json.dumps({"prompt": "a", "stop": ["x" * 500] * 8000}).encode(),
    "biases": json.dumps({"prompt": "a", "logit_bias": dict.fromkeys(range(250_000), 1)}).encode(),
    "one too many": b"x" * (LIMIT + 1),
    "ten times": b"x" * (10 * LIMIT),
}


@pytest.mark.parametrize("kind", HUGE)
def test_huge_bodies(victim: Victim, kind: str) -> None:
    data = HUGE[kind]
    for _ in range(3):
        sock = victim.connect(seconds=60)
        with contextlib.suppress(ConnectionError):  # the server need not read what it refuses
            sock.sendall(victim.head(len(data), connection="close") + data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(1 << 16):
                answer += part
        sock.close()
        assert answer[9:12] == (b"413" if len(data) > LIMIT else b"400"), answer[:300]
    assert victim.honest() < PATIENCE


def test_a_body_without_end(victim: Victim) -> None:
    """Chunks, until the server has had enough."""
    sock = victim.connect()
    head = victim.head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    sent = 0
    with contextlib.suppress(ConnectionError):
        sock.sendall(head)
        while sent < 4 * LIMIT:
            sock.sendall(chunk)
            sent += 0x10000
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if sock.recv(4096):
                    break
            sock.setblocking(True)
    assert sent < 4 * LIMIT, "nobody stopped it"
    sock.close()


def test_guessed_keys(victim: Victim) -> None:
    """From an address of its own, the owner's goes on; no key is in the log."""
    guesses = [f"guess-{number}-{'x' * (number % 40)}" for number in range(200)]
    statuses = []
    for key in guesses:
        sock = victim.connect("127.0.0.77")
        data = json.dumps(BODY).encode()
        sock.sendall(victim.head(len(data), key, connection="close") + data)
        statuses.append(sock.recv(4096)[9:12])
        sock.close()
    assert statuses[:20] == [b"401"] * 20
    assert set(statuses[20:]) == {b"429"}
    sock = victim.connect("127.0.0.77")
    sock.sendall(victim.head(len(data), "owner", connection="close") + data)
    assert sock.recv(4096)[9:12] == b"429", "the right key tells the guesser nothing"
    sock.close()
    assert victim.honest() < PATIENCE
    assert not any(key in victim.server.text() for key in [*guesses, "Bearer owner"])


def test_a_queue_full_of_one_client_leaves_room_for_another(victim: Victim) -> None:
    """As many as the server takes, and more: the rest gets 429, another client's is served."""
    long: dict[str, Any] = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    data = json.dumps(long).encode()
    socks = [victim.connect() for _ in range(450)]
    for sock in socks:
        sock.sendall(victim.head(len(data)) + data)
    victim.server.wait_until(
        lambda: victim.server.request("GET", "/load", **OWNER)[1]["server_load"] > 300, 20
    )
    assert victim.server.request("POST", COMPLETE, long | {"n": 2}, **GUEST)[0] == 429
    assert victim.honest() < 2 * PATIENCE
    for sock in socks:
        cut(sock)
