"""Pages from one GPU to another by handles of the driver: two processes on one card, or on two
where there are. Run as a script it is one that offers memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual.bench.comm.page_transfers import bench
from rorqual.bench.comm.transfer_setup import TransferSetup
from rorqual.cache.page_memory import PlaneMover
from rorqual.disagg.page_reader import PageReader
from rorqual.disagg.transports.handles import DeviceStaging, HandleTransport, PeerRead
from rorqual.disagg.transports.interface import ReadState, TransportError
from rorqual.ops.triton.rowwise.page_bytes import PlaneTable
from rorqual.parallel.shared.shared_block import SharedBlock
from rorqual.platforms import make_platform
from tests.child_process import environment

ROOT = Path(__file__).resolve().parents[2]
SIZE = (32 << 20) + 4096
HERE = "cuda:0"
THERE = [HERE, "cuda:1"] if torch.cuda.device_count() > 1 else [HERE]


def pattern(device: str) -> Tensor:
    numbers = torch.arange(SIZE // 4, dtype=torch.int32, device=device) * 2_654_435
    return numbers.view(torch.uint8)


@contextmanager
def offering(device: str) -> Iterator[tuple[subprocess.Popen[bytes], bytes]]:
    """A process, and the description of its memory, which holds the pattern."""
    with subprocess.Popen(
        [sys.executable, __file__, device],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    ) as other:
        try:
            assert other.stdout is not None
            yield other, other.stdout.readline().strip()
        finally:
            other.kill()
            other.wait()


def wait_until_gone(transport: HandleTransport) -> None:
    deadline = time.monotonic() + 30
    while transport.peers:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_block_in_this_process() -> None:
    device = torch.device(HERE)
    block = SharedBlock.new(1000, device)
    block.tensor(device).copy_(pattern(HERE)[:1000])
    fd = block.fd()
    again = SharedBlock.of(fd, 1000, device).tensor(device)
    os.close(fd)
    assert again.device == device
    assert again.data_ptr() != block.pointer
    del block
    gc.collect()
    assert again.equal(pattern(HERE)[:1000])


def test_blocks_leave_no_memory_behind() -> None:
    """There would not be room for so many. (What is free says little: other processes use the same
    GPU.)"""
    device = torch.device(HERE)
    size = 2 << 30
    for _ in range(torch.cuda.get_device_properties(device).total_memory // size + 1):
        block = SharedBlock.new(size, device)
        fd = block.fd()
        again = SharedBlock.of(fd, size, device).tensor(device)
        os.close(fd)
        del block
        again[-1] = 1
        torch.cuda.synchronize()
        del again
        gc.collect()


@pytest.mark.parametrize("there", THERE)
def test_bytes_come_and_a_kill_is_no_fault(there: str) -> None:
    """What is mapped can be read though its process is gone; the transport says so."""
    platform = make_platform(HERE)
    with offering(there) as (other, description):
        transport = HandleTransport(DeviceStaging(SIZE, platform), platform, False)
        transport.memory.bytes.zero_()
        torch.cuda.synchronize()
        ticket = transport.read(description, 4096, 0, SIZE - 4096)
        assert transport.poll(ticket, 10.0) is ReadState.DONE
        assert transport.memory.bytes[: SIZE - 4096].equal(pattern(HERE)[4096:])
        (peer,) = transport.peers.values()
        mapped = peer.memory
        assert mapped.device == torch.device(HERE), "as this GPU sees it"
        assert mapped.equal(pattern(HERE)), "read by a kernel"
        tickets = [transport.read(description, 0, 0, SIZE) for _ in range(8)]
        into = torch.empty_like(mapped)
        torch.cuda.synchronize()

        def by_kernel(data: Tensor) -> None:
            torch.bitwise_xor(data, 0, out=into)

        tickets += transport.read_windows(description, 8 * [PeerRead(0, 0, SIZE, by_kernel)])
        other.send_signal(signal.SIGKILL)
        other.wait()
        states = {transport.poll(ticket, 10.0) for ticket in tickets}
        assert states <= {ReadState.DONE, ReadState.ENDED}
        assert into.equal(pattern(HERE))
        wait_until_gone(transport)
        for _ in range(3):
            assert mapped.equal(pattern(HERE))
            assert (mapped.clone() == mapped).all()
        torch.cuda.synchronize()
        with pytest.raises(TransportError, match="not to be had"):
            transport.read(description, 0, 0, 1)
        del mapped, peer
        transport.close()


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize(
    ("places", "staging_mb", "after"),
    [
        pytest.param(True, 256, 0.0, id="at once"),
        pytest.param(True, 256, 0.02, id="at once, prepared"),
        pytest.param(True, 32, 0.0, id="at once, few windows", marks=pytest.mark.exhaustive),
        pytest.param(False, 256, 0.02, id="by a range, prepared", marks=pytest.mark.exhaustive),
        pytest.param(False, 256, 0.0, id="by a range", marks=pytest.mark.exhaustive),
        pytest.param(False, 32, 0.0, id="by the host"),
    ],
)
def test_a_prompt_s_pages_between_two_processes(
    there: str, places: bool, staging_mb: int, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bench compares the bytes of the pages that came with those that were sent."""
    monkeypatch.setattr(PageReader, "places", places)
    for model, tokens in (("deepseek-v2-lite", 2048), ("qwen3-30b-a3b", 1024)):
        setup = TransferSetup(
            *(model, tokens, 64, ("handles",), 1, staging_mb),
            devices=(there, HERE),
            request_after=after,
        )
        (times,) = bench(setup).transports
        assert len(times.whole) == 1


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_pages_to_rows_and_back(some: bool, far: bool) -> None:
    torch.manual_seed(1)
    planes = [torch.randn(300, 64, 4, 128, device=HERE).to(torch.bfloat16) for _ in range(6)]
    if some:
        planes = [plane.narrow(2, 1, 2) for plane in planes]
    table = PlaneTable.of(planes)
    pages = torch.randperm(300)[:129].to(HERE)
    rows = torch.empty(129, table.size, dtype=torch.uint8, device=HERE)
    want = torch.empty_like(rows)
    table.gather(pages, rows)
    PlaneMover(planes).gather(pages, want)
    assert rows.equal(want)
    for plane in planes:
        plane.zero_()
    table.scatter(want, pages, far)
    rows.zero_()
    PlaneMover(planes).gather(pages, rows)
    assert rows.equal(want)
    others = torch.ones(300, dtype=torch.bool, device=HERE)
    others[pages] = False
    assert not any(plane[others].any() for plane in planes)


