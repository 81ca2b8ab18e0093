"""The plugin that spreads another engine's routing, with stand-ins for the engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.bench.peers import natural_weights

VLLM = """
class DummyModelLoader:
    def load_weights(self, model, model_config):
        for parameter in model.parameters():
            parameter.data.fill_(1e-3)
loaders = {"dummy": DummyModelLoader}
def register_model_loader(name):
    def register(kind):
        loaders[name] = kind
    return register
"""
SGLANG = """
def initialize_dummy_weights(model, low=-1e-3):
    for parameter in model.parameters():
        parameter.data.fill_(low)
def load(model):
    initialize_dummy_weights(model, low=0.5)
"""
LOAD = """
import torch
from importlib.metadata import entry_points
(plugin,) = entry_points(group=GROUP)
plugin.load()()
plugin.load()()
model = torch.nn.ModuleDict({"o_proj": torch.nn.Linear(256, 64), "gate": torch.nn.Linear(256, 64)})
MAKE
print(model["gate"].weight.std().item() * 16, model["o_proj"].weight.std().item() * 16)
"""
MAKE = {
    "vllm.general_plugins": "from vllm.model_executor.model_loader.dummy_loader import loaders\n"
    "loaders['dummy']().load_weights(model, None)",
    "sglang.srt.plugins": "from sglang.srt.model_loader import loader\nloader.load(model)",
}


def module(folder: Path, name: str, text: str) -> None:
    path = folder.joinpath(*name.split("."))
    for parent in (path.parent, *path.parent.parents):
        if parent == folder:
            break
        parent.mkdir(parents=True, exist_ok=True)
        (parent / "__init__.py").touch()
    path.with_suffix(".py").write_text(text)


@pytest.mark.exhaustive
def test_engines_find_the_plugin_and_get_weights_of_unit_norm(tmp_path: Path):
    plugin = natural_weights.plugin_folder(tmp_path / "plugin")
    module(tmp_path, "vllm.model_executor.model_loader.dummy_loader", VLLM)
    (tmp_path / "vllm/model_executor/model_loader/__init__.py").write_text(
        "from vllm.model_executor.model_loader.dummy_loader import register_model_loader\n"
    )
    module(tmp_path, "sglang.srt.model_loader.loader", SGLANG)
    for group, make in MAKE.items():
        script = f"GROUP = {group!r}{LOAD.replace('MAKE', make)}"
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": f"{plugin}:{tmp_path}", natural_weights.GAIN: "0.25"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said, figures = done.stdout.splitlines()[-2:]
        assert said == f"{natural_weights.MARK} {2 * (256 * 64 + 64)} parameters"
        gate, to_residual = map(float, figures.split())
        assert 0.95 < gate < 1.05
        assert 0.23 < to_residual < 0.27


def test_the_plugin_imports_nothing_of_ours():
    text = Path(natural_weights.__file__).read_text()
    assert not [
        line for line in text.splitlines() if "import rorqual" in line or "from ror" in line
    ]
