"""Cases of rorqual.bench.kernels.run: attention, decode and prefill.

A time is the median over replays of one CUDA graph that calls the kernel over rotated data (more
than 200 MB in all), so nothing is found in L2. The schedule of a step is made outside the graph:
one serves all layers. Error is |out - reference| / |reference| in the Frobenius norm, against fp64,
over some of the requests. Tuning times the configuration in use and every entry of `configs_for`,
and keeps the fastest that is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rorqual.bench.kernels import vllm_kernels as peers
from rorqual.ops import reference
from rorqual.ops.triton.attention import gqa_decode as gqa
from rorqual.ops.triton.attention import latent_fp8, prefill
from rorqual.ops.triton.attention import mla_decode as mla
from rorqual.ops.triton.runtime import tuning

BANDWIDTH = 4.3e12  # bytes a second, an H200's copy rate
BF16_RATE = 735e12  # FLOP/s of an 8192^3 product on random data
ROTATE = 220e6  # bytes of data that calls of one graph go through
PAGE = 64
CHECKED = 3  # requests that --check computes anew
KERNELS = {
    "mla": "mla_decode",
    "mla fp8": "mla_decode",
    "gqa": "gqa_decode",
    "gqa fp8": "gqa_decode",
    "gqa int8": "gqa_decode",
    "prefill": "prefill",
    "prefill paged": "prefill",
}
Call = Callable[[Any], Tensor]  # takes a Config


@dataclass
class AttentionSetup:
    """Calls over rotated data, all into `out`, and how to judge the first one's output. configs:
    the one in use, then others to try; shape: what a tuned one is stored under. peers: by name,
    what makes another library's call over the same data."""

    out: Tensor
    calls: list[Call]
    configs: list[Any]
    error: Callable[[Tensor], float]
    shape: dict[str, Any]
    peers: Mapping[str, Callable[[], peers.Call]] = field(default_factory=dict)


@dataclass
class AttentionCase:
    """One line of the table. peer: microseconds of the best peer on an H200 (anchors/README.md),
    None if not measured."""

    kernel: str
    shape: str
    bytes: float
    flops: float
    setup: Callable[[torch.device], AttentionSetup]
    peer: float | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        return max(self.bytes / BANDWIDTH, self.flops / BF16_RATE) * 1e6


