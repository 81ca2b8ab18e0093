"""Exchanges alone: the weighted sums of all experts on one device, for every distribution of tokens
and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from rorqual.config.model import MoEConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.parallel.exchange import ExpertStore, SlotMap
from rorqual.parallel.exchange_policy import (
    ALLTOALL_ROWS,
    chosen_exchange,
    destinations,
    possible_exchanges,
)
from rorqual.parallel.exchange_select import make_exchange
from tests.parallel.fake_axes import place
from tests.parallel.pool import RankPool

WAYS: list[dict[str, Any]] = [
    {"tp": 2, "ep": 2, "exchange": "local"},
    {"dp": 2, "exchange": "allgather_tp"},
    {"dp": 4, "ep": 2, "exchange": "allgather_ep"},
    {"dp": 2, "ep": 2, "exchange": "alltoall"},
    {"dp": 4, "ep": 2, "exchange": "alltoall"},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "alltoall"},
    {"dp": 4, "ep": 4, "exchange": "low_latency"},
    {"tp": 2, "dp": 2, "ep": 2, "exchange": "low_latency"},
]
ROWS = {
    1: [[5]],
    2: [[4, 4], [7, 1], [0, 3], [0, 0]],
    4: [[2, 2, 2, 2], [6, 0, 1, 3], [0, 0, 0, 1]],
}


def name_of(sizes: dict[str, Any]) -> str:
    return "-".join(
        str(value) if name == "exchange" else f"{name}{value}" for name, value in sizes.items()
    )


def world_of(sizes: dict[str, Any]) -> int:
    return ParallelConfig(**sizes).world


@pytest.mark.parametrize("sizes", WAYS, ids=name_of)
def test_sums_are_those_of_one_device(pool: RankPool, sizes: dict[str, Any]) -> None:
    """Uneven rows, ranks without rows, and experts whose rank nobody asks (`first`: three of
    eight experts take all tokens)."""
    for tokens in ROWS[sizes.get("dp", 1)]:
        for routing in ("spread", "first"):
            results = pool.run(
                "exchange", world_of(sizes), sizes=sizes, tokens=tokens, routing=routing
            )
            assert max(result["worst"] for result in results) < 1e-5, (tokens, routing)
            assert sum(result["rows"] for result in results) == sum(tokens) * sizes.get("tp", 1)


# Experts 5 and 2 have a second slot, 5 a third; the slots of one expert lie on different ranks, or
# on the same one.
REPLICAS = [0, 1, 2, 3, 4, 5, 6, 7, 5, 2, 5, 0]


@pytest.mark.parametrize("sizes", [way for way in WAYS if way.get("ep", 1) > 1], ids=name_of)
def test_replicas(pool: RankPool, sizes: dict[str, Any]) -> None:
    tokens = ROWS[sizes.get("dp", 1)][-3 if "dp" in sizes else 0]
    results = pool.run(
        "exchange", world_of(sizes), sizes=sizes, tokens=tokens, routing="spread", slots=REPLICAS
    )
    assert max(result["worst"] for result in results) < 1e-5


@pytest.mark.parametrize("exchange", ["allgather_ep", "alltoall", "low_latency"])
def test_load_counts_logical_experts_of_dispatched_tokens(pool: RankPool, exchange: str) -> None:
    sizes = {"dp": 2, "ep": 2, "exchange": exchange}
    results = pool.run(
        "exchange", 2, sizes=sizes, tokens=[5, 2], routing="first", slots=REPLICAS, steps=2
    )
    assert [result["load"] for result in results] == [[10] * 3 + [0] * 5, [4] * 3 + [0] * 5]


def test_one_exchange_for_prompts_another_for_decoding(pool: RankPool) -> None:
    """`auto` with long prompts goes all-to-all, with tokens sharded; with few tokens it gathers.
    The same experts serve both."""
    sizes = {"tp": 2, "dp": 2, "ep": 4}
    few = pool.run("exchange", 4, sizes=sizes, tokens=[3, 5], routing="spread")
    assert "all_to_all" not in few[0]["traffic"].get("stage", {})
    assert few[0]["capturable"]
    many = pool.run(
        "exchange", 4, sizes=sizes, tokens=[2 * ALLTOALL_ROWS, 7], routing="spread", decode=False
    )
    assert "all_to_all" in many[0]["traffic"]["stage"]
    assert max(result["worst"] for result in few + many) < 1e-5


def test_tokens_go_once_to_each_rank(pool: RankPool) -> None:
    """Three experts of a token on one rank: one row of 256 fp32 with 3 ids and weights there, one
    row back; nothing for the rank's own."""
    sizes = {"dp": 2, "ep": 2, "exchange": "alltoall"}
    first, second = pool.run("exchange", 2, sizes=sizes, tokens=[5, 2], routing="first")
    row = 256 * 4
    routing = 3 * 8
    counts = 8
    # only sums for the other's two tokens
    assert first["traffic"]["dp"]["all_to_all"] == counts + 2 * row
    assert second["traffic"]["dp"]["all_to_all"] == counts + 2 * (row + routing)


