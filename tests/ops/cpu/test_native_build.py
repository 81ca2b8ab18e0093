"""The name under which compiled CPU kernels are kept: another processor never loads them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

from rorqual.ops.cpu import native
from tests.ops.cpu import remote

# Both compilers answer `-dM -E` with the macros that say which instructions they may use, and both
# write a library; only g++ describes its target for `-Q --help=target`.
COMPILER = """#!/bin/sh
case "$*" in
  --version) echo "{kind} 17.0.1" ;;
  *--help=target*)
    [ {kind} = g++ ] || {{ echo "error: unknown argument" >&2; exit 1; }}
    echo "-march= {processor}" ;;
  *-march=native*-dM*) echo "#define __{processor}__ 1" ;;
  *-dM*) echo "#define __x86_64__ 1" ;;
  *)
    while [ "$1" != -o ]; do shift; done
    echo "{kind} {processor}" > "$2" ;;
esac
"""
KINDS = pytest.mark.parametrize("kind", ["g++", "clang++"])


def build(folder: Path, kind: str, processor: str) -> Path:
    """What is built by a compiler that takes this processor for the machine's own."""
    compiler = folder / f"{kind}-{processor}"
    compiler.write_text(COMPILER.format(kind=kind, processor=processor))
    compiler.chmod(0o755)
    return native._build(str(compiler))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RORQUAL_CACHE", str(tmp_path / "cache"))


@KINDS
def test_every_processor_has_a_library_of_its_own(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    wide = build(tmp_path, kind, "AVX512F")
    narrow = build(tmp_path, kind, "SSE2")
    assert wide != narrow
    assert wide.read_text() == f"{kind} AVX512F\n"
    assert narrow.read_text() == f"{kind} SSE2\n"
    told = [
        "compiling the CPU kernels for this processor, once" in text for text in caplog.messages
    ]
    assert told == [True, True]
    assert build(tmp_path, kind, "AVX512F") == wide
    assert len(caplog.messages) == 2, "nothing is compiled again"


def test_every_compiler_has_a_library_of_its_own(tmp_path: Path) -> None:
    assert build(tmp_path, "g++", "SSE2") != build(tmp_path, "clang++", "SSE2")


@pytest.mark.parametrize("has_it", [True, False])
def test_gcc_generates_code_by_several_processes_where_it_can(tmp_path: Path, has_it: bool) -> None:
    compiler = tmp_path / "compiler"
    text = COMPILER.format(kind="g++ of the Free Software Foundation", processor="SSE2")
    calls = tmp_path / "calls"
    begun = f'  *-o*)\n    echo "$*" >> {calls}\n'
    if not has_it:
        begun += '    case "$*" in *-flto*) exit 1 ;; esac\n'
    compiler.write_text(text.replace("  *)\n", begun))
    compiler.chmod(0o755)
    assert native._build(str(compiler)).exists()
    with_it = [native.PARALLEL_FLAG in call.split() for call in calls.read_text().splitlines()]
    assert with_it == ([True] if has_it else [True, False])


@KINDS
def test_without_a_name_of_the_processor_nothing_is_built(tmp_path: Path, kind: str) -> None:
    compiler = tmp_path / "compiler"
    text = COMPILER.format(kind=kind, processor="SSE2")
    compiler.write_text(text.replace("*-march=native*-dM*)", "*-dM*) exit 1 ;;\n  *-never*)"))
    compiler.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError):
        native._build(str(compiler))


@pytest.mark.exhaustive
@pytest.mark.longest
def test_a_processor_without_what_was_compiled_in_is_told_so() -> None:
    remote.need_tools()
    program = remote.build("max")
    for processor, missing in (("cortex-a72", True), ("max", False)):
        command = [remote.EMULATOR, "-cpu", processor, str(program)]
        run = subprocess.run(command, input="", capture_output=True, text=True)
        assert ("has no DOTPROD" in run.stderr) == missing
        assert run.returncode == (4 if missing else 0)