def lengths(requests: int, longest: int, mixed: bool) -> list[int]:
    """All equal; or, mixed, spread between 0 and the longest, one of each extreme."""
    if not mixed:
        return [longest] * requests
    spread = torch.randint(
        1, longest, (requests,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    return [longest, 0, *spread[2:]]


def sizes_near(requests: int, longest: int) -> dict[str, Any]:
    return {"requests": tuning.near(requests), "kv": tuning.near(longest)}


def copies_of(size: float) -> int:
    return max(1, min(64, int(-(-ROTATE // size))))


def block_tables(copies: int, requests: int, longest: int, device: torch.device) -> Tensor:
    columns = -(-longest // PAGE)
    return (
        (1 + torch.randperm(copies * requests * columns, device=device))
        .int()
        .view(copies, requests, columns)
    )


def relative(out: list[Tensor], expected: list[Tensor]) -> float:
    x = torch.cat([t.flatten() for t in out]).double()
    y = torch.cat([t.flatten() for t in expected])
    return ((x - y).norm() / y.norm()).item() if x.isfinite().all() else float("nan")


MAX_SCORES = 1 << 24  # fp64 scores held at once


def exact_entries(rows: Tensor) -> Tensor:
    """Rows [n, 656] of an fp8 cache as entries [n, 576] in fp64, rounded nowhere."""
    latent, scales, rope = reference.latent_parts(rows, 512, torch.bfloat16)
    return torch.cat(
        (latent.double() * scales.double().repeat_interleave(128, 1), rope.double()), 1
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """fp64 attention of one request, bottom-right causal: q [Q, H, D], k [L, G, D], v [L, G,
    Dv]."""
    queries, heads = q.shape[:2]
    length, groups = k.shape[:2]
    if not length:
        return torch.zeros(queries, heads, v.shape[2], dtype=torch.float64, device=q.device)
    hidden = torch.ones(queries, length, dtype=torch.bool, device=q.device).triu(
        length - queries + 1
    )
    some = max(1, MAX_SCORES // (queries * length))  # heads at once
    out = []
    for group, own in enumerate(q.transpose(0, 1).split(heads // groups)):
        keys = k[:, group].double().T
        values = v[:, group].double()
        for part in own.split(some):
            scores = part.double() @ keys * scale
            out.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values)
    return torch.cat(out).transpose(0, 1)


def shape_name(requests: int, longest: int, heads: str, queries: int, mixed: bool) -> str:
    return (
        f"B{requests} S{longest}{heads}"
        + (f" q{queries}" if queries > 1 else "")
        + (" mixed" if mixed else "")
    )


def unwritten(*shape: int, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=torch.bfloat16)


def some_requests(requests: int) -> range:
    """Those that --check computes anew."""
    return range(0, requests, max(1, requests // CHECKED))


@dataclass(frozen=True)
class MlaShape:
    requests: int
    longest: int
    heads: int
    queries: int
    fp8: bool
    mixed: bool

    @property
    def lens(self) -> list[int]:
        return lengths(self.requests, self.longest, self.mixed)

    @property
    def moved(self) -> int:
        row = 656 if self.fp8 else 1152
        each = self.heads * (512 + 64 + 512) * 2
        return sum(self.lens) * row + self.requests * self.queries * each


class MlaSetup:
    """The data of a case, and calls over it."""

    def __init__(self, shape: MlaShape, device: torch.device):
        self.shape = shape
        self.lens = shape.lens
        self.scale = 192**-0.5
        self.copies = copies_of(shape.moved)
        tokens = shape.requests * shape.queries
        self.tables = block_tables(self.copies, shape.requests, shape.longest, device)
        values = torch.randn(
            self.tables.numel() + 1, PAGE, 576, device=device, dtype=torch.bfloat16
        )
        self.cache = fp8_cache(values) if shape.fp8 else values
        self.q_latent, self.q_rope = (
            torch.randn(
                self.copies, tokens, shape.heads, width, device=device, dtype=torch.bfloat16
            )
            for width in (512, 64)
        )
        self.kv_lens = torch.tensor(self.lens, device=device)
        self.out = unwritten(tokens, shape.heads, 512, device=device)
        self.plans: dict[Any, Any] = {}

    def call(self, i: int, config: Any) -> Tensor:
        shape = self.shape
        if config not in self.plans:
            self.plans[config] = mla.mla_plan(
                self.kv_lens, shape.longest, shape.queries, shape.heads, 512, config
            )
        return mla.mla_decode(
            self.q_latent[i],
            self.q_rope[i],
            self.cache,
            self.tables[i],
            self.kv_lens,
            self.scale,
            shape.longest,
            self.plans[config],
            self.out,
            config,
        )

    def error(self, got: Tensor) -> float:
        queries = self.shape.queries
        some = some_requests(self.shape.requests)
        expected = []
        for r in some:
            entries = self.cache[self.tables[0, r].long()].flatten(0, 1)[: self.lens[r]]
            entries = (exact_entries(entries) if self.shape.fp8 else entries)[:, None]
            at = slice(r * queries, (r + 1) * queries)
            q = torch.cat((self.q_latent[0, at], self.q_rope[0, at]), -1)
            expected.append(attend(q, entries, entries[..., :512], self.scale))
        return relative([got[r * queries : (r + 1) * queries] for r in some], expected)

    def setup(self) -> AttentionSetup:
        shape = self.shape
        rows = shape.queries * shape.heads
        configs = [
            mla.config_for(self.q_latent, rows, self.cache.dtype, shape.requests, shape.longest),
            *mla.configs_for(rows, self.q_latent.dtype, shape.fp8),
        ]
        data = (self.q_latent, self.q_rope, self.cache, self.tables, self.kv_lens, self.scale)
        others = {}
        if shape.queries == 1 and not shape.fp8 and not shape.mixed:
            others = {
                "FlashMLA": partial(peers.flash_mla, *data),
                "FA3": partial(peers.fa3_mla, *data),
            }
        named = {"dtype": "bfloat16", "cache": "fp8" if shape.fp8 else "plain", "rows": rows}
        return AttentionSetup(
            self.out,
            [partial(self.call, i) for i in range(self.copies)],
            configs,
            self.error,
            {**named, **sizes_near(shape.requests, shape.longest)},
            others,
        )


def fp8_cache(values: Tensor) -> Tensor:
    cache = torch.empty(*values.shape[:2], 656, device=values.device, dtype=torch.uint8)
    slots = torch.arange(cache.shape[0] * PAGE, device=values.device)
    latent_fp8.write(cache, slots, values.flatten(0, 1), 512)
    return cache


def mla_case(
    requests: int,
    longest: int,
    heads: int,
    queries: int = 1,
    fp8: bool = False,
    mixed: bool = False,
    peer: float | None = None,
) -> AttentionCase:
    shape = MlaShape(requests, longest, heads, queries, fp8, mixed)
    return AttentionCase(
        "mla fp8" if fp8 else "mla",
        shape_name(requests, longest, f" H{heads}", queries, mixed),
        shape.moved,
        2 * sum(shape.lens) * heads * queries * 1088,
        lambda device: MlaSetup(shape, device).setup(),
        peer,
    )


@dataclass(frozen=True)
class GqaShape:
    """held: the cache's dtype, uint8 for e4m3."""

    requests: int
    longest: int
    queries: int
    mixed: bool
    held: torch.dtype = torch.bfloat16
    heads: int = 32
    groups: int = 4
    width: int = 128

    @property
    def lens(self) -> list[int]:
        return lengths(self.requests, self.longest, self.mixed)

    @property
    def moved(self) -> int:
        rows = self.requests * self.queries * self.heads
        scale = 0 if self.held == torch.bfloat16 else 4
        entry = 2 * self.groups * (self.width * self.held.itemsize + scale)
        return sum(self.lens) * entry + rows * self.width * 4


class GqaSetup:
    """As MlaSetup."""

    def __init__(self, shape: GqaShape, device: torch.device):
        self.shape = shape
        self.lens = shape.lens
        self.scale = shape.width**-0.5
        self.copies = copies_of(shape.moved)
        tokens = shape.requests * shape.queries
        self.tables = block_tables(self.copies, shape.requests, shape.longest, device)
        pages = (self.tables.numel() + 1, PAGE, shape.groups, shape.width)
        self.k, self.v = (
            torch.randn(*pages, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self.held = (self.k, self.v)
        self.scales: Tensor | None = None
        if shape.held != torch.bfloat16:
            packed = [reference.pack_heads(x.flatten(0, 1), shape.held) for x in self.held]
            self.held = (packed[0][0].view(pages), packed[1][0].view(pages))
            self.scales = torch.stack([scale.view(pages[:3]) for _, scale in packed], -1)
            # what the kernel is compared with: the cache as it reads
            self.k, self.v = (reference.unpack_heads(*x, torch.float32).view(pages) for x in packed)
        rows = (tokens, shape.heads, shape.width)
        self.q = torch.randn(self.copies, *rows, device=device, dtype=torch.bfloat16)
        self.kv_lens = torch.tensor(self.lens, device=device)
        self.out = unwritten(*rows, device=device)
        self.plans: dict[Any, Any] = {}

    def call(self, i: int, config: Any) -> Tensor:
        shape = self.shape
        if config not in self.plans:
            sizes = (shape.longest, shape.queries, shape.heads, shape.groups, shape.width)
            self.plans[config] = gqa.gqa_plan(self.kv_lens, *sizes, config)
        return gqa.gqa_decode(
            self.q[i],
            *self.held,
            self.tables[i],
            self.kv_lens,
            self.scale,
            shape.longest,
            self.plans[config],
            self.out,
            config,
            self.scales,
        )

    def error(self, got: Tensor) -> float:
        queries = self.shape.queries
        some = some_requests(self.shape.requests)
        expected = []
        for r in some:
            keys, values = (
                x[self.tables[0, r].long()].flatten(0, 1)[: self.lens[r]] for x in (self.k, self.v)
            )
            at = slice(r * queries, (r + 1) * queries)
            expected.append(attend(self.q[0, at], keys, values, self.scale))
        return relative([got[r * queries : (r + 1) * queries] for r in some], expected)

    def setup(self) -> AttentionSetup:
        shape = self.shape
        configs = [
            gqa.config_for(self.q[0], self.held[0], shape.requests, shape.longest),
            *gqa.configs_for(shape.requests, shape.longest, self.q.dtype),
        ]
        named = {
            "dtype": "bfloat16",
            "cache": gqa.CACHES.get(shape.held, "plain"),
            "heads": shape.heads,
            "groups": shape.groups,
            "rows": shape.queries * shape.heads // shape.groups,
            "width": shape.width,
        }
        data = (self.q, self.k, self.v, self.tables, self.kv_lens, shape.queries, self.scale)
        return AttentionSetup(
            self.out,
            [partial(self.call, i) for i in range(self.copies)],
            configs,
            self.error,
            {**named, **sizes_near(shape.requests, shape.longest)},
            {"FA3": partial(peers.fa3_paged, *data)}
            if not shape.mixed and self.scales is None
            else {},
        )


def gqa_case(
    requests: int,
    longest: int,
    queries: int = 1,
    mixed: bool = False,
    peer: float | None = None,
    held: torch.dtype = torch.bfloat16,
) -> AttentionCase:
    shape = GqaShape(requests, longest, queries, mixed, held)
    return AttentionCase(
        " ".join(("gqa", gqa.CACHES.get(held, ""))).strip(),
        shape_name(requests, longest, "", queries, mixed),
        shape.moved,
        4 * sum(shape.lens) * shape.heads * queries * shape.width,
        lambda device: GqaSetup(shape, device).setup(),
        peer,
    )


@dataclass(frozen=True)
class PrefillShape:
    """widths: of keys and of values; paged: from the cache, else packed."""

    requests: int
    chunk: int
    prefix: int
    heads: int
    groups: int
    widths: tuple[int, int]
    paged: bool

    @property
    def length(self) -> int:
        return self.prefix + self.chunk

    @property
    def moved(self) -> float:
        rows = self.chunk * self.heads + self.length * self.groups
        return 2.0 * self.requests * rows * sum(self.widths)

    @property
    def flops(self) -> float:
        pairs = self.requests * self.chunk * (self.prefix + (self.chunk + 1) / 2)
        return 2 * pairs * self.heads * sum(self.widths)


class PrefillSetup:
    """As MlaSetup."""

    def __init__(self, shape: PrefillShape, device: torch.device):
        new = partial(torch.randn, device=device, dtype=torch.bfloat16)
        requests = shape.requests
        self.shape = shape
        self.scale = shape.widths[0] ** -0.5
        self.copies = copies_of(shape.moved)
        self.q = new(self.copies, requests * shape.chunk, shape.heads, shape.widths[0])
        self.query_starts = torch.arange(requests + 1, device=device) * shape.chunk
        self.key_starts = torch.arange(requests, device=device) * shape.length
        self.kv_lens = torch.full((requests,), shape.length, device=device)
        self.tables = block_tables(self.copies, requests, shape.length, device)
        self.k, self.v = (
            new(self.tables.numel() + 1, PAGE, shape.groups, width)
            if shape.paged
            else new(self.copies, requests * shape.length, shape.groups, width)
            for width in shape.widths
        )
        rows = (requests * shape.chunk, shape.heads, shape.widths[1])
        self.out = unwritten(*rows, device=device)

    def call(self, i: int, config: Any) -> Tensor:
        q = self.q[i]
        lens, chunk = self.kv_lens, self.shape.chunk
        if self.shape.paged:
            data = (q, self.k, self.v, self.tables[i], self.query_starts)
            return prefill.paged_prefill(*data, lens, chunk, self.scale, self.out, config)
        packed = (q, self.k[i], self.v[i], self.query_starts, self.key_starts)
        return prefill.dense_prefill(*packed, lens, chunk, self.scale, self.out, config)

    def error(self, got: Tensor) -> float:
        shape = self.shape
        r = shape.requests - 1
        own = self.tables[0, r].long()
        keys, values = (
            (x[own].flatten(0, 1) if shape.paged else x[0, r * shape.length :])[: shape.length]
            for x in (self.k, self.v)
        )
        at = slice(r * shape.chunk, (r + 1) * shape.chunk)
        few = [0, shape.heads - 1]
        groups_of = [h // (shape.heads // shape.groups) for h in few]
        expected = attend(
            self.q[0, at][:, few], keys[:, groups_of], values[:, groups_of], self.scale
        )
        return relative([got[at][:, few]], [expected])

    def setup(self) -> AttentionSetup:
        shape = self.shape
        (width, _) = shape.widths
        configs = [
            prefill.config_for(self.q[0], shape.groups, shape.paged, shape.chunk),
            *prefill.configs_for(width, self.q.dtype),
        ]
        named = {
            "dtype": "bfloat16",
            "heads": shape.heads,
            "groups": shape.groups,
            "width": width,
            "paged": shape.paged,
            "queries": tuning.near(shape.chunk),
        }
        data = (self.q, self.k, self.v)
        other = (
            partial(peers.fa3_paged, *data, self.tables, self.kv_lens, shape.chunk, self.scale)
            if shape.paged
            else partial(peers.fa3_dense, *data, shape.requests, self.scale)
        )
        return AttentionSetup(
            self.out,
            [partial(self.call, i) for i in range(self.copies)],
            configs,
            self.error,
            named,
            {"FA3": other},
        )


def prefill_case(
    requests: int,
    chunk: int,
    prefix: int,
    heads: int,
    groups: int,
    widths: tuple[int, int],
    paged: bool,
) -> AttentionCase:
    shape = PrefillShape(requests, chunk, prefix, heads, groups, widths, paged)
    return AttentionCase(
        "prefill paged" if paged else "prefill",
        f"R{requests} Q{chunk}+{prefix} H{heads}/{groups} {widths[0]}/{widths[1]}",
        shape.moved,
        shape.flops,
        lambda device: PrefillSetup(shape, device).setup(),
    )


def cases() -> list[AttentionCase]:
    return [
        mla_case(1, 4096, 128, peer=19.7),
        mla_case(1, 32768, 128, peer=52.3),
        mla_case(16, 4096, 128, peer=49.3),
        mla_case(128, 1024, 128, peer=84.3),
        mla_case(128, 4096, 128, peer=278.5),
        mla_case(64, 4096, 128, queries=2, mixed=True),
        mla_case(128, 1100, 128, queries=2),
        mla_case(128, 1100, 128, queries=4),
        mla_case(32, 1100, 128, queries=4),
        mla_case(1, 4096, 16, peer=29.1),
        mla_case(128, 4096, 16, peer=153.0),
        mla_case(128, 4096, 16, queries=2, peer=154.1),
        mla_case(1, 1024, 16),
        mla_case(8, 1024, 16),
        mla_case(64, 1024, 16),
        mla_case(256, 1024, 16),
        mla_case(64, 4096, 16, mixed=True),
        mla_case(128, 4096, 16, fp8=True),
        mla_case(128, 4096, 128, fp8=True),
        mla_case(1, 4096, 16, fp8=True),
        mla_case(128, 4096, 16, queries=2, fp8=True),
        mla_case(128, 4096, 16, queries=4, fp8=True),
        mla_case(64, 4096, 16, fp8=True, mixed=True),
        mla_case(16, 4096, 128, fp8=True),
        gqa_case(1, 1024, peer=12.2),
        gqa_case(1, 4096, peer=13.8),
        gqa_case(64, 1024, peer=44.0),
        gqa_case(256, 1024, peer=148.3),
        gqa_case(8, 1024),
        gqa_case(64, 4096, peer=132.4),
        gqa_case(64, 4096, queries=3, mixed=True),
        *(
            gqa_case(requests, longest, held=held)
            for held in gqa.CACHES
            for requests, longest in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 4096))
        ),
        prefill_case(1, 4096, 0, 128, 128, (192, 128), False),
        prefill_case(4, 1024, 0, 128, 128, (192, 128), False),
        prefill_case(1, 1024, 7168, 128, 128, (192, 128), False),
        prefill_case(1, 4096, 0, 32, 4, (128, 128), True),
        prefill_case(8, 1024, 1024, 32, 4, (128, 128), True),
    ]


def time_graph(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Median microseconds of one call. The calls are captured in turn in one graph; the last
    warm-up replay is thrown away."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks[1:]))
    return times[len(times) // 2] * 1e3 / len(calls)


def measure(setup: AttentionSetup, config: Any) -> float:
    calls = [partial(call, config) for call in setup.calls]
    return time_graph(calls * max(1, -(-4 // len(calls))))


def measure_peers(setup: AttentionSetup, check: bool) -> dict[str, Any]:
    """Over the same data, in the same way: see vllm_kernels.best."""

    def one(make: Callable[[], peers.Call]) -> tuple[float, float | None]:
        call = make()
        error = setup.error(call(0)) if check else None
        calls = [partial(call, i) for i in range(len(setup.calls))]
        return time_graph(calls * max(1, -(-4 // len(calls)))), error

    return peers.best(setup.peers, one)


def run_case(
    case: AttentionCase, device: torch.device, check: bool, tune: bool, peer: bool = False
) -> None:
    """Fills case.measured: us, error, config, (tune) trials, a list of (us or message, config),
    and (peer) what vllm_kernels.best says."""
    setup = case.setup(device)
    trials: list[tuple[float, Any]] = []
    failures: list[tuple[str, Any]] = []
    for config in dict.fromkeys(setup.configs) if tune else setup.configs[:1]:
        try:
            setup.out.fill_(float("nan"))
            error = setup.error(setup.calls[0](config)) if check or tune else None
            trials.append((measure(setup, config), config))
            if error is not None and not error < 2e-2:
                failures.append((f"error {error:.1e}", trials.pop()[1]))
            elif len(trials) == 1 or trials[-1][0] < case.measured["us"]:
                case.measured.update(us=trials[-1][0], config=config, error=error)
        except Exception as problem:
            if "CUDA error" in str(problem):
                raise
            failures.append(
                (" ".join(f"{type(problem).__name__}: {problem}".split())[:200], config)
            )
    case.measured.update(trials=sorted(trials, key=lambda t: t[0]), failures=failures)
    if peer:
        case.measured.update(measure_peers(setup, check))
    card = tuning.card_of(device)
    if tune and trials and card is not None:
        tuning.store(
            card, KERNELS[case.kernel], setup.shape, case.measured["config"], case.measured["us"]
        )


def rows(
    device: torch.device,
    check: bool = False,
    tune: bool = False,
    only: str = "",
    peer: bool = False,
) -> Iterator[dict[str, Any]]:
    """One dictionary a case: kernel, us, gb_s, tflop_s, floor_us, peer_us, error, config,
    trials, failures."""
    wanted = [word for word in only.split(",") if word]
    for case in cases():
        name = f"{case.kernel} {case.shape}"
        if wanted and not any(word in name + "$" for word in wanted):
            continue
        torch.manual_seed(0)
        run_case(case, device, check, tune, peer)
        us = case.measured.get("us")
        yield {
            "kernel": name,
            "us": us,
            "gb_s": us and case.bytes / us / 1e3,
            "tflop_s": us and case.flops / us / 1e6,
            "floor_us": case.floor,
            "peer_us": case.peer,
            **case.measured,
        }
        torch.cuda.empty_cache()


def short(config: Any) -> str:
    return (
        ",".join(str(int(v)) if isinstance(v, bool) else str(v) for v in vars(config).values())
        if config is not None
        else "-"
    )
