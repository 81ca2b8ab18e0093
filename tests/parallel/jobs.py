"""What ranks do in tests. Arguments and results are plain data; `world` counts the ranks that
take part."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rorqual.bench.comm import run as comm
from rorqual.config.hf import read_config_file
from rorqual.config.model import ModelConfig, MoEConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.engine import kernels_ahead
from rorqual.engine.scheduling.dp_scheduler import DataParallelScheduler
from rorqual.layers.fixed_experts import check_fixed_experts
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights, random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops import reference
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.parallel import comm_volume, exchange_gather
from rorqual.parallel.comm_volume import step_messages
from rorqual.parallel.eplb.placement import place
from rorqual.parallel.exchange import ExpertStore, SlotMap
from rorqual.parallel.exchange_select import make_exchange
from rorqual.parallel.group_axis import Arriving, GroupAxis
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import Mesh, ProcessGroups
from rorqual.parallel.p2p_memory import run_on_all_ranks
from rorqual.parallel.shared.slow_link import SlowLink
from rorqual.planner.costs.costs import BatchShape, Format, GroupWork
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.request import SamplingParams
from tests.layers.weight_format.wide_rows import wide_rows
from tests.parallel.driver import CPU, RankDriver, schedule, split, tokens_of
from tests.parallel.lockstep import (
    Lockstep,
    Member,
    Results,
    Settings,
    make_runner,
    make_transformer,
)

TIE = 1e-4
Forms = tuple[str, str]
DEFAULT_FORMS = ("CC", "A_CC_ME")


@cache
def groups() -> ProcessGroups:
    return ProcessGroups()


def mesh_of(sizes: dict[str, Any], world: int) -> Mesh:
    """Over the first `world` ranks, or, for a rank beyond them, over as many others: every
    process makes equally many groups."""
    first = dist.get_rank() // world * world if dist.is_initialized() else 0
    mesh = Mesh.of(ParallelConfig(**sizes), range(first, first + world), groups())
    for axis in mesh.axes.values():
        axis.traffic.reset()
    return mesh


def idle(world: int, sizes: dict[str, Any], **_: Any) -> None:
    """What ranks beyond `world` do meanwhile."""
    mesh_of(sizes, world)


def slot_maps(config: ModelConfig, sizes: dict[str, Any]) -> dict[int, SlotMap]:
    """Of each layer another one, where experts have copies: the hot experts are the layer's own."""
    parallel = ParallelConfig(**sizes)
    if not parallel.redundant_experts:
        return {}
    experts = config.moe.num_experts
    layers = config.num_layers + config.num_mtp_layers
    loads = np.random.default_rng(0).lognormal(0, 1, (layers, experts))
    rows = place(loads, parallel.expert_slots(experts), parallel.ep).tolist()
    return {layer: SlotMap(tuple(row), experts) for layer, row in enumerate(rows)}


def model_of(
    sizes: dict[str, Any],
    world: int,
    folder: str,
    forms: Forms = DEFAULT_FORMS,
    seed: int | None = None,
    fixed_experts: bool = False,
) -> Transformer:
    config = read_config_file(folder)
    if fixed_experts:
        check_fixed_experts(config, ParallelConfig(**sizes))
    model = make_model(
        config,
        Build(
            CpuOps(),
            torch.float32,
            CPU,
            config.quant,
            mesh=mesh_of(sizes, world),
            slot_maps=slot_maps(config, sizes),
            fixed_experts=fixed_experts,
        ),
        256,
        *forms,
    )
    load_weights(model, Path(folder)) if seed is None else random_weights(model, seed)
    return model


class NotedLink(SlowLink):
    """Counts bytes and delays nothing."""

    def __init__(self) -> None:
        self.bytes = 0

    def join(self, axis: GroupAxis, stop: Callable[[torch.device], Tensor]) -> None:
        pass

    def carry(
        self, send: Callable[[], Arriving], count: int, axis: str = "", ready: Tensor | None = None
    ) -> Arriving:
        self.bytes += count
        return send()


def traffic(mesh: Mesh) -> dict[str, dict[str, int]]:
    found = {
        name: {call: count for call, count in axis.traffic.bytes.items() if count}
        for name, axis in mesh.axes.items()
    }
    return {name: calls for name, calls in found.items() if calls}


