"""`rorqual route` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.child_process import environment as child_environment
from tests.serve.running import ROOT, Running


def start_router(*options: str, environment: dict[str, str] | None = None) -> Running:
    """On a free port, once it answers."""
    handle, name = tempfile.mkstemp(prefix="rorqual-router-", suffix=".log")
    process = subprocess.Popen(
        [sys.executable, "-m", "rorqual", "route", "--port", "0", *options],
        stdout=handle,
        stderr=handle,
        env=child_environment(**(environment or {})),
        cwd=ROOT,
    )
    os.close(handle)
    router = Running(process, Path(name))
    try:
        router.wait_until(lambda: _port(router))
        router.port = _port(router)
    except BaseException:
        process.kill()
        raise
    return router


def _port(router: Running) -> int:
    found = re.search(r"routing \d+ servers on http://\S+:(\d+)", router.text())
    return int(found[1]) if found else 0
