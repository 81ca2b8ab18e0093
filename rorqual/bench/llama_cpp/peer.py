"""The process that has llama.cpp, as this one sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rorqual.bench.llama_cpp import peer_process
from rorqual.errors import ConfigError, EngineError

MARK = peer_process.MARK.encode()
PATIENCE = 1200.0  # seconds for one answer: a file of 17 GB is read and laid out anew
ERROR_BYTES = 1 << 16  # of its standard error that are searched


@dataclass(frozen=True)
class PeerSetting:
    """How llama.cpp computes. repack: weights are laid out anew when they are loaded, which is its
    default; ubatch: tokens of a prompt that are computed at once."""

    repack: bool = True
    flash: bool = True
    threads: int = 1
    ubatch: int = 512

    def __str__(self) -> str:
        words = [f"{self.threads} threads"]
        words += ["flash attention"] if self.flash else ["no flash attention"]
        words += [f"ubatch {self.ubatch}"] + ([] if self.repack else ["no repacking"])
        return ", ".join(words)


class LlamaCpp:
    """llama.cpp with one model at a time. processor_time: report processor seconds instead of
    elapsed ones. Raises EngineError if it fails or exits."""

    def __init__(self, python: str, processor_time: bool = False):
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        try:
            self.process = subprocess.Popen(
                [python, str(Path(peer_process.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
            )
        except OSError as error:
            self.errors.close()
            raise ConfigError(f"llama_python={python!r} does not start: {error.strerror}") from None
        self.waiting = b""
        self.loaded: tuple[Path, bool] | None = None
        self.system = ""  # instructions that it was built for, once a model is loaded
        self.open_as: tuple[PeerSetting, int, int] | None = None
        try:
            self.version = self._answer()["version"]
            self.ask("count", processor_time=processor_time)
        except EngineError as error:
            self.close()
            raise ConfigError(
                f"llama_python={python!r} has no llama-cpp-python that works: {error}"
            ) from None

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self.errors.close()

    def use(self, path: Path, setting: PeerSetting, sequences: int, length: int) -> None:
        """A context of this setting for so many sequences of `length` tokens; a model that is
        loaded already stays."""
        if self.loaded != (path, setting.repack):
            self.loaded = self.open_as = None
            self.system = self.ask("load", path=str(path), repack=setting.repack)["system"]
            self.loaded = (path, setting.repack)
        if self.open_as != (setting, sequences, length):
            self.ask(
                "open",
                sequences=sequences,
                length=length,
                ubatch=setting.ubatch,
                flash=setting.flash,
                threads=setting.threads,
            )
            self.open_as = (setting, sequences, length)

    def unload(self) -> None:
        """Give the model's memory back."""
        self.ask("unload")
        self.loaded = self.open_as = None

    def prompt_seconds(self, prompts: Sequence[Sequence[int]]) -> float:
        return float(self.ask("prompt", tokens=[list(ids) for ids in prompts])["seconds"])

    def decode_seconds(self, steps: int) -> float:
        """Of so many greedy steps behind the last prompts."""
        return float(self.ask("decode", steps=steps)["seconds"])

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        line = json.dumps({"do": what, **arguments}) + "\n"
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"llama.cpp has ended: {self._said()}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Lines without the mark are passed over: the library prints some of its own."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + PATIENCE
        while True:
            line, found, rest = self.waiting.partition(b"\n")
            if found:
                self.waiting = rest
                if line.startswith(MARK):
                    answer: dict[str, Any] = json.loads(line[len(MARK) :])
                    if "error" in answer:
                        raise EngineError(f"llama.cpp: {answer['error']}: {self._said()}")
                    return answer
                continue
            if not select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0]:
                self.process.kill()
                raise EngineError(f"llama.cpp has not answered within {PATIENCE:.0f} s")
            more = os.read(descriptor, 1 << 16)
            if not more:
                self.process.wait()
                raise EngineError(f"llama.cpp has ended: {self._said()}")
            self.waiting += more

    def _said(self) -> str:
        """The failed assertion that it wrote to standard error, which a debugger's long trace
        follows; else the end of what it wrote."""
        self.errors.flush()
        size = os.fstat(self.errors.fileno()).st_size
        start = max(0, size - ERROR_BYTES)
        text = os.pread(self.errors.fileno(), ERROR_BYTES, start).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        failed = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line]
        return " | ".join(failed[-1:] or lines[-4:])[-600:] or "nothing was said"
