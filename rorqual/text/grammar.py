"""Structured output through xgrammar: matchers for the sampler, and compilation in a process that
can be stopped.

An untrusted schema or regular expression may take forever to compile, or all memory. So it is
compiled in a child of `grammar_process`, under limits on time and memory; the result is returned
serialized and cached. Most compile quickly: each gets a short try first, and slower ones wait for a
second process, so that they only delay each other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from rorqual.engine.execution.grammar_matcher import XMatcher
from rorqual.errors import BusyError, RequestError
from rorqual.request import StructuredOutput
from rorqual.text.grammar_lanes import Framed, GrammarJob, GrammarQueue, Lane
from rorqual.text.grammar_limits import GrammarLimits
from rorqual.text.schemas.enforced import WHERE, enforced


def check_size(structure: StructuredOutput, limits: GrammarLimits) -> None:
    """Raises RequestError where the text is longer than the limit."""
    most = limits.regex if structure.kind == "regex" else limits.size
    if len(structure.value) > most:
        raise RequestError(
            f"the {structure.kind} has {len(structure.value)} characters; accepted: at most {most}"
        )


class GrammarLimitError(RequestError):
    """A structure that exceeded the limits of its try."""


class XGrammars:
    """Compiled grammars of one model's vocabulary; see engine.grammar.Grammars. `matcher` may be
    called from the engine's thread at any time: it is quick for structures that `prepare` has
    compiled."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits
    ):
        self.folder = folder
        self.vocab_size = vocab_size
        self.eos = eos_token_ids
        self.limits = limits
        self.info: Any = None
        self.info_lock = threading.Lock()
        self.compiled: OrderedDict[StructuredOutput, Any] = OrderedDict()
        # Also evicted ones that a live request still holds, which needs them again after
        # preemption.
        self.alive: WeakValueDictionary[StructuredOutput, Any] = WeakValueDictionary()
        self.sizes: dict[StructuredOutput, int] = {}  # of those, serialized size in characters
        self.jobs: dict[StructuredOutput, GrammarJob] = {}  # waiting or being compiled
        self.lock = threading.Lock()  # for all of these, never held for long
        self.first = Lane(self._start_helper)
        self.slow = Lane(self._start_helper)
        self.queue = GrammarQueue(limits.waiting)
        self.slow_queue = GrammarQueue(limits.slow_waiting)
        self.threads: list[threading.Thread] = []
        self.closed = False

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
        """Start the compiling process now, in the background, rather than at the first request."""
        self.prepare(StructuredOutput("json_object"), lambda error: None)

    def ready(self, structure: StructuredOutput) -> bool:
        """True where `matcher` need not compile; marks the structure as most recently used."""
        with self.lock, suppress(KeyError):
            self.compiled.move_to_end(structure)
            return True
        return False

    def prepare(
        self,
        structure: StructuredOutput,
        done: Callable[[Exception | None], None],
        client: str = "",
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Compile on another thread and call done(error or None), from there or at once; to keep
        the compiled grammar, call `hold` there. Clients take turns; BusyError where too many wait.
        A structure no longer `wanted` when its turn comes is skipped."""
        with self.lock:
            job = self.jobs.get(structure)
            if job is not None:
                job.waiters.append((done, wanted))
                return
            job = self.jobs[structure] = GrammarJob(structure, client, [(done, wanted)])
            if not self.threads:
                self._start_threads()
        self._push(self.queue, job)

    def _start_threads(self) -> None:
        for work in (self._try_all, self._compile_slow):
            thread = threading.Thread(target=work, name="grammars", daemon=True)
            self.threads.append(thread)
            thread.start()

    def _push(self, queue: GrammarQueue, job: GrammarJob) -> None:
        for dropped in queue.push(job):
            message = f"{queue.most} grammars wait to be compiled, which is as many as may"
            self._finish(dropped, BusyError(f"{message}; try again later"))

    def _try_all(self) -> None:
        """Where a client has several jobs, each gets a short try before any gets a full one: a
        small grammar does not wait for its client's earlier ones."""
        while (job := self.queue.pop()) is not None:
            if self._still_wanted(job):
                short = self._is_one_of_several(job)
                job.tries += 1
                seconds = self.limits.short if short else self.limits.quick
                error = self._try(job, self.first, seconds)
                if isinstance(error, GrammarLimitError):
                    self._push(self.queue if short else self.slow_queue, job)
                else:
                    self._finish(job, error)

    def _is_one_of_several(self, job: GrammarJob) -> bool:
        if job.tries or self.limits.short >= self.limits.quick:
            return False
        return self.queue.has(job.client) or self.slow_queue.has(job.client)

    def _compile_slow(self) -> None:
        while (job := self.slow_queue.pop()) is not None:
            if self._still_wanted(job):
                self._finish(job, self._try(job, self.slow, self.limits.seconds))

    def _still_wanted(self, job: GrammarJob) -> bool:
        with self.lock:
            wanted = job.wanted
            if not wanted:
                del self.jobs[job.structure]  # later requests make a new job
            return wanted

    def _try(self, job: GrammarJob, lane: Lane, seconds: float) -> Exception | None:
        try:
            job.found = self._find(job.structure, lane, seconds)
        except Exception as error:
            return error
        return None

    def _finish(self, job: GrammarJob, error: Exception | None) -> None:
        with self.lock:
            self.jobs.pop(job.structure, None)
            waiters = [] if self.closed else job.waiters
        for done, _ in waiters:
            done(error)

    def hold(self, structure: StructuredOutput | None) -> Any:
        """A reference that keeps the compiled grammar in memory."""
        return None if structure is None else self.alive.get(structure)

    def matcher(self, structure: StructuredOutput) -> XMatcher:
        """Raises RequestError where the structure cannot be compiled within the limits."""
        return XMatcher(self._find(structure, self.first, self.limits.seconds))

    def packed(self, structure: StructuredOutput) -> str:
        return self._find(structure, self.first, self.limits.seconds).serialize_json()

    def vocabulary(self) -> str:
        """Available once something has been compiled."""
        return self.info.serialize_json()

    def _find(self, structure: StructuredOutput, lane: Lane, seconds: float) -> Any:
        """A cached grammar, else compile it. For structures that were prepared the engine's thread
        never waits."""
        found = self.alive.get(structure)
        if found is None:
            found, size = self._compile(structure, lane, seconds)
            with self.lock:
                self._keep(structure, found, size)
        return found

    def _keep(self, structure: StructuredOutput, found: Any, size: int) -> None:
        """Cache a grammar, evicting the oldest. Those in use cannot be evicted, so no more are
        accepted when they are too many: in memory each takes several times its serialized size."""
        self.sizes = {it: size for it, size in self.sizes.items() if it in self.alive}
        in_use = sum(self.sizes.values()) - sum(self.sizes.get(it, 0) for it in self.compiled)
        if in_use + size > self.limits.in_use:
            raise BusyError(
                f"the compiled grammars of open requests take {in_use} characters and this one "
                f"{size}, of {self.limits.in_use}; try again later"
            )
        self.compiled[structure] = self.alive[structure] = found
        self.sizes[structure] = size
        kept = sum(self.sizes[it] for it in self.compiled)
        while len(self.compiled) > self.limits.kept or kept > self.limits.kept_size:
            kept -= self.sizes[self.compiled.popitem(last=False)[0]]

    def _compile(self, structure: StructuredOutput, lane: Lane, seconds: float) -> tuple[Any, int]:
        """The grammar, and its serialized size in characters."""
        import xgrammar

        check_size(structure, self.limits)
        structure = enforced(structure)
        if not any(0 <= token < self.vocab_size for token in self.eos):
            # Without stop tokens a grammar would allow no token after its text, but the sampler
            # needs one.
            raise RequestError(
                f"structured output needs an end-of-sequence id in the model's vocabulary, which "
                f"has ids 0 to {self.vocab_size - 1}; the model names {list(self.eos)}"
            )
        request = compile_request(structure)
        text = self._ask(structure.kind, request, lane, seconds)
        with self.info_lock:
            if self.info is None:
                self.info = tokenizer_info(self.folder, self.vocab_size, self.eos)
        return xgrammar.CompiledGrammar.deserialize_json(text, self.info), len(text)

    def _ask(self, kind: str, request: tuple[str, str], lane: Lane, seconds: float) -> str:
        try:
            answer = lane.ask((*request, seconds), seconds + 5.0)
        except (TimeoutError, EOFError):
            raise GrammarLimitError(
                f"the {kind} could not be compiled; accepted: one that compiles within "
                f"{seconds:g} s"
            ) from None
        if "error" in answer:
            error = GrammarLimitError if answer.get("limit") else RequestError
            where = answer.get(WHERE)
            subject = f"{where}: the schema" if where else f"the {kind}"
            raise error(f"{subject} cannot be compiled: {answer['error']}")
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

    def close(self) -> None:
        self.closed = True
        for queue in (self.queue, self.slow_queue):
            queue.close()
        for lane in (self.first, self.slow):
            lane.close()


def compile_request(structure: StructuredOutput) -> tuple[str, str]:
    """The compiler's kind and text for a structure. JSON is on one line: unbounded whitespace could
    let a model generate forever."""
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
    """xgrammar's view of the vocabulary. Special tokens are left blank, else a grammar could use
    them for text, which would not be shown; the end-of-sequence ids are the stop tokens."""
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
