"""Tokens with a cache that is far too small and host memory behind it are those of a large cache,
and pages do come from there. fp32, tiny checkpoints, real engine."""

from __future__ import annotations

import ctypes
import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import rorqual.engine.executor as executors
from rorqual import LLM
from rorqual.cache.host_memory import HostMemory
from rorqual.cache.host_tier import PageCopy
from rorqual.cache.page_memory import PlaneMover
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import KVSpec, Plane
from rorqual.config import host_memory
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution import worker
from rorqual.errors import ConfigError
from rorqual.platforms.cpu import CpuPlatform
from rorqual.platforms.cuda import CudaPlatform
from tests.demo_script import load_demo
from tests.engine.execution.replaying import ReplayingPlatform
from tests.engine.execution.test_identity import engine, greedy
from tests.models.checkpoints import VOCAB, save, save_with_mtp

PAGE = 8
TIER = {"num_pages": 26, "max_num_seqs": 4, "kv_host_memory": 0.01}


def texts(count: int = 6, length: int = 81) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB, (count, length), generator=generator).tolist()


def assert_host_helps(llm: LLM, want: list[list[int]]) -> None:
    """Six prompts of eleven pages in turn, twice, through a cache of 25: the second time ten pages
    of each are found in host memory, or those that the device still has there."""
    assert greedy(llm, texts(), one_by_one=True) == want
    before = llm.engine.scheduler.usage()
    assert greedy(llm, texts(), one_by_one=True) == want
    assert greedy(llm, texts()) == want
    after = llm.engine.scheduler.usage()
    assert after.host_hits - before.host_hits >= 4 * 9 * PAGE
    found = after.prefix_hits - before.prefix_hits
    assert found >= 0.9 * (after.prefix_queries - before.prefix_queries) - len(texts()) * 24


class LatePlatform(CpuPlatform):
    """Copies beside the steps are done as late as they may be: when something waits for them."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.left: tuple[deque[Callable[[], None]], ...] = (deque(), deque())

    def beside(self, work: Callable[[], None], lane: int = 0) -> Callable[[], None]:
        left = self.left[lane]
        left.append(work)

        def wait() -> None:
            while work in left:
                left.popleft()()

        return wait


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        executors, "make_platform", lambda device: LatePlatform(torch.device("cpu"))
    )


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("v3", {"steps_in_flight": 2}),
        ("qwen", {"chunked_prefill_size": 20}),
        ("v3", {"kv_cache_dtype": "int8"}),
        ("qwen", {"kv_cache_dtype": "int8", "steps_in_flight": 2}),
        ("v3", {"mla_prefill": "CD", "mla_decode": "CD"}),
    ],
    ids=lambda found: str(found),
)
def test_tokens_are_those_of_a_large_cache(
    tmp_path: Path, late: None, model: str, options: dict[str, Any]
) -> None:
    save(model, tmp_path)
    want = greedy(engine(tmp_path, **options), texts(), one_by_one=True)
    assert_host_helps(engine(tmp_path, **{**options, **TIER}), want)


class ByLayer(LatePlatform):
    """Planes of pages that a step reads while they come are there as late as they may be, too."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.planes: deque[Callable[[], None]] = deque()
        self.started = 0
        self.most_left = 0  # after a wait

    def read(self, work: Callable[[], None]) -> None:
        self.planes.append(work)
        self.started += 1

    def mark(self) -> Callable[[], None]:
        place = self.started

        def wait() -> None:
            while self.planes and self.started - len(self.planes) < place:
                self.planes.popleft()()
            self.most_left = max(self.most_left, len(self.planes))

        return wait

    def beside(self, work: Callable[[], None], lane: int = 0) -> Callable[[], None]:
        if lane:
            return super().beside(work, lane)
        work()
        return self.mark()


class ByAddress(PlaneMover):
    reads_host = True

    def __init__(self, planes: Sequence[Tensor], platform: ByLayer):
        super().__init__(planes)
        self.platform = platform

    def read_host(self, addresses: Tensor, pages: Tensor, planes: range) -> None:
        sizes = [plane[0].nbytes for plane in self.planes]
        for number in planes:
            for address, page in zip(addresses.tolist(), pages.tolist(), strict=True):
                target = self.planes[number][page]
                source = address + sum(sizes[:number])
                self.platform.read(
                    partial(ctypes.memmove, target.data_ptr(), source, target.nbytes)
                )


class InPieces(ByLayer, ReplayingPlatform):
    """Steps are captured as well."""


LayerPlatform = TypeVar("LayerPlatform", bound=ByLayer)


