"""How long a server takes to start from a checkpoint folder, and what takes it: with files and
kernels cold, with files cold, and with both warm, beside a plain parallel read of the same files.

    python demo/cold_start.py v2-lite                            # 31 GB are written there first
    python demo/cold_start.py tiny --layers 2 -- --device cpu --max-model-len 512

The checkpoint has random weights under the published one's names, in files of 4 GB, and the bundled
tokenizer. Before a row with cold files their pages are dropped from the page cache (--drop-all: the
pages of Python and its libraries as well). Python's bytecode is kept with the kernels, so it is as
warm as they are: packages may have been installed without any. Behind `--`: options of `rorqual
serve`. Exit status 1 where a cold start takes 15 s more than the plain read before it, or a warm
one more than --warm-seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rorqual.config.hf import read_config
from rorqual.layers.parameter import Build, Target
from rorqual.models.hub import BUNDLED, model_folder
from rorqual.models.registry import make_model
from rorqual.ops.interface import Ops

SHARD_BYTES = 4_000_000_000
BLOCK = 32 << 20  # values that are drawn; larger tensors repeat them
READ = 8 << 20
WRITERS = 4
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
MAX_SECONDS_ABOVE_READ = 15.0
START_SECONDS = 200.0


# ---- the checkpoint


def targets_of(raw: dict[str, Any]) -> list[Target]:
    """What the published checkpoint holds: names, shapes, types."""
    config = read_config(raw)
    dtype = getattr(torch, config.dtype)
    build = Build(Ops(), dtype, torch.device("meta"), config.quant)
    targets = make_model(config, build, 64).targets()
    return list({one.name: one for one in targets if not one.covers}.values())


def file_type(target: Target, dtype: torch.dtype) -> torch.dtype:
    """A router is kept wider than it is stored."""
    wide = target.view.dtype == torch.float32 and target.std is not None
    return dtype if wide else target.view.dtype


class Values:
    """Bytes of random tensors, drawn once for each type and deviation."""

    def __init__(self) -> None:
        self.normal = torch.randn(BLOCK // 4, generator=torch.Generator().manual_seed(0))
        self.blocks: dict[tuple[torch.dtype, float | None, float], Tensor] = {}
        self.lock = threading.Lock()

    def of(self, target: Target, dtype: torch.dtype) -> memoryview:
        key = (dtype, target.std, target.fill)
        with self.lock:
            if key not in self.blocks:
                drawn = (
                    torch.full_like(self.normal, target.fill)
                    if target.std is None
                    else self.normal * target.std
                )
                self.blocks[key] = drawn.to(dtype).view(torch.uint8)
            return self.blocks[key].numpy().data


def write_file(path: Path, tensors: list[tuple[Target, torch.dtype]], values: Values) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    sizes = []
    for target, dtype in tensors:
        size = torch.Size(target.shape).numel() * dtype.itemsize
        places = [end, end + size]
        header[target.name] = {
            "dtype": TYPES[dtype],
            "shape": list(target.shape),
            "data_offsets": places,
        }
        end += size
        sizes.append(size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
        for (target, dtype), size in zip(tensors, sizes, strict=True):
            block = values.of(target, dtype)
            while size:
                part = min(size, len(block))
                write_all(file.fileno(), block[:part])
                size -= part
        os.fsync(file.fileno())


def write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def make_checkpoint(folder: Path, model: str, layers: int | None) -> None:
    """Unless it is there: config.json comes last."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.loads((model_folder(model, weights=False) / "config.json").read_text())
    if layers is not None:
        raw["num_hidden_layers"] = layers
    plain = getattr(torch, read_config(raw).dtype)
    shards: list[list[tuple[Target, torch.dtype]]] = [[]]
    size = 0
    for target in targets_of(raw):
        dtype = file_type(target, plain)
        shards[-1].append((target, dtype))
        size += torch.Size(target.shape).numel() * dtype.itemsize
        if size > SHARD_BYTES:
            shards.append([])
            size = 0
    shards = [shard for shard in shards if shard]
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    values = Values()
    with ThreadPoolExecutor(WRITERS) as pool:
        paths = [folder / name for name in names]
        list(pool.map(write_file, paths, shards, [values] * len(shards)))
    places = {
        target.name: name for name, shard in zip(names, shards, strict=True) for target, _ in shard
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name in TOKENIZER:
        shutil.copy(Path(BUNDLED) / name, folder / name)
    (folder / "config.json").write_text(json.dumps(raw))


# ---- files, cold and warm


def drop_pages(files: list[Path], everything: bool) -> str:
    """Take them, or all there is, out of the page cache; says how."""
    os.sync()
    if everything:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return "drop_caches"
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return "fadvise"


def plain_read(files: list[Path], threads: int) -> float:
    """Seconds of reading every byte once, into buffers that nobody keeps."""
    buffers = threading.local()

    def read(place: tuple[Path, int]) -> None:
        path, offset = place
        if not hasattr(buffers, "data"):
            buffers.data = bytearray(READ)
        with path.open("rb", buffering=0) as file:
            os.preadv(file.fileno(), [buffers.data], offset)

    places = [(path, at) for path in files for at in range(0, path.stat().st_size, READ)]
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, places))
    return time.perf_counter() - began


