"""Calls the compiled kernels with every array, those they make themselves included, between two
pages that nobody may touch: at the end of its pages or at their start. An access outside ends the
process, masked loads and stores of vectors too, which the address sanitizer does not see. The
results must be those of ordinary arrays.

Run by test_page_ends.py as `python -m tests.ops.cpu.page_ends end|start|beyond fp32|bf16`; `beyond`
reads past an array, to show that this ends the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rorqual.config.model import MLAConfig, MoEConfig
from rorqual.ops.cpu import quantized
from rorqual.ops.cpu.native import Native, library
from rorqual.ops.interface import GQAWeights, MLAWeights, TokenPlaces
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight

PAGE = mmap.PAGESIZE
SLOTS = 16  # entries of a page of the cache
THREADS = (1, 2, 3, 4)
EMPTY = (torch.empty, torch.empty_like, Tensor.new_empty)
Tensors = tuple[Tensor, ...]
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Fenced:
    """Arrays between pages that nobody may touch; gone with `clear`."""

    def __init__(self, at_end: bool):
        self.at_end = at_end
        self.held: list[tuple[int, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        if not count:
            return torch.zeros(shape, dtype=dtype)
        size = count * dtype.itemsize
        room = -(-size // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = libc.mmap(None, room + 2 * PAGE, 0, flags, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value), "no memory"
        self.held.append((base, room + 2 * PAGE))
        assert libc.mprotect(base + PAGE, room, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        at = base + PAGE + (room - size if self.at_end else 0)
        array = (ctypes.c_char * size).from_address(at)
        made = torch.frombuffer(array, dtype=dtype).view(shape)
        made.view(torch.uint8).fill_(0xFF)  # NaN, or -1
        return made

    def copy(self, x: Tensor) -> Tensor:
        return self.empty(tuple(x.shape), x.dtype).copy_(x)

    def clear(self) -> None:
        for at, size in self.held:
            libc.munmap(at, size)
        self.held.clear()


class MadeWithin(TorchFunctionMode):
    """What the callers of kernels allocate is fenced as well."""

    def __init__(self, fenced: Fenced):
        super().__init__()
        self.fenced = fenced

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return self.fenced.empty(tuple(made.shape), made.dtype) if func in EMPTY else made


# A kernel's call: from tensors to those it made or wrote, whatever holds the others.
Call = Callable[..., Tensors]


def rows_of(dtype: torch.dtype) -> Iterator[tuple[str, Call, Tensors]]:
    """add_norm and linear layers: remainders of registers, of tiles and of panels."""
    for rows in (1, 3, 9, 29, 75):
        for width in (1, 17, 63, 129, 1100):
            x, weight = draw(dtype, rows, width), draw(dtype, width)
            yield f"add_norm {rows} {width}", add_norm, (x, draw(dtype, rows, width), weight)
            yield (
                f"norm {rows} {width}",
                lambda native, x, w: native.add_norm(x, None, w, 1e-6),
                (
                    x,
                    weight,
                ),
            )
    for rows in (1, 2, 5, 6, 7, 27, 28, 31, 43, 130):
        for outputs, columns in ((1, 1), (5, 31), (13, 33), (37, 257), (70, 2055)):
            given = (
                draw(dtype, rows, columns),
                draw(dtype, outputs, columns),
                draw(dtype, outputs),
            )
            yield f"linear {rows} {outputs} {columns}", linear, given


def four_bits(dtype: torch.dtype) -> Iterator[tuple[str, Call, Tensors]]:
    """Linear layers of int4: few rows and panels, groups within and across registers."""
    for rows in (1, 3, 9, 28, 75):
        for outputs, columns, group in (
            (5, 96, 32),
            (37, 256, 128),
            (70, 1248, 96),
            (33, 192, 192),
        ):
            places = outputs, columns // group
            given = (
                draw(dtype, rows, columns),
                torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8),
                draw(dtype, *places),
                torch.randint(0, 16, places, dtype=torch.uint8),
            )
            yield f"int4 {rows} {outputs} {columns} {group}", linear_int4, given
            yield f"int4, no zero points {rows} {outputs} {columns} {group}", linear_int4, given[:3]
            yield f"int4, bytes {rows} {outputs} {columns} {group}", linear_int4_bytes, given


def linear_int4(
    native: Native,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    activation: str = "wide",
) -> Tensors:
    weight = Weight(data, scale, (1, x.shape[1] // scale.shape[1]), zero, activation)
    assert not quantized.refused(weight)
    return (quantized.linear(native, x, weight),)


def linear_int4_bytes(
    native: Native, x: Tensor, data: Tensor, scale: Tensor, zero: Tensor
) -> Tensors:
    return linear_int4(native, x, data, scale, zero, "int8_token")


def add_norm(native: Native, x: Tensor, residual: Tensor, weight: Tensor) -> Tensors:
    return native.add_norm(x, residual, weight, 1e-6)


def linear(native: Native, x: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
    return (native.linear(x, weight, bias),)


def layers(dtype: torch.dtype) -> Iterator[tuple[str, Call, Tensors]]:
    """Dense layers, experts and routers: few rows, lanes, panels."""
    for rows in (1, 5, 28, 31, 64, 131):
        for hidden, size in ((7, 5), (40, 24), (129, 97), (520, 161)):
            x = draw(dtype, rows, hidden)
            up = draw(dtype, 3, 2 * size, hidden, scale=hidden**-0.5)
            down = draw(dtype, 3, hidden, size, scale=size**-0.5)
            yield f"mlp {rows} {hidden} {size}", mlp, (x, up[0].clone(), down[0].clone())
            # the first expert has nearly all rows; picks that are not here
            ids = torch.zeros(rows, 2, dtype=torch.int64)
            ids[:, 1] = torch.arange(rows) % 4 - 1
            yield (
                f"experts {rows} {hidden} {size}",
                experts,
                (x, ids, torch.rand(rows, 2), up, down),
            )
    for rows in (1, 30):
        for count, top_k, groups in ((4, 2, 1), (23, 4, 1), (130, 2, 1), (96, 96, 1), (24, 6, 4)):
            x, gate = draw(dtype, rows, 33), torch.randn(count, 33)
            moe = MoEConfig(
                count, top_k, 24, 0, "sigmoid", "noaux_tc", groups, (groups + 1) // 2, True, 2.5
            )

            def route(native: Native, x: Tensor, gate: Tensor, bias: Tensor, moe: Any = moe) -> Any:
                return native.router(x, RouterWeights(gate, bias, moe))

            yield f"router {rows} {count} {top_k}", route, (x, gate, torch.randn(count))


def mlp(native: Native, x: Tensor, up: Tensor, down: Tensor) -> Tensors:
    return (native.mlp(x, up, down),)


def experts(
    native: Native, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor
) -> Tensors:
    return (native.experts(x, ids, weights, ExpertWeights(Weight(up), Weight(down))),)


def cached(lens: list[int]) -> tuple[Tensor, Tensor]:
    """(tables, lens): the last page of a cache of so many pages is the longest request's last."""
    pages = -(-max(lens) // SLOTS)
    return torch.arange(pages).repeat(len(lens), 1), torch.tensor(lens)


def heads(dtype: torch.dtype) -> Iterator[tuple[str, Call, Tensors]]:
    """Attention by groups of heads: prologue, decode steps, prompts."""
    for rows in (1, 5, 70):
        for count, groups, dim in ((4, 2, 8), (6, 2, 24), (7, 1, 130), (32, 4, 128)):
            pages = -(-rows // SLOTS)
            qkv = draw(dtype, rows, count + 2 * groups, dim)
            norms = draw(dtype, dim), draw(dtype, dim)
            angles = torch.rand(rows, dim // 2), torch.rand(rows, dim // 2)
            planes = tuple(draw(dtype, pages, SLOTS, groups, dim) for _ in range(2))
            slots = pages * SLOTS - 1 - torch.arange(rows)  # up to the last entry of all
            given = (qkv, *norms, *angles, *planes, slots)
            yield f"gqa_prologue {rows} {count} {groups} {dim}", gqa_prologue, given
    for lens in ([1], [16, 3, 48], [1, 37, 528, 1200]):
        for count, groups, dim in ((4, 4, 24), (6, 2, 64), (7, 1, 130), (30, 1, 40)):
            tables, held = cached(lens)
            planes = tuple(draw(dtype, tables.shape[1], SLOTS, groups, dim) for _ in range(2))
            given = (draw(dtype, len(lens), count, dim), *planes, tables, held)
            yield f"gqa_decode {lens} {count} {groups} {dim}", gqa_decode, given
    for queries, length in ((1, 1), (3, 70), (97, 130), (48, 300)):
        for count, groups, dim, width in ((4, 2, 40, 40), (3, 3, 96, 50), (10, 1, 33, 161)):
            q, k = draw(dtype, queries, count, dim), draw(dtype, length, groups, dim)
            given = (q, k, draw(dtype, length, groups, width))
            yield f"causal {queries} {length} {count} {groups} {dim} {width}", causal, given
            kv = draw(dtype, length, groups, dim + width)
            name = f"causal apart {queries} {length} {count} {groups} {dim} {width}"
            yield name, causal_apart, (q, kv)


def gqa_prologue(
    native: Native,
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensors:
    w = GQAWeights(q_norm, k_norm, 1e-6)
    q = native.gqa_prologue(qkv, w, TokenPlaces(cos, sin, slots), (keys, values))
    return q, keys, values


def gqa_decode(
    native: Native, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor
) -> Tensors:
    return (native.gqa_decode(q, (keys, values), tables, lens, 0.2),)


def causal(native: Native, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    out = q.new_empty(*q.shape[:2], v.shape[2])
    native.causal(q, k, v, out, 0.2)
    return (out,)


def causal_apart(native: Native, q: Tensor, kv: Tensor) -> Tensors:
    """Entries of keys and values side by side: values end where the array ends."""
    dim = q.shape[2]
    return causal(native, q, kv[..., :dim], kv[..., dim:])


def latents(dtype: torch.dtype) -> Iterator[tuple[str, Call, Tensors]]:
    """MLA: prologue with and without a query latent, decode steps."""
    for mla in (
        MLAConfig(3, None, 64, 20, 6, 18),
        MLAConfig(8, 33, 72, 48, 32, 65),
        MLAConfig(2, 65, 30, 7, 2, 9),
    ):
        hidden, entry = 51, mla.latent_dim
        queries = mla.num_heads * mla.qk_dim
        rank = mla.q_lora_rank
        for rows in (1, 6, 29, 130):
            pages = -(-rows // SLOTS)
            given = (
                draw(dtype, rows, hidden),
                draw(dtype, (rank or queries) + entry, hidden, scale=hidden**-0.5),
                draw(dtype, rank or 1),
                draw(dtype, queries, rank or 1, scale=(rank or 1) ** -0.5),
                draw(dtype, mla.kv_lora_rank),
                draw(dtype, mla.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank),
                torch.rand(rows, mla.rope_dim // 2),
                torch.rand(rows, mla.rope_dim // 2),
                draw(dtype, pages, SLOTS, entry),
                pages * SLOTS - 1 - torch.arange(rows),
            )

            def prologue(native: Native, *given: Any, mla: MLAConfig = mla) -> Tensors:
                x, down, q_norm, q_b, kv_norm, kv_b, cos, sin, plane, slots = given
                latent = mla.q_lora_rank is not None
                w = MLAWeights(
                    mla,
                    Weight(down),
                    None,
                    q_norm if latent else None,
                    Weight(q_b) if latent else None,
                    kv_norm,
                    Weight(kv_b),
                    1e-6,
                    interleaved=True,
                )
                q = native.mla_prologue(x, w, TokenPlaces(cos, sin, slots), plane)
                return q, plane

            yield f"mla_prologue {rows} {mla}", prologue, given
        for lens in ([1], [16, 3, 48], [1, 37, 528, 1200]):
            tables, held = cached(lens)
            step = (
                draw(dtype, len(lens), mla.num_heads, mla.qk_dim),
                draw(dtype, mla.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank),
                draw(dtype, tables.shape[1], SLOTS, entry),
                tables,
                held,
            )

            def absorbed(native: Native, *given: Any, mla: MLAConfig = mla) -> Tensors:
                q, kv_b, plane, tables, lens = given
                none = torch.zeros(1, 1, dtype=q.dtype)
                w = MLAWeights(
                    mla, Weight(none), None, None, None, none, Weight(kv_b), 1e-6, interleaved=True
                )
                return (native.mla_absorbed(q, w, plane, tables, lens, 0.2),)

            yield f"mla_absorbed {lens} {mla}", absorbed, step


def draw(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


@contextmanager
def threads_of(native: Native, count: int) -> Iterator[None]:
    native.lib.rq_threads(count)
    try:
        yield
    finally:
        native.lib.rq_threads(1)


def main(place: str, kind: str) -> int:
    faulthandler.enable()
    kernels = library()
    if kernels is None:
        return 77
    native = Native(kernels)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
    fenced = Fenced(place != "start")
    if place == "beyond":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        x = fenced.empty((1, 40), dtype)
        native.lib.rq_add_norm(int(dtype == torch.float32), *[x.data_ptr()] * 5, 1, 41, 1e-6)
        return 0
    done = 0
    for cases in (rows_of, four_bits, layers, heads, latents):
        for name, call, given in cases(dtype):
            for threads in THREADS:
                with threads_of(native, threads):
                    wants = call(native, *(x.clone() for x in given))
                    own = [fenced.copy(x) for x in given]
                    with MadeWithin(fenced):
                        got = call(native, *own)
                for made, want in zip(got, wants, strict=True):
                    assert torch.equal(made, want), (name, threads)
                del own, got, made
                fenced.clear()
                done += 1
    print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
