"""What ranks do in the tests of exchanges over shared memory: their buffers are shared files,
and Triton's interpreter runs the kernels."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime import interpreter

import tests.emulation.triton_interpreter  # noqa: F401  asks for the interpreter before kernels are defined
from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.comm import dispatch_combine
from rorqual.parallel import mesh as mesh_module
from rorqual.parallel.exchange import Exchange, ExpertStore, SlotMap
from rorqual.parallel.exchange_select import make_exchange
from rorqual.parallel.group_axis import GroupAxis
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import Mesh
from rorqual.parallel.p2p_dispatch import P2PDispatchBuffers
from rorqual.parallel.p2p_memory import P2PMemory
from tests.parallel.driver import CPU

HIDDEN = 160
INNER = 16
EXPERTS = 8
TOP_K = 3
Given = tuple[Tensor, Tensor, Tensor, Layout]


def files(mesh: Mesh, folder: str) -> Callable[[GroupAxis, int, torch.device, Tensor], P2PMemory]:
    """As P2PMemory.of, in files. Where kernels read before anyone has written lies NaN; counters
    are the caller's."""

    def of(axis: GroupAxis, size: int, device: torch.device, stop: Tensor) -> P2PMemory:
        where = (
            Path(folder)
            / f"{axis.name}{mesh.stage_rank - axis.rank * (mesh.stage.size // axis.size)}"
        )
        where.mkdir(exist_ok=True)
        own = torch.from_file(
            str(where / str(axis.rank)), shared=True, size=size, dtype=torch.uint8
        )
        own.fill_(255)
        mesh.stage.all_reduce(torch.ones(1))
        found = [
            torch.from_file(str(where / str(rank)), shared=True, size=size, dtype=torch.uint8)
            for rank in range(axis.size)
        ]
        return P2PMemory(
            own, torch.tensor([memory.data_ptr() for memory in (*found, stop)]), stop, found
        )

    return of


def attach(
    mesh: Mesh,
    moe: MoEConfig,
    folder: str,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    flights: int,
    start: int = 0,
) -> str:
    """Steps of up to `rows` rows a data-parallel rank go through files, as they would through
    GPUs' memory; says so. `start`: what all counters have come to already."""
    with (
        mock.patch.object(mesh_module, "why_not_shared", return_value=""),
        mock.patch.object(P2PMemory, "of", files(mesh, folder)),
    ):
        way = mesh.all2all_backend(rows, hidden, moe, dtype, CPU, flights=flights)
    peers = peers_of(mesh, moe)
    for buffer in peers.buffers if peers else ():
        peers.memory.own[buffer.start : buffer.start + 8 * buffer.areas.world].view(
            torch.int32
        ).fill_(start)
        buffer.totals.fill_(start)
    mesh.stage.all_reduce(torch.ones(1))
    return way


def peers_of(mesh: Mesh, moe: MoEConfig) -> Any:
    return mesh.layout([1] * mesh.sizes.dp, True, moe).moe_axis.p2p_dispatch


def sharing(folder: str) -> Callable[[Mesh, MoEConfig, Tensor], None]:
    """Memory in files for each layer of the bench."""
    made = itertools.count()

    def share(mesh: Mesh, moe: MoEConfig, x: Tensor) -> None:
        where = Path(folder) / str(next(made))
        where.mkdir(exist_ok=True)
        attach(mesh, moe, str(where), len(x), x.shape[1], x.dtype, 1)

    return share


def dawdle(pause: random.Random | None) -> None:
    if pause is not None and pause.random() < 0.2:
        time.sleep(0.01 * pause.random())


@contextmanager
def slow_programs(call: Callable[..., None], seconds: float) -> Iterator[None]:
    """The first kernel that `call`, of dispatch_combine, launches starts a program every `seconds`.
    Others are as fast as ever."""
    builder = interpreter.interpreter_builder
    start = builder.set_grid_idx
    launches = itertools.count()

    def later(*index: int) -> None:
        time.sleep(seconds)
        start(*index)

    def slowly(*args: Any) -> None:
        with nullcontext() if next(launches) else mock.patch.object(builder, "set_grid_idx", later):
            call(*args)

    with mock.patch.object(dispatch_combine, call.__name__, slowly):
        yield


