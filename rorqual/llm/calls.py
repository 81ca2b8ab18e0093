"""One engine for many callers: any thread may step it, and each token goes to the call it is of."""

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

LOOK_SECONDS = 1.0  # how often a waiting thread looks without being woken


class OpenCall:
    """What one `generate` or `stream` has under way. open: unfinished completions by request id;
    said: what has not been read yet; error: why the rest will never come."""

    def __init__(self) -> None:
        self.open: dict[str, Completion] = {}
        self.said: deque[Delta] = deque()
        self.error: BaseException | None = None


class SharedEngine:
    """Adds, cancels and steps, never two of them at once; while one thread steps others read what
    the step before brought.

    Ctrl-C may strike between any two instructions. So whoever has the engine is known by an object
    that is taken back without a call; each change can be begun again; and who waits also looks
    now and then whether the engine is free, for the thread that should have said so may be gone.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.lock = threading.RLock()  # around a look at `holder` and a change of it, no more
        self.holder: object | None = None
        self.claims: set[object] = set()  # who adds or cancels goes before who steps
        self.waiting: deque[threading.Lock] = deque()  # each is released to wake a thread
        self.calls: dict[str, OpenCall] = {}
        self.dropped: deque[OpenCall] = deque()
        self.lost: BaseException | None = None  # ended a step of which not every call has heard

    def submit(self, call: OpenCall, work: Sequence[tuple[Request, Completion]]) -> None:
        """Queue everything, or nothing: a refused request takes back those queued before it."""
        self._between_steps(partial(self._add, call, work))

    def cancel(self, call: OpenCall) -> None:
        """Give up what is open of a call; waits for the end of a step under way."""
        if call.open:
            self._between_steps(partial(self._end, call))

    def drop(self, call: OpenCall) -> None:
        """`cancel` for the garbage collector: it may run in the midst of anything, so never waits.
        Where the engine is not free, whoever has it cancels the call."""
        self.dropped.append(call)
        self._sweep()

    def advance(self, call: OpenCall) -> None:
        """Step, or wait while another thread does. Returns once there may be news of the call."""
        me = object()
        try:
            if self._hold(me, call):
                self._settle()
                if call.open and not call.said:  # else they came while we took it
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

    # ---- who has the engine

    def _hold(self, me: object, reader: OpenCall | None = None) -> bool:
        """Wait until the engine is free and take it; False where the reader has news before."""
        while True:
            latch = threading.Lock()
            latch.acquire()
            self.waiting.append(latch)  # before the look: whoever frees the engine later wakes us
            if reader is not None and (reader.said or not reader.open):
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
        """Cancel what was dropped, if the engine is free."""
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

    # ---- for whoever has it

    def _settle(self, own: OpenCall | None = None) -> None:
        """Leave nothing that was lost or dropped. With a step tokens of every call are lost: none
        may go on as if they had not been. All are told, but the one that raises the error itself,
        before the engine is asked for anything, which may fail again."""
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
        """Readers take an empty `open` for the end of `said`: it is emptied last."""
        name = token.sequence.request.id
        call = self.calls.get(name)
        if call is None:
            return  # text behind a stop string
        completion = call.open[name]
        delta, stopped = completion.push(token)
        if stopped and token.finish is None:
            self.engine.stop(name)
        call.said.append(delta)
        if delta.finish_reason is not None:
            del self.calls[name]
            del call.open[name]


class Deltas(Iterator[Delta]):
    """What the steps add to the completions of one call. Closing it, or letting go of it, cancels
    what is left; so does an exception raised while it waits."""

    def __init__(self, engine: SharedEngine, call: OpenCall):
        self._engine = engine
        self._call = call

    def __next__(self) -> Delta:
        call = self._call
        try:
            while True:
                ended = not call.open
                try:
                    return call.said.popleft()
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
        self._call.said.clear()
        self._call.error = None

    def __del__(self) -> None:
        if self._call.open:
            self._engine.drop(self._call)
