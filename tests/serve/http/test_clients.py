"""How much one client, and all of them, may have open: what is refused for now, what for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rorqual.request import Request, SamplingParams
from rorqual.serve.engines.pool import EXPECTED, EnginePool
from rorqual.serve.errors import ApiError
from rorqual.serve.http.clients import check_room
from rorqual.serve.limits import ServerLimits

ROWS = 16
pools: list[EnginePool] = []


@dataclass
class Client:
    """As much of an engine's client as counting needs."""

    index: int
    live: dict[str, Any] = field(default_factory=dict)
    ready: Any = field(default_factory=lambda: SimpleNamespace(is_set=lambda: True))
    info: Any = field(default_factory=lambda: SimpleNamespace(max_num_seqs=ROWS))


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while pools:
        pools.pop().kill()


def pool_of(*options: dict[str, Any], **limits: Any) -> EnginePool:
    made = EnginePool(list(options or ({},)), ServerLimits(**limits))
    pools.append(made)
    for engine in made.engines:
        engine.client = Client(engine.index)  # type: ignore[assignment]
    return made


def requests(
    count: int, client: str, prompt: int = 10, max_tokens: int | None = 5
) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens)
    return [Request(str(number), (1,) * prompt, params, client=client) for number in range(count)]


def refusal(pool: EnginePool, count: int, client: str = "a", **more: Any) -> ApiError | None:
    try:
        check_room(pool, requests(count, client, **more), 7)
    except ApiError as error:
        return error
    return None


def fill(pool: EnginePool, count: int, client: str = "a") -> None:
    """Open so many, each as a request of its own that must be accepted."""
    for _ in range(count):
        assert refusal(pool, 1, client) is None
        found: Any = pool.engines[0].client
        found.live[f"{client}-{len(found.live)}"] = None
        pool.usage.change(client, 1, 15)


def assert_never(error: ApiError | None, *words: str) -> None:
    assert error is not None
    assert (error.status, error.retry_after) == (400, None)
    assert "retry-after" not in error.headers()
    for word in words:
        assert word in error.message


def assert_later(error: ApiError | None, code: str, *words: str) -> None:
    assert error is not None
    assert (error.status, error.code, error.retry_after) == (429, code, 7)
    for word in words:
        assert word in error.message


def test_one_client_may_have_all_rows() -> None:
    pool = pool_of(waiting=0)
    assert refusal(pool, ROWS) is None
    fill(pool, ROWS)
    assert_later(
        refusal(pool, 1, "b"),
        "queue_full",
        "16 sequences are open and 1 more were asked for; this server runs 16 and queues 0;",
    )


def test_an_eighth_of_the_queue_is_left_for_others() -> None:
    pool = pool_of(waiting=8)
    fill(pool, ROWS + 7)
    assert_later(
        refusal(pool, 1),
        "queue_full",
        "23 sequences are open",
        "this server runs 16 and queues 8, 1 of these for clients with at most 1 open;",
    )
    fill(pool, 1, "b")
    assert_later(refusal(pool, 1, "c"), "queue_full", "24 sequences are open", "queues 8;")


def test_what_an_idle_server_has_no_room_for_is_not_to_be_tried_again() -> None:
    pool = pool_of(waiting=8)
    assert refusal(pool, ROWS + 7) is None
    error = refusal(pool, ROWS + 8)
    assert_never(error, "24 sequences", "runs 16 and queues 8, 1 of these", "--max-waiting")
    assert error is not None
    assert error.param == "n"
    fill(pool, 3)
    assert_later(refusal(pool, ROWS + 7), "queue_full", "3 sequences are open and 23 more")
    assert_never(refusal(pool, ROWS + 8), "24 sequences")


def test_rows_of_all_engines_and_their_ranks_count() -> None:
    pool = pool_of({"dp": 2}, {"dp": 2}, waiting=0)
    assert pool.room == 4 * ROWS
    assert refusal(pool, 4 * ROWS) is None
    assert_never(refusal(pool, 4 * ROWS + 1), "runs 64 and queues 0")
    pool.engines[1].client = None
    assert_later(refusal(pool, 4 * ROWS), "queue_full", "runs 32 and queues 0")
    assert_never(refusal(pool, 4 * ROWS + 1), "runs 64 and queues 0")
    pool.engines[0].client = None
    error = refusal(pool, 4 * ROWS + 1)
    assert error is not None
    assert (error.status, error.code) == (503, "not_ready")


def test_sequences_of_one_client() -> None:
    pool = pool_of(client_sequences=4)
    assert refusal(pool, 4) is None
    assert_never(refusal(pool, 5), "5 sequences", "accepted of one client: 4", "--client-sequences")
    fill(pool, 1)
    assert_later(refusal(pool, 4), "client_limit", "1 of your sequences are open and 4 more")
    assert_never(refusal(pool, 5), "--client-sequences")


def test_tokens_of_one_client() -> None:
    pool = pool_of(client_tokens=60)
    assert refusal(pool, 4) is None
    assert_never(refusal(pool, 5), "75 tokens", "accepted of one client: 60", "--client-tokens")
    fill(pool, 1)
    assert_later(refusal(pool, 4), "client_limit", "hold 15 tokens and 60 more")
    long = refusal(pool, 1, max_tokens=100_000)
    assert_never(long, f"{10 + EXPECTED} tokens", f"up to {EXPECTED} of each answer")
