"""The entry point: signals, exit status, and what begins before the commands are imported."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rorqual.config.log import log_to_stderr
from rorqual.config.process import end_process
from rorqual.errors import RorqualError
from rorqual.serve.engines.begin import early_engines

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no more can be written


def main() -> None:
    """Entry point: a user's mistake becomes one sentence and exit status 2, an interruption 130,
    SIGTERM 143."""
    log_to_stderr("rorqual: %(message)s", logging.WARNING)
    signal.signal(signal.SIGTERM, _terminate)
    with early_engines():
        status = _flushed(_run())
    if "torch" in sys.modules:  # this may be a rank, or have been one
        end_process(status)
    sys.exit(status)


def _terminate(number: int, frame: FrameType | None) -> None:
    """Like Ctrl-C: shut down in order. A second signal ends the process at once, even inside a
    library call."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(128 + number)


def _run() -> int:
    """The exit status."""
    try:
        if will_serve(sys.argv[1:]):
            early_engines().begin(1)
        from rorqual.cli.app import app

        app()
    except SystemExit as end:  # typer returns by SystemExit
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except RorqualError as error:
        print(f"rorqual: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"rorqual: output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _flushed(status: int) -> int:
    """Write out what was printed. At its exit Python would do so as well, and tell an error in
    words of its own."""
    if sys.stdout is None or sys.stdout.closed:
        return status
    try:
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        status = status or 141
    except OSError as error:
        if not status:
            print(f"rorqual: output cannot be written: {error.strerror}", file=sys.stderr)
        status = status or 1
    # what is left in the buffer goes nowhere
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return status


def will_serve(words: Sequence[str]) -> bool:
    """Whether these arguments start a server, in a process that is not itself a rank."""
    return words[:1] == ["serve"] and "--help" not in words and "RANK" not in os.environ


if __name__ == "__main__":
    main()
