"""Compiled calls that are captured and replayed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.cpu.captured import capture
from rorqual.ops.cpu.native import Native
from rorqual.ops.interface import Replay

ROOM = 2**20
TURNED = torch.tensor([1, 0])


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    found = CpuOps()
    if found.native is None:
        pytest.skip("no compiler")
    return found


@pytest.fixture
def native(ops: CpuOps) -> Native:
    assert ops.native is not None
    return ops.native


def captured(ops: CpuOps, work: Callable[[], Tensor], room: int = ROOM) -> tuple[Tensor, Replay]:
    with torch.inference_mode():
        out, replay = ops.capture_calls(work, torch.empty(room, dtype=torch.uint8))
    assert replay is not None
    return out, replay


def chain(native: Native, x: Tensor) -> Callable[[], Tensor]:
    """Some calls, with results of one as arguments of the next, views and numbers of all kinds."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(x.shape[1], generator=generator)
    matrix = torch.randn(6, x.shape[1], generator=generator)

    def work() -> Tensor:
        normed, total = native.add_norm(x, None, weight, 1e-5)
        low = native.linear(normed, matrix, None).view(-1, 2, 3).flatten(1)
        return native.concat_columns(low, native.add_to(total, normed))

    return work


def test_a_replay_reads_what_is_there_now(ops: CpuOps, native: Native) -> None:
    x = torch.randn(4, 16)
    work = chain(native, x)
    before = x.clone()
    want = work()
    x.copy_(before)
    out, replay = captured(ops, work)
    assert torch.equal(out, want)
    x.copy_(torch.randn(4, 16))
    other = x.clone()
    got = replay().clone()
    x.copy_(other)
    assert torch.equal(got, work())
    assert not torch.equal(got, want)


def test_captures_may_share_memory(ops: CpuOps, native: Native) -> None:
    """Each replay finds its own inputs, whatever another has left in the memory."""
    memory = torch.empty(ROOM, dtype=torch.uint8)
    pairs = [(torch.randn(rows, 8), torch.randn(rows, 8)) for rows in (2, 5)]

    def work(a: Tensor, b: Tensor) -> Tensor:
        return native.concat_columns(native.concat_columns(a, b), a)

    with torch.inference_mode():
        replays = [ops.capture_calls(partial(work, *pair), memory)[1] for pair in pairs]
    for _ in range(2):
        for (a, b), replay in zip(pairs, replays, strict=True):
            assert replay is not None
            assert torch.equal(replay(), torch.cat((a, b, a), 1))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (lambda y: y * 2, "aten.mul"),
        (lambda y: y.index_select(0, TURNED), "aten.index_select"),
        (lambda y: y.fill_(1.0), "aten.fill_"),
        (lambda y: y.t().contiguous(), "aten.contiguous"),
        (lambda y: y.t().reshape(-1), "aten.reshape"),
        (lambda y: y.to(torch.bfloat16), "aten.to"),
        (lambda y: torch.cat([y, y]), "aten.cat"),
        (lambda y: torch.broadcast_tensors(y, y)[0], "aten.broadcast_tensors"),
    ],
)
def test_what_torch_computes_is_not_captured(
    native: Native,
    more: Callable[[Tensor], Tensor],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The result is right all the same."""
    x = torch.randn(2, 16)
    work = chain(native, x.clone())
    want = more(chain(native, x.clone())())
    with torch.inference_mode(), caplog.at_level("DEBUG", "rorqual"):
        out, calls = capture(native, lambda: more(work()), torch.empty(ROOM, dtype=torch.uint8))
    assert calls is None
    assert torch.equal(out, want)
    assert reason in caplog.text


def test_too_little_memory(native: Native) -> None:
    x = torch.randn(8, 64)
    want = chain(native, x.clone())()
    with torch.inference_mode():
        out, calls = capture(native, chain(native, x), torch.empty(3000, dtype=torch.uint8))
    assert calls is None
    assert torch.equal(out, want)


def test_calls_that_cannot_be_captured(native: Native) -> None:
    seeds = torch.arange(3)
    with torch.inference_mode():
        out, calls = capture(
            native, lambda: native.uniform(seeds, seeds, 1), torch.empty(ROOM, dtype=torch.uint8)
        )
    assert calls is None
    assert torch.equal(out, native.uniform(seeds, seeds, 1))


def test_other_threads_are_not_captured(ops: CpuOps, native: Native) -> None:
    x = torch.randn(3, 16)
    elsewhere: list[Tensor] = []

    def both() -> Tensor:
        thread = threading.Thread(target=lambda: elsewhere.append(chain(native, x + 1)()))
        thread.start()
        thread.join()
        return native.add_to(native.concat_columns(x, x), native.concat_columns(x, x))

    _, replay = captured(ops, both)
    (found,) = elsewhere
    kept = found.clone()
    x.copy_(torch.ones(3, 16))
    assert torch.equal(replay(), torch.full((3, 32), 2.0))
    assert torch.equal(found, kept), "a replay computed what another thread had asked for"


def test_an_error_leaves_the_library_as_it_was(ops: CpuOps, native: Native) -> None:
    lib = native.lib

    def broken() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(native, broken, torch.empty(ROOM, dtype=torch.uint8))
    assert native.lib is lib
    assert native.kept is None
    x = torch.ones(1, 2)
    assert torch.equal(captured(ops, lambda: native.concat_columns(x, x))[1](), torch.ones(1, 4))


def test_a_replay_stops_at_an_id_that_is_none(ops: CpuOps, native: Native) -> None:
    table = torch.randn(5, 8)
    ids = torch.tensor([4, 0])
    out, replay = captured(ops, lambda: native.embed(ids, table))
    ids.copy_(torch.tensor([1, 2]))
    assert torch.equal(replay(), table[1:3])
    ids[1] = 5
    with pytest.raises(IndexError, match="out of range"):
        replay()
    ids[1] = 3
    assert torch.equal(replay(), table[[1, 3]])
    assert out.data_ptr() == replay().data_ptr()


def test_the_first_step_imports_no_compiler() -> None:
    """torch's own would take a second, between the first token of a server and the second."""
    script = """
import sys
from rorqual import LLM, SamplingParams
llm = LLM()
llm.generate(["Once"], SamplingParams(max_tokens=4, temperature=0))
assert llm.engine.worker.runner.captured.kinds["model"].replays[1], "it is a captured step"
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