@pytest.mark.parametrize("word", [None, b"DOTPROD"])
def test_a_library_that_this_processor_cannot_run_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, word: bytes | None
) -> None:
    loaded = mock.MagicMock()
    loaded.rq_lacking.return_value = word
    monkeypatch.setattr(native, "compiler", lambda: "g++")
    monkeypatch.setattr(native, "_build", lambda command, flags: Path("kernels.so"))
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: loaded)
    assert (native.library.__wrapped__() is None) == (word is not None)
    assert [b"DOTPROD".decode() in text for text in caplog.messages] == [True] * (word is not None)


@pytest.mark.exhaustive
@pytest.mark.longest
def test_emulated_bf16_is_what_the_processor_does() -> None:
    """Bit by bit, numbers too small for fp32's exponents among them."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("a processor without AVX512-BF16")
    header = Path(__file__).with_name("bf16.h")
    forms = [native.library.__wrapped__("native", more) for more in ((), ("-include", str(header)))]
    for scale in (1.0, 1e-18, 1e-20):
        x = (torch.randn(40, 300) * scale).bfloat16()
        w = (torch.randn(50, 300) * scale).bfloat16()
        found = [native.Native(form).linear(x, w, None) for form in forms if form]
        assert len(found) == 2
        assert torch.equal(*found)


@pytest.mark.exhaustive
@pytest.mark.longest
def test_amx_is_compiled_as_its_instructions(tmp_path: Path) -> None:
    """Not run: no machine with AMX was to be had."""
    compiler, disassembler = native.compiler(), shutil.which("objdump")
    if compiler is None or disassembler is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64, or no objdump")
    flags = [flag.replace("native", "sapphirerapids") for flag in native.FLAGS]
    made = tmp_path / "kernels.so"
    subprocess.run([compiler, *flags, str(native.SOURCE), "-o", str(made)], check=True)
    run = subprocess.run([disassembler, "-d", str(made)], capture_output=True, text=True)
    for word in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbssd", "tilestored", "tilerelease"):
        assert word in run.stdout, word


def test_the_first_cache_is_the_systems(tmp_path: Path) -> None:
    assert native.first_cache(tmp_path / "nowhere") == 0
    for place, words in enumerate((("1", "Instruction", "64K"), ("1", "Data", "48K"))):
        folder = tmp_path / f"index{place}"
        folder.mkdir()
        for name, word in zip(("level", "type", "size"), words, strict=True):
            (folder / name).write_text(f"{word}\n")
    assert native.first_cache(tmp_path) == 48 << 10
    (tmp_path / "index1" / "size").write_text("much\n")
    assert native.first_cache(tmp_path) == 0


@pytest.mark.parametrize(
    ("processor", "kilobytes", "second"),
    [
        ("cooperlake", 32, True),
        ("cooperlake", 48, False),
        ("cooperlake", 0, False),
        ("haswell", 32, False),
    ],
)
def test_a_small_first_cache_is_spared(processor: str, kilobytes: int, second: bool) -> None:
    """What is read later is asked for in the second cache, on processors with AVX512-BF16."""
    compiler = native.compiler()
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64")
    assert f"-DFIRST_CACHE={native.first_cache()}" in native.FLAGS
    flags = [flag.replace("native", processor) for flag in native.FLAGS]
    flags.append(f"-DFIRST_CACHE={kilobytes << 10}")
    run = subprocess.run(
        [compiler, *flags, "-E", str(native.SOURCE)], capture_output=True, text=True, check=True
    )
    hints = set(re.findall(r"__builtin_prefetch\(w \+ STREAM_AHEAD [^;]*?(, 0, 2)?\)", run.stdout))
    assert hints == {", 0, 2" if second else ""}


@pytest.mark.parametrize("vectors", ["avx512", "avx2", "neon", "plain"])
def test_no_constant_is_defined_twice_for_any_processor(vectors: str) -> None:
    """Compilers for other processors are rarely there to say so."""
    found: dict[str, str] = {}
    for name in native.HEADERS:
        if name.startswith("vectors/") and vectors not in name:
            continue
        text = (native.SOURCE.parent / name).read_text()
        for line in re.findall(r"^constexpr \w+ ([^;]*);", text, flags=re.M):
            for constant in re.findall(r"(\w+) = ", line):
                # one file may have alternatives
                assert found.setdefault(constant, name) == name, f"{constant} in {name}"
    assert len(found) > 10
