"""The Hopper kernel of prompts' attention: its Python over torch tensors against fp64, with hostile
neighbours and unused pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE

pytest.importorskip("triton.experimental.gluon")

from rorqual.bench.kernels.attention import attend
from rorqual.ops.triton.attention import mla_decode, prefill_sm90
from rorqual.ops.triton.runtime import launch
from tests.emulation import gluon_emulator, ptx_interpreter
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, compiled, run_time
from tests.emulation.ptx_memory import TensorMap

pytestmark = pytest.mark.exhaustive

# (queries, keys) of each request
CASES = [
    [(130, 130), (1, 300), (64, 64)],  # blocks of several sizes, one behind a long prefix
    [(257, 385)],  # whole tiles, part of one, a prefix that ends in a tile
    [(128, 128), (0, 0), (200, 511)],
]


@dataclass
class Earlier:
    """What was found over keys before these; `prefill.SoFar`."""

    firsts: Tensor
    totals: Tensor
    out: Tensor


@dataclass
class Case:
    """(queries, keys) of each request; page 0: packed keys. What no request owns is NaN."""

    lens: list[tuple[int, int]]
    width: int
    page: int
    groups: int = 2
    split: bool = False  # keys' last 64 columns apart, the same for all heads
    pack: int = 1
    share: int = 0  # heads of a group; 0: two, or as many as a block has
    bound: int = 0  # by how much max_query_len is more than the most queries of a request

    def __post_init__(self) -> None:
        torch.manual_seed(len(self.lens) + self.width + self.page)
        page = self.page
        tokens = sum(q for q, _ in self.lens)
        heads = (self.share or max(2, self.pack)) * self.groups
        # as in a joint projection: between tokens there is something else
        joint = torch.full((tokens, heads + 3, self.width), float("nan"), dtype=torch.bfloat16)
        self.q = joint[:, :heads] if self.pack > 1 else torch.empty(tokens, heads, self.width)
        self.q = self.q.bfloat16().copy_(torch.randn(tokens, heads, self.width))
        columns = -(-max(n for _, n in self.lens) // page) + 1 if page else 0
        rows = (1 + len(self.lens) * columns) * page if page else sum(n for _, n in self.lens)
        self.tables = (
            (1 + torch.randperm(len(self.lens) * columns)).int().view(len(self.lens), columns)
        )
        self.k, self.v = (
            torch.full((rows, self.groups, n), float("nan"), dtype=torch.bfloat16)
            for n in (self.width, 128)
        )
        self.query_starts = torch.tensor([0, *(n for n, _ in self.lens)]).cumsum(0)
        self.key_starts = torch.tensor([0, *(n for _, n in self.lens)]).cumsum(0)[:-1]
        self.kv_lens = torch.tensor([n for _, n in self.lens])
        self.own = []
        for r, (_, length) in enumerate(self.lens):
            token = torch.arange(length)
            place = self.key_starts[r] + token
            if page:
                place = self.tables[r].long()[token // page] * page + token % page
            self.k[place] = torch.randn(length, self.groups, self.width).bfloat16()
            if self.split:
                self.k[place, :, 128:] = self.k[place, :1, 128:]
            self.v[place] = torch.randn(length, self.groups, 128).bfloat16()
            self.own.append(place)

    def expected(self) -> Tensor:
        found = []
        for r, (count, _) in enumerate(self.lens):
            at = slice(int(self.query_starts[r]), int(self.query_starts[r]) + count)
            keys = self.own[r]
            if count:
                scale = self.width**-0.5
                found.append(attend(self.q[at], self.k[keys], self.v[keys], scale))
        return torch.cat(found)

    def run(
        self,
        earlier: Earlier | None = None,
        machine: Kernel | None = None,
        seed: int | None = None,
        splits: int = 1,
        whole: int = 0,
    ) -> Tensor:
        """Every program, from the kernel's Python or from what it was compiled to."""
        heads = self.q.shape[1]
        out = torch.full((len(self.q), heads, 128), float("nan"), dtype=torch.bfloat16)
        partial = totals = None
        if earlier is not None:
            out, totals = earlier.out, earlier.totals
        places = -(-(max(q for q, _ in self.lens) + self.bound) * self.pack // 128)
        parts = (places, heads // self.pack, whole, splits)
        grid: tuple[int, ...] = (*parts[:2], len(self.lens))
        if splits > 1:
            programs = (places * parts[1] * len(self.lens) - whole) * splits
            partial = torch.full((programs, 128, 128), float("nan"))
            totals = torch.full((programs, 128), float("nan"))
            grid = (whole + programs,)
        rest = [
            self.tables if self.page else None,
            self.query_starts,
            None if self.page else self.key_starts,
            self.kv_lens,
            None if earlier is None else earlier.firsts,
            totals,
            out,
            partial,
            self.width**-0.5 * mla_decode.LOG2E,
            self.width,
            *((128, 0, 0) if self.split else (self.width, self.width, 128)),
            128,
            self.tables.shape[1],
            *((0, 0) if earlier is None else earlier.totals.stride()),
            *out.stride()[:2],
        ]
        box = (64 if self.pack == 1 else 128 // self.pack, 64)
        queries = self.q.as_strided((len(self.q), heads * self.width), (self.q.stride(0), 1))
        matrices = [queries, *(x.flatten(1) for x in (self.k, self.k, self.v))]
        if self.split:
            matrices[1] = self.k[..., :128].flatten(1)
            matrices[2] = self.k[:, 0, 128:]
        if machine is not None:
            boxes = (box, (64, 64), (64, 64), (64, 64))
            maps = [TensorMap(x, each, 128) for x, each in zip(matrices, boxes, strict=True)]
            arguments = [*run_time(*maps, *rest), *parts]  # ones are not constants there
            assert ptx_interpreter.run(machine.ptx, machine.shared, grid, arguments, seed=seed) > 0
            return self.merged(out, partial, totals, parts)
        constants = [
            earlier is not None,
            splits > 1,
            heads // self.groups,
            self.pack,
            128,
            self.width - 128,
            self.page,
            prefill_sm90.STAGES,
            *prefill_sm90.REGISTERS,
        ]
        gluon_emulator.run(
            prefill_sm90,
            "_prefill_sm90_kernel",
            grid,
            [
                *(Descriptor(x, list(box) if i == 0 else [64, 64]) for i, x in enumerate(matrices)),
                *rest,
                *parts,
                *constants,
            ],
            opaque_zero=lambda: 0,
        )
        return self.merged(out, partial, totals, parts)

    def merged(
        self,
        out: Tensor,
        partial: Tensor | None,
        logs: Tensor | None,
        parts: tuple[int, int, int, int],
    ) -> Tensor:
        if partial is not None:
            assert logs is not None
            prefill_sm90.merge(partial, logs, self.query_starts, out, parts, self.pack)
        return out

    def check(self, out: Tensor) -> None:
        assert not out.isnan().any()
        assert torch.allclose(out.double(), self.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("lens", CASES, ids=str)
@pytest.mark.parametrize(("width", "page"), [(128, 64), (192, 0), (128, 128)])
def test_emulated_result(lens: list[tuple[int, int]], width: int, page: int) -> None:
    case = Case(lens, width, page)
    case.check(case.run())


@pytest.mark.skipif(DEVICE != "cpu", reason="the kernels' Python is interpreted")
@pytest.mark.parametrize(
    ("lens", "splits", "whole"),
    [
        # more parts than the short ones have tiles; queries that see nothing of the last part
        ([(70, 1300), (3, 130), (64, 64)], 4, 0),
        ([(130, 520), (0, 0), (1, 700)], 2, 0),
        ([(200, 200)], 3, 0),
        # some blocks whole: a request's, and of one head of the next; all but the last
        ([(130, 520), (0, 0), (200, 700)], 3, 5),
        ([(0, 0), (130, 520)], 2, 15),
    ],
    ids=str,
)
@pytest.mark.parametrize(("width", "page"), [(128, 64), (192, 0)])
def test_keys_are_split(
    lens: list[tuple[int, int]], splits: int, whole: int, width: int, page: int
) -> None:
    case = Case(lens, width, page)
    case.check(case.run(splits=splits, whole=whole))


@pytest.mark.skipif(DEVICE != "cpu", reason="the kernels' Python is interpreted")
@pytest.mark.parametrize(
    ("lens", "splits", "whole"),
    [
        ([(130, 130), (1, 300), (20, 64), (0, 0)], 1, 0),
        ([(17, 385), (3, 130)], 1, 0),
        ([(20, 1300), (3, 130), (1, 64)], 4, 0),
        ([(20, 1300), (3, 130), (17, 64)], 3, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize(("page", "groups"), [(64, 2), (0, 1)])
def test_blocks_of_eight_heads(
    lens: list[tuple[int, int]], splits: int, whole: int, page: int, groups: int
) -> None:
    case = Case(lens, 128, page, groups=groups, pack=prefill_sm90.PACK)
    case.check(case.run(splits=splits, whole=whole))


@pytest.mark.skipif(DEVICE != "cpu", reason="the kernels' Python is interpreted")
@pytest.mark.parametrize(("splits", "whole"), [(1, 0), (2, 7)])
def test_several_blocks_of_heads_share_keys(splits: int, whole: int) -> None:
    """And max_query_len is only a bound, by which each request has an empty block."""
    lens = [(20, 300), (3, 130)]
    case = Case(lens, 128, 64, groups=1, pack=prefill_sm90.PACK, share=16, bound=13)
    case.check(case.run(splits=splits, whole=whole))


def divided(
    heads: int, groups: int, queries: int, requests: int, keys: int, width: int = 128
) -> str:
    """`division` of so many queries and keys a request: pack / whole / splits."""
    q = torch.empty(queries * requests, heads, width, device="meta")
    return shown(prefill_sm90.division(q, groups, queries, requests, keys * requests))


def shown(found: prefill_sm90.Division) -> str:
    return f"{found.pack}/{found.whole}/{found.splits}"


def test_how_blocks_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_sm90, "multiprocessors", lambda device: 132)
    # four heads share keys, so blocks have one head
    assert [divided(32, 8, 128, 1, n) for n in (8000, 1900, 500)] == ["1/0/4", "1/0/3", "1/0/1"]
    assert divided(1, 1, 128, 1, 10**6) == "1/0/16"
    assert divided(67, 67, 128, 1, 8000) == "1/0/1"
    # 64 blocks a request: all of two fit, of three the last 60 are split
    assert [divided(32, 8, 200, n, 4200) for n in (1, 2)] == ["1/0/2", "1/0/1"]
    assert divided(32, 8, 200, 3, 4200) == "1/132/2"
    # 52 blocks of eight heads
    found = [divided(32, 4, 200, n, 4200) for n in (2, 3, 4, 5, 6)]
    assert found == ["8/0/1", "8/132/5", "8/0/1", "8/0/1", "8/264/2"]
    assert divided(32, 4, 16, 1, 8000) == "8/0/16"
    # nothing before: blocks of many sizes
    assert [divided(32, 4, n, 8, n) for n in (1000, 8000)] == ["8/0/1", "8/0/1"]
    # heads of two parts are not packed
    assert divided(16, 1, 64, 1, 8000, 192) == "1/0/8"
    assert divided(16, 16, 200, 5, 4200, 192) == "1/132/4"


def test_empty_blocks_are_not_split_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond a full round may be the empty blocks of a request with fewer queries."""
    monkeypatch.setattr(prefill_sm90, "multiprocessors", lambda device: 132)
    for tokens, expected in ((600, "8/132/5"), (560, "8/132/5"), (420, "8/0/1")):
        q = torch.empty(tokens, 32, 128, device="meta")
        assert shown(prefill_sm90.division(q, 4, 200, 3, 4200 * 3)) == expected


def test_which_kernel_takes_few_queries() -> None:
    shared = prefill_sm90.Division(prefill_sm90.PACK)
    assert [shared.takes_few_queries(keys) for keys in (17, 128, 129)] == [False, False, True]
    assert not prefill_sm90.Division().takes_few_queries(8000)
    assert prefill_sm90.Division(1, 0, 2).takes_few_queries(8000)
    # mostly blocks of one head, nearly empty: Triton's have 16 rows
    assert not prefill_sm90.Division(1, 132, 2).takes_few_queries(8000)


def test_a_launch_ahead_is_of_every_kernel() -> None:
    chosen = prefill_sm90.Division(8, 132, 5)
    assert chosen.forms(156) == [chosen]
    with launch.ahead():
        forms = chosen.forms(156)
    assert all((156 - form.whole) * form.splits <= 16 for form in forms if form.splits > 1)
    split = [form for form in forms if form.splits > 1]
    assert len(split) < len(forms)
    assert {form.pack for form in forms} == {8}
    found = {prefill_sm90.merged_parts(form.splits) for form in split}
    splits = range(2, prefill_sm90.MOST_SPLITS + 1)
    assert found == {prefill_sm90.merged_parts(count) for count in splits}


def test_keys_in_two_parts() -> None:
    case = Case([(130, 200), (3, 3)], 192, 0, split=True)
    case.check(case.run())


def test_it_goes_on_from_earlier_keys() -> None:
    """150 queries of 300 keys, in stretches of 128, 128 and 44: the first two are seen whole by
    some rows, in part or not at all by others."""
    whole = Case([(150, 300)], 192, 0)
    out = torch.zeros(150, 4, 128)
    totals = torch.full((150, 4), float("-inf"))
    for begin in (0, 128, 256):
        size = min(128, 300 - begin)
        stretch = Case([(150, size)], 192, 0)
        stretch.q = whole.q
        stretch.k = whole.k[begin : begin + size]
        stretch.v = whole.v[begin : begin + size]
        found = Earlier(torch.tensor([150 - begin]), totals, out)
        stretch.run(found)
    whole.check(out)


LAUNCHES = """
import contextlib
from rorqual.ops.triton.attention import prefill, prefill_sm90
from rorqual.ops.triton.runtime import launch
m = lambda *s, t=torch.bfloat16: torch.empty(*s, dtype=t)
i = lambda *s: torch.empty(*s, dtype=torch.int64)
config = prefill.PrefillConfig(128, 64, 8, 3, gluon=True)
prefill.dense_prefill(m(512, 4, 192), m(512, 2, 192), m(512, 2, 128), i(3), i(2), i(2), 256, 0.1,
    config=config)
prefill.paged_prefill(m(512, 4, 128), m(9, 64, 2, 128), m(9, 64, 2, 128),
    torch.empty(2, 5, dtype=torch.int32), i(3), i(2), 256, 0.1, config=config)
so_far = prefill.SoFar(m(512, 4, 128, t=torch.float32), m(512, 4, t=torch.float32), i(2))
kv = m(512, 2, 256)
prefill.dense_prefill(m(512, 4, 192), kv[..., :128], kv[..., 128:], i(3), i(2), i(2), 256, 0.1,
    config=config, so_far=so_far, k_rope=m(512, 576)[:, 512:])
prefill.paged_prefill(m(73, 4, 128), m(99, 64, 2, 128), m(99, 64, 2, 128),
    torch.empty(2, 30, dtype=torch.int32), i(3), i(2), 70, 0.1, config=config)
few = prefill.PrefillConfig(16, 64, 4, 3)  # Triton's kernel, but for heads that share long keys
for pages in (2, 3):
    prefill.paged_prefill(m(32, 16, 128), m(9, 64, 2, 128), m(9, 64, 2, 128),
        torch.empty(2, pages, dtype=torch.int32), i(3), i(2), 16, 0.1, config=few)
for splits in (1, 3, None):
    prefill_sm90.division = lambda *shape: prefill_sm90.Division(prefill_sm90.PACK, 0, splits or 2)
    with contextlib.nullcontext() if splits else launch.ahead():
        prefill.paged_prefill(m(40, 19, 128)[:, :16], m(9, 64, 2, 128), m(9, 64, 2, 128),
            torch.empty(2, 7, dtype=torch.int32), i(3), i(2), 20, 0.1, config=config)
"""
CHECKS = """
names = [kernel.name for kernel in launched]
prefills = ["_prefill_sm90_kernel"] * 4
few = ["_prefill_kernel", "_prefill_sm90_kernel"]
split = ["_prefill_sm90_kernel", "_merge_kernel"]
ahead = [prefills[0], *split, *split, *split]
assert names == [*prefills, "_merge_kernel", *few, prefills[0], *split, *ahead], names
assert len({kernel.ptx for kernel in launched if kernel.name == "_merge_kernel"}) == 3
for kernel in launched:
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, found
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Packed keys, pages, packed keys in two parts behind others, pages that are split, the merge,
    16 queries of few keys and of more, blocks of eight heads, whole and split, and what a launch
    ahead compiles."""
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"), CHECKS)


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in (*kernels[:4], *kernels[7:9]):
        said = assembled(kernel, tmp_path)
        assert "serialized" not in said
        assert "setmaxnreg" not in said


@pytest.mark.skipif(DEVICE != "cpu", reason="executed without a GPU")
@pytest.mark.parametrize(("which", "width", "page"), [(0, 192, 0), (1, 128, 64)])
def test_compiled_code_is_right_and_free_of_races(
    kernels: list[Kernel], which: int, width: int, page: int
) -> None:
    case = Case([(70, 300), (3, 200)], width, page)
    case.check(case.run(machine=kernels[which]))
    case.check(case.run(machine=kernels[which], seed=which))


@pytest.mark.skipif(DEVICE != "cpu", reason="executed without a GPU")
def test_compiled_code_splits_keys(kernels: list[Kernel]) -> None:
    case = Case([(70, 1300), (3, 200)], 128, 64)
    case.check(case.run(machine=kernels[3], splits=4, seed=1))
    case.check(case.run(machine=kernels[3], splits=2, whole=3))


@pytest.mark.skipif(DEVICE != "cpu", reason="executed without a GPU")
@pytest.mark.parametrize(
    ("lens", "splits", "whole"),
    [([(20, 300), (3, 200)], 1, 0), ([(20, 700)], 2, 0), ([(20, 700)], 2, 1)],
)
def test_compiled_code_packs_heads(
    kernels: list[Kernel], lens: list[tuple[int, int]], splits: int, whole: int
) -> None:
    case = Case(lens, 128, 64, pack=prefill_sm90.PACK)
    case.check(case.run(machine=kernels[6 + splits], splits=splits, whole=whole, seed=splits))
