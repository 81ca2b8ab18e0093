"""The GPU's kernels as operators of a traced step, in Triton's interpreter where there is no
GPU: what the graph says of their results (number, shape, strides, dtype) is so, and their
values are those of the same step run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.config.hf import read_config
from rorqual.engine.execution.compiled import CompiledForward
from rorqual.ops.custom_ops import TracedOps
from rorqual.ops.triton.backend import TritonOps
from rorqual.parallel.overlap import run_one
from tests.gpu.device_driver import DeviceDriver, random_model
from tests.ops.triton.test_triton_backend import DEEPSEEK, QWEN, WIDE

pytestmark = [pytest.mark.exhaustive, pytest.mark.longest]


def strides(x: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def checked(
    self: CompiledForward, graph: torch.fx.GraphModule, inputs: list[Any]
) -> Callable[..., Any]:
    """In place of inductor: run the graph, and compare every operator's result with its fake."""

    class Interpreter(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            found = super().run_node(n)
            if "rorqual" in str(n.target):
                operators.append(str(n.target))
                want = n.meta["example_value"]
                for got, fake in zip(
                    *([x] if isinstance(x, torch.Tensor) else x or () for x in (found, want)),
                    strict=True,
                ):
                    assert (got.shape, strides(got), got.dtype) == (
                        fake.shape,
                        strides(fake),
                        fake.dtype,
                    ), n.target
            return found

    operators: list[str] = []
    self.operators = operators
    return lambda *arguments: Interpreter(graph).run(*arguments)


@pytest.mark.parametrize(
    ("config", "tokens"), [(DEEPSEEK, 1), (QWEN, 1), (WIDE, 2)], ids=["v3", "qwen", "v3-fp8"]
)
def test_operators_are_what_the_graph_says(
    config: dict[str, Any], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledForward, "_inductor", checked)
    ops = TracedOps(TritonOps(), read_config(config).moe)
    model = random_model(config, ops, "float32", torch.device(DEVICE))
    driver = DeviceDriver(model, 1, 16, 4)
    ids = torch.randint(
        config["vocab_size"], (5 + tokens,), generator=torch.Generator().manual_seed(1)
    )
    driver.logits(driver.step([ids[:5]], [0]))
    step = driver.step([ids[5:]], [5])
    forward = CompiledForward(model, driver.pool, ops, tmp_path)
    with torch.inference_mode():
        forward.compile([step])
        want = run_one(model.forward(driver.step([ids[5:]], [5]), every_row=True))
        torch.testing.assert_close(forward(step), want, rtol=1e-4, atol=1e-5)
    attention = "attention" if config is QWEN else "latent_attention"
    assert {f"rorqual.{name}" for name in (attention, "router", "experts")} <= set(
        forward.operators
    )
