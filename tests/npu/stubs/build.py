"""Builds shared libraries that stand for CANN, so that torch_npu loads where CANN is not.

    python tests/npu/stubs/build.py OUT     # then LD_LIBRARY_PATH=OUT python -c "import torch_npu"

What CANN would have to provide is read from torch_npu's own shared objects: the libraries they name
and nobody has, and the functions they want and nobody defines. A new version needs no edit here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The functions all lie in this one; the others are empty but need it, so that it is searched for
# what torch_npu looks up in them by name.
HOLDER = "libascendcl.so"
# The operators' library, looked up at run time: torch_npu's own host code then runs before them.
OPERATORS = "libopapi.so"
# Opened by torchair at its first capture.
ALSO = {"libnnopbase.so"}
# Loaded by name at run time where their functions are asked for; better absent than empty.
OPTIONAL = {"libatb.so"}


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def package(name: str) -> Path:
    """Where a package lies, without importing it: torch_npu cannot be imported yet."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed for {sys.executable}")
    return Path(spec.origin).parent


def needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-dW", str(library))))


def symbols(library: Path, which: str) -> set[str]:
    """Names of dynamic symbols, without their versions. Weak ones may stay undefined."""
    listed = [line.split() for line in run("nm", "-D", which, str(library)).splitlines()]
    wanted = [words for words in listed if words and (which != "--undefined-only" or "U" in words)]
    return {words[-1].partition("@")[0] for words in wanted}


def system_libraries() -> dict[str, Path]:
    """Every library that the loader finds without being told where, by name."""
    lines = run("/sbin/ldconfig", "-p").splitlines()
    pairs = [line.split(" => ") for line in lines if " => " in line]
    return {left.split()[0]: Path(right) for left, right in pairs}


def missing() -> tuple[set[str], set[str]]:
    """The libraries and functions that torch_npu wants and this machine lacks."""
    npu = [path for path in package("torch_npu").rglob("*.so*") if path.name not in OPTIONAL]
    npu = [path for path in npu if not needed(path) & OPTIONAL]
    torch = list((package("torch") / "lib").glob("*.so*"))
    present = system_libraries() | {path.name: path for path in npu + torch}
    wanted_libraries = set().union(*(needed(path) for path in npu))
    absent = {name for name in wanted_libraries if name not in present}
    providers = {present[name] for name in wanted_libraries - absent} | set(npu) | set(torch)
    interpreter = Path(os.path.realpath(sys.executable))
    shared = Path(sysconfig.get_config_var("LIBDIR") or "/") / (
        sysconfig.get_config_var("INSTSONAME") or "none"
    )
    providers |= {path for path in (interpreter, shared) if path.is_file()}
    defined = set().union(*(symbols(path, "--defined-only") for path in providers))
    wanted = set().union(*(symbols(path, "--undefined-only") for path in npu))
    return absent, wanted - defined


def refuse_other_torch(functions: set[str]) -> None:
    """What torch itself lacks must not be stubbed: it means that the two versions do not fit."""
    foreign = sorted(name for name in functions if re.match(r"_ZNK?(2at|3c10|5torch)", name))
    if foreign:
        raise SystemExit(
            f"torch_npu {version('torch_npu')} is built for another torch than {version('torch')}: "
            f"{len(foreign)} functions are missing, as {foreign[0]}"
        )


def returning_0(functions: set[str]) -> str:
    return "".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(functions))


def compile_library(source: str, out: Path, *needs: Path) -> None:
    command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-o", str(out), f"-Wl,-soname,{out.name}"]
    command += ["-x", "c", "-", "-x", "none", "-Wl,--no-as-needed", *map(str, needs)]
    subprocess.run(command, input=source, text=True, check=True)


def operators() -> set[str]:
    """Names of the operator functions that torch_npu may look up, as they stand in its text."""
    text = (package("torch_npu") / "lib" / "libtorch_npu.so").read_bytes()
    return {name.decode() for name in re.findall(rb"(?<!\w)aclnn[A-Z]\w+(?!\w)", text)}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    libraries, functions = missing()
    refuse_other_torch(functions)
    answers = "".join(path.read_text() for path in sorted(HERE.glob("*.c")))
    found = operators()
    own = set(re.findall(r"(\w+)\([^)]*\) \{", answers))
    compile_library(answers + returning_0(functions - own), out / HOLDER)
    compile_library(returning_0(found), out / OPERATORS, out / HOLDER)
    for name in (libraries | ALSO) - {HOLDER}:
        compile_library("", out / name, out / HOLDER)
    made = f"{len(functions)} functions and {len(found)} operators"
    print(f"stubs of {len(libraries)} libraries of CANN with {made} are in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
