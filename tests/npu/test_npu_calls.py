"""The calls that whole models make: each against its real schema and the Meta kernel's shapes, and
what becomes of such a call when it is wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.emulation import npu_ops, npu_platform
from tests.emulation.npu_ops.recorder import CallRecorder
from tests.npu.npu_models import write_model
from tests.npu.test_npu_models import C8, MTP, W4A16, W8A8, answers
from tests.npu.wrong_calls import mutations, table, verdicts

RUNS: list[tuple[str, dict[str, Any]]] = [
    ("v3", MTP),
    ("v3", {**C8, **MTP}),
    ("v2", {}),
    ("v2", {"mla_decode": "AM_CC_ME"}),
    ("v2-groups", W8A8),
    ("qwen3", {}),
    ("qwen3", W4A16),
]
# operators that only other layouts call (test_npu_models.py), or none
ELSEWHERE = {
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_distribute_combine_v2",
}
# emulated, and called by nothing here: for models whose rope turns halves, forms that the two
# documents name and later ones replace, and double routing
UNUSED = {
    "npu_rotary_mul",
    "npu_mla_prolog_v2",
    "npu_kv_rmsnorm_rope_cache",
    "npu_format_cast_",
    "npu_prefetch",
    "npu_moe_init_routing",
    "npu_moe_compute_expert_tokens",
    "npu_moe_re_routing",
}
SEEDS = (0, 1, 2)
EACH = 40


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> CallRecorder:
    npu_platform.install(wide=False)
    npu_platform.set_gain(npu_platform.RESIDUAL_GAIN)
    recorder = CallRecorder()
    for name, options in RUNS:
        folder = write_model(tmp_path_factory.getbasetemp(), name)
        with recorder:
            answers(folder, "npu", "bfloat16", options)
    return recorder


def test_every_output_is_as_the_meta_kernel_says(recorded):
    print(f"{len(recorded.counts)} operators, {sum(recorded.counts.values())} calls")
    assert not Counter(recorded.differences)
    assert sum(recorded.counts.values()) > 1000


def test_every_operator_is_called(recorded):
    assert recorded.counts.keys() | ELSEWHERE | UNUSED == npu_ops.kernels().keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_of_forty_wrong_calls_thirty_eight_are_caught(recorded, seed):
    kept = [call for call in recorded.kept.values() if call[0].name() != "npu::npu_format_cast"]
    judged = verdicts(kept, mutations(kept, seed, EACH), _emulate)
    print(table(judged))
    missed = [wrong for wrong, verdict in judged if verdict == "nobody"]
    assert len(judged) == EACH
    assert len(missed) <= EACH - 38, missed


def _emulate(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.inference_mode():
        return operator(*args, **kwargs)