# ---- the server


@dataclass
class Start:
    """Seconds: until /health says 200, until a token has come; `phases` as the server tells."""

    what: str
    read: float | None = None
    ready: float = 0.0
    token: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def server(folder: Path, options: list[str], cache: str) -> Iterator[tuple[str, Any]]:
    """(its address, its process)."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "rorqual", "serve", str(folder), "--port", str(port)]
    kept = {"RORQUAL_CACHE": cache, "PYTHONPYCACHEPREFIX": f"{cache}/bytecode"}
    environment = {**os.environ, **kept}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen([*command, *options], env=environment)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(url: str, body: Any = None) -> str | None:
    """None where nothing answers, or with an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def measure(what: str, folder: Path, options: list[str], cache: str) -> Start:
    found = Start(what)
    began = time.perf_counter()
    with server(folder, options, cache) as (url, process):
        while ask(f"{url}/health") is None:
            if process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                raise SystemExit(f"{what}: the server did not start")
            time.sleep(0.02)
        found.ready = time.perf_counter() - began
        (name,) = (one["id"] for one in json.loads(ask(f"{url}/v1/models") or "")["data"])
        body = {"model": name, "prompt": "A", "max_tokens": 1, "ignore_eos": True}
        if ask(f"{url}/v1/completions", body) is None:
            raise SystemExit(f"{what}: the server computes nothing")
        found.token = time.perf_counter() - began
        line = r'rorqual:startup_seconds\{engine="0",phase="(\w+)"\} (\S+)'
        phases = re.findall(line, ask(f"{url}/metrics") or "")
        found.phases = {phase: float(seconds) for phase, seconds in phases}
    return found


def show(rows: list[Start], size: float) -> None:
    phases = list(dict.fromkeys(name for row in rows for name in row.phases))
    head = ["files, kernels", "plain read s", "ready s", "first token s", *phases]
    print(f"\n{size / 1e9:.1f} GB of files; seconds:\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        read = "" if row.read is None else f"{row.read:.1f}"
        cells = [row.what, read, f"{row.ready:.1f}", f"{row.token:.1f}"]
        cells += [f"{row.phases.get(name, 0):.2f}" for name in phases]
        print("| " + " | ".join(cells) + " |")


def missed(rows: list[Start], warm_seconds: float) -> list[str]:
    """What took longer than it may, kernels that must be compiled first left out."""
    found = []
    for row in rows:
        if row.what == "cold, warm" and row.read is not None:
            most = row.read + MAX_SECONDS_ABOVE_READ
            if row.ready > most:
                found.append(f"{row.what}: {row.ready:.1f} s, more than {most:.1f}")
        if row.what == "warm, warm" and row.ready > warm_seconds:
            found.append(f"{row.what}: {row.ready:.1f} s, more than {warm_seconds:.1f}")
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint is, or is to be made")
    parser.add_argument("--model", default="deepseek-v2-lite", help="whose shape it has")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--threads", type=int, default=16, help="of the plain read")
    parser.add_argument("--warm-seconds", type=float, default=12.0)
    parser.add_argument("--limit", type=float, default=300.0, help="no row starts after so long")
    parser.add_argument(
        "--drop-all", action="store_true", help="libraries from the page cache too; needs root"
    )
    parser.add_argument("--json", type=Path)
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    asked = parser.parse_args(given[:end])
    began = time.perf_counter()
    make_checkpoint(asked.folder, asked.model, asked.layers)
    files = sorted(asked.folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    print(f"checkpoint: {size / 1e9:.1f} GB after {time.perf_counter() - began:.0f} s", flush=True)
    rows: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="rorqual-cold-start-") as cache:
        for what in ("cold, cold", "cold, warm", "warm, warm"):
            if time.perf_counter() - began > asked.limit:
                print(f"{what}: left out, {asked.limit:g} s are over")
                continue
            read = None
            if what.startswith("cold"):
                drop_pages(files, asked.drop_all)
                read = plain_read(files, asked.threads)
                how = drop_pages(files, asked.drop_all)
                print(f"{what}: pages dropped by {how}; plain read {read:.1f} s", flush=True)
            row = measure(what, asked.folder, given[end + 1 :], cache)
            row.read = read
            rows.append(row)
            print(f"{what}: ready after {row.ready:.1f} s", flush=True)
    show(rows, size)
    if asked.json:
        asked.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    failures = missed(rows, asked.warm_seconds)
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
