"""One engine shared by many callers: any thread may step it, and each token is delivered to its
call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from rorqual.engine.engine import Engine
from rorqual.engine.scheduling.sequence import TokenOut
from rorqual.errors import EngineError
from rorqual.request import FinishReason, Request
from rorqual.text.detokenizer import Completion, Delta

LOOK_SECONDS = 1.0  # how often a waiting thread checks without being woken


class OpenCall:
    """The state of one `generate` or `stream`. open: unfinished completions by request id; unread:
    deltas not yet read; error: why no more will follow."""

    def __init__(self) -> None:
        self.open: dict[str, Completion] = {}
        self.unread: deque[Delta] = deque()
        self.error: BaseException | None = None


class SharedEngine:
    """Serializes adding, cancelling and stepping; while one thread steps, others read the previous
    step's deltas.

    Ctrl-C may interrupt between any two instructions. So the holder of the engine is an object that
    is released without a function call; every change can be restarted; and waiting threads also
    poll whether the engine is free, since the thread that should wake them may have been
    interrupted.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.lock = threading.RLock()  # only for reading and changing `holder`
        self.holder: object | None = None
        self.claims: set[object] = set()  # threads that add or cancel have priority over stepping
        self.waiting: deque[threading.Lock] = deque()  # released to wake a thread
        self.calls: dict[str, OpenCall] = {}
        self.dropped: deque[OpenCall] = deque()
        self.lost: BaseException | None = None  # a failed step's error, until all have it

    def submit(self, call: OpenCall, work: Sequence[tuple[Request, Completion]]) -> None:
        """Queue all requests, or none: a rejected request cancels those queued before it."""
        self._between_steps(partial(self._add, call, work))

    def cancel(self, call: OpenCall) -> None:
        """Cancel a call's open requests; waits for the end of a running step."""
        if call.open:
            self._between_steps(partial(self._end, call))

    def drop(self, call: OpenCall) -> None:
        """`cancel` for the garbage collector: it may run at any point, so it never waits. If the
        engine is not free, its holder cancels the call."""
        self.dropped.append(call)
        self._sweep()

    def advance(self, call: OpenCall) -> None:
        """Step, or wait while another thread does. Returns once the call may have new deltas."""
        me = object()
        try:
            if self._hold(me, call):
                self._settle()
                if call.open and not call.unread:  # otherwise deltas arrived while we waited
                    for token in self._step():
                        self._deliver(token)
        except BaseException as error:
            if self.holder is me:
                self.lost = error
                self._settle(call)
            raise
        finally:
            if self.holder is me:
                self.holder = None
                self._sweep()
                self._wake()

    # ---- holding the engine

    def _hold(self, me: object, reader: OpenCall | None = None) -> bool:
        """Wait until the engine is free and hold it; False where `reader` has new deltas first."""
        while True:
            latch = threading.Lock()
            latch.acquire()
            self.waiting.append(latch)  # before the check: a later release of the engine wakes us
            if reader is not None and (reader.unread or not reader.open):
                return False
            with self.lock:
                if self.holder is None and not (reader and self.claims):
                    self.holder = me
                    return True
            latch.acquire(timeout=LOOK_SECONDS)

    def _wake(self) -> None:
        with suppress(IndexError):
            while True:
                self.waiting.popleft().release()

    def _between_steps(self, work: Callable[[], None]) -> None:
        me = object()
        try:
            self.claims.add(me)
            self._hold(me)
            self._settle()
            work()
        finally:
            if self.holder is me:
                self.holder = None
            self.claims.discard(me)
            self._sweep()
            self._wake()

    def _sweep(self) -> None:
        """Cancel dropped calls, if the engine is free."""
        while self.dropped:
            me = object()
            try:
                with self.lock:
                    if self.holder is None:
                        self.holder = me
                if self.holder is not me:
                    return
                self._settle()
            finally:
                if self.holder is me:
                    self.holder = None
                    self._wake()

    # ---- for the engine's holder

    def _settle(self, own: OpenCall | None = None) -> None:
        """Fail calls that lost tokens, and cancel dropped ones. A failed step loses tokens of every
        call, so none may continue. All but the one that raises the error itself get the error
        before the engine is used again, which may fail too."""
        if self.lost is not None:
            for call in list(self.calls.values()):
                call.error = None if call is own else self.lost
                for completion in list(call.open.values()):
                    completion.out.finish_reason = FinishReason.ABORT.value
                call.open.clear()
            for name in list(self.calls):
                self.engine.abort(name)
            self.calls.clear()
            self.lost = None
        while self.dropped:
            self._end(self.dropped[0])
            self.dropped.popleft()

    def _add(self, call: OpenCall, work: Sequence[tuple[Request, Completion]]) -> None:
        try:
            for request, completion in work:
                self.calls[request.id] = call
                call.open[request.id] = completion
                self.engine.add(request)
        except BaseException:
            self._end(call)
            raise

    def _end(self, call: OpenCall) -> None:
        for name, completion in list(call.open.items()):
            self.engine.abort(name)
            completion.out.finish_reason = FinishReason.ABORT.value
            self.calls.pop(name, None)
            call.open.pop(name, None)

    def _step(self) -> list[TokenOut]:
        engine = self.engine
        nothing = not engine.in_flight
        steps = engine.stats.steps
        outs = engine.step()
        if nothing and engine.stats.steps == steps and engine.missing is None:
            names = ", ".join(self.calls)
            raise EngineError(
                f"the engine has nothing to compute, yet these requests are unfinished: {names}; "
                "they were aborted, or their tokens taken, by other means than the LLM's",
            )
        return outs

    def _deliver(self, token: TokenOut) -> None:
        """Readers take an empty `open` as the end of `unread`, so `open` is emptied last."""
        name = token.sequence.request.id
        call = self.calls.get(name)
        if call is None:
            return  # text after a stop string
        completion = call.open[name]
        delta, stopped = completion.push(token)
        if stopped and token.finish is None:
            self.engine.stop(name)
        call.unread.append(delta)
        if delta.finish_reason is not None:
            del self.calls[name]
            del call.open[name]


class Deltas(Iterator[Delta]):
    """What the steps add to the completions of one call. Closing or dropping it cancels the rest;
    so does an exception raised while it waits."""

    def __init__(self, engine: SharedEngine, call: OpenCall):
        self._engine = engine
        self._call = call

    def __next__(self) -> Delta:
        call = self._call
        try:
            while True:
                ended = not call.open
                try:
                    return call.unread.popleft()
                except IndexError:
                    if ended:
                        break
                self._engine.advance(call)
        except BaseException:
            self.close()
            raise
        error = call.error
        call.error = None
        if error is not None:
            known = isinstance(error, EngineError)
            what = str(error) if known else f"a step shared with other requests ended in {error!r}"
            raise EngineError(what) from error
        raise StopIteration

    def close(self) -> None:
        self._engine.cancel(self._call)
        self._call.unread.clear()
        self._call.error = None

    def __del__(self) -> None:
        if self._call.open:
            self._engine.drop(self._call)