def compare(
    world: int,
    sizes: dict[str, Any],
    folder: str,
    answers: str,
    prompts: list[int],
    lengths: list[int],
    way: str = "straight",
    forms: Forms = DEFAULT_FORMS,
    seed: int | None = None,
    peers: str = "",
    fixed_experts: bool = False,
) -> dict[str, Any]:
    """Walk through the schedule and compare with the logits of one process: the largest
    difference, greedy tokens that differ beyond a tie, and how many positions were compared
    here. peers: a folder for memory that the ranks share, taken by steps of few rows."""
    known = load_file(answers)
    model = model_of(sizes, world, folder, forms, seed, fixed_experts)
    shared = None
    taking = ""
    if peers:
        from tests.parallel import p2p_jobs

        config = model.config
        taking = p2p_jobs.attach(
            model.mesh, config.moe, peers, 4, config.hidden_size, torch.float32, 2
        )
        shared = p2p_jobs.peers_of(model.mesh, config.moe)
    driver = RankDriver(model, len(prompts), max(lengths))
    worst = 0.0
    differ = 0
    positions = 0
    for turn in schedule(lengths, prompts):
        for (request, position), logits in driver.turn(
            known["ids"], turn, model.mesh.sizes.micro_batches, way
        ).items():
            want = known["logits"][request, position]
            worst = max(worst, float((logits - want).abs().max()))
            differ += bool(logits.argmax() != want.argmax()) and bool(
                want.topk(2).values.diff().abs() > TIE
            )
            positions += 1
    taken = int(sum(buffer.totals[0] for buffer in shared.buffers)) if shared else 0
    return {
        "worst": worst,
        "differ": differ,
        "positions": positions,
        "traffic": traffic(model.mesh),
        "taken": taken,
        "way": taking,
    }


def compare_unrounded(world: int, **given: Any) -> dict[str, Any]:
    """`compare` of products that take their rows as they are."""
    with pytest.MonkeyPatch.context() as patch:
        wide_rows(patch)
        return compare(world, **given)


def gather_twice(
    world: int,
    sizes: dict[str, Any],
    folder: str,
    prompts: list[int],
    lengths: list[int],
    seed: int | None = None,
) -> list[dict[str, Any]]:
    """Walk through the schedule twice, with rows gathered as the rule says, and all as they are:
    digests of the logits, bytes counted and expected, and calls with rows in fp8."""
    model = model_of(sizes, world, folder, seed=seed)
    mesh = model.mesh
    ids = torch.randint(
        model.config.vocab_size,
        (len(prompts), max(lengths)),
        generator=torch.Generator().manual_seed(2),
    )
    rule = exchange_gather.gathers_fp8
    found = []
    for wide in (False, True):
        for axis in mesh.axes.values():
            axis.traffic.reset()
        driver = RankDriver(model, len(prompts), max(lengths))
        digest = hashlib.sha256()
        expected: dict[str, dict[str, int]] = {}
        chosen: list[bool] = []

        def noted(*given: Any, wide: bool = wide, chosen: list[bool] = chosen) -> bool:
            chosen.append(not wide and rule(*given))
            return chosen[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange_gather, "gathers_fp8", noted)
            patch.setattr(comm_volume, "gathers_fp8", lambda *given, w=wide: not w and rule(*given))
            for turn in schedule(lengths, prompts):
                for _, logits in sorted(driver.turn(ids, turn, 1, "straight").items()):
                    digest.update(logits.numpy().tobytes())
                tokens = tokens_of(turn, driver.home, mesh.sizes.dp)
                add_messages(expected, model, tokens, turn.decode)
        found.append(
            {
                "logits": digest.hexdigest(),
                "counted": traffic(mesh),
                "expected": expected,
                "in fp8": sum(chosen),
                "calls": len(chosen),
            }
        )
    return found


def predict(
    world: int, sizes: dict[str, Any], folder: str, prompts: list[int], lengths: list[int]
) -> dict[str, list[float]]:
    """Logits of the prediction module by "request,position", random weights."""
    config = read_config_file(folder)
    maps = slot_maps(config, sizes)
    build = Build(CpuOps(), torch.float32, CPU, mesh=mesh_of(sizes, world), slot_maps=maps)
    model = make_model(config, build, 256, with_mtp=True)
    random_weights(model, 0)
    driver = RankDriver(model, len(prompts), max(lengths))
    found = {}
    ids = torch.randint(
        config.vocab_size,
        (len(prompts), max(lengths) + 1),
        generator=torch.Generator().manual_seed(2),
    )
    for turn in schedule(lengths, prompts):
        found.update(
            {f"{i},{p}": logits.tolist() for (i, p), logits in driver.predict(ids, turn).items()}
        )
        model.mesh.pp.flush()
    return found


