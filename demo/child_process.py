"""What demos of two processes share. The child, a prefill engine or an expert server, is the demo
itself, started again with `--keep`. And the options of demos with two engines."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import rorqual
from rorqual.disagg.transfer_config import TRANSPORTS


class ChildProcess:
    """`script --keep`, as its parent sees it. Messages both ways are lines of JSON; `first` is the
    first one to the child."""

    def __init__(self, script: str, first: Any):
        here = str(Path(rorqual.__file__).parents[1])  # both run the same code
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, script, "--keep"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )
        self.send(first)

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """The child's next message. Raises SystemExit where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the child process has ended ({self.process.wait()})")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def options_of_both(about: str, known: Any) -> argparse.ArgumentParser:
    """The options that every such demo has; `known` has their defaults."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("model", nargs="?", help="the bundled checkpoint if left out")
    parser.add_argument("--weights", choices=("checkpoint", "random"), default=known.weights)
    parser.add_argument("--layers", type=int, help="with random weights: of so many alone")
    parser.add_argument("--page-size", type=int, default=known.page_size)
    parser.add_argument("--threads", type=int, help="of each engine on a CPU")
    parser.add_argument("--transport", choices=TRANSPORTS, default=known.transport)
    parser.add_argument("--seed", type=int, default=known.seed)
    parser.add_argument("--json", type=Path, help="file for what was measured")
    return parser
