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

    def __post_init__(self) -> None:
        torch.manual_seed(len(self.lens) + self.width + self.page)
        page = self.page
        self.q = torch.randn(sum(q for q, _ in self.lens), 2 * self.groups, self.width).bfloat16()
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
    ) -> Tensor:
        """Every program, from the kernel's Python or from what it was compiled to."""
        heads = self.q.shape[1]
        merged = out = torch.full((len(self.q), heads, 128), float("nan"), dtype=torch.bfloat16)
        totals = None
        if earlier is not None:
            out, totals = earlier.out, earlier.totals
        if splits > 1:
            out = torch.full((splits, *out.shape), float("nan"))
            totals = torch.full(out.shape[:-1], float("nan"))
        blocks = -(-max(q for q, _ in self.lens) // 128)
        grid = (blocks * splits, heads, len(self.lens))
        rest = [
            self.tables if self.page else None,
            self.query_starts,
            None if self.page else self.key_starts,
            self.kv_lens,
            None if earlier is None else earlier.firsts,
            totals,
            out,
            self.width**-0.5 * mla_decode.LOG2E,
            self.width,
            *((128, 0, 0) if self.split else (self.width, self.width, 128)),
            128,
            self.tables.shape[1],
            *((0, 0) if totals is None else totals.stride()[-2:]),
            *out.stride()[-3:-1],
            *((splits, totals.stride(0), out.stride(0)) if splits > 1 else (0, 0, 0)),
        ]
        matrices = [x.flatten(1) for x in (self.q, self.k, self.k, self.v)]
        if self.split:
            matrices[1] = self.k[..., :128].flatten(1)
            matrices[2] = self.k[:, 0, 128:]
        if machine is not None:
            maps = [TensorMap(x, (64, 64), 128) for x in matrices]
            arguments = run_time(*maps, *rest)
            assert ptx_interpreter.run(machine.ptx, machine.shared, grid, arguments, seed=seed) > 0
            return out if splits == 1 else self.merge(out, totals, merged)
        constants = [
            earlier is not None,
            splits > 1,
            heads // self.groups,
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
            [*(Descriptor(x, [64, 64]) for x in matrices), *rest, *constants],
            opaque_zero=lambda: 0,
        )
        return out if splits == 1 else self.merge(out, totals, merged)

    @staticmethod
    def merge(parts: Tensor, logs: Tensor | None, out: Tensor) -> Tensor:
        assert logs is not None
        prefill_sm90.merge(parts, logs, out)
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
    ("lens", "splits"),
    [
        # more parts than the short ones have tiles; queries that see nothing of the last part
        ([(70, 1300), (3, 130), (64, 64)], 4),
        ([(130, 520), (0, 0), (1, 700)], 2),
        ([(200, 200)], 3),
    ],
    ids=str,
)
@pytest.mark.parametrize(("width", "page"), [(128, 64), (192, 0)])
def test_keys_are_split(lens: list[tuple[int, int]], splits: int, width: int, page: int) -> None:
    case = Case(lens, width, page)
    case.check(case.run(splits=splits))


def test_how_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_sm90, "multiprocessors", lambda device: 132)
    found = [
        prefill_sm90.splits_for(torch.empty(128, heads, 128), 128, 1, keys)
        for heads, keys in [(32, 8000), (32, 600), (32, 500), (16, 8000), (1, 10**6), (67, 8000)]
    ]
    assert found == [4, 2, 1, 8, prefill_sm90.MOST_SPLITS, 1]
    # three requests of two blocks each, of 2,000 keys in all
    assert prefill_sm90.splits_for(torch.empty(600, 4, 128), 200, 3, 2000) == 2


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
from rorqual.ops.triton.attention import prefill
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
"""
CHECKS = """
names = [kernel.name for kernel in launched]
assert names == ["_prefill_sm90_kernel"] * 4 + ["_merge_kernel"], names
for kernel in launched:
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, found
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Packed keys, pages, packed keys in two parts behind others, and pages that are split."""
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"), CHECKS)


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels[:4]:
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