def test_fp8_dispatch_rounds_what_it_sends_and_halves_it(pool: RankPool) -> None:
    sizes = {"dp": 2, "ep": 2, "exchange": "low_latency"}
    exact, rounded = (
        pool.run(
            "exchange", 2, sizes={**sizes, "fp8_dispatch": fp8}, tokens=[8, 5], routing="spread"
        )[0]
        for fp8 in (False, True)
    )
    assert exact["worst"] < 1e-5 < rounded["worst"] < 0.08
    sent = [result["traffic"]["dp"]["all_to_all"] for result in (exact, rounded)]
    assert sent[0] - sent[1] == 8 * (256 * 4 - (256 + 2 * 4))


# ---- the rule


V3 = MoEConfig(256, 8, 2048, n_group=8, topk_group=4, method="noaux_tc")
V3_SHARED = replace(V3, num_shared=1)
QWEN = MoEConfig(128, 8, 768)


@pytest.mark.parametrize(
    ("sizes", "moe", "rows", "decode", "want"),
    [
        ({"tp": 8}, V3, 1, True, "local"),
        ({"tp": 8, "ep": 8}, V3, 4096, False, "local"),
        ({"dp": 8}, V3, 4096, False, "allgather_tp"),
        ({"dp": 8, "ep": 8}, V3, 128, True, "allgather_ep"),
        ({"dp": 8, "ep": 8}, V3, 4096, False, "alltoall"),
        ({"dp": 8, "ep": 8}, V3, 100, False, "allgather_ep"),
        ({"dp": 16, "ep": 16}, V3, 64, True, "low_latency"),
        ({"dp": 2, "ep": 2}, QWEN, 4096, False, "allgather_ep"),
        ({"tp": 8, "ep": 8, "sequence_parallel": True}, QWEN, 4096, False, "alltoall"),
        ({"tp": 8, "ep": 8, "sequence_parallel": True}, V3_SHARED, 4096, False, "allgather_ep"),
        ({"tp": 8, "ep": 8, "dense_tp": 1}, V3_SHARED, 4096, False, "alltoall"),
        ({"dp": 8, "ep": 8, "exchange": "low_latency"}, V3, 4096, False, "low_latency"),
    ],
)
def test_the_rule(
    sizes: dict[str, Any], moe: MoEConfig, rows: int, decode: bool, want: str
) -> None:
    chosen = ParallelConfig(**sizes)
    assert chosen_exchange(chosen, moe, rows, decode) == want
    assert want in possible_exchanges(chosen, moe)


def test_destinations() -> None:
    assert destinations(8, QWEN) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    assert destinations(8, V3) == 4  # half of the groups of experts, one a rank
    assert destinations(32, V3) == pytest.approx(32 * (1 - (31 / 32) ** 8))


# ---- tables


def store_of(slots: tuple[int, ...]) -> ExpertStore:
    weight = Weight(torch.zeros(len(slots), 2, 2))
    experts = ExpertWeights(weight, weight)
    return ExpertStore(SlotMap(slots, 3), experts, lambda x, *_: x, torch.device("cpu"))


def test_rows_take_replicas_in_turn() -> None:
    store = store_of((0, 1, 2, 1, 0, 0))
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 0]])
    assert store.to_physical(ids).tolist() == [[0, 1], [4, 3], [5, 2], [3, 0]]
    assert store.to_physical(ids, first=1).tolist() == [[4, 3], [5, 1], [0, 2], [1, 4]], (
        "another rank"
    )
    evenly = store_of((0, 1, 2, 1, 1, 0)).to_physical(torch.tensor([[0, 1]]).expand(60, -1))
    assert evenly.unique(return_counts=True)[1].tolist() == [30, 20, 20, 20, 30]


