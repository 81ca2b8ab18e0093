"""The cases of quantized weights are right where the kernels are: small ones, interpreted where
there is no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.bench.kernels import quantized, quantized_tuning
from rorqual.bench.kernels.gemm_and_experts import ExpertShape
from rorqual.bench.kernels.quantized import QuantizedFormat

pytestmark = pytest.mark.exhaustive(but_first=True)


@pytest.mark.parametrize("form", quantized.FORMATS, ids=lambda form: form.name)
def test_errors_are_small(form: QuantizedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rorqual.bench.kernels.gemm_and_experts.ROTATE", 1e5)
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    linear = quantized.linear_setup(form, 64, 256, 5, device)
    assert linear.error() < 1e-4
    assert linear.bytes > 64 * 256 * form.width
    shape = ExpertShape("bf16", 4, 128, 128, 2)
    experts = quantized.expert_setup(form, shape, 9, device)
    assert experts.error() < 1e-3


def test_every_case_has_its_search_and_its_own_name() -> None:
    names = [case.name for case in quantized.cases()]
    assert len(names) == len(set(names))
    assert [search.name for search in quantized_tuning.searches()] == names
    for tokens, int4 in itertools.product(quantized.TOKENS, (True, False)):
        assert [*quantized_tuning.linear_candidates(tokens, int4)]
