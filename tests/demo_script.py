"""The scripts of demo/, which are no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DEMO = Path(__file__).resolve().parents[1] / "demo"


def load_demo(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DEMO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(DEMO) not in sys.path:
        sys.path.append(str(DEMO))  # scripts import what lies beside them
    sys.modules[name] = module  # dataclasses look there for what annotations name
    spec.loader.exec_module(module)
    return module
