"""The engine process: an Engine, and the loop that feeds it requests from one socket and sends each
step's outputs to another.

Started as `python -m rorqual.serve.engines.engine_main` (begin.py) with a EngineProcessConfig as
one line of JSON on its standard input, which may arrive after its imports.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec

from rorqual.cache.events import CacheCleared
from rorqual.config.log import log_to_stderr
from rorqual.config.process import (
    die_with_parent,
    freeze_loaded,
    ignore_group_signals,
    process_age,
)
from rorqual.disagg.kv_transfers import KVTransfers
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.engine.config import AUTO, OFF, EngineConfig
from rorqual.engine.engine import Engine
from rorqual.engine.scheduling.scheduler_output import TokenLogprobs
from rorqual.engine.scheduling.sequence import Sequence, TokenOut
from rorqual.errors import BusyError, ExpertsMissing, RequestError, RorqualError
from rorqual.platforms import device_of
from rorqual.request import FinishReason, Request
from rorqual.serve import messages
from rorqual.serve.engines.engine_metrics import EngineMetrics, RequestEnd
from rorqual.serve.engines.kv_events import KVEventPublisher
from rorqual.serve.engines.phase_reporter import PhaseReporter
from rorqual.serve.engines.sockets import EngineSockets
from rorqual.serve.kv_events_config import KVEventsConfig
from rorqual.serve.messages import Counting
from rorqual.text.generation_config import read_generation
from rorqual.text.grammar import XGrammars
from rorqual.text.grammar_limits import GrammarLimits

log = logging.getLogger("rorqual.engine")

SNAPSHOT_SECONDS = 0.25
IDLE_POLL_MS = 1000
BLOCKED_POLL_MS = 20  # while other engines hold the pages that every request here waits for
STARTUP_FAILED = 3  # exit status: the engine could not start as configured
STEP_FAILED = 4  # exit status: a step raised


class EngineProcessConfig(msgspec.Struct, frozen=True):
    """engine: fields of EngineConfig. The sockets are addresses that the API process has bound.
    tokenizer: the folder of the server's tokenizer, where it is not the model's own."""

    parent: int
    inbox: str
    outbox: str
    engine: dict[str, Any]
    grammar: GrammarLimits
    structured: bool = True
    tokenizer: str | None = None
    transfer: TransferConfig | None = None
    events: KVEventsConfig | None = None


@dataclass(slots=True)
class LiveRequest:
    """An open request. `held` keeps its compiled grammar.

    `queued`: when the engine received it; `started`: when it was admitted; `first` and `last`: when
    its first and its newest token were sent; 0 until then. `answered`: the response is complete,
    while its prompt is still being computed for another engine.
    """

    sequence: Sequence
    every_step: bool
    traced: bool = False
    counting: Counting = Counting.SENT
    queued: float = 0.0
    held: Any = None
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    answered: bool = False
    # kept for the end where the caller does not stream
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def end(self, reason: FinishReason, tokens: int) -> RequestEnd:
        """It ends, so far, with the token sent last."""
        request = self.sequence.request
        times = (request.arrival, self.started or self.first, self.first, self.last)
        return RequestEnd(reason.value, self.sequence.prompt_len, tokens, *times)


class EngineProcess:
    """`run` until Shutdown. unread: ends of requests whose text the API process still reads: it may
    find that a stop string came before."""

    def __init__(
        self,
        engine: Engine,
        link: EngineSockets,
        grammars: XGrammars | None,
        transfers: KVTransfers | None = None,
        publisher: KVEventPublisher | None = None,
    ):
        self.engine = engine
        self.transfers = transfers
        if transfers is not None:
            transfers.answer = self._answer_now
        self.publisher = publisher
        # requests whose pages are being fetched; the second keeps the compiled grammar
        self.arriving: dict[str, tuple[messages.Add, Any]] = {}
        self.link = link
        self.grammars = grammars
        self.meter = EngineMetrics(engine)
        self.phases = PhaseReporter(link)
        self.live: dict[str, LiveRequest] = {}
        self.unstarted: dict[str, LiveRequest] = {}
        self.unread: dict[str, RequestEnd] = {}
        self.preparing: dict[str, messages.Add] = {}
        # the last keeps the compiled grammar until the request holds it
        self.prepared: SimpleQueue[tuple[messages.Add, Exception | None, Any]] = SimpleQueue()
        self.running = True
        self.tracing = False
        self.next_snapshot = 0.0

    def run(self) -> None:
        while self.running:
            if not self.engine.has_work:
                self._snapshot(time.monotonic())
                self.link.wait(0 if self.transfers and self.transfers.busy else IDLE_POLL_MS)
            self._receive()
            if self.transfers:
                self._queue_arrived(self.transfers)
            if self.engine.has_work:
                self._step()
            if self.publisher:
                self._publish(self.publisher)

    def _publish(self, publisher: KVEventPublisher) -> None:
        for rank, scheduler in enumerate(self.engine.scheduler.schedulers):
            events = scheduler.prefix.record().drain()
            if events:
                publisher.publish(rank, events)

    # ---- messages received

    def _receive(self) -> None:
        while (message := self.link.receive()) is not None:
            self._handle(message)
        while not self.prepared.empty():
            add, error, _held = self.prepared.get()
            if self.preparing.pop(add.request.id, None) is not None:
                self.phases.grammar(add)
                self._refuse(add.request, error, structured=True) if error else self._add(add)

    def _handle(self, message: messages.ToEngine) -> None:
        if isinstance(message, messages.Add):
            if message.shares and self.transfers:
                self.transfers.expect_answer(message.request.id)
            self._prepare(message) if message.request.params.structured else self._add(message)
        elif isinstance(message, messages.Cancel):
            for name in message.ids:
                self.cancel(name)
        elif isinstance(message, messages.Answered):
            if self.transfers:
                self.transfers.answered(message.ids, message.lost)
        elif isinstance(message, messages.TextEnded):
            self._end_text(message)
        elif isinstance(message, messages.ResetPrefix):
            self.engine.scheduler.prefix.clear()
        elif isinstance(message, messages.StartTrace):
            self.tracing = True
            self.engine.start_trace(message.prefix, message.steps)
        elif isinstance(message, messages.StopTrace):
            self.engine.stop_trace()
        else:
            self.running = False

    def cancel(self, name: str) -> None:
        self.preparing.pop(name, None)
        if self.arriving.pop(name, None) is not None and self.transfers:
            self.phases.arrivals.pop(name, None)
            self.transfers.cancel(name)
        self.unstarted.pop(name, None)
        if self.live.pop(name, None) is not None:
            self.engine.abort(name)
            self.meter.finished["abort"] += 1
        end = self.unread.pop(name, None)
        if end is not None:
            self.meter.end(end)

    def _end_text(self, message: messages.TextEnded) -> None:
        """Count a request that the API process has read, as far as its text goes: the engine may
        have sent more tokens."""
        live = self.live.pop(message.id, None)
        if live is not None:
            self.engine.stop(message.id)
            end = live.end(FinishReason.STOP, message.tokens)
        else:
            found = self.unread.pop(message.id, None)
            if found is None:
                return
            end = replace(found, reason=FinishReason.STOP.value) if message.stopped else found
        self.meter.end(replace(end, tokens=message.tokens, last=message.last))

    def _prepare(self, add: messages.Add) -> None:
        """Compile a request's grammar in the background; the request is queued once that is
        done."""
        structure = add.request.params.structured
        assert structure is not None
        if self.grammars is None:
            error = RequestError("structured output is not offered by this server")
            self._refuse(add.request, error, structured=True)
        elif (_held := self.grammars.hold(structure)) is not None:
            self.grammars.ready(structure)
            self._add(add)
        else:
            name = add.request.id
            self.preparing[name] = add
            self.grammars.prepare(
                structure,
                partial(self._when_prepared, add),
                add.request.client,
                lambda: name in self.preparing,
            )

    def _when_prepared(self, add: messages.Add, error: Exception | None) -> None:
        """Called on a compiling thread, or at once."""
        assert self.grammars is not None
        self.prepared.put((add, error, self.grammars.hold(add.request.params.structured)))
        self.link.wake()

    def _add(self, add: messages.Add) -> None:
        request = add.request
        held = self.grammars.hold(request.params.structured) if self.grammars else None
        if self.transfers and request.kv_transfer_params:
            try:
                self.transfers.check(request)
            except RequestError as error:
                self._refuse(request, error)
                return
            if self.transfers.fetch(request):
                self.phases.fetching(add, self.transfers)
                self.arriving[request.id] = (add, held)
                return
        self._queue(add, held)

    def _queue_arrived(self, transfers: KVTransfers) -> None:
        """Queue remotely prefilled requests whose pages have arrived."""
        for request, error, dp_rank in transfers.arrived():
            add, held = self.arriving.pop(request.id)
            self.phases.fetched(add, error)
            if error and transfers.config.on_failure == "fail":
                self.link.send(messages.Refused(request.id, error, pages_lost=True))
            else:
                self._queue(add, held, dp_rank)

    def _queue(self, add: messages.Add, held: Any, dp_rank: int | None = None) -> None:
        """held: keeps the compiled grammar until the request is live. dp_rank: the data-parallel
        rank that has its pages."""
        request = add.request
        try:
            over = self.engine.add(request, dp_rank)
        except RequestError as error:
            self._refuse(request, error)
            return
        if over is not None:
            self.link.send(messages.StepOutputs([messages.Output(request.id, [], over.value)]))
            return
        sequence = self.engine.scheduler.sequences[request.id]
        mode = (add.every_step, add.traced, add.counting)
        live = LiveRequest(sequence, *mode, time.monotonic(), held)
        self.live[request.id] = self.unstarted[request.id] = live
        if self.transfers:
            self.transfers.begin(request)

    def _refuse(self, request: Request, error: Exception, structured: bool = False) -> None:
        busy = isinstance(error, BusyError)
        self.link.send(messages.Refused(request.id, str(error), busy, structured=structured))

    # ---- messages sent

    def _step(self) -> None:
        before = time.monotonic()
        steps = self.engine.stats.steps
        try:
            outs = self.engine.step()
        except ExpertsMissing as error:
            self._end_all(str(error))
            return
        now = time.monotonic()
        for name in [
            name
            for name, live in self.unstarted.items()
            if live.sequence.num_cached_prompt is not None
        ]:
            self.unstarted.pop(name).started = before
        outputs = self._outputs(outs, now)
        if self.transfers:
            outputs += self._answer_early(self.transfers)
        if outputs:
            self.link.send(messages.StepOutputs(outputs))
        if now >= self.next_snapshot:
            self._snapshot(now)
        if self.engine.stats.steps == steps and not (self.engine.in_flight or outs):
            if self.transfers:
                self.transfers.give_way()
            self.link.wait(BLOCKED_POLL_MS)

    def _end_all(self, reason: str) -> None:
        """End all requests: an expert has had no holder for too long."""
        log.error("%d requests end: %s", len(self.live), reason)
        for name, live in list(self.live.items()):
            if not live.answered:
                self.link.send(messages.Refused(name, reason, experts_missing=True))
            self.cancel(name)

    def _outputs(self, outs: list[TokenOut], now: float) -> list[messages.Output]:
        """One Output for each request with news; a step may have several tokens of one request."""
        found: dict[str, messages.Output] = {}
        tokens: dict[str, int] = {}
        for out in outs:
            name = out.sequence.request.id
            live = self.live.get(name)
            if live is None:
                continue
            tokens[name] = tokens.get(name, 0) + 1
            if live.every_step and not live.answered:
                self._extend(found, name, out, first=not live.first)
                if live.counting is Counting.READ:
                    output = found[name]
                    output.times = [*(output.times or ()), now]
            elif out.logprobs is not None:
                live.logprobs.append(out.logprobs)
            if out.finish is not None:
                if not live.answered:
                    found[name] = found.get(name) or _whole(name, out, live.logprobs)
                    if self.transfers:
                        found[name].transfer = self.transfers.offer(out.sequence)
                self._end(name, live, out, tokens.pop(name), now)
        for name, count in tokens.items():
            self._count(self.live[name], count, now)
        return list(found.values())

    def _answer_early(self, transfers: KVTransfers) -> list[messages.Output]:
        """Outputs of requests whose pages may be fetched while they are computed: their own token
        is not needed."""
        return [self._early(name, params) for name, params in transfers.advance()]

    def _answer_now(self, name: str, params: dict[str, Any]) -> None:
        """Answer a request that the next step starts to compute."""
        self.link.send(messages.StepOutputs([self._early(name, params)]))

    def _early(self, name: str, params: dict[str, Any]) -> messages.Output:
        live = self.live[name]
        live.answered = True
        live.counting = Counting.NONE
        cached = live.sequence.num_cached_prompt or 0
        output = messages.Output(name, [], FinishReason.LENGTH.value, cached=cached)
        output.transfer = params
        return output

    def _extend(
        self, found: dict[str, messages.Output], name: str, out: TokenOut, first: bool
    ) -> None:
        output = found.get(name)
        if output is None:
            output = found[name] = messages.Output(
                name, [], cached=out.sequence.num_cached_prompt or 0
            )
            output.prompt_logprobs = _prompt_logprobs(out.sequence) if first else None
        output.tokens.append(out.token)
        if out.logprobs is not None:
            output.logprobs = [*(output.logprobs or ()), out.logprobs]
        if out.finish is not None:
            output.finish = out.finish.value
            output.stop_token = out.sequence.stop_token

    def _count(self, live: LiveRequest, tokens: int, now: float) -> None:
        counts = live.counting is Counting.SENT
        if counts:
            self.meter.tokens += tokens
        if live.first:
            if counts:
                self.meter.count_gap(now - live.last, tokens)
        else:
            live.first = now
            self.meter.first_token(live.sequence, now)
            if live.traced:
                self.phases.began(live.sequence, live.queued, live.started or live.queued, now)
        live.last = now

    def _end(self, name: str, live: LiveRequest, out: TokenOut, tokens: int, now: float) -> None:
        """tokens: new ones."""
        self._count(live, tokens, now)
        assert out.finish is not None
        request = out.sequence.request
        end = live.end(out.finish, len(out.sequence.tokens) - len(request.tokens))
        if live.counting is Counting.NONE:
            end = replace(end, reason=FinishReason.LENGTH.value, tokens=0)
        if live.counting is Counting.READ:
            self.unread[name] = end
        else:
            if live.traced:
                self.phases.ended(request, end.tokens, live.first, now)
            self.meter.end(end)
        self.unstarted.pop(name, None)
        del self.live[name]

    def _snapshot(self, now: float) -> None:
        self.next_snapshot = now + SNAPSHOT_SECONDS
        if self.transfers:
            self.transfers.settle()
        figures = self.transfers.figures() if self.transfers else []
        traffic = self.transfers.traffic() if self.transfers else {}
        self.link.send(self.meter.snapshot(now, figures, traffic))
        if self.tracing:
            self._send_trace_result()

    def _send_trace_result(self) -> None:
        found = self.engine.traced()
        if found is not None:
            self.tracing = False
            files = [one.path for one in found if not one.error]
            errors = [f"{one.path}: {one.error}" for one in found if one.error]
            self.link.send(messages.TraceDone(files, errors))


def _whole(name: str, out: TokenOut, logprobs: list[TokenLogprobs]) -> messages.Output:
    sequence = out.sequence
    assert out.finish is not None
    return messages.Output(
        name,
        sequence.outputs,
        out.finish.value,
        sequence.stop_token,
        sequence.num_cached_prompt or 0,
        logprobs or None,
        _prompt_logprobs(sequence),
    )


def _prompt_logprobs(sequence: Sequence) -> list[TokenLogprobs] | None:
    wanted = sequence.request.params.prompt_logprobs is not None
    return sequence.prompt_logprobs if wanted else None


def info(engine: Engine, eos: tuple[int, ...], startup: dict[str, float]) -> messages.EngineInfo:
    config = engine.config
    scheduler = engine.scheduler.config
    sizes = (
        scheduler.max_model_len,
        scheduler.max_num_seqs,
        scheduler.num_pages - 1,
        scheduler.page_size,
    )
    vocab = engine.model_config.vocab_size
    return messages.EngineInfo(
        os.getpid(),
        config.model,
        engine.dtype,
        engine.platform.name,
        vocab,
        *sizes,
        eos,
        startup,
    )


def _start(config: EngineProcessConfig, link: EngineSockets) -> EngineProcess:
    from pathlib import Path

    imports = process_age()
    options = {
        **config.engine,
        "ignore_config_fields": tuple(config.engine.get("ignore_config_fields", ())),
    }
    if "itl_ms" not in options:
        # a GPU takes only about four decode steps' time for a prompt of 2,000 tokens
        cpu = device_of(options.get("device", "auto")).type == "cpu"
        options["itl_ms"] = AUTO if cpu else OFF
    engine = Engine(EngineConfig(**options))
    eos = read_generation(Path(engine.config.model), engine.model_config).eos_token_ids
    where = Path(config.tokenizer or engine.config.model)
    vocab_size = engine.model_config.vocab_size
    loaded = process_age()
    grammars = XGrammars.make(where, vocab_size, eos, config.grammar) if config.structured else None
    if grammars is not None:
        engine.grammars = grammars
        grammars.warm()
    startup = {"imports": imports, **engine.stats.startup, "grammars": process_age() - loaded}
    transfers = KVTransfers(engine, config.transfer, link.wake) if config.transfer else None
    publisher = None
    if config.events is not None:
        for scheduler in engine.scheduler.schedulers:
            scheduler.prefix.record()
        publisher = KVEventPublisher(config.events)
        for rank in range(len(engine.scheduler.schedulers)):
            publisher.publish(rank, [CacheCleared()])  # an earlier engine's pages
    freeze_loaded()
    startup["other"] = max(0.0, process_age() - sum(startup.values()))
    link.send(info(engine, eos, startup))
    return EngineProcess(engine, link, grammars, transfers, publisher)


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the server ended before sending a configuration
    config = msgspec.json.decode(line, type=EngineProcessConfig)
    die_with_parent(config.parent)
    log_to_stderr("rorqual engine: %(message)s", logging.INFO)
    faulthandler.register(signal.SIGUSR1)
    ignore_group_signals()
    link = EngineSockets(config.inbox, config.outbox)
    try:
        worker = _start(config, link)
    except RorqualError as error:
        link.send(messages.Dying(str(error), user=True))
        link.close()
        return STARTUP_FAILED
    try:
        worker.run()
    except Exception as error:
        log.exception("a step failed")
        link.send(messages.Dying(f"{type(error).__name__}: {error}", user=False))
        return STEP_FAILED
    finally:
        if worker.tracing:
            worker.engine.close()  # leaves no partial file
        if worker.grammars is not None:
            worker.grammars.close()
        if worker.transfers is not None:
            worker.transfers.close()
        if worker.publisher is not None:
            worker.publisher.close()
        link.close()
    return 0
