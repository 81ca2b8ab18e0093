"""torch_npu itself, loaded over the stubs: what the other tests here stand on."""

from __future__ import annotations

import torch
import torch_npu


def test_operators_have_schemas_and_shapes() -> None:
    listed = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("npu::")}
    assert len(listed) > 400
    x = torch.empty(5, 64, dtype=torch.bfloat16, device="meta")
    y, rstd = torch_npu.npu_rms_norm(x, torch.empty(64, device="meta", dtype=x.dtype), 1e-6)
    assert (y.shape, y.dtype, rstd.shape) == (x.shape, x.dtype, (5, 1))


def test_there_is_no_device() -> None:
    assert torch.npu.device_count() == 0
    assert not torch.npu.is_available()
