"""Builds kernels.cpp once a machine and calls it. No compiler: the CPU backend goes on with
torch calls alone, and says so."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rorqual.config.model import cache_folder, compiler
from rorqual.ops import rng
from rorqual.ops.interface import GQAWeights, MLAWeights, TokenPlaces
from rorqual.ops.reference import Distribution, ExpertWeights, RouterWeights

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = (
    "crew.h",
    "vectors.h",
    "vectors/avx512.h",
    "vectors/avx2.h",
    "vectors/neon.h",
    "vectors/plain.h",
    "products.h",
    "units.h",
    "pairs.h",
    "lanes.h",
    "tiles.h",
    "vectors/units_avx512.h",
    "vectors/units_neon.h",
    "gemm.h",
    "attention.h",
    "experts.h",
    "quantized.h",
    "int4_pairs.h",
    "int4_panels.h",
    "int4_byte_panels.h",
    "sampling.h",
    "captured.h",
)
PARTS = tuple(Path(__file__).parent / name for name in HEADERS)
# Of compilers for aarch64 all know -mcpu, not all -march.
THIS_PROCESSOR = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def first_cache(caches: Path = CACHES) -> int:
    """Bytes of this processor's first data cache; 0 where the system does not say."""
    for folder in sorted(caches.glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text() for name in ("level", "type", "size"))
            if level.strip() == "1" and kind.strip() != "Instruction":
                return int(size.strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            return 0
    return 0


FLAGS = (
    "-O3",
    THIS_PROCESSOR,
    f"-DFIRST_CACHE={first_cache()}",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-Wno-psabi",
)
# GCC's alone. Tuned for some processors (AMD's Zen 2 and later) it rounds the product of a long sum
# before it adds it, in some loops and not in others: a row's result would depend on how many rows
# there are beside it.
GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
# GCC then generates the code by so many processes: with two cores in 20 s instead of 36. What it
# generates does not depend on the number.
PARALLEL_FLAG = f"-flto={min(16, os.cpu_count() or 1)}"
COMPILE_SECONDS = 300
STORAGE = (torch.float32, torch.bfloat16)
log = logging.getLogger("rorqual")


class _MlaLayer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("hidden", "q_rank", "heads", "nope", "rope", "v_dim", "rank", "interleaved")
    ]
    _fields_ += [("eps", ctypes.c_double)]
    _fields_ += [
        (name, ctypes.c_void_p)
        for name in ("down", "down_bias", "q_norm", "q_b", "kv_norm", "kv_b")
    ]


