"""Clients that nobody here wrote, by the scripts of demo/clients: those whose packages this Python
has. `python demo/clients/run_all.py --install` runs them all."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.serve.running import ROOT, Running

FOLDER = ROOT / "demo" / "clients"


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_all", FOLDER / "run_all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_all"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


RUNNER = load_runner()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNNER.CLIENTS)
def test_client(name: str, server: Running):
    client = RUNNER.CLIENTS[name]
    if importlib.util.find_spec(client.module) is None:
        pytest.skip(f"{client.package} is not installed")
    command = [sys.executable, str(FOLDER / client.script), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured: " in done.stdout


def test_every_script_is_run():
    scripts = {path.name for path in FOLDER.glob("*.py")} - {"run_all.py"}
    assert scripts == {client.script for client in RUNNER.CLIENTS.values()}


def test_a_client_that_fails_or_measures_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kinds = {"good": "print('measured: 7')", "silent": "", "bad": "raise SystemExit(3)"}
    monkeypatch.setattr(RUNNER, "HERE", tmp_path)
    for name, source in kinds.items():
        (tmp_path / f"{name}.py").write_text(source)
        client = RUNNER.Client(f"{name}.py", "pytest", "pytest", ())
        monkeypatch.setitem(RUNNER.CLIENTS, name, client)
    outcomes = [RUNNER.run(name, Path(sys.executable), "http://nowhere") for name in kinds]
    assert [one.status for one in outcomes] == ["passed", "failed", "failed"]
    assert outcomes[0].measured == ["7"]
    assert outcomes[0].version == pytest.__version__
    absent = RUNNER.run("good", tmp_path / "python", "http://nowhere")
    assert absent.status == "not installed"