def count_bytes(
    world: int, sizes: dict[str, Any], folder: str, prompts: list[int], lengths: list[int]
) -> dict[str, Any]:
    """The counters of a whole schedule, what messages.py expects of them, what the planner says
    of the first rank, and how many calls there were."""
    model = model_of(sizes, world, folder, seed=0)
    mesh = model.mesh
    link = NotedLink()
    mesh.slow_down(link)
    driver = RankDriver(model, len(prompts), max(lengths))
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    expected = {}
    step = {}
    for turn in schedule(lengths, prompts):
        driver.turn(ids, turn, mesh.sizes.micro_batches, "chain")
        for part in split(turn, mesh.sizes.micro_batches):
            tokens = tokens_of(part, driver.home, mesh.sizes.dp)
            add_messages(expected, model, tokens, turn.decode)
            batch = BatchShape(1, tokens[0], logits=tokens[0])
            work = GroupWork(
                batch if turn.decode else None, () if turn.decode else (batch,), sum(tokens)
            )
            messages = rank_step(model.config, mesh.sizes, work, Format("float32")).messages
            add(
                step,
                (
                    (message.axis, message.kind, message.wire_bytes * message.layers)
                    for message in messages
                ),
            )
    calls = sum(sum(axis.traffic.calls.values()) for axis in mesh.axes.values())
    return {
        "counted": traffic(mesh),
        "expected": expected,
        "planned": step,
        "calls": calls,
        "carried": link.bytes,
    }


def add(sums: dict[str, dict[str, int]], found: Iterable[tuple[str, str, int]]) -> None:
    for axis, call, value in found:
        calls = sums.setdefault(axis, {})
        calls[call] = calls.get(call, 0) + value


def add_messages(
    sums: dict[str, dict[str, int]], model: Transformer, tokens: tuple[int, ...], decode: bool
) -> None:
    """What a step of these tokens of each data-parallel rank should send."""
    mesh = model.mesh
    sent = step_messages(model.config, mesh.sizes, mesh.rank, tokens, decode, itemsize=4)
    add(sums, ((axis, call, n) for axis, calls in sent.items() for call, n in calls.items()))


def gathered(mesh: Mesh, layout: Layout, y: Tensor) -> Tensor:
    """What an exchange returns, to the complete sums of this data-parallel rank's tokens."""
    return mesh.tp.all_gather(y, layout.counts) if layout.sharded else mesh.tp.all_reduce(y)


@torch.inference_mode()
def exchange(
    world: int,
    sizes: dict[str, Any],
    tokens: list[int],
    routing: str,
    slots: list[int] | None = None,
    decode: bool = True,
    steps: int = 1,
) -> dict[str, Any]:
    """One layer's exchange against all experts on one device. routing: `spread`, or `first`: all
    tokens want the first experts."""
    mesh = mesh_of(sizes, world)
    hidden = 256
    size = 32
    experts = 8
    top_k = 3
    moe = MoEConfig(experts, top_k, size)
    slot_map = SlotMap(tuple(slots), experts) if slots else SlotMap.identity(experts)
    generator = torch.Generator().manual_seed(3)
    up = torch.randn(experts, 2 * size, hidden, generator=generator) / 16
    down = torch.randn(experts, hidden, size, generator=generator) / 6
    held = [slot_map.physical_to_logical[slot] for slot in slot_map.local(mesh.axes["ep"].shard)]
    columns = slice(*mesh.axes["expert_tp"].shard.span(size))
    gate_up = Weight(
        torch.cat((up[held, :size][:, columns], up[held, size:][:, columns]), 1).contiguous()
    )
    ops = CpuOps()
    store = ExpertStore(
        slot_map,
        ExpertWeights(gate_up, Weight(down[held][:, :, columns].contiguous())),
        ops.experts,
        CPU,
        mesh.axes["ep"].shard,
        ops.experts_fp8,
    )
    made = make_exchange(mesh.sizes, moe, store)
    made.record_load = True
    worst = 0.0
    rows = 0
    for step in range(steps):
        layout = mesh.layout(tokens, decode, moe)
        generator.manual_seed(100 * step + mesh.dp_rank)
        x = torch.randn(tokens[mesh.dp_rank], hidden, generator=generator)
        ids = torch.rand(len(x), experts, generator=generator).topk(top_k).indices
        ids = torch.arange(top_k).expand(len(x), -1).contiguous() if routing == "first" else ids
        weights = torch.rand(len(x), top_k, generator=generator)
        ticket = made.dispatch(*(layout.enter(part) for part in (x, ids, weights)), layout)
        if made.counts_first(layout):
            made.send(ticket)
        made.run_experts(ticket)
        y = gathered(mesh, layout, made.combine(ticket))
        if len(x):
            want = ops.experts(x, ids, weights, ExpertWeights(Weight(up), Weight(down)))
            worst = max(worst, float((y - want).abs().max() / want.abs().max()))
            rows = rows + len(x)
    return {
        "worst": worst,
        "rows": rows,
        "load": made.load.tolist(),
        "capturable": made.capturable,
        "traffic": traffic(mesh),
    }