def test_padding_is_not_counted() -> None:
    """Of two ranks' rows of requests with two rows each: this one's begin at number 3."""
    store = store_of((0, 1, 2))
    store.record_load = True
    ids = torch.tensor([[0, 1], [0, 2], [1, 2]])
    for requests, want in ((1, [0, 0, 0]), (2, [1, 1, 0]), (3, [2, 2, 2]), (8, [2, 2, 2])):
        store.load.zero_()
        padded = PaddedRows(torch.tensor([requests]), 2, 1).after(2)
        assert torch.equal(store.to_physical(ids, padded=padded), ids)
        assert store.load.tolist() == want
    store.to_physical(ids, counted=False, padded=padded)
    assert store.load.tolist() == [2, 2, 2]


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 0, 1), (0, 1, 2, 1)])
def test_padding_without_experts(slots: tuple[int, ...]) -> None:
    """Ids -1, as a router gives them to padding, are in no slot and not counted, with each kind of
    slot map."""
    store = store_of(slots)
    store.record_load = True
    ids = torch.tensor([[0, 1], [1, 2], [-1, -1]])
    padded = PaddedRows(torch.tensor([2]), 1)
    found = store.to_physical(ids, padded=padded)
    assert torch.equal(found[:2], store.to_physical(ids[:2], counted=False))
    assert store.to_local(found)[2].tolist() == [-1, -1]
    assert store.load.tolist() == [1, 2, 1]
    marked = padded.without_experts(ids.clamp_min(0), torch.ones(3, 2))
    assert torch.equal(marked[0], ids)
    assert marked[1].tolist() == [[1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_padding_without_experts_where_ranks_share_them(rank: int) -> None:
    """Every rank has every token, and its own slots."""
    from rorqual.parallel.shard import Shard

    weight = Weight(torch.zeros(2, 2, 2))
    store = ExpertStore(
        SlotMap((0, 1, 2, 1), 3), ExpertWeights(weight, weight), lambda x, *_: x,
        torch.device("cpu"), Shard(rank, 2),
    )  # fmt: skip
    found = store.to_local(store.to_physical(torch.tensor([[0, 2], [-1, -1]])))
    assert found.tolist() == [[[0, -1], [-1, -1]], [[-1, 0], [-1, -1]]][rank]


def test_which_exchanges_take_padding_without_experts() -> None:
    """An all-gather does, and one through shared memory only where a step's rows do not fit into
    that: there padding is not sent."""
    from types import SimpleNamespace

    from rorqual.parallel.exchange_alltoall import LowLatencyExchange
    from rorqual.parallel.exchange_gather import AllGatherExchange
    from rorqual.parallel.exchange_p2p import P2PExchange

    store = store_of((0, 1, 2))
    x = torch.zeros(4, 2)
    fits = SimpleNamespace(takes=lambda x, capacity, top_k: capacity <= 8)
    for rows, expected in ((8, False), (9, True)):
        axis = SimpleNamespace(p2p_dispatch=fits)
        layout: Any = SimpleNamespace(moe_axis=axis, moe_rows=(4, rows), dense_rows=None)
        shared = P2PExchange(store, AllGatherExchange(store, False), True, False)
        assert shared.takes_absent(x, 2, layout) == expected
        assert AllGatherExchange(store, False).takes_absent(x, 2, layout)
        assert not LowLatencyExchange(store).takes_absent(x, 2, layout)
        padded = P2PExchange(store, LowLatencyExchange(store), False, False)
        assert not padded.takes_absent(x, 2, layout)


def test_a_table_is_remapped_in_place() -> None:
    store = store_of((0, 1, 2, 1))
    table = store.table
    store.remap(SlotMap((2, 1, 0, 2), 3))
    assert store.to_physical(torch.tensor([[-1, 0]])).tolist() == [[-1, 2]]
    assert store.table is table
    assert store.to_physical(torch.tensor([[0, 1, 2], [0, 1, 2]])).tolist() == [
        [2, 1, 0],
        [2, 1, 3],
    ]
    with pytest.raises(ConfigError, match="the new map has 5 slots, the layer 4"):
        store.remap(SlotMap((0, 0, 0, 1, 2), 3))


def test_slots_that_cannot_be_dealt_out() -> None:
    from rorqual.parallel.shard import Shard

    with pytest.raises(ConfigError, match="ep=4 does not divide 10"):
        SlotMap((*range(8), 0, 1), 8).local(Shard(0, 4))


def test_one_device_has_a_local_exchange() -> None:
    made = make_exchange(ParallelConfig(), QWEN, store_of((0, 1, 2)))
    assert type(made).__name__ == "LocalExchange"


def go_round(name: str) -> torch.Tensor:
    """One decode step through an exchange of rank 1 of 2, on tensors without contents: nothing
    can be read by the host."""
    mesh = place(ParallelConfig(dp=2, ep=2, exchange=name), 1)
    moe = MoEConfig(8, 3, 16)
    nothing = Weight(torch.empty(0))
    with FakeTensorMode():
        store = ExpertStore(
            SlotMap(tuple(REPLICAS), 8),
            ExpertWeights(nothing, nothing),
            lambda x, *_: x,
            torch.device("cpu"),
            mesh.axes["ep"].shard,
        )
        made = make_exchange(mesh.sizes, moe, store)
        layout = mesh.layout([4, 4], True, moe)
        ticket = made.dispatch(
            torch.empty(4, 64), torch.empty(4, 3, dtype=torch.int64), torch.empty(4, 3), layout
        )
        if made.counts_first(layout):
            made.send(ticket)
        made.run_experts(ticket)
        return made.combine(ticket)


@pytest.mark.parametrize("name", ["allgather_ep", "low_latency"])
def test_what_says_it_is_capturable_never_asks_the_host(name: str) -> None:
    assert go_round(name).shape == (4, 64)


def test_the_dynamic_all_to_all_does() -> None:
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        go_round("alltoall")
