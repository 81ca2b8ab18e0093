"""The CPU kernels under the address sanitizer: no ids, hidden states or logits make them touch
memory that is not theirs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from rorqual.config.model import compiler
from rorqual.ops.cpu import native

# as the library is built, but for speed, and as a program
LEFT_OUT = ("-O3", "-shared", "-fPIC")
FLAGS = [flag for flag in native.FLAGS if flag not in LEFT_OUT]
KINDS = ("fp32", "bf16")
SANITIZER = ["-O0", "-g1", "-fsanitize=address", f"-I{native.SOURCE.parent}"]

WHAT = [kind + part for part in ("", " products", " layers", " prompts") for kind in KINDS]

# AMX reads tiles of 16 rows, whether there are so many or not
FORMS = ["native", pytest.param("amx.h", marks=pytest.mark.longest)]


@pytest.fixture(scope="module", params=FORMS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = compiler()
    more = []
    if request.param != "native":
        if not torch.cpu._is_avx512_supported():
            pytest.skip("AMX is emulated in AVX-512")
        more = ["-include", str(Path(__file__).with_name(request.param))]
    if command is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("memory")
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    probe = [command, "-fsanitize=address", str(empty), "-o", str(folder / "empty")]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("the compiler has no address sanitizer")
    source = Path(__file__).with_name("memory.cpp")
    made = folder / "memory"
    subprocess.run([command, *FLAGS, *SANITIZER, *more, str(source), "-o", str(made)], check=True)
    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", [*WHAT, "logits"])
def test_kernels_stay_within_their_arrays(program: Path, what: str) -> None:
    # libgomp's threads are still there at the end: what they hold is no leak
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run([program, what], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "done\n"