def run_on(kind: type[LayerPlatform], monkeypatch: pytest.MonkeyPatch) -> LayerPlatform:
    """Engines that are made from now on run on this platform."""
    platform = kind(torch.device("cpu"))
    monkeypatch.setattr(worker, "check_host_memory", lambda *given: None)  # of known platforms
    monkeypatch.setattr(executors, "make_platform", lambda device: platform)
    monkeypatch.setattr(
        "rorqual.cache.host_memory.page_mover", lambda planes: ByAddress(planes, platform)
    )
    return platform


def save_any(model: str, folder: Path) -> None:
    if model == "mtp":
        save_with_mtp(folder, 1, agreement=2.0)
    else:
        save(model, folder)


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("v3", {"steps_in_flight": 2}),
        ("qwen", {"chunked_prefill_size": 20, "steps_in_flight": 2}),
        ("v3", {"mla_prefill": "CD", "mla_decode": "CD"}),
        ("mtp", {"num_speculative_tokens": 2}),
    ],
    ids=lambda found: str(found),
)
def test_each_layer_waits_for_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any]
) -> None:
    save_any(model, tmp_path)
    prompts = texts(length=85)  # of the last page some tokens are computed
    want = greedy(engine(tmp_path, **options), prompts, one_by_one=True)
    platform = run_on(ByLayer, monkeypatch)
    small = engine(tmp_path, **{**options, **TIER})
    for one_by_one in (True, True, False):
        assert greedy(small, prompts, one_by_one) == want
    assert small.engine.scheduler.usage().host_hits >= 6 * 9 * PAGE
    assert platform.most_left, "no layer ran before the last one's pages had come"
    assert not platform.planes


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("v3", {}),
        ("qwen", {"steps_in_flight": 2}),
        ("v3", {"mla_prefill": "CC", "mla_decode": "AM_CC_ME"}),
        ("mtp", {"num_speculative_tokens": 2}),
    ],
    ids=lambda found: str(found),
)
def test_a_request_that_only_decodes_waits_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any]
) -> None:
    """Its step is launched in pieces where it has pages to wait for, else replayed whole."""
    save_any(model, tmp_path)
    want = greedy(engine(tmp_path, **options), texts(), one_by_one=True)
    platform = run_on(InPieces, monkeypatch)
    small = engine(tmp_path, **{**options, **TIER}, piecewise_tokens=64)
    assert greedy(small, texts(), one_by_one=True) == want
    platform.most_left = platform.pieces = platform.replayed_between = 0
    before = small.engine.scheduler.usage()
    for one_by_one in (True, False):
        assert greedy(small, texts(), one_by_one) == want
    assert small.engine.scheduler.usage().host_hits - before.host_hits >= 4 * 9 * PAGE
    assert platform.most_left, "no layer ran before the last one's pages had come"
    assert not platform.planes
    assert platform.pieces
    if "mla_decode" not in options:
        assert platform.replayed_between, "attention was not captured"


@pytest.mark.parametrize("length", [81, 85], ids=["decodes", "a chunk"])
@pytest.mark.parametrize("model", ["v3", "qwen"])
def test_a_request_that_waits_layer_by_layer_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, length: int
) -> None:
    """Of one step: a request whose pages come, one whose prompt is computed, and one that has its
    pages. Attention of those that decode is captured, that of the others is not."""
    save(model, tmp_path)
    prompts = texts(length=length)
    short = texts(2, 17)
    want = greedy(engine(tmp_path), [*prompts, *short], one_by_one=True)
    platform = run_on(InPieces, monkeypatch)
    small = engine(tmp_path, **{**TIER, "num_pages": 40}, piecewise_tokens=64)
    greedy(small, prompts, one_by_one=True)
    for index, prompt in enumerate(prompts):
        assert greedy(small, short[1:], one_by_one=True) == want[-1:]  # on the device
        platform.most_left = platform.pieces = 0
        hits = small.engine.scheduler.usage().host_hits
        fresh = [index, *short[0][1:]]
        first, *others = greedy(small, [prompt, fresh, short[1]])
        assert small.engine.scheduler.usage().host_hits > hits
        assert first == want[index]
        assert others[1] == want[-1]
        assert platform.most_left, "no layer ran before the last one's pages had come"


def test_steps_of_copies_alone_teach_nothing_of_decoding(tmp_path: Path) -> None:
    save("qwen", tmp_path)
    llm = engine(tmp_path, **TIER, itl_ms="auto")
    for _ in range(2):
        greedy(llm, texts(3), one_by_one=True)
    assert llm.engine.scheduler.usage().host_hits
    assert llm.engine.chunks is not None
    assert set(llm.engine.chunks.decode) == {0}, "one request at a time"


