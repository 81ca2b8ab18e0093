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


def exact_entries(rows: Tensor) -> Tensor:
    """Rows [n, 656] of an fp8 cache as entries [n, 576] in fp64, rounded nowhere."""
    latent, scales, rope = reference.latent_parts(rows, 512, torch.bfloat16)
    return torch.cat(
        (latent.double() * scales.double().repeat_interleave(128, 1), rope.double()), 1
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """fp64 attention of one request, bottom-right causal: q [Q, H, D], k [L, G, D], v [L, G,
    Dv]."""
    queries = q.shape[0]
    length = k.shape[0]
    share = q.shape[1] // k.shape[1]
    out = []
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // share].double().T * scale
        hidden = torch.ones(queries, length, dtype=torch.bool, device=q.device).triu(
            length - queries + 1
        )
        out.append(
            scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, head // share].double()
        )
    return (
        torch.stack(out, 1)
        if length
        else torch.zeros(queries, q.shape[1], v.shape[2], dtype=torch.float64, device=q.device)
    )


def mla_case(
    requests: int,
    longest: int,
    heads: int,
    queries: int = 1,
    fp8: bool = False,
    mixed: bool = False,
    peer: float | None = None,
) -> AttentionCase:
    lens = lengths(requests, longest, mixed)
    row = 656 if fp8 else 1152
    scale = 192**-0.5
    moved = sum(lens) * row + requests * queries * heads * (512 + 64 + 512) * 2

    def setup(device: torch.device) -> AttentionSetup:
        copies = copies_of(moved)
        tokens = requests * queries
        tables = block_tables(copies, requests, longest, device)
        values = torch.randn(tables.numel() + 1, PAGE, 576, device=device, dtype=torch.bfloat16)
        cache = values
        if fp8:
            cache = torch.empty(*values.shape[:2], 656, device=device, dtype=torch.uint8)
            latent_fp8.write(
                cache, torch.arange(cache.shape[0] * PAGE, device=device), values.flatten(0, 1), 512
            )
            del values
        q_latent = torch.randn(copies, tokens, heads, 512, device=device, dtype=torch.bfloat16)
        q_rope = torch.randn(copies, tokens, heads, 64, device=device, dtype=torch.bfloat16)
        kv_lens = torch.tensor(lens, device=device)
        out = torch.full((tokens, heads, 512), float("nan"), device=device, dtype=torch.bfloat16)
        plans: dict[Any, Any] = {}

        def call(i: int, config: Any) -> Tensor:
            if config not in plans:
                plans[config] = mla.mla_plan(kv_lens, longest, queries, heads, 512, config)
            return mla.mla_decode(
                q_latent[i],
                q_rope[i],
                cache,
                tables[i],
                kv_lens,
                scale,
                longest,
                plans[config],
                out,
                config,
            )

        def error(got: Tensor) -> float:
            some = range(0, requests, max(1, requests // CHECKED))
            expected = []
            for r in some:
                entries = cache[tables[0, r].long()].flatten(0, 1)[: lens[r]]
                entries = (exact_entries(entries) if fp8 else entries)[:, None]
                at = slice(r * queries, (r + 1) * queries)
                expected.append(
                    attend(
                        torch.cat((q_latent[0, at], q_rope[0, at]), -1),
                        entries,
                        entries[..., :512],
                        scale,
                    )
                )
            return relative([got[r * queries : (r + 1) * queries] for r in some], expected)

        configs = [
            mla.config_for(q_latent, queries * heads, fp8, requests, longest),
            *mla.configs_for(queries * heads, q_latent.dtype, fp8),
        ]
        shape = {"dtype": "bfloat16", "cache": "fp8" if fp8 else "plain", "rows": queries * heads}
        data = (q_latent, q_rope, cache, tables, kv_lens, scale)
        others = {}
        if queries == 1 and not fp8 and not mixed:
            others = {
                "FlashMLA": partial(peers.flash_mla, *data),
                "FA3": partial(peers.fa3_mla, *data),
            }
        return AttentionSetup(
            out,
            [partial(call, i) for i in range(copies)],
            configs,
            error,
            {**shape, **sizes_near(requests, longest)},
            others,
        )

    name = (
        f"B{requests} S{longest} H{heads}"
        + (f" q{queries}" if queries > 1 else "")
        + (" mixed" if mixed else "")
    )
    return AttentionCase(
        "mla fp8" if fp8 else "mla",
        name,
        moved,
        2 * sum(lens) * heads * queries * 1088,
        setup,
        peer,
    )


def gqa_case(
    requests: int, longest: int, queries: int = 1, mixed: bool = False, peer: float | None = None
) -> AttentionCase:
    heads = 32
    groups = 4
    width = 128
    lens = lengths(requests, longest, mixed)
    moved = sum(lens) * 2 * groups * width * 2 + requests * queries * heads * width * 4

    def setup(device: torch.device) -> AttentionSetup:
        copies = copies_of(moved)
        tokens = requests * queries
        tables = block_tables(copies, requests, longest, device)
        k, v = (
            torch.randn(
                tables.numel() + 1, PAGE, groups, width, device=device, dtype=torch.bfloat16
            )
            for _ in range(2)
        )
        q = torch.randn(copies, tokens, heads, width, device=device, dtype=torch.bfloat16)
        kv_lens = torch.tensor(lens, device=device)
        out = torch.full((tokens, heads, width), float("nan"), device=device, dtype=torch.bfloat16)
        plans: dict[Any, Any] = {}

        def call(i: int, config: Any) -> Tensor:
            if config not in plans:
                plans[config] = gqa.gqa_plan(
                    kv_lens, longest, queries, heads, groups, width, config
                )
            return gqa.gqa_decode(
                q[i], k, v, tables[i], kv_lens, width**-0.5, longest, plans[config], out, config
            )

        def error(got: Tensor) -> float:
            some = range(0, requests, max(1, requests // CHECKED))
            expected = []
            for r in some:
                keys, values = (x[tables[0, r].long()].flatten(0, 1)[: lens[r]] for x in (k, v))
                expected.append(
                    attend(q[0, r * queries : (r + 1) * queries], keys, values, width**-0.5)
                )
            return relative([got[r * queries : (r + 1) * queries] for r in some], expected)

        configs = [
            gqa.config_for(q[0], k, requests, longest),
            *gqa.configs_for(requests, longest, q.dtype),
        ]
        shape = {
            "dtype": "bfloat16",
            "heads": heads,
            "groups": groups,
            "width": width,
            **sizes_near(requests, longest),
        }
        others = (
            {}
            if mixed
            else {"FA3": partial(peers.fa3_paged, q, k, v, tables, kv_lens, queries, width**-0.5)}
        )
        return AttentionSetup(
            out, [partial(call, i) for i in range(copies)], configs, error, shape, others
        )

    name = (
        f"B{requests} S{longest}"
        + (f" q{queries}" if queries > 1 else "")
        + (" mixed" if mixed else "")
    )
    return AttentionCase("gqa", name, moved, 4 * sum(lens) * heads * queries * width, setup, peer)


def prefill_case(
    requests: int,
    chunk: int,
    prefix: int,
    heads: int,
    groups: int,
    widths: tuple[int, int],
    paged: bool,
) -> AttentionCase:
    (width, v_width) = widths
    length = prefix + chunk
    pairs = requests * chunk * (prefix + (chunk + 1) / 2)
    moved = (
        2.0 * requests * (chunk * heads * (width + v_width) + length * groups * (width + v_width))
    )

    def setup(device: torch.device) -> AttentionSetup:
        new = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)  # noqa: E731
        copies = copies_of(moved)
        q = new(copies, requests * chunk, heads, width)
        query_starts = torch.arange(requests + 1, device=device) * chunk
        key_starts = torch.arange(requests, device=device) * length
        kv_lens = torch.full((requests,), length, device=device)
        tables = block_tables(copies, requests, length, device)
        k, v = (
            new(tables.numel() + 1, PAGE, groups, w)
            if paged
            else new(copies, requests * length, groups, w)
            for w in widths
        )
        out = torch.full(
            (requests * chunk, heads, v_width), float("nan"), device=device, dtype=torch.bfloat16
        )
        scale = width**-0.5

        def call(i: int, config: Any) -> Tensor:
            if paged:
                return prefill.paged_prefill(
                    q[i], k, v, tables[i], query_starts, kv_lens, chunk, scale, out, config
                )
            return prefill.dense_prefill(
                q[i], k[i], v[i], query_starts, key_starts, kv_lens, chunk, scale, out, config
            )

        def error(got: Tensor) -> float:
            r = requests - 1
            keys, values = (
                (x[tables[0, r].long()].flatten(0, 1) if paged else x[0, r * length :])[:length]
                for x in (k, v)
            )
            at = slice(r * chunk, (r + 1) * chunk)
            few = [0, heads - 1]
            groups_of = [h // (heads // groups) for h in few]
            return relative(
                [got[at][:, few]],
                [attend(q[0, at][:, few], keys[:, groups_of], values[:, groups_of], scale)],
            )

        configs = [
            prefill.config_for(q[0], groups, paged, chunk),
            *prefill.configs_for(width, q.dtype),
        ]
        shape = {
            "dtype": "bfloat16",
            "heads": heads,
            "groups": groups,
            "width": width,
            "paged": paged,
            "queries": tuning.near(chunk),
        }
        other = (
            partial(peers.fa3_paged, q, k, v, tables, kv_lens, chunk, scale)
            if paged
            else partial(peers.fa3_dense, q, k, v, requests, scale)
        )
        return AttentionSetup(
            out, [partial(call, i) for i in range(copies)], configs, error, shape, {"FA3": other}
        )

    name = f"R{requests} Q{chunk}+{prefix} H{heads}/{groups} {width}/{v_width}"
    return AttentionCase(
        "prefill paged" if paged else "prefill",
        name,
        moved,
        2 * pairs * heads * (width + v_width),
        setup,
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