class _Router(ctypes.Structure):
    _names: tuple[str, ...] = ("experts", "top_k", "groups", "top_groups")
    _names += ("sigmoid", "best_two", "grouped", "normalize", "rounded")
    _fields_ = [(name, ctypes.c_int64) for name in _names]
    _fields_ += [("scaling", ctypes.c_double), ("gate", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


_I = ctypes.c_int
_P = ctypes.c_void_p
_D = ctypes.c_double
_N = ctypes.c_int64
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "rq_lacking": (),
    "rq_threads": (_I,),
    "rq_threads_used": (),
    "rq_add_norm": (_I, _P, _P, _P, _P, _P, _N, _N, _D),
    "rq_embed": (_P, _P, _P, _N, _N, _N),
    "rq_concat_columns": (_P, _P, _P, _N, _N, _N),
    "rq_add": (_I, _P, _P, _N),
    "rq_linear": (_I, _P, _P, _P, _P, _N, _N, _N),
    "rq_mlp": (_I, _P, _P, _P, _P, _N, _N, _N),
    "rq_mla_prologue": (_I, _P, _P, _P, _P, _P, _P, _P, _N),
    "rq_mla_absorbed": (_I, _P, _P, _P, _P, _N, _P, _N, _D, _P, _N),
    "rq_gqa_prologue": (_I, _P, _P, _P, _D, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N),
    "rq_gqa_decode": (_I, _P, _P, _P, _P, _N, _P, _N, _D, _P, _N, _N, _N, _N),
    "rq_causal": (_I, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N, _D),
    "rq_route": (_I, _I, _P, _P, _P, _P, _N, _N),
    "rq_experts": (_I, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N),
    "rq_linear_packed": (_I, _P, _P, _P, _P, _N),
    "rq_mlp_packed": (_I, _P, _P, _P, _P, _N),
    "rq_mla_prologue_packed": (_I, _P, _P, _P, _P, _P, _P, _P, _P, _P, _N),
    "rq_experts_packed": (_I, _P, _P, _P, _P, _P, _P, _N, _N, _N),
    "rq_uniform": (_P, _P, _N, _P, _N),
    "rq_draw_normal": (_I, _P, _N, _N, _N, _N, _D, _N, _N),
    "rq_distribution": (_P, _N, _N, _N, _P, _I, _P, _P, _P),
    "rq_draw": (_P, _N, _N, _N, _P, _P, _P, _P, _P),
    "rq_draw_rest": (_P, _N, _N, _P, _P, _P, _P, _P, _P, _P, _P, _N),
    "rq_write_probs": (_P, _N, _N, _N, _P, _P, _P, _P),
    "rq_capturable": (ctypes.c_char_p,),
    "rq_replay": (_P, _N),
}
# the others return nothing
_RESULTS: dict[str, Any] = {
    "rq_lacking": ctypes.c_char_p,
    "rq_threads_used": _I,
    "rq_embed": _N,
    "rq_capturable": _N,
    "rq_replay": _N,
    "rq_experts": _N,
    "rq_experts_packed": _N,
}


@functools.cache
def library(processor: str = "native", more: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The compiled kernels, or None (with one line in the log) where they cannot be built.
    processor, more: for which, and flags besides; others than this one are for tests."""
    command = compiler()
    if command is None:
        log.warning(
            "no C++ compiler found: decoding on the CPU uses torch calls alone, several "
            "times slower for small models"
        )
        return None
    flags = tuple(flag.replace("native", processor) for flag in FLAGS) + more
    try:
        # torch has loaded an OpenMP runtime of the usual name: the kernels find that one, and share
        # its threads.
        loaded = ctypes.CDLL(str(_build(command, flags)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "the CPU kernels could not be built (%s): decoding uses torch calls alone", error
        )
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = _RESULTS.get(name)
    lacking = loaded.rq_lacking()
    if lacking:
        log.warning(
            "the C++ compiler believes that this processor has %s, and it has not: decoding uses "
            "torch calls alone",
            lacking.decode(),
        )
        return None
    return loaded


def _output(*command: str) -> bytes:
    run = subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS, check=True)
    return run.stdout


def _build(command: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """Compile into the cache folder, under a name that covers source, flags, compiler and
    processor."""
    name = _output(command, "--version")
    is_gcc = b"Free Software Foundation" in name
    if is_gcc:
        flags += GCC_FLAGS
    # The macros are those of the instructions that may be used. Every compiler prints them; one
    # that does not leaves no way to tell this processor's library from another's: nothing is built.
    processor = _output(command, *flags, "-dM", "-E", "-x", "c++", os.devnull)
    source = b"".join(path.read_bytes() for path in (SOURCE, *PARTS))
    all_flags = " ".join((*flags, "-flto")) if is_gcc else " ".join(flags)
    key = hashlib.sha256(source + all_flags.encode() + processor + name).hexdigest()[:16]
    target = cache_folder() / f"kernels-{key}.so"
    if not target.exists():
        log.warning(
            "compiling the CPU kernels for this processor, once, into %s: half a minute or so",
            target.parent,
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            compiling = (command, *flags, str(SOURCE), "-o", str(made))
            try:
                _output(*compiling, *([PARALLEL_FLAG] if is_gcc else []))
            except subprocess.CalledProcessError:
                if not is_gcc:
                    raise
                _output(*compiling)  # a GCC without that part of it
            made.replace(target)  # atomic: another process may be building the same file
    return target


BLOCK = 128  # tokens of a part of a distribution, as in sampling.h


def _wide(x: Tensor) -> int:
    return int(x.dtype == torch.float32)


def _pointer(x: Tensor | None) -> int:
    if x is None:
        return 0
    assert x.is_contiguous()
    return x.data_ptr()


def _pointers(*tensors: Tensor) -> list[int]:
    # a missing argument is a TypeError, never a wrong address
    return [x.data_ptr() for x in tensors if x.is_contiguous()]


def unknown_expert(slot: int, slots: int) -> IndexError:
    return IndexError(f"expert id {slot} is neither a slot, 0 to {slots - 1}, nor -1 (not here)")


class Native:
    """Calls into the library. Callers have checked that dtypes are one of STORAGE and that
    everything is contiguous."""

    def __init__(self, kernels: ctypes.CDLL):
        self.lib = kernels
        self.lib.rq_threads(torch.get_num_threads())
        self.kept: list[Any] | None = (
            None  # while calls are captured: what they read by its address
        )

    def threads_used(self) -> int:
        """How many threads calls use at present (crew.h)."""
        return self.lib.rq_threads_used()

    def keep(self, what: Any) -> None:
        """To be called with what compiled calls read and nothing else may hold."""
        if self.kept is not None:
            self.kept.append(what)

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        n, d = x.shape
        self.lib.rq_add_norm(
            _wide(x),
            _pointer(x),
            _pointer(residual),
            weight.data_ptr(),
            normed.data_ptr(),
            total.data_ptr(),
            n,
            d,
            eps,
        )
        return normed, total

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows `ids` of a table of any dtype; an id that is none is an IndexError."""
        rows, columns = table.shape
        out = table.new_empty(ids.shape[0], columns)
        given = (*_pointers(table, ids), out.data_ptr())
        sizes = (ids.shape[0], rows, columns * table.element_size())
        known = self.lib.rq_embed(*given, *sizes)
        if known < ids.shape[0]:
            raise IndexError(f"token id {int(ids[known])} is not below {rows}")
        return out

    def concat_columns(self, a: Tensor, b: Tensor) -> Tensor:
        """Columns of a, then of b, of one dtype."""
        out = a.new_empty(a.shape[0], a.shape[1] + b.shape[1])
        rows = (a.shape[1] * a.element_size(), b.shape[1] * b.element_size())
        self.lib.rq_concat_columns(*_pointers(a, b, out), a.shape[0], *rows)
        return out

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """y, with x added to it."""
        self.lib.rq_add(_wide(y), *_pointers(y, x), y.numel())
        return y

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, columns = weight.shape
        y = x.new_empty(x.shape[0], rows)
        self.lib.rq_linear(
            _wide(x),
            _pointer(x),
            _pointer(weight),
            _pointer(bias),
            y.data_ptr(),
            x.shape[0],
            rows,
            columns,
        )
        return y

    def mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        y = torch.empty_like(x)
        (hidden, size) = down.shape
        self.lib.rq_mlp(
            _wide(x),
            _pointer(x),
            _pointer(gate_up),
            _pointer(down),
            y.data_ptr(),
            x.shape[0],
            hidden,
            size,
        )
        return y

    def mla_layer(self, w: MLAWeights, hidden: int) -> _MlaLayer:
        mla = w.config
        query = _pointer(w.q_b.data) if w.q_b else 0
        pointers = [
            _pointer(w.down.data),
            _pointer(w.down_bias),
            _pointer(w.q_norm),
            query,
            _pointer(w.kv_norm),
            _pointer(w.kv_b.data),
        ]
        rank = (mla.q_lora_rank or 0) if w.q_b is not None else 0
        sizes = (
            hidden,
            rank,
            mla.num_heads,
            mla.nope_dim,
            mla.rope_dim,
            mla.v_dim,
            mla.kv_lora_rank,
            int(w.interleaved),
        )
        return _MlaLayer(*sizes, w.eps, *pointers)

    def layer_of(self, w: MLAWeights) -> int:
        """Where what does not change from step to step is; valid while `w` is."""
        if w.scratch is None:
            w.scratch = self.mla_layer(w, w.down.columns)
        return ctypes.addressof(w.scratch)

    def mla_prologue(self, x: Tensor, w: MLAWeights, places: TokenPlaces, plane: Tensor) -> Tensor:
        q = x.new_empty(x.shape[0], w.config.num_heads, w.config.qk_dim)
        at = self.layer_of(w)
        given = _pointers(x, places.cos, places.sin, plane, places.slots, q)
        self.lib.rq_mla_prologue(_wide(x), at, *given, x.shape[0])
        return q

    def mla_absorbed(
        self, q: Tensor, w: MLAWeights, plane: Tensor, tables: Tensor, lens: Tensor, scale: float
    ) -> Tensor:
        out = q.new_empty(q.shape[0], w.config.num_heads, w.config.v_dim)
        table = _pointer(tables)
        width = tables.shape[1]
        at = self.layer_of(w)
        self.lib.rq_mla_absorbed(
            _wide(q),
            at,
            _pointer(q),
            _pointer(plane),
            table,
            width,
            _pointer(lens),
            plane.shape[1],
            scale,
            out.data_ptr(),
            q.shape[0],
        )
        return out

    def gqa_prologue(
        self, qkv: Tensor, w: GQAWeights, places: TokenPlaces, planes: tuple[Tensor, Tensor]
    ) -> Tensor:
        groups, dim = planes[0].shape[2:]
        heads = qkv.shape[1] - 2 * groups
        q = qkv.new_empty(qkv.shape[0], heads, dim)
        first = _pointers(qkv, w.q_norm, w.k_norm)
        rest = _pointers(places.cos, places.sin, *planes, places.slots, q)
        self.lib.rq_gqa_prologue(_wide(qkv), *first, w.eps, *rest, qkv.shape[0], heads, groups, dim)
        return q

    def gqa_decode(
        self, q: Tensor, planes: tuple[Tensor, Tensor], tables: Tensor, lens: Tensor, scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        (rows, heads, dim) = q.shape
        groups = planes[0].shape[2]
        pointers = _pointers(q, *planes, tables)
        self.lib.rq_gqa_decode(
            _wide(q),
            *pointers,
            tables.shape[1],
            _pointer(lens),
            planes[0].shape[1],
            scale,
            out.data_ptr(),
            rows,
            heads,
            groups,
            dim,
        )
        return out

    def causal(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
        """Attention of one request into out [Q, H, Dv]: see reference.causal_attention. Entries of
        k and v, and their heads, may lie apart."""
        strides = (ctypes.c_int64 * 4)(*k.stride()[:2], *v.stride()[:2])
        sizes = (q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        at = (k.data_ptr(), v.data_ptr(), ctypes.addressof(strides), _pointer(out))
        self.lib.rq_causal(_wide(q), _pointer(q), *at, *sizes, scale)

    def router(self, x: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
        """The routed experts alone."""
        ids = torch.empty(x.shape[0], w.config.top_k, dtype=torch.int64)
        weights = torch.empty(x.shape[0], w.config.top_k)
        at = ctypes.addressof(self._settings_of(w))
        self.lib.rq_route(
            _wide(x), _wide(w.gate), at, _pointer(x), ids.data_ptr(), weights.data_ptr(), *x.shape
        )
        return ids, weights

    def _settings_of(self, w: RouterWeights) -> _Router:
        """For the kernel; valid while `w` is."""
        matrices = (_pointer(w.gate), _pointer(w.bias))
        if w.scratch is None or w.scratch[0] != matrices:
            moe = w.config
            grouped = moe.method != "greedy" and moe.n_group > 1
            kinds = (moe.scoring == "sigmoid", moe.method == "noaux_tc", grouped)
            flags = (*kinds, moe.norm_topk_prob, not moe.router_fp32)
            sizes = (moe.num_experts, moe.top_k, moe.n_group, moe.topk_group)
            w.scratch = (matrices, _Router(*sizes, *map(int, flags), moe.scaling, *matrices))
        settings: _Router = w.scratch[1]
        self.keep(settings)
        return settings

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> Tensor:
        """Ids may repeat within a token; one that is neither a slot nor -1 is an IndexError, and
        nothing is computed."""
        y = torch.empty_like(x)
        slots, hidden, size = w.down.data.shape
        assert x.shape == (ids.shape[0], hidden)
        assert weights.shape == ids.shape
        assert weights.dtype == torch.float32
        assert w.gate_up.data.shape == (slots, 2 * size, hidden)
        matrices = (_pointer(w.gate_up.data), _pointer(w.down.data))
        ids = ids.long()  # int32 as well, in which they travel between ranks
        unknown = self.lib.rq_experts(
            _wide(x),
            *_pointers(x, ids, weights),
            *matrices,
            y.data_ptr(),
            *ids.shape,
            slots,
            hidden,
            size,
        )
        if unknown < ids.numel():
            raise unknown_expert(int(ids.flatten()[unknown]), slots)
        return y

    # ---- sampling. Logits are fp32, each row dense; a distribution's scratch holds the masses of
    # blocks of BLOCK tokens.

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        out = torch.empty(positions.shape, dtype=torch.float64)
        self.lib.rq_uniform(*_pointers(seeds, positions), stream, out.data_ptr(), out.numel())
        return out

    def draw_normal(self, view: Tensor, key: int, std: float, first: int, width: int) -> None:
        """rng.draw_normal of a view [rows, columns] whose columns lie side by side."""
        rows, columns = view.shape
        factor = std / rng.FIELDS_DEVIATION
        at = (view.data_ptr(), view.stride(0), rows, columns)
        self.lib.rq_draw_normal(_wide(view), *at, key, factor, first, width)

    def distribution(self, logits: Tensor, settings: Tensor, filters: bool) -> Distribution:
        m, v = logits.shape
        summary = torch.empty(m, 4, dtype=torch.float64)
        best = torch.empty(m, dtype=torch.int64)
        parts = torch.empty(m, -(-v // BLOCK), dtype=torch.float64)
        out = _pointers(summary, parts, best)
        self.lib.rq_distribution(
            logits.data_ptr(), logits.stride(0), m, v, _pointer(settings), int(filters), *out
        )
        return Distribution(logits, summary, best, parts)

    def sample_from(self, given: Distribution, numbers: Tensor) -> Tensor:
        out = torch.empty_like(given.best)
        self.lib.rq_draw(
            *self._rows(given), *_pointers(given.summary, given.scratch, given.best, numbers, out)
        )
        return out

    def sample_residual(
        self,
        given: Distribution,
        rows: Tensor,
        numbers: Tensor,
        refused: Tensor,
        q: Tensor | None,
        q_rows: Tensor | None,
    ) -> Tensor:
        out = torch.empty_like(rows)
        (logits, stride, _, v) = self._rows(given)
        pointers = _pointers(given.summary, given.scratch, rows, numbers, refused)
        self.lib.rq_draw_rest(
            logits,
            stride,
            v,
            *pointers,
            _pointer(q),
            _pointer(q_rows),
            out.data_ptr(),
            rows.shape[0],
        )
        return out

    def write_probs(self, given: Distribution, plane: Tensor, rows: Tensor) -> None:
        self.lib.rq_write_probs(
            *self._rows(given), *_pointers(given.summary, given.scratch, plane, rows)
        )

    def _rows(self, given: Distribution) -> tuple[int, int, int, int]:
        m, v = given.logits.shape
        return given.logits.data_ptr(), given.logits.stride(0), m, v