@pytest.mark.exhaustive
def test_pages_of_prediction_modules_come_back(tmp_path: Path, late: None) -> None:
    save_with_mtp(tmp_path, 1, agreement=2.0)
    options = {"num_speculative_tokens": 2, "steps_in_flight": 2}
    large = engine(tmp_path, **options)
    want = greedy(large, texts(), one_by_one=True)
    small = engine(tmp_path, **{**options, **TIER})
    assert_host_helps(small, want)
    # drafts read the modules' entries: what came back makes as good ones
    rates = [
        sum(llm.engine.stats.accepted) / sum(llm.engine.stats.drafted) for llm in (large, small)
    ]
    assert rates[1] > 0.9 * rates[0]


@pytest.mark.exhaustive
@pytest.mark.longest
@pytest.mark.parametrize(
    "layout", [{"tp": 2, "num_speculative_tokens": 1}, {"dp": 2, "ep": 2}, {"pp": 2}], ids=str
)
def test_ranks_copy_their_own_parts(tmp_path: Path, layout: dict[str, Any]) -> None:
    save_with_mtp(tmp_path, 1, agreement=2.0)
    want = greedy(engine(tmp_path), texts(), one_by_one=True)
    ranks = engine(tmp_path, **layout, **TIER)
    try:
        assert_host_helps(ranks, want)
    finally:
        ranks.engine.close()


# ---- the copies themselves


def memory(
    slots: int, platform: Callable[[torch.device], CpuPlatform] = CpuPlatform
) -> tuple[KVPool, HostMemory]:
    layer = (Plane("k", "float32", (2, 3)), Plane("scale", "int8", (5,)))
    pool = KVPool(KVSpec((layer, layer[:1]), 4), 9, torch.device("cpu"))
    return pool, HostMemory(pool, platform(torch.device("cpu")), slots)


def contents(pool: KVPool, page: int) -> list[Tensor]:
    return [plane[page].clone() for layer in pool.layers for plane in layer.values()]


@pytest.mark.parametrize("platform", [CpuPlatform, LatePlatform])
@pytest.mark.parametrize("small", [False, True], ids=["whole", "piece by piece"])
def test_pages_are_bytes_that_come_back(
    monkeypatch: pytest.MonkeyPatch, small: bool, platform: type[CpuPlatform]
) -> None:
    if small:
        size = memory(1)[1].size
        monkeypatch.setattr("rorqual.cache.host_memory.BLOCK_BYTES", 2 * size)
        monkeypatch.setattr(CpuPlatform, "host_step_bytes", 2 * size)
    pool, host = memory(5, platform)
    assert len(host.blocks) == (3 if small else 1)
    for layer in pool.layers:
        for plane in layer.values():
            plane.copy_(torch.randint(-100, 100, plane.shape))
    wanted = {page: contents(pool, page) for page in range(9)}
    host.start([PageCopy(page, slot, True) for slot, page in enumerate((1, 7, 3, 4, 8))])
    # a slot that is read, filled anew, and read again in one step
    host.start([PageCopy(2, 1, False), PageCopy(5, 1, True), PageCopy(6, 1, False)])
    host.start([PageCopy(1, 4, False), PageCopy(7, 0, False)])
    host.settle()
    now = {1: 8, 2: 7, 6: 5, 7: 1}
    for page in range(9):
        found = contents(pool, page)
        right = wanted[now.get(page, page)]
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True)), page


