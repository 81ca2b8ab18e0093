"""Without an Ascend device nothing imports torch_npu: where it is installed without CANN, the
import fails, and takes `import torch` with it unless torch is told not to load it by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A module in the place of torch_npu that fails on import, as the real one does without CANN.
PLANTED = "raise ImportError('libhccl.so: cannot open shared object file')\n"

IMPORTS_ALL = """
import importlib, importlib.util, pkgutil, sys
import rorqual
assert importlib.util.find_spec("torch_npu").origin.startswith(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(rorqual.__path__, "rorqual.")] + sys.argv[2:]
failed = []
for name in names:
    if name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except ImportError as error:
        if "libhccl" in str(error):
            failed.append(name)
assert not failed, failed
assert "torch_npu" not in sys.modules
print(len(names))
"""


def imports_all(tmp_path: Path, *also: str) -> subprocess.CompletedProcess[str]:
    planted = tmp_path / "torch_npu"
    planted.mkdir()
    (planted / "__init__.py").write_text(PLANTED)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    settings = {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(
        [sys.executable, "-c", IMPORTS_ALL, str(tmp_path), *also],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_module_of_the_package_imports_torch_npu(tmp_path: Path) -> None:
    done = imports_all(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100


@pytest.mark.exhaustive
def test_the_check_sees_an_import(tmp_path: Path) -> None:
    (tmp_path / "imports_npu.py").write_text("import torch_npu\n")
    done = imports_all(tmp_path, "imports_npu")
    assert done.returncode != 0
    assert "AssertionError: ['imports_npu']" in done.stderr
