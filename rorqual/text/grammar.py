"""Structured output through xgrammar: matchers for the sampler, and compilation in a process that
can be stopped.

A schema or regular expression comes from a stranger and may take for ever to compile, or all
memory. So it is compiled in a child of `grammar_process`, under limits on time and memory; the
result comes back serialized and is kept.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from rorqual.engine.execution.grammar_matcher import XMatcher
from rorqual.errors import RequestError
from rorqual.request import StructuredOutput
from rorqual.text.grammar_limits import GrammarLimits
from rorqual.text.schema_refs import check_refs


def check_size(structure: StructuredOutput, limits: GrammarLimits) -> None:
    """Raises RequestError where the text is longer than will be tried."""
    most = limits.regex if structure.kind == "regex" else limits.size
    if len(structure.value) > most:
        raise RequestError(
            f"the {structure.kind} has {len(structure.value)} characters; accepted: at most {most}"
        )


class Framed:
    """Messages of msgpack with a length before them, over a child's standard input and output."""

    def __init__(self, command: list[str]):
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.input = self.child.stdin
        self.output = self.child.stdout

    def ask(self, message: Any, seconds: float) -> Any:
        """Send one message, wait for its answer; raises TimeoutError, or EOFError where the
        child has gone."""
        data = msgspec.msgpack.encode(message)
        try:
            self.input.write(len(data).to_bytes(8, "little") + data)
            self.input.flush()
        except BrokenPipeError:
            raise EOFError from None
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._read(8, deadline), "little")
        return msgspec.msgpack.decode(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        fd = self.output.fileno()
        parts = []
        missing = size
        while missing:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(fd, min(missing, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in (self.input, self.output):
            with suppress(BrokenPipeError):
                pipe.close()


class XGrammars:
    """Compiled grammars of one model's vocabulary; see engine.grammar.Grammars. `matcher` may be
    called from the engine's thread at any time: it is quick for whatever `prepare` has brought
    in."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits
    ):
        self.folder = folder
        self.vocab_size = vocab_size
        self.eos = eos_token_ids
        self.limits = limits
        self.info: Any = None
        self.compiled: OrderedDict[StructuredOutput, Any] = OrderedDict()
        # Also what has been dropped but a live request still holds: one that was preempted asks
        # again.
        self.alive: WeakValueDictionary[StructuredOutput, Any] = WeakValueDictionary()
        self.helper: Framed | None = None
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @classmethod
    def make(
        cls, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits
    ) -> XGrammars | None:
        """None where xgrammar is not installed or the model has no tokenizer."""
        there = (
            importlib.util.find_spec("xgrammar") is not None
            and (folder / "tokenizer.json").exists()
        )
        return cls(folder, vocab_size, eos_token_ids, limits) if there else None

    def warm(self) -> None:
        """Bring up the compiling process now, beside everything else, rather than at the first
        request."""
        self.pool.submit(self._find, StructuredOutput("json_object"))

    def ready(self, structure: StructuredOutput) -> bool:
        """True where `matcher` need not compile; the structure then counts as used last."""
        with suppress(KeyError):
            self.compiled.move_to_end(structure)
            return True
        return False

    def prepare(
        self, structure: StructuredOutput, done: Callable[[Exception | None], None]
    ) -> None:
        """Compile on a thread of its own and call done(error or None) from there."""
        self.pool.submit(self._prepare, structure, done)

    def _prepare(
        self, structure: StructuredOutput, done: Callable[[Exception | None], None]
    ) -> None:
        error: Exception | None = None
        try:
            self._find(structure)
        except Exception as found:
            error = found
        done(error)

    def hold(self, structure: StructuredOutput | None) -> Any:
        """What keeps a compiled grammar at hand for as long as the caller keeps it."""
        return None if structure is None else self.alive.get(structure)

    def matcher(self, structure: StructuredOutput) -> XMatcher:
        """Raises RequestError where the structure cannot be compiled within the limits."""
        return XMatcher(self._find(structure))

    def packed(self, structure: StructuredOutput) -> str:
        return self._find(structure).serialize_json()

    def vocabulary(self) -> str:
        """Known once something has been compiled."""
        return self.info.serialize_json()

    def _find(self, structure: StructuredOutput) -> Any:
        """The lock is held while compiling, which the engine's thread must never wait for when
        it asks for what is there."""
        found = self.alive.get(structure)
        if found is not None:
            return found
        with self.lock:
            if structure not in self.compiled:
                self.compiled[structure] = self.alive[structure] = self._compile(structure)
                while len(self.compiled) > self.limits.kept:
                    self.compiled.popitem(last=False)
            return self.compiled[structure]

    def _compile(self, structure: StructuredOutput) -> Any:
        import xgrammar

        check_size(structure, self.limits)
        check_refs(structure)
        if not any(0 <= token < self.vocab_size for token in self.eos):
            # After its text a grammar would allow no token at all, and the sampler must draw one.
            raise RequestError(
                f"structured output needs an end-of-sequence id in the model's vocabulary, which "
                f"has ids 0 to {self.vocab_size - 1}; the model names {list(self.eos)}"
            )
        request = compile_request(structure)
        if self.info is None:
            self.info = tokenizer_info(self.folder, self.vocab_size, self.eos)
        text = self._ask(structure.kind, request)
        return xgrammar.CompiledGrammar.deserialize_json(text, self.info)

    def _ask(self, kind: str, request: tuple[str, str]) -> str:
        try:
            self.helper = self.helper or self._start_helper()
            answer = self.helper.ask(request, self.limits.seconds + 5.0)
        except (TimeoutError, EOFError):
            self._stop_helper()
            raise RequestError(
                f"the {kind} could not be compiled; accepted: one that compiles within "
                f"{self.limits.seconds:g} s"
            ) from None
        if "error" in answer:
            raise RequestError(f"the {kind} cannot be compiled: {answer['error']}")
        return answer["compiled"]

    def _start_helper(self) -> Framed:
        helper = Framed([sys.executable, "-m", "rorqual.text.grammar_process"])
        where = {
            "parent": os.getpid(),
            "folder": str(self.folder),
            "vocab_size": self.vocab_size,
            "eos": list(self.eos),
        }
        limits = msgspec.to_builtins(self.limits)
        helper.ask({**where, "limits": limits}, 120.0)
        return helper

    def _stop_helper(self) -> None:
        if self.helper is not None:
            self.helper.close()
            self.helper = None

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._stop_helper()


def compile_request(structure: StructuredOutput) -> tuple[str, str]:
    """What to ask of xgrammar, and its text. JSON comes on one line: whitespace without bound
    would let a model never end."""
    if structure.kind == "json_object":
        return "json_schema", '{"type": "object"}'
    if structure.kind == "choice":
        choices = json.loads(structure.value)
        return "structural_tag", _one_of(choices)
    return structure.kind, structure.value


def _one_of(choices: list[str]) -> str:
    elements = [{"type": "const_string", "value": choice} for choice in choices]
    return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": elements}})


def tokenizer_info(folder: Path, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """xgrammar's view of the vocabulary. Special tokens are left blank, else a grammar could
    spell text with them, which is then not shown; the end-of-sequence ids are the stop tokens."""
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    from rorqual.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.raw)
    full = xgrammar.TokenizerInfo.from_huggingface(
        fast, vocab_size=vocab_size, stop_token_ids=list(eos)
    )
    words: list[bytes | str] = [""] * vocab_size
    for word, index in tokenizer.raw.get_vocab(with_added_tokens=True).items():
        if index < vocab_size and index not in tokenizer.special_ids:
            words[index] = word
    return xgrammar.TokenizerInfo.from_vocab_and_metadata(words, full.dump_metadata())