def test_a_page_comes_by_layer_once_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old content goes to the host in the same step."""
    platform = ByLayer(torch.device("cpu"))
    monkeypatch.setattr(
        "rorqual.cache.host_memory.page_mover", lambda planes: ByAddress(planes, platform)
    )
    pool, host = memory(3, lambda device: platform)
    for layer in pool.layers:
        for plane in layer.values():
            plane.copy_(torch.randint(-100, 100, plane.shape))
    wanted = {page: contents(pool, page) for page in range(9)}
    host.start([PageCopy(2, 1, True)])
    host.settle()
    coming = host.start([PageCopy(1, 0, True), PageCopy(1, 1, False)], by_layer=True)
    for index, layer in enumerate(pool.layers):
        coming.layer(index)
        first = sum(map(len, pool.layers[:index]))
        for plane, right in zip(layer.values(), wanted[2][first:], strict=False):
            assert torch.equal(plane[1], right), index
    host.start([PageCopy(3, 0, False)])
    host.settle()
    for page, source in ((1, 2), (2, 2), (3, 1), (4, 4)):
        found = contents(pool, page)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted[source], strict=True)), page


def test_what_an_interrupt_left_half_started_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platform = ByLayer(torch.device("cpu"))
    monkeypatch.setattr(
        "rorqual.cache.host_memory.page_mover", lambda planes: ByAddress(planes, platform)
    )
    _, host = memory(3, lambda device: platform)
    read = host.mover.read_host

    def broken(addresses: Tensor, pages: Tensor, planes: range) -> None:
        read(addresses, pages, planes)
        raise KeyboardInterrupt

    host.start([PageCopy(2, 1, True)])
    monkeypatch.setattr(host.mover, "read_host", broken)
    with pytest.raises(KeyboardInterrupt):
        host.start([PageCopy(1, 1, False)], by_layer=True)
    assert platform.planes, "some of it was launched"
    host.settle()
    assert not platform.planes
    assert not any(host.running.values())


class Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, log: list[str]):
        self.name = name
        self.log = log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: object) -> None:
        self.log.append(f"{self.name} waits for the copies")

    def synchronize(self) -> None:
        self.log.append(f"the thread waits for {self.name}")

    def __enter__(self) -> None:
        self.log.append(f"{self.name}:")

    def __exit__(self, *raised: object) -> None:
        self.log.append("end")


def test_streams_of_a_gpu_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come behind the steps launched before and run on the stream on which other threads
    read pages; what is launched after them waits."""
    log: list[str] = []
    steps, side = Stream("steps", log), Stream("side", log)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: Stream("device", []))
    platform = CudaPlatform(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    wait_for_copies = platform.beside(lambda: log.append("copies"))
    log.append("a step")
    wait_for_copies()
    with platform.background() as wait:
        wait()
    assert log == [
        "side waits for steps",
        *("side:", "copies", "end"),
        "a step",
        "steps waits for the copies",
        *("side:", "the thread waits for side", "end"),
    ]


def test_an_interrupted_launch_leaves_no_copy_behind(tmp_path: Path, late: None) -> None:
    """Copies of a step that never was wait no longer than the next one, whose requests may have
    their pages."""
    save("qwen", tmp_path)
    llm = engine(tmp_path, **TIER)
    want = greedy(engine(tmp_path), texts(3), one_by_one=True)
    assert greedy(llm, texts(3), one_by_one=True) == want
    runner = llm.engine.worker.runner
    launch = runner._launch
    struck = []

    def broken(*given: Any) -> Any:
        if runner.host is not None and any(runner.host.running.values()) and not struck:
            struck.append(True)
            raise KeyboardInterrupt
        return launch(*given)

    runner._launch = broken  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        greedy(llm, texts(3), one_by_one=True)
    assert struck
    assert greedy(llm, texts(3), one_by_one=True) == want


# ---- what is refused


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, said in (
        ({"kv_host_memory": -1.0}, "out of range; accepted: 0 to 16384"),
        ({"kv_host_memory": "64GB"}, "'64GB' is out of range; accepted: 0 to 16384"),
        ({"kv_host_memory": 1.0, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"kv_host_memory": 1.0, "device": "npu"}, "for device auto, cpu or cuda"),
    ):
        with pytest.raises(ConfigError, match=said):
            EngineConfig("", **options)
    save("qwen", tmp_path)
    with pytest.raises(ConfigError, match=r"the host has \d+\.\d\d GiB free"):
        engine(tmp_path, kv_host_memory=10_000.0)
    with pytest.raises(ConfigError, match="holds no page, which takes"):
        engine(tmp_path, kv_host_memory=1e-7)
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"0.3 GiB for each of 4 ranks: the host has 1.00 GiB"):
        host_memory.check_room(0.3, 4)
    serve = pytest.importorskip("rorqual.serve.launch")
    config = pytest.importorskip("rorqual.serve.config").ServeConfig
    asked = {"kv_host_memory": 0.3, "tp": 2}
    assert len(serve.engine_options(config(engine=asked), tmp_path)) == 1
    with pytest.raises(ConfigError, match=r"0.3 GiB for each of 4 ranks: the host has 1.00 GiB"):
        serve.engine_options(config(engine=asked, replicas=2), tmp_path)


def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bundled model on a CPU. It asserts itself what was found where."""
    path = tmp_path / "found.json"
    words = ["--device", "cpu", "--threads", "1", "--turns", "1", "--prompt-len", "200"]
    more = ["--streams", "2", "--stream-len", "20", "--steps", "20", "--every", "5"]
    found = load_demo("host_memory_cache").main([*words, *more, "--json", str(path)])
    assert set(found.first_token) == {"computed", "device", "host memory"}
    assert min(found.first_token.values()) > 0
    assert set(found.gaps) == {"nothing", "from the cache", "host memory"}
    assert all(0 < p50 <= p99 <= longest for p50, p99, longest in found.gaps.values())
    assert found.bytes > 0
    assert json.loads(path.read_text())["bytes"] == found.bytes
    assert "p99 with copies over p99 without" in capsys.readouterr().out
