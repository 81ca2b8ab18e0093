"""Which variants of which kernels an engine launches: at its start, and while it serves bursts of
requests. Launches are only noted, not run, so tokens mean nothing.

    python -m tests.emulation.kernel_variants qwen3-30b-a3b '{"num_layers": 2}'

prints the variants of a real shape that serving launches and the start does not, with the kernels
and settings of an H200: launches of Gluon kernels and with bulk copies are noted as well. (A CPU
does the rest, without the products of large matrices.)
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tests.emulation.triton_interpreter  # noqa: F401  asks for the interpreter before kernels are defined
from tests.engine.execution.replaying import CompilingPlatform

Variant = tuple[Any, ...]


def variant(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Variant:
    """What Triton compiles a kernel for: constants, dtypes, arguments that are None, and whether an
    integer is 1 or a multiple of 16."""
    parameters = inspect.signature(kernel.fn).parameters
    # an interpreted kernel keeps the decorator's arguments, a compiled one has attributes
    options = getattr(kernel, "kwargs", None) or vars(kernel)
    free = set(options.get("do_not_specialize") or ())
    unaligned = set(options.get("do_not_specialize_on_alignment") or ()) | free
    found: list[Any] = [kernel.fn.__name__]
    for name, value in {**dict(zip(parameters, args, strict=False)), **named}.items():
        if name not in parameters or "constexpr" in str(parameters[name].annotation):
            found.append((name, str(value)))
        elif isinstance(value, Tensor):
            found.append((name, str(value.dtype)))
        elif value is None:
            found.append((name, "None"))
        elif isinstance(value, int) and name not in free:
            aligned = value % 16 == 0 and name not in unaligned
            found.append((name, "one" if value == 1 else "aligned" if aligned else "any"))
    return tuple(found)


@contextmanager
def noted() -> Iterator[set[Variant]]:
    """Inside, engines of one process have a platform of a CPU that "replays", the GPU's ops, and
    empty launches; yields the variants launched."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from rorqual.ops.triton.quantized.backend import QuantizedTritonOps
    from rorqual.ops.triton.runtime.launch import ahead
    from rorqual.ops.triton.runtime.precompile import blank

    found: set[Variant] = set()

    @contextmanager
    def _ahead() -> Iterator[Callable[[], int]]:
        with ahead(), blank():
            yield lambda: len(found)

    class NotedOps(QuantizedTritonOps):
        def compiling(self) -> AbstractContextManager[Callable[[], int] | None]:
            return _ahead()  # also for the thread that compiles while weights are read

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.add(variant(self, args, named))

    platform = CompilingPlatform(torch.device("cpu"))
    ops = NotedOps()
    with ExitStack() as stack:
        for kind in (InterpretedFunction, JITFunction):
            stack.enter_context(mock.patch.object(kind, "run", note))
        replaced = {
            "rorqual.engine.executor.make_platform": lambda device: platform,
            "rorqual.engine.execution.worker.ops_for": lambda name: ops,
            "rorqual.engine.execution.request_state.ops_for": lambda name: ops,
        }
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        stack.enter_context(blank())
        yield found


def met_while_serving(folder: Path, options: dict[str, Any], length: int) -> list[Variant]:
    """The variants that the start of an engine for so many tokens does not launch, and serving
    does, up to the first burst that has any."""
    with noted() as launched:
        llm = make_engine(folder, options)
        ahead = set(launched)
        assert len(ahead) > 40
        for prompts, params in bursts(llm.engine.model_config.vocab_size, length):
            llm.generate(prompts, params)
            if new := launched - ahead:
                return sorted(new, key=str)
    return []


def met_again(folder: Path, options: dict[str, Any]) -> tuple[set[Variant], set[Variant]]:
    """The variants that compiling ahead launches at a first start, and at a second one, which knows
    what met kernels in the first."""
    from rorqual.engine.execution.model_runner import ModelRunner

    compile_ahead = ModelRunner.compile_ahead
    found = []
    with noted() as launched:

        def alone(self: ModelRunner, *steps: Any) -> list[str] | None:
            launched.clear()
            met = compile_ahead(self, *steps)
            found.append(set(launched))
            return met

        with mock.patch.object(ModelRunner, "compile_ahead", alone):
            for _ in range(2):
                make_engine(folder, options)
    return found[0], found[1]


def make_engine(folder: Path, options: dict[str, Any]) -> Any:
    from rorqual import LLM

    return LLM(folder, weights="random", dtype="bfloat16", skip_tokenizer_init=True, **options)


def bursts(vocab: int, length: int) -> Iterator[tuple[list[list[int]], Sequence[Any]]]:
    """Requests that share prefixes, twice; long prompts; prompts of all lengths, greedy and not;
    prompts of one token."""
    from rorqual import SamplingParams

    draw = random.Random(1)

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocab - 1) for _ in range(count)]

    def greedy(count: int) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=0, max_tokens=3 + i % 9, ignore_eos=True)
            for i in range(count)
        ]

    prefixes = [ids(640) for _ in range(4)]
    for count in (40, 80):
        yield [prefixes[i % 4] + ids(40) for i in range(count)], greedy(count)
    yield [ids(length * 3 // 4) for _ in range(6)], greedy(6)
    mixed = [ids(draw.randrange(1, length // 3 * 2)) for _ in range(60)]
    yield mixed, greedy(60)
    drawn = [
        SamplingParams(temperature=0.8, max_tokens=3 + i % 9, top_p=1 - 0.1 * (i % 2), seed=i)
        for i in range(60)
    ]
    more = [ids(draw.randrange(1, length // 3 * 2)) for _ in range(30)]
    yield mixed[30:] + more, drawn
    yield [ids(1) for _ in range(7)], greedy(7)


def main(model: str, options: str = "{}") -> int:
    from rorqual.models.hub import model_folder
    from rorqual.ops.triton.runtime import launch

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    def products(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return x.new_zeros(*x.shape[:-1], y.shape[-1]) if out is None else out

    asked = json.loads(options)
    length = asked.get("max_model_len", 8192)
    given = {
        "max_num_seqs": 256,
        "max_model_len": length,
        "max_num_batched_tokens": length,
        "page_size": 64,
        "num_pages": 3000,
        **asked,
    }
    with ExitStack() as stack:
        # before the modules of kernels are imported
        for name, value in {
            "is_hopper": lambda device: True,
            "dependent": lambda device, after_long=False: {"DEPENDENT": True, "launch_pdl": True},
            "INTERPRETED": False,
        }.items():
            stack.enter_context(mock.patch.object(launch, name, value))
        stack.enter_context(mock.patch.object(torch.nn.functional, "linear", product))
        stack.enter_context(mock.patch.object(torch, "bmm", products))
        new = met_while_serving(model_folder(model), given, length)
    for one in new:
        print(*one)
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
