"""What ranks do in the tests of exchanges over shared memory: their buffers are shared files, and Triton's interpreter runs the kernels."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tests.ops.triton_interpreter  # noqa: F401  asks for the interpreter before kernels are defined
from rorqual.config import MoEConfig
from rorqual.models.transformer import Transformer
from rorqual.ops import reference
from rorqual.ops.reference import Weight
from rorqual.ops.triton.dispatch import Areas
from rorqual.parallel.exchange import Exchange, ExpertStore, SlotMap
from rorqual.parallel.exchange_select import make_exchange
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import Mesh
from rorqual.parallel.peer_rows import PeerRows
from rorqual.parallel.symmetric import PeerMemory
from tests.parallel.driver import CPU

HIDDEN, INNER, EXPERTS, TOP_K = 160, 16, 8, 3
Given = tuple[Tensor, Tensor, Tensor, Layout]


def shared_memory(rank: int, world: int, folder: str, size: int, meet: Any) -> PeerMemory:
    """As PeerMemory.of, in files. Where kernels read before anyone has written lies NaN; counters are the caller's."""
    own = torch.from_file(f"{folder}/{rank}", shared=True, size=size, dtype=torch.uint8)
    own.fill_(255)
    meet()
    files = [
        own if other == rank else torch.from_file(f"{folder}/{other}", shared=True, size=size, dtype=torch.uint8) for other in range(world)
    ]
    return PeerMemory(own, torch.tensor([file.data_ptr() for file in files]), files)


def peers_of(
    layout: Layout, rows: int, folder: str, dtype: torch.dtype, flights: int, start: int = 0, hidden: int = HIDDEN, top_k: int = TOP_K
) -> PeerRows:
    """`start`: what all counters have come to already."""
    axis = layout.moe_axis
    areas = Areas(axis.size, rows, hidden, top_k, dtype.itemsize)
    stage_rank = layout.mesh.stage_rank
    where = f"{folder}/{axis.name}{stage_rank - axis.rank * (layout.mesh.stage.size // axis.size)}"
    Path(where).mkdir(exist_ok=True)
    memory = shared_memory(axis.rank, axis.size, where, flights * areas.size, lambda: layout.mesh.stage.all_reduce(torch.ones(1)))
    peers = PeerRows(memory, axis.rank, areas, dtype, flights)
    for buffer in peers.buffers:
        memory.own[buffer.start : buffer.start + 8 * axis.size].view(torch.int32).fill_(start)
        buffer.totals.fill_(start)
    layout.mesh.stage.all_reduce(torch.ones(1))
    return peers


def attach(model: Transformer, folder: str, rows: int) -> PeerRows:
    """Steps of up to `rows` rows a rank reach the model's experts through shared memory, two of them at once."""
    moe, config = model.config.moe, model.config
    layout = model.mesh.layout([1] * model.mesh.sizes.dp, True, moe)
    peers = peers_of(layout, rows, folder, torch.float32, 2, 0, config.hidden_size, moe.top_k)
    layout.moe_axis.peers = peers
    return peers


def sharing(folder: str) -> Callable[[Mesh, MoEConfig, Tensor], None]:
    """Memory in files for each layer of the bench."""
    made = itertools.count()

    def share(mesh: Mesh, moe: MoEConfig, x: Tensor) -> None:
        where = f"{folder}/{next(made)}"
        Path(where).mkdir(exist_ok=True)
        mesh.dp.peers = peers_of(mesh.layout([1] * mesh.sizes.dp, True, moe), len(x), where, x.dtype, 1, 0, x.shape[1], moe.top_k)

    return share


def expert_layer(mesh: Mesh, slots: list[int] | None, dtype: torch.dtype) -> Exchange:
    slot_map, generator = SlotMap(tuple(slots), EXPERTS) if slots else SlotMap.identity(EXPERTS), torch.Generator().manual_seed(3)
    up = torch.randn(EXPERTS, 2, INNER, HIDDEN, generator=generator).to(dtype) / 4
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator).to(dtype) / 4
    held = [slot_map.logical[slot] for slot in slot_map.local(mesh.axes["ep"].cut)]
    columns = slice(*mesh.axes["expert_tp"].cut.span(INNER))
    gate_up, part = Weight(up[held][:, :, columns].flatten(1, 2)), Weight(down[held][:, :, columns].contiguous())

    def compute_fp8(x: Tensor, scale: Tensor, kind: torch.dtype, *rest: Any) -> Tensor:
        return compute(reference.dequantise_activation(x, scale, kind), *rest)

    def compute(x: Tensor, *rest: Any) -> Tensor:
        return reference.experts(x, *rest)

    store = ExpertStore(slot_map, gate_up, part, compute, CPU, mesh.axes["ep"].cut, compute_fp8)
    return make_exchange(mesh.sizes, MoEConfig(EXPERTS, TOP_K, INNER), store)


def call(mesh: Mesh, number: int, tokens: list[int], dtype: torch.dtype) -> Given:
    """Every third call wants the first experts alone: nobody asks for those of the last ranks."""
    generator = torch.Generator().manual_seed(1000 * number + mesh.dp_rank)
    count = tokens[mesh.dp_rank]
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(count, EXPERTS, generator=generator).topk(TOP_K).indices
    ids = ids % TOP_K if number % 3 == 2 else ids
    layout = mesh.layout(tokens, True, MoEConfig(EXPERTS, TOP_K, INNER))
    return *(layout.enter(part) for part in (x, ids, torch.rand(count, TOP_K, generator=generator))), layout  # type: ignore[return-value]


def walk(exchange: Exchange, calls: list[Given], at_once: int, pause: random.Random | None) -> Iterator[Tensor]:
    """All calls, `at_once` under way; a rank with `pause` dawdles now and then."""

    def dawdle() -> None:
        if pause is not None and pause.random() < 0.2:
            time.sleep(0.01 * pause.random())

    for first in range(0, len(calls), at_once):
        tickets = []
        for given in calls[first : first + at_once]:
            dawdle()
            tickets.append(exchange.submit(*given))
        for ticket in tickets:
            dawdle()
            exchange.run_experts(ticket)
        for ticket in tickets:
            dawdle()
            yield exchange.wait(ticket)


@torch.inference_mode()
def compare(
    mesh: Mesh, folder: str, tokens: list[list[int]], dtype: str, slots: list[int] | None, at_once: int, start: int, rows: int
) -> dict[str, Any]:
    """The same calls through shared memory, with no other meeting between them, and then through the process group."""
    kind, layer = getattr(torch, dtype), expert_layer(mesh, slots, getattr(torch, dtype))
    calls = [call(mesh, number, counts, kind) for number, counts in enumerate(tokens)]
    layout = calls[0][3]
    axis = layout.moe_axis
    axis.peers = peers = peers_of(layout, rows, folder, kind, at_once, start)
    axis.traffic.reset()
    found = list(walk(layer, calls, at_once, random.Random(mesh.rank)))
    counted = dict(axis.traffic.bytes)
    taken = sum(int(buffer.totals[0]) - start for buffer in peers.buffers)
    axis.peers = None
    mesh.stage.all_reduce(torch.ones(1))
    axis.traffic.reset()
    wanted = list(walk(layer, calls, at_once, None))
    return {
        "equal": [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)],
        "worst": max((float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True) if len(a)), default=0.0),
        "largest": max((float(b.abs().max()) for b in wanted if len(b)), default=0.0),
        "rows": sum(len(y) for y in found),
        "taken": taken,
        "busy": len(peers.busy),
        "traffic": counted == axis.traffic.bytes,
    }
