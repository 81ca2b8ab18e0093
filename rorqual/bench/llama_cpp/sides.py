"""Our engine and llama.cpp, as a measurement in turns sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rorqual.bench.llama_cpp.gguf_file import GgufTensor
from rorqual.bench.llama_cpp.peer import LlamaCpp, PeerSetting
from rorqual.bench.llama_cpp.work import WIDE, LlamaCppWork
from rorqual.bench.offline.run import floor_seconds, greedy
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.config.model import ModelConfig
from rorqual.engine.execution.worker import weight_bytes
from rorqual.llm.llm import LLM
from rorqual.planner.costs.costs import expected_experts, kv_bytes_per_token

Prompts = Sequence[Sequence[int]]
Tell = Callable[[str], None]
SETTLING = 2  # steps before the first that counts
PROBED_STEPS = 4
UBATCHES = (128, 1024)  # tried in addition to llama.cpp's 512


class Side(Protocol):
    """prepare: once for each batch; decoding: all prompts are through, and `steps` go on from
    there; steps, prompt: seconds."""

    name: str

    def prepare(self, prompts: Prompts, tell: Tell) -> None: ...

    @contextmanager
    def decoding(self, prompts: Prompts) -> Iterator[None]: ...

    def steps(self, count: int) -> float: ...

    def prompt(self, prompts: Prompts) -> float: ...


class OurSide:
    """weight_bytes: all that the model holds."""

    name = "ours"

    def __init__(self, quantization: str, folder: Path, work: LlamaCppWork, most: int):
        self.work = work
        self.clock = time.process_time if work.processor_time else time.perf_counter
        self.length = work.prompt + SETTLING + work.output
        self.llm = LLM(
            folder,
            device="cpu",
            dtype="bfloat16",
            quantization="auto" if quantization == WIDE else quantization,
            quantize_head=work.quantize_head,
            load_format="dummy",
            seed=work.seed,
            skip_tokenizer_init=True,
            max_num_seqs=most,
            max_model_len=self.length + 4 * most + 16,
            kv_cache_bytes=256 * 2**20,
            threads=work.threads,
        )
        self.weight_bytes = weight_bytes(self.llm.engine.model)

    def prepare(self, prompts: Prompts, tell: Tell) -> None:
        self.llm.generate([list(ids) for ids in prompts], greedy(2))

    @contextmanager
    def decoding(self, prompts: Prompts) -> Iterator[None]:
        engine = self.llm.engine
        engine.scheduler.prefix.clear()
        settings = greedy(SETTLING + self.work.output + 4 * len(prompts) + 8)
        with steady_state_steps(engine, prompts, settings):
            self.steps(SETTLING)
            yield

    def steps(self, count: int) -> float:
        return self._timed(lambda: [self.llm.engine.step() for _ in range(count)])

    def prompt(self, prompts: Prompts) -> float:
        self.llm.engine.scheduler.prefix.clear()
        return self._timed(lambda: self.llm.generate([list(ids) for ids in prompts], greedy(1)))

    def step_bytes(self, batch: int) -> float:
        """That a decode step must read, with experts under uniform routing."""
        return floor_seconds(self.llm, batch, self.work.prompt + self.work.output // 2, 1.0)

    def _timed(self, call: Callable[[], object]) -> float:
        start = self.clock()
        call()
        return self.clock() - start

    def close(self) -> None:
        self.llm.engine.close()


class LlamaSide:
    """llama.cpp, at the fastest setting of those tried for each batch and kind of work."""

    name = "llama.cpp"

    def __init__(
        self,
        process: LlamaCpp,
        path: Path,
        tensors: Sequence[GgufTensor],
        config: ModelConfig,
        work: LlamaCppWork,
        threads: int,
    ):
        self.process = process
        self.path = path
        self.tensors = tensors
        self.config = config
        self.work = work
        self.threads = threads
        self.length = work.prompt + SETTLING + work.output + PROBED_STEPS
        self.decode_settings: dict[int, PeerSetting] = {}
        self.prompt_settings: dict[int, PeerSetting] = {}

    def prepare(self, prompts: Prompts, tell: Tell) -> None:
        """Search settings: starting from llama.cpp's default, change one setting at a time in the
        best so far; settings that require a reload are last."""
        found: dict[PeerSetting, tuple[float, float]] = {}
        count = len(prompts)

        def probe(setting: PeerSetting) -> None:
            if setting not in found:
                found[setting] = self._probe(setting, prompts)
                step, prompt = found[setting]
                tell(f"  {setting}: {1e3 * step:.1f} ms a step, prompts {1e3 * prompt:.0f} ms")

        def best(kind: int) -> PeerSetting:
            return min(found, key=lambda setting: found[setting][kind])

        probe(PeerSetting(threads=self.threads))
        probe(replace(best(0), flash=False))
        if self.threads > 1:
            probe(replace(best(0), threads=self.threads - 1))
        for ubatch in UBATCHES:
            if ubatch < 2 * count * self.work.prompt:
                probe(replace(best(1), ubatch=ubatch))
        for kind in (0, 1):
            probe(replace(best(kind), repack=False))
        self.decode_settings[count] = best(0)
        self.prompt_settings[count] = best(1)

    def _probe(self, setting: PeerSetting, prompts: Prompts) -> tuple[float, float]:
        """Seconds of a step and of all prompts."""
        self._use(setting, prompts)
        self.process.prompt_seconds([ids[:8] for ids in prompts])  # touches what is new
        prompt = self.process.prompt_seconds(prompts)
        self.process.decode_seconds(1)
        return min(self.process.decode_seconds(1) for _ in range(PROBED_STEPS)), prompt

    def _use(self, setting: PeerSetting, prompts: Prompts) -> None:
        self.process.use(self.path, setting, len(prompts), self.length)

    @contextmanager
    def decoding(self, prompts: Prompts) -> Iterator[None]:
        self._use(self.decode_settings[len(prompts)], prompts)
        self.process.prompt_seconds(prompts)
        self.process.decode_seconds(SETTLING)
        yield

    def steps(self, count: int) -> float:
        return self.process.decode_seconds(count)

    def prompt(self, prompts: Prompts) -> float:
        self._use(self.prompt_settings[len(prompts)], prompts)
        return self.process.prompt_seconds(prompts)

    def setting(self, kind: str, batch: int) -> PeerSetting:
        return (self.decode_settings if kind == "decode" else self.prompt_settings)[batch]

    def step_bytes(self, batch: int) -> float:
        """As ours: of routed experts those of uniform routing, of the embeddings a row each."""
        moe = self.config.moe
        hit = expected_experts(moe.num_experts, moe.top_k, batch) / moe.num_experts
        cached = batch * (self.work.prompt + self.work.output // 2)
        total = float(cached * kv_bytes_per_token(self.config))
        for tensor in self.tensors:
            share = hit if tensor.is_routed else 1.0
            if tensor.is_embedding:
                share = batch / tensor.shape[0]
            total += share * tensor.nbytes
        return total
