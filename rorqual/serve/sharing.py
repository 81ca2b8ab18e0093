"""One engine for many callers: any thread may step it, and each token goes to the call it is of."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from rorqual.engine.engine import Engine
from rorqual.engine.sequence import TokenOut
from rorqual.errors import EngineError
from rorqual.request import FinishReason, Request
from rorqual.serve.output import Completion, Delta


class Call:
    """What one `generate` or `stream` has under way. open: unfinished completions by request id;
    said: what nobody has read yet; error: why the rest will never come."""

    def __init__(self) -> None:
        self.open: dict[str, Completion] = {}
        self.said: deque[Delta] = deque()
        self.error: BaseException | None = None


class SharedEngine:
    """Adds, cancels and steps, never two of them at once.

    A step runs without the lock: a thread whose tokens the last step brought reads them meanwhile.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        # Entered by itself, not through the condition, whose own method Ctrl-C could leave midway.
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.stepper: object | None = None  # of the step under way
        self.claims = 0  # threads that wait to add or cancel: without it they might wait for ever
        self.calls: dict[str, Call] = {}
        self.dropped: deque[Call] = deque()

    def submit(self, call: Call, work: Sequence[tuple[Request, Completion]]) -> None:
        """Queue everything, or nothing: a refused request takes back those queued before it."""
        with self.lock:
            self._between_steps()
            try:
                for request, completion in work:
                    self.calls[request.id] = call
                    call.open[request.id] = completion
                    self.engine.add(request)
            except BaseException:
                self._end(call)
                raise

    def cancel(self, call: Call) -> None:
        """Give up what is open of a call; waits for the end of a step under way."""
        with self.lock:
            if call.open:
                self._between_steps()
                self._end(call)
            # This thread may have been interrupted on its way out of a step, where others wait.
            self.changed.notify_all()

    def drop(self, call: Call) -> None:
        """`cancel` for the garbage collector: it may run in the midst of anything, so never waits.
        Where the engine is not free, the next to have it cancels the call, before any step."""
        self.dropped.append(call)
        if self.lock.acquire(blocking=False):
            try:
                if self.stepper is None:
                    self._sweep()
            finally:
                self.lock.release()

    def advance(self, call: Call) -> None:
        """Step, or wait while another thread does. Returns once there may be news of the call."""
        me = object()
        try:
            with self.lock:
                while (self.stepper or self.claims) and call.open and not call.said:
                    self.changed.wait()
                if call.said or not call.open:
                    return
                self._sweep()
                self.stepper = me
            for token in self._step():
                self._deliver(token)
        except BaseException as error:
            if self.stepper is me:
                self._fail(call, error)
            raise
        finally:
            if self.stepper is me:
                self.stepper = None
                with self.lock:
                    if self.stepper is None:
                        self._sweep()
                    self.changed.notify_all()

    # ---- with the lock, and no step under way

    def _between_steps(self) -> None:
        self.claims += 1
        try:
            while self.stepper:
                self.changed.wait()
        finally:
            self.claims -= 1
            self.changed.notify_all()
        self._sweep()

    def _sweep(self) -> None:
        while self.dropped:
            self._end(self.dropped.popleft())

    # ---- the same, or in the step under way

    def _end(self, call: Call) -> None:
        names = list(call.open)
        for name in names:
            completion = call.open.pop(name)
            completion.out.finish_reason = FinishReason.ABORT.value
            self.calls.pop(name, None)
        for name in names:
            self.engine.abort(name)

    def _step(self) -> list[TokenOut]:
        engine = self.engine
        nothing, steps = not engine.in_flight, engine.stats.steps
        outs = engine.step()
        if nothing and engine.stats.steps == steps:
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

    def _fail(self, own: Call, error: BaseException) -> None:
        """A step was lost, and with it tokens of every call: none may go on as if it had not been.
        All are told before the engine is asked for anything, which may fail again."""
        names = list(self.calls)
        for call in {id(call): call for call in self.calls.values()}.values():
            call.error = None if call is own else error
            for completion in call.open.values():
                completion.out.finish_reason = FinishReason.ABORT.value
            call.open.clear()
        self.calls.clear()
        for name in names:
            self.engine.abort(name)


class Deltas(Iterator[Delta]):
    """What the steps add to the completions of one call. Closing it, or letting go of it, cancels
    what is left; so does an exception raised while it waits."""

    def __init__(self, engine: SharedEngine, call: Call):
        self._engine, self._call = engine, call

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
        error, call.error = call.error, None
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
