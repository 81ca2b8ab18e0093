"""Experts in other processes: the tokens of one process, however they are spread and cut, and
whatever ends in between."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM
from rorqual.disagg.experts.server import ExpertServer, serve_experts
from rorqual.disagg.kv_transfers import KVTransfers
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.errors import ConfigError, ExpertsMissing, RorqualError
from rorqual.models import transformer
from rorqual.parallel import overlap
from rorqual.parallel.remote import exchange as remote_exchange
from rorqual.parallel.remote.link import LinkError, introduce, receive, send, shut
from rorqual.parallel.remote.wire import (
    MAX_HOLDINGS,
    PURPOSE,
    CallHead,
    CallOutcome,
    ExpertMessage,
    Holdings,
    ReplyHead,
    ranges,
    read_ranges,
)
from tests.disagg.expert_caller import FLOAT, SECRET, Caller, Start
from tests.engine.mixed_batch import COMMON, TEXTS, everything, params


@pytest.fixture(scope="module")
def three(start: Start) -> list[ExpertServer]:
    """All experts between them, some twice."""
    return [start("0-5,14"), start("6-11"), start("10-15,0")]


def at(servers: list[ExpertServer]) -> str:
    return ",".join(f"127.0.0.1:{server.port}" for server in servers)


def options(servers: list[ExpertServer], secret_file: str, **more: Any) -> dict[str, Any]:
    return {**COMMON, "experts": (at(servers),), "expert_secret_file": secret_file, **more}


@contextmanager
def engine(servers: list[ExpertServer], secret_file: str, **more: Any) -> Iterator[LLM]:
    llm = LLM(**options(servers, secret_file, **more))
    try:
        yield llm
    finally:
        llm.engine.close()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """One process with all its experts."""
    return everything(LLM(**COMMON), TEXTS)


@pytest.fixture(scope="module")
def greedy() -> list[list[int]]:
    llm = LLM(**COMMON)
    try:
        return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]
    finally:
        llm.engine.close()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]


@pytest.mark.longest
@pytest.mark.exhaustive
def test_a_mixed_batch_is_one_process_s(
    three: list[ExpertServer], secret_file: str, expected: list[Any]
) -> None:
    before = [server.stats.calls for server in three]
    more = {"micro_batches": 2, "num_speculative_tokens": 1}
    assert everything(LLM(**options(three, secret_file, **more)), TEXTS) == expected
    assert all(server.stats.calls > count for server, count in zip(three, before, strict=True))


# several ranks take a minute
LAYOUTS: list[Any] = [
    (1, {}),
    (1, {"num_speculative_tokens": 2}),
    (2, {"micro_batches": 3}),
    (3, {"micro_batches": 4, "num_speculative_tokens": 2}),
    (2, {"micro_batches": 6, "num_speculative_tokens": 1}),
    (3, {"steps_in_flight": 3, "chunked_prefill_size": 3}),
    (2, {"pipeline_turns": 2}),
    pytest.param(
        3,
        {"pipeline_turns": 2, "num_speculative_tokens": 2, "chunked_prefill_size": 3},
        marks=[pytest.mark.longest],
    ),
    (2, {"dp": 2, "micro_batches": 2, "num_speculative_tokens": 1}),
    pytest.param(2, {"tp": 2, "micro_batches": 2}, marks=[pytest.mark.longest]),
    pytest.param(3, {"tp": 2, "dp": 2, "num_speculative_tokens": 1}, marks=[pytest.mark.longest]),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("count", "more"), LAYOUTS)
def test_every_layout_gives_one_process_s_tokens(
    count: int, more: dict[str, Any], start: Start, secret_file: str, expected: list[Any]
) -> None:
    spread = {1: ["all"], 2: ["0-7", "8-15"], 3: ["0-5,14", "6-11", "10-15,0"]}[count]
    servers = [start(slots) for slots in spread]
    assert everything(LLM(**options(servers, secret_file, **more)), TEXTS) == expected


# of different lengths, and tokens of different numbers: steps pass from twelve requests to one
MANY = [*TEXTS, "A", "The old man and the sea", "Why not", "Once upon a time there was", "So"]
LENGTHS = [params(max_tokens=4 + 2 * number) for number in range(len(MANY))]
MANY_SEQS: dict[str, Any] = {"max_num_seqs": len(MANY)}


@pytest.fixture(scope="module")
def many() -> list[list[int]]:
    """Of one process."""
    llm = LLM(**{**COMMON, **MANY_SEQS})
    try:
        return [out.outputs[0].token_ids for out in llm.generate(MANY, LENGTHS)]
    finally:
        llm.engine.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("parts", "drafts"), [(8, 0), (8, 1), (5, 0), (5, 2), (6, 0), (6, 1), (7, 1)]
)
def test_up_to_eight_parts_give_one_process_s_tokens(
    parts: int,
    drafts: int,
    start: Start,
    secret_file: str,
    many: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of steps with fewer requests than parts, which stay whole; and of those that a server
    leaves."""
    cut: set[int] = set()

    def noted(generators: Any) -> Any:
        cut.add(len(generators))
        return overlap.run(generators)

    monkeypatch.setattr(transformer, "run", noted)
    first, second = start("0-9"), start("6-15,0-5")
    more = {"micro_batches": parts, "num_speculative_tokens": drafts, **MANY_SEQS}

    def generated(llm: LLM, count: int) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in llm.generate(MANY[:count], LENGTHS[:count])]

    with engine([first, second], secret_file, **more) as llm:
        assert generated(llm, len(MANY)) == many
        assert cut == {parts}
        cut.clear()
        for count in (parts - 1, 1):
            assert generated(llm, count) == many[:count]
        assert not cut
        first.close()
        assert generated(llm, len(MANY)) == many
        assert cut == {parts}