class Doubling:
    """Stands for a fused kernel that takes messages of one row."""

    def takes(self, x: Tensor, residual: Tensor | None) -> bool:
        return x.shape[0] == 1

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return 2 * x, 2 * x


def collectives(world: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Every call of an axis with uneven rows, zero rows included; ranks send their own number."""
    axis = mesh_of(sizes, world).stage
    rank = axis.rank
    counts = [(3 * r) % 4 for r in range(world)]
    mine = torch.full((counts[rank], 2), float(rank))
    total = torch.arange(2.0 * sum(counts)).view(-1, 2)
    start = sum(counts[:rank])
    send = [r + 1 for r in range(world)]
    uneven = axis.all_to_all(torch.full((sum(send), 1), float(rank)), send, [rank + 1] * world)
    blocks = axis.all_to_all_fixed(torch.arange(world).view(world, 1) * 10 + rank)
    columns = axis.all_gather_columns(
        torch.full((2, 1 + rank % 2), float(rank)), [1 + r % 2 for r in range(world)]
    )
    weight = torch.ones(2)
    plain = axis.add_norm(torch.ones(1, 2), torch.ones(1, 2), weight, 0.0, reference.add_norm)
    axis.fused = Doubling()
    fused = [
        axis.add_norm(x, torch.ones(1, 2), weight, 0.0, reference.add_norm)
        for x in (torch.ones(1, 2), torch.ones(9, 2))
    ]
    axis.fused = None
    payload = torch.full((world, 1), rank + 1.0).to(torch.float8_e4m3fn)
    fp8 = axis.all_to_all_fixed(payload).float().flatten().tolist()
    axis.send(torch.tensor([rank]), (rank + 1) % world)
    got = axis.receive((1,), torch.int64, CPU, (rank - 1) % world).wait()
    axis.flush()
    return {
        "sum": axis.all_reduce(torch.tensor([float(rank + 1)])).item() == world * (world + 1) / 2,
        "scatter": torch.equal(
            axis.reduce_scatter(total.clone(), counts), world * total[start : start + counts[rank]]
        ),
        "even scatter": torch.equal(
            axis.reduce_scatter(torch.ones(2 * world, 3)), torch.full((2, 3), float(world))
        ),
        "gather": axis.all_gather(mine, counts)[:, 0].tolist()
        == [float(r) for r, count in enumerate(counts) for _ in range(count)],
        "to all": uneven.flatten().tolist()
        == [float(r) for r in range(world) for _ in range(rank + 1)],
        "to all fixed": blocks.flatten().tolist() == [10 * rank + r for r in range(world)],
        "add norm": plain[1].tolist() == [[world + 1.0] * 2]
        and torch.equal(plain[0], weight[None]),
        "fused": fused[0][1].tolist() == [[2.0] * 2]
        and fused[1][1].tolist() == [[world + 1.0] * 2] * 9,
        "columns": columns[1].tolist()
        == [float(r) for r in range(world) for _ in range(1 + r % 2)],
        "fp8": fp8 == [r + 1.0 for r in range(world)],
        "broadcast": axis.start_broadcast(torch.tensor([rank]), 1).wait().item() == 1,
        "ring": got.item() == (rank - 1) % world,
    }


def kept_names(
    world: int, sizes: dict[str, Any], names: list[list[str] | None]
) -> tuple[bool, list[str]]:
    """names: of each rank."""
    mesh = mesh_of(sizes, world)
    own = names[mesh.rank]
    place = mesh.axes["stage"], CPU
    return kernels_ahead.agreed(own, *place), kernels_ahead.of_all_ranks(own or [], *place)


def refused(world: int, sizes: dict[str, Any], failing: list[int]) -> str:
    axis = mesh_of(sizes, world).tp
    assert isinstance(axis, GroupAxis)

    def make() -> None:
        if axis.rank in failing:
            raise RuntimeError("no permission\nand more")

    try:
        run_on_all_ranks(axis, make, CPU)
    except RuntimeError as error:
        return str(error)
    return ""


def fused_all_reduce(
    world: int, sizes: dict[str, Any], folder: str, rows: list[int], two_shot: list[bool]
) -> tuple[float, str]:
    """Calls of the fused kernel over buffers in shared files; returns the largest error and a
    digest of all results."""
    import tests.emulation.triton_interpreter  # noqa: F401  asks for the interpreter before kernels are defined
    from rorqual.ops.triton.comm.all_reduce_norm import all_reduce_norm, buffer_bytes

    axis = mesh_of(sizes, world).tp
    columns = 48
    most = max(rows)
    size = buffer_bytes(most, columns, world, 4)
    mine = torch.from_file(f"{folder}/{axis.rank}", shared=True, size=size, dtype=torch.uint8)
    mine.zero_()
    axis.all_reduce(torch.ones(1))  # every file is there
    buffers = [
        torch.from_file(f"{folder}/{rank}", shared=True, size=size, dtype=torch.uint8)
        for rank in range(world)
    ]
    stop = torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([memory.data_ptr() for memory in (*buffers, stop)])
    epochs = torch.zeros(most, dtype=torch.int32)
    weight = torch.rand(columns, generator=torch.Generator().manual_seed(1))
    worst = 0.0
    digest = hashlib.sha256()
    for call, (count, shots) in enumerate(zip(rows, two_shot, strict=True)):
        parts = torch.randn(world, count, columns, generator=torch.Generator().manual_seed(call))
        residual = torch.randn(count, columns, generator=torch.Generator().manual_seed(99 + call))
        time.sleep(0.02 * ((axis.rank + call) % world))
        normed, total = all_reduce_norm(
            table, epochs, axis.rank, parts[axis.rank].clone(), residual, weight, 1e-6, shots
        )
        want = reference.add_norm(parts.sum(0), residual, weight, 1e-6)
        worst = max(
            worst, *(float((a - b).abs().max()) for a, b in zip((normed, total), want, strict=True))
        )
        digest.update(normed.numpy().tobytes() + total.numpy().tobytes())
    axis.all_reduce(torch.ones(1))
    return worst, digest.hexdigest()


class OverProcesses(Lockstep):
    """One rank of them in this process, with the scheduler of all."""

    def gather(self, results: Results) -> Results:
        found: list[Any] = [None] * self.sizes.world
        group = self.members[0].runner.model.mesh.stage.group
        dist.all_gather_object(found, results, group=group)
        return {rank: result for part in found for rank, result in part.items()}


def in_step(
    world: int,
    sizes: dict[str, Any],
    folder: str,
    settings: dict[str, Any],
    arrivals: list[tuple[int, int, int, SamplingParams]],
) -> dict[str, list[int]]:
    """The tokens of each request; see Lockstep.run."""
    config = read_config_file(folder)
    given = Settings(**settings)
    model = make_transformer(config, mesh_of(sizes, world), given)
    load_weights(model, Path(folder))
    member = Member(make_runner(model, given), [], {})
    scheduler = DataParallelScheduler(given.scheduler(config), model.mesh.sizes.dp)
    loop = OverProcesses([member], model.mesh.sizes, scheduler, given)
    loop.run(arrivals)
    return loop.tokens


def peer_exchange(world: int, sizes: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    from tests.parallel import p2p_jobs

    return p2p_jobs.compare(mesh_of(sizes, world), **arguments)


def comm_rows(
    world: int, sizes: dict[str, Any], setup: dict[str, Any], peers: str = ""
) -> list[dict[str, Any]]:
    if not peers:
        return [asdict(row) for row in comm.measure(comm.CommSetup(**setup))]
    from tests.parallel import p2p_jobs

    return [asdict(row) for row in comm.measure(comm.CommSetup(**setup), p2p_jobs.sharing(peers))]
