"""Serving meets no kernel, in no variant that is compiled separately, that the start has not met: a
compilation would hold up every request for half a second. Launches are only noted, not run, so
tokens mean nothing here; the kernels are chosen as for a GPU without bulk copies."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None or DEVICE != "cpu":
    pytest.skip(SKIP_REASON or "kernels run on a GPU", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from rorqual import LLM, SamplingParams
from rorqual.ops.triton.quantized.backend import QuantizedTritonOps
from rorqual.ops.triton.runtime.precompile import blank
from tests.engine.execution.replaying import ReplayingPlatform
from tests.models.checkpoints import rewrite_config, save, save_with_mtp

LENGTH = 2048
SIZES: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_model_len": LENGTH,
    "max_num_batched_tokens": LENGTH,
    "page_size": 64,
    "num_pages": 3000,
}


class CompilingPlatform(ReplayingPlatform):
    compiles = True

    def available_memory(self) -> int:
        return 1 << 40


class NotedOps(QuantizedTritonOps):
    def compiling(self) -> AbstractContextManager[None]:
        return blank()  # for the thread that compiles while weights are read


Variant = tuple[Any, ...]


def variant(kernel: InterpretedFunction, args: tuple[Any, ...], named: dict[str, Any]) -> Variant:
    """What Triton compiles a kernel for: constants, dtypes, arguments that are None, and whether an
    integer is 1 or a multiple of 16."""
    parameters = inspect.signature(kernel.fn).parameters
    unspecialized = set(kernel.kwargs.get("do_not_specialize") or ())
    unaligned = set(kernel.kwargs.get("do_not_specialize_on_alignment") or ()) | unspecialized
    found: list[Any] = [kernel.fn.__name__]
    for name, value in {**dict(zip(parameters, args, strict=False)), **named}.items():
        if name not in parameters or "constexpr" in str(parameters[name].annotation):
            found.append((name, str(value)))
        elif isinstance(value, torch.Tensor):
            found.append((name, str(value.dtype)))
        elif value is None:
            found.append((name, "None"))
        elif isinstance(value, int) and name not in unspecialized:
            aligned = value % 16 == 0 and name not in unaligned
            found.append((name, "one" if value == 1 else "aligned" if aligned else "any"))
    return tuple(found)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Variant]]:
    found: set[Variant] = set()

    def note(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.add(variant(self, args, named))

    platform = CompilingPlatform(torch.device("cpu"))
    ops = NotedOps()
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    for module in ("execution.worker", "execution.request_state"):
        monkeypatch.setattr(f"rorqual.engine.{module}.ops_for", lambda name: ops)
    with mock.patch.object(InterpretedFunction, "run", note), blank():
        yield found


def bursts(vocab: int) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
    """Requests that share prefixes, twice; long prompts; prompts of all lengths, greedy and not;
    prompts of one token."""
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
    yield [ids(1500) for _ in range(6)], greedy(6)
    mixed = [ids(draw.randrange(1, 1400)) for _ in range(60)]
    yield mixed, greedy(60)
    drawn = [
        SamplingParams(temperature=0.8, max_tokens=3 + i % 9, top_p=1 - 0.1 * (i % 2), seed=i)
        for i in range(60)
    ]
    yield mixed[30:] + [ids(draw.randrange(1, 1400)) for _ in range(30)], drawn
    yield [ids(1) for _ in range(7)], greedy(7)


MTP = {"num_speculative_tokens": 2, "speculative_policy": "adaptive"}
NGRAM = {"num_speculative_tokens": 2, "drafter": "ngram"}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen", {"piecewise_tokens": 512}),
        *(
            pytest.param(model, options, marks=pytest.mark.exhaustive)
            for model, options in (
                ("qwen", {"piecewise_tokens": 0}),
                ("qwen", {}),
                ("qwen", {"piecewise_tokens": 512, **NGRAM}),
                ("qwen", {"piecewise_tokens": 512, "kv_cache_dtype": "fp8"}),
                ("v3", {"piecewise_tokens": 512}),
                ("v3", {"piecewise_tokens": 0}),
                ("v3", {"piecewise_tokens": 512, "kv_cache_dtype": "fp8"}),
                ("v3", {"quantization": "w4a16"}),
                ("mtp", {"piecewise_tokens": 512, **MTP}),
                ("mtp", {"piecewise_tokens": 0, "num_speculative_tokens": 1}),
            )
        ),
    ],
    ids=str,
)
def test_no_kernel_is_met_first_while_serving(
    model: str, options: dict[str, Any], tmp_path: Path, launched: set[Variant]
) -> None:
    if model == "mtp":
        save_with_mtp(tmp_path)
    else:
        save(model, tmp_path)
    rewrite_config(tmp_path, max_position_embeddings=LENGTH)
    llm = LLM(
        tmp_path,
        weights="random",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        **{**SIZES, **options},
    )
    ahead = set(launched)
    assert len(ahead) > 40
    for prompts, params in bursts(llm.engine.model_config.vocab_size):
        llm.generate(prompts, params)
        new = sorted(launched - ahead, key=str)
        assert not new, new[0]