@pytest.mark.parametrize("there", THERE)
def test_tokens_are_those_of_one_engine_and_a_keeper_may_die(there: str) -> None:
    pytest.importorskip("transformers")
    from tests.disagg.apart import Apart
    from tests.disagg.test_ranks_travel import nothing_is_held, prompt, travels

    more = {"transport": "handles", "num_pages": 160}
    with (
        Apart("both", device=there, **more) as keeper,
        Apart("both", device=HERE, **more) as reader,
    ):
        keeper.end()
        reader.end()
        assert reader.ask("state")["transport"].startswith("handles on host")
        for number in (1, 2, 3):
            travels(keeper, reader, number, 99, count=number)
            travels(reader, keeper, number + 3, 99)
        ids = prompt(9)
        given = keeper.ask("prefill", ids)
        keeper.process.kill()
        keeper.process.wait()
        ((tokens, cached, error),) = reader.ask("answer", ids, given)
        ((want, _, _),) = reader.ask("answer", ids, None, salt="alone")
        assert (tokens, cached) == (want, 0)
        assert error
        nothing_is_held(reader)


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("transport", ["tcp", "handles"])
def test_pages_that_are_sent_while_their_layers_are_computed(transport: str, there: str) -> None:
    """Whole prompts, and in chunks; each layer's copy waits for an event of the keeper's stream."""
    pytest.importorskip("transformers")
    from tests.disagg.apart import Apart
    from tests.disagg.test_ranks_travel import nothing_is_held, prompt

    more = {"transport": transport, "num_pages": 160}
    early = {"by_layer": True, "chunked_prefill_size": 40}
    with (
        Apart("both", device=there, **more, **early) as keeper,
        Apart("both", device=HERE, **more) as reader,
    ):
        keeper.end()
        reader.end()
        for number in range(4):
            ids = prompt(number)[: 33 if number % 2 else 100]
            given = keeper.ask("begin", ids)
            reader.begin("answer", ids, given)
            keeper.ask("go_on", 20)
            ((tokens, cached, error),) = reader.end()
            assert (cached, error) == (len(ids) - 1, "")
            assert tokens == keeper.ask("answer", ids, None, salt="alone")[0][0]
        nothing_is_held(keeper)
        nothing_is_held(reader)


def offer(device: str) -> None:
    platform = make_platform(device)
    memory = DeviceStaging(SIZE, platform)
    memory.bytes.copy_(pattern(device))
    torch.cuda.synchronize()
    print(HandleTransport(memory, platform, True).describe().decode(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    offer(sys.argv[1])