def expert_layer(mesh: Mesh, slots: list[int] | None, dtype: torch.dtype, late: float) -> Exchange:
    """Its experts take `late` seconds between the arrival of rows and reading them."""
    slot_map = SlotMap(tuple(slots), EXPERTS) if slots else SlotMap.identity(EXPERTS)
    generator = torch.Generator().manual_seed(3)
    up = torch.randn(EXPERTS, 2, INNER, HIDDEN, generator=generator).to(dtype) / 4
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator).to(dtype) / 4
    held = [slot_map.physical_to_logical[slot] for slot in slot_map.local(mesh.axes["ep"].shard)]
    columns = slice(*mesh.axes["expert_tp"].shard.span(INNER))
    gate_up = Weight(up[held][:, :, columns].flatten(1, 2))
    part = Weight(down[held][:, :, columns].contiguous())

    def compute_fp8(x: Tensor, scale: Tensor, kind: torch.dtype, *rest: Any) -> Tensor:
        return compute(reference.dequantize_activation(x, scale, kind), *rest)

    def compute(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None = None,
    ) -> Tensor:
        assert base is None, "an exchange between ranks adds no rows of its own"
        time.sleep(late)
        return reference.experts(x, ids, weights, w)

    experts = ExpertWeights(gate_up, part)
    store = ExpertStore(slot_map, experts, compute, CPU, mesh.axes["ep"].shard, compute_fp8)
    return make_exchange(mesh.sizes, MoEConfig(EXPERTS, TOP_K, INNER), store)


def call(mesh: Mesh, number: int, tokens: list[int], dtype: torch.dtype) -> Given:
    """Every third call wants the first experts alone: none of the last ranks' experts are used."""
    generator = torch.Generator().manual_seed(1000 * number + mesh.dp_rank)
    count = tokens[mesh.dp_rank]
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(count, EXPERTS, generator=generator).topk(TOP_K).indices
    ids = ids % TOP_K if number % 3 == 2 else ids
    layout = mesh.layout(tokens, True, MoEConfig(EXPERTS, TOP_K, INNER))
    return *(
        layout.enter(part) for part in (x, ids, torch.rand(count, TOP_K, generator=generator))
    ), layout  # type: ignore[return-value]


def walk(
    exchange: Exchange, calls: list[Given], at_once: int, pause: random.Random | None
) -> Iterator[Tensor]:
    """All calls, `at_once` under way; a rank with `pause` dawdles now and then."""
    for first in range(0, len(calls), at_once):
        tickets = []
        for given in calls[first : first + at_once]:
            dawdle(pause)
            ticket = exchange.dispatch(*given)
            if exchange.counts_first(given[-1]):
                exchange.send(ticket)
            tickets.append(ticket)
        for ticket in tickets:
            dawdle(pause)
            exchange.run_experts(ticket)
        for ticket in tickets:
            dawdle(pause)
            yield exchange.combine(ticket)


@torch.inference_mode()
def compare(
    mesh: Mesh,
    folder: str,
    tokens: list[list[int]],
    dtype: str,
    slots: list[int] | None,
    at_once: int,
    start: int,
    rows: int,
    late: int,
    slow: int,
) -> dict[str, Any]:
    """The same calls through shared memory, with no other meeting between them, and then through
    the process group. late: a rank whose experts take their time; slow: one that takes its time to
    give back the first call's rows."""
    kind = getattr(torch, dtype)
    pause = random.Random(mesh.rank)
    layer = expert_layer(mesh, slots, kind, 0.05 if mesh.rank == late else 0)
    calls = [call(mesh, number, counts, kind) for number, counts in enumerate(tokens)]
    moe = MoEConfig(EXPERTS, TOP_K, INNER)
    axis = calls[0][3].moe_axis
    unshared = [
        mesh.all2all_backend(rows, HIDDEN, moe, kind, CPU, share) for share in (True, False)
    ]
    way = attach(mesh, moe, folder, rows, HIDDEN, kind, at_once, start)
    peers = axis.p2p_dispatch
    assert isinstance(peers, P2PDispatchBuffers)
    axis.traffic.reset()
    with slow_programs(dispatch_combine.send_combine, 0.5) if mesh.rank == slow else nullcontext():
        found = list(walk(layer, calls, at_once, pause))
    counted = dict(axis.traffic.bytes)
    taken = sum(int(buffer.totals[0]) - start for buffer in peers.buffers)
    axis.p2p_dispatch = None
    mesh.stage.all_reduce(torch.ones(1))
    axis.traffic.reset()
    wanted = list(walk(layer, calls, at_once, None))
    return {
        "equal": [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)],
        "worst": max(
            (float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True) if len(a)),
            default=0.0,
        ),
        "largest": max((float(b.abs().max()) for b in wanted if len(b)), default=0.0),
        "rows": sum(len(y) for y in found),
        "taken": taken,
        "busy": len(peers.busy),
        "ways": [*unshared, way],
        "traffic": counted == axis.traffic.bytes,
    }
