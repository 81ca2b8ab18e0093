"""Compiles untrusted grammars: each in its own forked process, with limits on processor time and
memory.

Framed msgpack on standard input and output. The first message has the vocabulary and the limits;
each further one is (kind, text, processor seconds), and the response is {"compiled": ...} or
{"error": ...}, with "limit" where more time or memory might have sufficed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import signal
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from rorqual.config.log import log_to_stderr
from rorqual.config.process import die_with_parent
from rorqual.errors import escaped
from rorqual.text.grammar import tokenizer_info
from rorqual.text.grammar_limits import GrammarLimits
from rorqual.text.schemas.enforced import WHERE, schemas_within

log = logging.getLogger("rorqual.grammar")

MAX_OUTPUT_BYTES = 2048  # of what a compilation prints


def read(stream: BinaryIO) -> Any:
    """The next message, or None at the end."""
    head = stream.read(8)
    return (
        msgspec.msgpack.decode(stream.read(int.from_bytes(head, "little")))
        if len(head) == 8
        else None
    )


def write(stream: BinaryIO, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def compile_text(info: Any, kind: str, text: str) -> str:
    """The serialized form of a compiled grammar; raises whatever xgrammar raises."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if kind == "json_schema":
        compiled = compiler.compile_json_schema(text, any_whitespace=False)
    elif kind == "regex":
        compiled = compiler.compile_regex(text)
    elif kind == "structural_tag":
        compiled = compiler.compile_structural_tag(text)
    else:
        compiled = compiler.compile_grammar(text)
    _check_start(xgrammar.GrammarMatcher(compiled), info.vocab_size)
    return compiled.serialize_json()


def _check_start(matcher: Any, vocab_size: int) -> None:
    """Rejects a grammar that allows no first token, which would leave the sampler without a
    choice."""
    mask = array("i", [0] * (-(-vocab_size // 32)))
    if matcher.fill_next_token_bitmask(
        np.frombuffer(mask, dtype=np.int32).reshape(1, -1)
    ) and not any(mask):
        raise ValueError("no text of this vocabulary matches it")


def limited(info: Any, kind: str, text: str, limits: GrammarLimits) -> dict[str, Any]:
    """Compile in a child process; its result, or an error if it returned none."""
    source, target = os.pipe()
    said = os.memfd_create("said")
    child = os.fork()
    if not child:
        os.close(source)
        _redirect(said)
        _as_child(target, info, kind, text, limits)
    os.close(target)
    data = _drain(source, time.monotonic() + limits.seconds + 2.0, limits.compiled)
    os.close(source)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _log_said(said)
    if data is None:
        return {
            "error": f"it takes more than {limits.seconds:g} s, or {limits.memory_mib} MiB, or "
            "its "
            "compiled form is too large",
            "limit": True,
        }
    return msgspec.msgpack.decode(data)


def _redirect(said: int) -> None:
    """Redirect output to a file first: xgrammar prints the caller's text unescaped."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
    os.dup2(said, 1)
    os.dup2(said, 2)


def _log_said(said: int) -> None:
    text = os.pread(said, MAX_OUTPUT_BYTES, 0).decode(errors="replace").strip()
    os.close(said)
    if text:
        log.warning("%s", text)


def _as_child(target: int, info: Any, kind: str, text: str, limits: GrammarLimits) -> None:
    """Never returns. Ends without a message where a limit is hit: by signal, or out of memory."""
    try:
        seconds = max(1, round(limits.seconds))
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(
            resource.RLIMIT_CPU, (seconds + int(used.ru_utime + used.ru_stime), seconds + 60)
        )
        # RLIMIT_CPU has whole seconds only.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + (limits.memory_mib << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            answer: dict[str, Any] = {"compiled": compile_text(info, kind, text)}
        except MemoryError:
            os._exit(1)
        except Exception as error:
            answer = {"error": _first_line(error), WHERE: _where(info, kind, text)}
        with os.fdopen(target, "wb") as stream:
            stream.write(msgspec.msgpack.encode(answer))
    finally:
        os._exit(0)


def _where(info: Any, kind: str, text: str) -> str | None:
    """The parameter whose schema cannot be compiled, if several are in the text."""
    if kind != "structural_tag":
        return None
    for form in schemas_within(json.loads(text)):
        try:
            compile_text(info, "json_schema", json.dumps(form["json_schema"]))
        except Exception:
            return form.get(WHERE)
    return None


def _first_line(error: Exception) -> str:
    """xgrammar's message, without its timestamp and source line."""
    text = re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", str(error).strip())
    return escaped(" ".join(text.split())[:300]) or type(error).__name__


def _drain(source: int, deadline: float, most: int) -> bytes | None:
    """The child's whole output; None where there is none, too much, or none in time."""
    parts: list[bytes] = []
    size = 0
    while select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(source, 1 << 20)
        if not part:
            return b"".join(parts) or None
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return None


def main() -> None:
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not mix with messages
    log_to_stderr("rorqual grammar: %(message)s", logging.WARNING)
    first = read(source)
    die_with_parent(first["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limits = msgspec.convert(first["limits"], GrammarLimits)
    info = tokenizer_info(Path(first["folder"]), first["vocab_size"], tuple(first["eos"]))
    write(target, {})
    while (message := read(source)) is not None:
        kind, text, seconds = message
        write(target, limited(info, kind, text, replace(limits, seconds=seconds)))


if __name__ == "__main__":
    main()