@pytest.mark.exhaustive
def test_rows_in_fp8_are_near_the_model_s(start: Start, secret_file: str, greedy: Any) -> None:
    with engine([start("0-9"), start("10-15")], secret_file, fp8_dispatch=True) as llm:
        found = tokens(llm)
    same = [
        next((n for n, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(found, greedy, strict=True)
    ]
    assert sum(same) >= 0.5 * sum(map(len, greedy)), same


@pytest.mark.exhaustive
def test_layers_may_lie_apart(start: Start, secret_file: str, greedy: Any) -> None:
    layers = sorted(start().shard.layers)
    half = len(layers) // 2
    first = start(layers=ranges(layers[:half]))
    second = start(layers=ranges(layers[half:]))
    with engine([first, second], secret_file) as llm:
        assert tokens(llm) == greedy


@pytest.mark.longest
@pytest.mark.exhaustive
def test_two_engines_share_servers(
    three: list[ExpertServer], secret_file: str, greedy: Any
) -> None:
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        with engine(three, secret_file) as llm:
            found[number] = [tokens(llm), tokens(llm)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [greedy, greedy], 1: [greedy, greedy]}


@pytest.mark.exhaustive
def test_a_closed_server_s_part_goes_to_others(start: Start, secret_file: str, greedy: Any) -> None:
    """In the midst of a step; the one that comes back gets its share again."""
    first, second = start(), start()
    with engine([first, second], secret_file) as llm:
        wanted = llm.stream(TEXTS[0], params())
        head = [next(iter(wanted)) for _ in range(3)]
        assert head
        first.close()
        assert tokens(llm) == greedy
        again = start(port=first.port)
        servers = llm.engine.worker.experts
        assert servers is not None
        until(lambda: len(servers.links) == 2)
        assert tokens(llm) == greedy
        assert again.stats.calls > 0


def until(done: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.exhaustive
def test_no_pages_arrive_while_steps_take_turns(start: Start, secret_file: str) -> None:
    with engine([start("0-15")], secret_file, pipeline_turns=2) as llm:
        config = TransferConfig("decode", "a secret that is long enough")
        with pytest.raises(ConfigError, match="role='decode' does not go with pipeline_turns=2"):
            KVTransfers(llm.engine, config, lambda: None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("turns", [1, 2])
def test_requests_wait_for_a_holder(
    turns: int, start: Start, secret_file: str, greedy: Any
) -> None:
    first, second = start("0-7"), start("8-15")
    more = {"expert_wait": 60.0, "pipeline_turns": turns}
    with engine([first, second], secret_file, **more) as llm:
        assert tokens(llm) == greedy
        second.close()
        timer = threading.Timer(1.0, lambda: start("8-15", port=second.port))
        timer.start()
        assert tokens(llm) == greedy
        timer.join()


@pytest.mark.exhaustive
def test_and_end_with_an_error_that_names_what_is_missing(start: Start, secret_file: str) -> None:
    first, second = start("0-7"), start("8-15")
    with engine([first, second], secret_file, expert_wait=0.3) as llm:
        second.close()
        with pytest.raises(ExpertsMissing, match=r"no server holds expert \d.* of layer \d"):
            llm.generate(TEXTS, params())
        third = start("8-15", port=second.port)
        until(lambda: not llm.engine.worker.experts.without_holder())  # type: ignore[union-attr]
        out = llm.generate(TEXTS[:1], params())
        assert len(out[0].outputs[0].token_ids) == 20
        assert third.stats.calls


RANKS: list[Any] = [
    {"tp": 2},
    pytest.param(
        {"dp": 2, "micro_batches": 2, "num_speculative_tokens": 1}, marks=[pytest.mark.longest]
    ),
    pytest.param({"tp": 2, "dp": 2, "steps_in_flight": 2}, marks=[pytest.mark.longest]),
]


@pytest.mark.longest
@pytest.mark.exhaustive
@pytest.mark.parametrize("more", RANKS)
def test_several_ranks_give_up_a_step_together(
    more: dict[str, Any], start: Start, secret_file: str, greedy: Any
) -> None:
    """They wait for a holder, end requests where none comes, and live on."""
    first, second = start("0-7"), start("8-15")
    with engine([first, second], secret_file, expert_wait=2.0, **more) as llm:
        assert tokens(llm) == greedy
        second.close()
        with pytest.raises(ExpertsMissing, match=r"holder of an expert|no server holds expert"):
            llm.generate(TEXTS, params())
        timer = threading.Timer(0.5, lambda: start("8-15", port=second.port))
        timer.start()
        assert tokens(llm) == greedy
        timer.join()
        assert tokens(llm) == greedy


@pytest.mark.longest
def test_what_one_rank_misses_all_give_up(start: Start, secret_file: str, greedy: Any) -> None:
    """Rank 0 itself misses nothing: a server answers it and not the other rank."""
    first, second = start("0-7"), start("8-15")
    welcome = second.moves.callers
    with engine([first, second], secret_file, expert_wait=2.0, tp=2) as llm:
        assert tokens(llm) == greedy
        own = llm.engine.worker.experts
        assert own is not None
        kept = {own_socket(link) for link in own.links if link.address[1] == second.port}
        others = [sock for sock in welcome.versions if sock.getpeername()[1] not in kept]  # type: ignore[attr-defined]
        assert len(others) == 1
        serve = second.server.serve
        second.server.serve = refuse
        shut(others[0])  # type: ignore[arg-type]
        with pytest.raises(ExpertsMissing, match="rank 1 found no holder of an expert"):
            llm.generate(TEXTS, params())
        assert not own.without_holder()
        second.server.serve = serve
        until(lambda: len(welcome.versions) == 2)
        assert tokens(llm) == greedy


def own_socket(link: Any) -> int:
    port: int = link.control.getsockname()[1]
    return port


def refuse(sock: socket.socket) -> None:
    raise LinkError("nobody is linked now")


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [{"micro_batches": 2}, {"pipeline_turns": 2}])
def test_a_step_that_is_given_up_leaves_nothing_half_done(
    more: dict[str, Any],
    start: Start,
    secret_file: str,
    greedy: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt while replies are awaited: they must not be taken for those of a later step."""
    with engine([start("0-9"), start("10-15")], secret_file, **more) as llm:
        receive_calls = remote_exchange.RemoteExchange._receive
        left = [7]

        def interrupted(self: Any, calls: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return receive_calls(self, calls)

        monkeypatch.setattr(remote_exchange.RemoteExchange, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:  # and with it the step's frames
            llm.generate(TEXTS, params())
        for _ in range(3):
            assert tokens(llm) == greedy
        assert kept.tb is not None


# ---- who may call, and with what


@pytest.fixture(scope="module")
def server(start: Start) -> ExpertServer:
    return start("0-7", max_rows=64)


def test_a_wrong_secret_or_checkpoint_is_refused(server: ExpertServer) -> None:
    with pytest.raises(LinkError, match="secrets differ"):
        Caller(server, 0, b"another secret of some length")
    with pytest.raises(LinkError, match=r"weights is .* at the keeper, 'another' here"):
        Caller(server, 0, weights="another")


def test_holdings_are_told(server: ExpertServer) -> None:
    caller = Caller(server, None)
    kind, data = receive(caller.sock, MAX_HOLDINGS)
    assert kind == ExpertMessage.HOLDINGS
    found = Holdings.unpack(data, 16)
    assert found.max_rows == 64
    assert set(found.layers) == set(server.shard.layers)
    assert set(found.layers.values()) == {tuple(range(8))}


BAD = {
    "not a call": b"x" * CallHead.FORM.size,
    "no rows": CallHead(1, 1, 0, 2, 0).pack(),
    "many rows": CallHead(1, 1, 65, 2, 0).pack(),
    "a large top_k": CallHead(1, 1, 1, 65, 0).pack(),
    "a form": CallHead(1, 1, 1, 2, 9).pack(),
}


@pytest.mark.parametrize("name", BAD)
def test_calls_that_nobody_sends_end_the_link(name: str, server: ExpertServer) -> None:
    caller = Caller(server, 0)
    caller.sock.sendall(BAD[name])
    assert caller.ended()
    assert not Caller(server, None).ended()  # others are served


@pytest.mark.parametrize(
    ("layer", "expert", "text"),
    [(99, 0, "layer 99 is not held"), (1, 9, "not held here"), (1, 77, "no such expert")],
)
def test_what_is_not_held_is_said(layer: int, expert: int, text: str, server: ExpertServer) -> None:
    caller = Caller(server, 0)
    hidden = server.shard.config.hidden_size
    body = struct.pack("<if", expert, 1.0) + bytes(4 * hidden)
    caller.sock.sendall(CallHead(5, layer, 1, 1, 0).pack() + body)
    head = ReplyHead.unpack(caller.sock.recv(ReplyHead.FORM.size, socket.MSG_WAITALL))
    assert head.outcome
    assert text in caller.sock.recv(head.rows, socket.MSG_WAITALL).decode()
    if head.outcome == CallOutcome.MOVED:
        caller.sock.sendall(CallHead(6, layer, 1, 1, 0).pack() + struct.pack("<if", 0, 1.0))
        caller.sock.sendall(bytes(4 * hidden))
        head = ReplyHead.unpack(caller.sock.recv(ReplyHead.FORM.size, socket.MSG_WAITALL))
        assert (head.sequence, head.outcome) == (6, CallOutcome.DONE)
    else:
        assert caller.ended()


@pytest.mark.parametrize(
    "message", [b"", b"[]", b'{"lane": 8}', b'{"lane": -1}', b'{"lane": true}', b"{"]
)
def test_who_joins_with_something_else_is_cut_off(message: bytes, server: ExpertServer) -> None:
    sock = socket.create_connection((server.host, server.port), 5)
    introduce(sock, SECRET, server.server.fingerprint, PURPOSE)
    send(sock, ExpertMessage.JOIN, message)
    assert sock.recv(1) == b""


REPLIES: dict[str, Callable[[int, int], bytes]] = {
    "another sequence": lambda sequence, rows: ReplyHead(sequence + 1, rows, 0, 0).pack(),
    "more rows": lambda sequence, rows: ReplyHead(sequence, rows + 1, 0, 0).pack(),
    "a long error": lambda sequence, rows: ReplyHead(sequence, 2**31, 0, 1).pack(),
    "garbage": lambda sequence, rows: b"\xff" * ReplyHead.FORM.size,
    "an end": lambda sequence, rows: b"",
}


class LyingServer(ExpertServer):
    """Answers call number `honest` and all later ones wrongly."""

    honest = 0
    lie: Callable[[int, int], bytes] = REPLIES["an end"]

    def _reply(self, sock: socket.socket, head: ReplyHead, result: torch.Tensor) -> None:
        if self.stats.calls <= self.honest:
            super()._reply(sock, head, result)
            return
        sock.sendall(self.lie(head.sequence, head.rows))
        raise LinkError("lied")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REPLIES)
def test_a_server_that_answers_wrongly_is_left_out(
    name: str, start: Start, secret_file: str, greedy: Any
) -> None:
    honest = start()
    liar = start()
    liar.close()
    bad = LyingServer(liar.shard, ("127.0.0.1", 0), SECRET, liar.server.fingerprint, 4096)
    bad.honest = 30
    bad.lie = REPLIES[name]
    try:
        with engine([bad, honest], secret_file) as llm:
            assert tokens(llm) == greedy
        assert bad.stats.calls > bad.honest
    finally:
        bad.close()


def test_an_engine_says_which_experts_it_misses_at_its_start(
    server: ExpertServer, secret_file: str
) -> None:
    with pytest.raises(ConfigError, match=r"no server holds 8-15 of layer 1; .* is linked"):
        LLM(**options([server], secret_file, expert_wait=0.5, max_num_batched_tokens=64))
    with pytest.raises(ConfigError, match="takes 64 rows in a call"):
        LLM(**options([server], secret_file, expert_wait=3600))


def test_a_start_does_not_wait_for_a_server_that_refuses_it(
    start: Start, secret_file: str, tmp_path: Path, greedy: Any
) -> None:
    """Another secret is a mistake, which an hour would not mend. Unless others hold all experts."""
    other = tmp_path / "other"
    other.write_text("a secret that no server of these tests has")
    whole = start()
    with pytest.raises(ConfigError, match=r"no server holds 0-15 of layer 1; .*secrets differ"):
        LLM(**options([whole], str(other), expert_wait=3600))
    narrow = start("0-7", max_rows=64)
    with engine([narrow, whole], secret_file, expert_wait=3600) as llm:
        assert tokens(llm) == greedy


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"experts": ("8.8.8.8:1",)}, "is public"),
        ({"experts": ("127.0.0.1",)}, "is no address"),
        ({"experts": ("127.0.0.1:1",), "expert_secret_file": None}, "expert_secret_file is needed"),
        ({"experts": ("127.0.0.1:1",), "tp": 2, "ep": 2}, "do not go with ep=2"),
        ({"experts": ("127.0.0.1:1",), "exe_mode": "compile"}, "exe_mode='compile'"),
        ({"experts": ("127.0.0.1:1",), "fixed_experts": True}, "fixed_experts does not go"),
        ({"experts": ("127.0.0.1:1",), "pipeline_turns": 3}, "accepted: 1, 2"),
        (
            {"experts": ("127.0.0.1:1",), "pipeline_turns": 2, "micro_batches": 2},
            "goes with one rank, and with micro_batches=1, not 2",
        ),
        (
            {"experts": ("127.0.0.1:1",), "pipeline_turns": 2, "kv_host_memory": 1},
            "does not go with kv_host_memory=1",
        ),
        ({"exchange": "remote"}, "exchange='remote' is not known"),
    ],
)
def test_options_that_do_not_go_together(
    given: dict[str, Any], text: str, secret_file: str
) -> None:
    file = {"expert_secret_file": secret_file} if "experts" in given else {}
    with pytest.raises(ConfigError, match=text):
        LLM(**{**COMMON, **file, **given})


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 9]) == "0-2,5,9"
    assert read_ranges("0-2, 5,9", 10) == (0, 1, 2, 5, 9)
    assert read_ranges("all", 3) == (0, 1, 2)
    for text in ("", "x", "3-1", "0-10", "-1", "1-2-3"):
        with pytest.raises(ValueError, match="accepted"):
            read_ranges(text, 10)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text("short")
    with pytest.raises(RorqualError, match="has 5 bytes"):
        serve_experts(None, FLOAT, "all", "all", "127.0.0.1:0", str(path), 64)


@pytest.mark.exhaustive
def test_a_slower_server_gets_less(start: Start, secret_file: str, greedy: Any) -> None:
    quick, slow = start(), start()
    compute = slow.shard.compute

    def slowly(*given: Any) -> torch.Tensor:
        time.sleep(0.004)
        return compute(*given)

    slow.shard.compute = slowly  # type: ignore[method-assign]
    with engine([quick, slow], secret_file) as llm:
        for _ in range(2):
            assert tokens(llm) == greedy
        servers = llm.engine.worker.experts
        assert servers is not None
        shares = [found.share for found in servers.stats()]
        assert shares[0] == 1.0
        assert shares[1] < 0.7


def test_a_start_that_fails_leaves_no_thread_that_tries_to_connect(secret_file: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="experts"):
        LLM(experts="127.0.0.1:9", expert_secret_file=secret_file, expert_wait=0.2, num_pages=16)
    deadline = time.monotonic() + 30
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
