"""Runs a Gluon kernel's Python on torch tensors, one program after the other: Triton's interpreter
does not take Gluon.

Layouts are ignored. What is asynchronous on a GPU fails here if it is used wrongly: a bulk copy
fills its place with NaN when it is issued and brings its data when its barrier is waited for, in
the right phase; a product must find, when it is waited for, the operands it found when it was
issued, and a wait that leaves the last n products under way finishes none of those. Partitions of
warps are threads of which one runs until it has to wait.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr


@dataclass
class Pointer:
    """Elements of a storage; `offset` in elements."""

    flat: Tensor
    offset: Any = 0

    @staticmethod
    def of(tensor: Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return Pointer(torch.as_strided(tensor, (size,), (1,), 0), tensor.storage_offset())

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + more)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.flat.dtype)


def _spoil(data: Tensor) -> Tensor:
    """Full of NaN; bytes of all ones are one in e4m3."""
    return (
        data.fill_(float("nan"))
        if data.dtype.is_floating_point
        else data.fill_(255)
        if data.dtype == torch.uint8
        else data
    )


class Shared:
    """A piece of shared memory, full of NaN at first."""

    def __init__(self, data: Tensor):
        self.data = data
        self.shape = list(data.shape)
        self.dtype = data.dtype
        self.pending: list[Callable[[], None]] = []  # copies of the phase under way
        self.landed: list[Callable[[], None]] = []  # of complete ones, not awaited yet
        self.filled = self.count = self.arrived = self.expected = self.arriving = 0
        self.parts: dict[int, Shared] = {}

    def index(self, i: Any) -> Shared:
        return self.parts.setdefault(int(i), Shared(self.data[int(i)]))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        """[tokens, columns] in the layout of wgmma's operands, in which blocks of 128 bytes of
        all tokens follow one another, as these blocks, [blocks, tokens, elements], or as pieces
        of so many of their tokens."""
        if len(shape) == 2:  # the same bytes in other rows
            return Shared(self.data.view(shape))
        _, tokens, columns = shape
        assert columns * dtype.itemsize % 128 == 0, "no blocks of 128 bytes"
        found = (
            self.data.view(dtype)
            .view(-1, tokens, self.data.view(dtype).shape[1] // columns, columns)
            .permute(2, 0, 1, 3)
        )
        if tokens == self.shape[0]:
            return Shared(found[:, 0])
        assert (columns * dtype.itemsize, tokens % 8) == (128, 0), (
            "no pieces that follow one another"
        )
        return Pieces(found)

    @property
    def layout(self) -> None:
        return None

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.data.dtype, (value.dtype, self.data.dtype)
        self.data.copy_(value)


class Pieces(Shared):
    """[blocks, pieces of a block, tokens, elements], counted through."""

    def index(self, i: Any) -> Shared:
        return Shared(self.data[divmod(int(i), self.shape[1])])


@dataclass
class Descriptor:
    base: Tensor
    block: list[int]
    layout: Any = None


@dataclass
class Sum:
    """A product under way."""

    compute: Callable[[], Tensor]
    seen: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.compute()

    def finish(self) -> Tensor:
        now = self.compute()
        assert torch.equal(now.nan_to_num(7e7), self.seen.nan_to_num(7e7)), (
            "an operand changed under a product"
        )
        return now


def _value(x: Any) -> Tensor:
    return x.data if isinstance(x, Shared) else x


class Products:
    """wgmma, of one program. Each partition of warps waits for its own."""

    def __init__(self) -> None:
        self.of_partition: dict[int, list[Sum]] = {}

    def multiply(
        self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        assert not isinstance(a, Tensor) or a.dtype == b.data.dtype
        start = acc.compute if isinstance(acc, Sum) else (lambda: acc)
        made = Sum(lambda: _value(a).float() @ b.data.float() + (start() if use_acc else 0))
        self.of_partition.setdefault(threading.get_ident(), []).extend([made] if is_async else [])
        return made if is_async else made.finish()

    def wait(self, outstanding: int, deps: list[Any]) -> Any:
        under_way = self.of_partition.setdefault(threading.get_ident(), [])
        count = max(len(under_way) - outstanding, 0)
        for product in under_way[:count]:
            product.finish()
        del under_way[:count]
        assert not any(product is dep for product in under_way for dep in deps), (
            "a product that may still be under way"
        )
        found = [dep.finish() if isinstance(dep, Sum) else dep for dep in deps]
        return found[0] if len(found) == 1 else tuple(found)


TURN = threading.Condition()  # held by whoever runs
# whether several run; seconds
PARTITIONS = [False]
WAIT = 5.0


class Barriers:
    """mbarrier"""

    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(barrier: Shared, count: int) -> None:
        barrier.filled = 0
        barrier.count = count

    @classmethod
    def arrive(cls, barrier: Shared, count: int, pred: Any = True) -> None:
        if not pred:
            return
        barrier.arrived += count
        assert barrier.arrived <= barrier.count, "the barrier still waits for an earlier fill"
        cls.advance(barrier)

    @classmethod
    def expect(cls, barrier: Shared, size: int, pred: Any = True) -> None:
        if pred:
            barrier.expected += size
            cls.arrive(barrier, 1)

    @staticmethod
    def advance(barrier: Shared) -> None:
        assert barrier.arriving <= barrier.expected, (barrier.arriving, barrier.expected)
        if barrier.arrived == barrier.count and barrier.arriving == barrier.expected:
            assert not barrier.landed, "nobody waited for the fill before"
            barrier.landed = barrier.pending
            barrier.pending = []
            barrier.arrived = barrier.expected = barrier.arriving = 0
            barrier.filled += 1
            TURN.notify_all()

    @staticmethod
    def wait(barrier: Shared, phase: Any, pred: Any = True) -> None:
        if not pred:
            return
        if not TURN.wait_for(
            lambda: barrier.filled % 2 != int(phase), timeout=WAIT if PARTITIONS[0] else 0
        ):
            raise AssertionError(
                f"nothing is on its way: {barrier.arriving} of {barrier.expected} bytes, "
                f"{barrier.arrived} arrivals"
            )
        for bring in barrier.landed:
            bring()
        barrier.landed.clear()


class Copies:
    """tma"""

    @staticmethod
    def async_copy_global_to_shared(
        source: Descriptor, place: list[Any], barrier: Shared, target: Shared, pred: Any = True
    ) -> None:
        if not pred:
            return
        row, column = (int(x) for x in place)
        data = torch.zeros(source.block, dtype=source.base.dtype)
        part = source.base[row : row + source.block[0], column : column + source.block[1]]
        assert row >= 0
        data[: part.shape[0], : part.shape[1]] = part
        _spoil(target.data)
        barrier.arriving += data.numel() * data.element_size()
        barrier.pending.append(lambda: target.data.copy_(data))  # type: ignore[arg-type, return-value]
        Barriers.advance(barrier)

    @staticmethod
    def async_copy_shared_to_global(target: Descriptor, place: list[Any], source: Shared) -> None:
        row, column = (int(x) for x in place)
        part = target.base[row : row + target.block[0], column : column + target.block[1]]
        part.copy_(source.data[: part.shape[0], : part.shape[1]])

    @staticmethod
    def store_wait(outstanding: int) -> None:
        """Copies out are done at once."""


def _alike(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    a = torch.as_tensor(a)
    return a, torch.as_tensor(b, dtype=a.dtype)


class Language:
    """gluon.language"""

    float16 = torch.float16
    bfloat16 = torch.bfloat16
    float32 = torch.float32
    float8e4nv = torch.float8_e4m3fn
    uint8 = torch.uint8
    int16 = torch.int16
    int32 = torch.int32
    int64 = torch.int64
    exp2, log2, where, abs, floor = (
        staticmethod(f) for f in (torch.exp2, torch.log2, torch.where, torch.abs, torch.floor)
    )
    reshape = staticmethod(torch.reshape)
    permute = staticmethod(torch.permute)
    join = staticmethod(lambda a, b: torch.stack((a, b), -1))
    static_range = range

    def __init__(self, programs: tuple[int, ...], program: tuple[int, ...]):
        self.programs = programs
        self.program = program

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *a, **k: None
        raise AttributeError(f"the emulator has no {name}")

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self.program[axis], dtype=torch.int32)

    def num_programs(self, axis: int) -> Tensor:
        return torch.tensor(self.programs[axis], dtype=torch.int32)

    @staticmethod
    def load(
        where: Pointer, mask: Any = None, other: Any = None, cache_modifier: str = ""
    ) -> Tensor:
        offset = torch.as_tensor(where.offset)
        if mask is None:
            return where.flat[offset.long()]
        mask = mask.expand(offset.shape)
        return torch.where(
            mask,
            where.flat[offset.long().masked_fill(~mask, 0)],
            torch.tensor(other, dtype=where.flat.dtype),
        )

    @staticmethod
    def store(where: Pointer, value: Any, mask: Any = None) -> None:
        value = torch.as_tensor(
            value, dtype=None if isinstance(value, Tensor) else where.flat.dtype
        )
        offset = torch.as_tensor(where.offset)
        mask = (
            torch.ones(offset.shape, dtype=torch.bool)
            if mask is None
            else mask.expand(offset.shape)
        )
        assert value.dtype == where.flat.dtype
        where.flat[offset[mask].long()] = value.expand(offset.shape)[mask]

    @staticmethod
    def atomic_add(where: Pointer, value: Any, sem: str) -> Tensor:
        before = where.flat[int(where.offset)].clone()
        where.flat[int(where.offset)] += int(value)
        return before

    @staticmethod
    def arange(start: int, stop: int, layout: Any) -> Tensor:
        return torch.arange(start, stop, dtype=torch.int32)

    @staticmethod
    def full(shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(_spoil(torch.zeros(shape, dtype=dtype)))

    @staticmethod
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., 0], x[..., 1]

    @staticmethod
    def maximum(a: Any, b: Any) -> Tensor:
        return torch.maximum(*_alike(a, b))

    @staticmethod
    def minimum(a: Any, b: Any) -> Tensor:
        return torch.minimum(*_alike(a, b))

    @staticmethod
    def max(x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    @staticmethod
    def sum(x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    @staticmethod
    def convert_layout(x: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
        return x

    @staticmethod
    def warp_specialize(
        partitions: list[tuple[Callable[..., None], tuple[Any, ...]]],
        warps: list[int],
        registers: list[int],
    ) -> None:
        failed: list[BaseException] = []

        def enter(work: Callable[..., None], given: tuple[Any, ...]) -> None:
            with TURN:
                try:
                    work(*given)
                except BaseException as error:
                    failed.append(error)

        threads = [threading.Thread(target=enter, args=partition) for partition in partitions]
        PARTITIONS[0] = True
        for thread in threads:
            thread.start()
        TURN.release()
        for thread in threads:
            thread.join()
        TURN.acquire()
        PARTITIONS[0] = False
        if failed:
            raise failed[0]

    @staticmethod
    def thread_barrier() -> None:
        """Programs here are never apart."""


def run(
    module: types.ModuleType,
    kernel: str,
    grid: tuple[int, ...],
    args: list[Any],
    backwards: bool = False,
    **stand_ins: Callable[..., Any],
) -> None:
    """Every program of `grid`, the last first if `backwards`; `args` in the kernel's order:
    tensors become pointers, Descriptors and numbers stay. Functions may come from other modules,
    if no two have one name. stand_ins: by name, what takes the place of functions in assembler."""
    given = [Pointer.of(x) if isinstance(x, Tensor) else x for x in args]
    programs = list(itertools.product(*(range(n) for n in grid)))
    for program in reversed(programs) if backwards else programs:
        products = Products()
        tools = {
            "gl": Language(grid, program),
            "tma": Copies,
            "mbarrier": Barriers,
            "fence_async_shared": lambda: None,
            "thread_barrier": Language.thread_barrier,
            "warpgroup_mma": products.multiply,
            "warpgroup_mma_wait": products.wait,
            "warpgroup_mma_init": lambda x: x,
        }
        names: dict[str, Any] = {}
        for other in {
            value.fn.__module__ for value in vars(module).values() if hasattr(value, "is_gluon")
        }:
            names |= vars(sys.modules[other])
        names |= {**vars(module), **tools}
        for name, value in list(names.items()):
            if isinstance(value, constexpr):
                names[name] = value.value
            elif hasattr(value, "is_gluon"):
                names[name] = types.FunctionType(
                    value.fn.__code__, names, name, value.fn.__defaults__
                )
        names |= stand_ins
        with TURN:
            names[kernel](*given)
        assert not any(products.of_partition.values()), "nobody waited for a product"
