"""What the server costs: throughput and processor time at a fixed concurrency, streamed and not,
beside the offline engine.

    python tests/serve/load.py [--concurrency 64] [--output 128] [--threads N]

Both engines compute with the same number of threads. Starts a server with the bundled checkpoint.
The client reads raw sockets and parses nothing, so that its own share stays small.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from pathlib import Path

if __package__ in (None, ""):
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.serve.running import Running, start_server

TICKS = os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def engine_pid(server: Running) -> int:
    return server.get("/server_info")["engines"][0]["pid"]


async def ask(port: int, body: dict) -> tuple[float, float, int]:
    """One request: seconds to the first byte, seconds in all, events or 1."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    head = "\r\n".join(lines) + "\r\n\r\n"
    start = time.perf_counter()
    writer.write(head.encode() + data)
    first = 0.0
    events = 0
    while chunk := await reader.read(1 << 16):
        first = first or time.perf_counter()
        events += chunk.count(b"data: ")
    writer.close()
    return first - start, time.perf_counter() - start, events


async def burst(
    port: int, prompts: list[list[int]], output: int, stream: bool
) -> list[tuple[float, float, int]]:
    common = {"max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": stream}
    return await asyncio.gather(*(ask(port, {"prompt": prompt, **common}) for prompt in prompts))


def measure(
    server: Running, concurrency: int, prompt: int, output: int, stream: bool
) -> dict[str, float]:
    prompts = [[random.randrange(3, 4000) for _ in range(prompt)] for _ in range(concurrency)]
    engine = engine_pid(server)
    before = cpu(server.pid), cpu(engine), cpu(os.getpid())
    start = time.perf_counter()
    results = asyncio.run(burst(server.port, prompts, output, stream))
    seconds = time.perf_counter() - start
    used = [
        now - then
        for now, then in zip((cpu(server.pid), cpu(engine), cpu(os.getpid())), before, strict=True)
    ]
    tokens = concurrency * output
    return {
        "tok_s": tokens / seconds,
        "api_us_per_token": used[0] / tokens * 1e6,
        "engine_cpu_share": used[1] / seconds,
        "api_cpu_share": used[0] / seconds,
        "client_cpu_share": used[2] / seconds,
        "ttft_ms": statistics.median(r[0] for r in results) * 1e3,
        "events_per_request": statistics.mean(r[2] for r in results),
    }


def offline(concurrency: int, prompt: int, output: int, dtype: str, threads: int) -> float:
    """Tokens a second of the engine in this process on the same work, after a warm-up."""
    from rorqual import LLM, SamplingParams

    llm = LLM(dtype=dtype, max_num_seqs=256, threads=threads)
    best = []
    for _ in range(3):
        prompts = [[random.randrange(3, 4000) for _ in range(prompt)] for _ in range(concurrency)]
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
        best.append(concurrency * output / (time.perf_counter() - start))
    return statistics.median(best[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    sizes = given.concurrency, given.prompt, given.output
    alone = offline(*sizes, given.dtype, given.threads)
    print(f"offline                {alone:8.0f} tok/s")
    threads = str(given.threads)
    with start_server(
        "--dtype", given.dtype, "--threads", threads, environment={"OMP_NUM_THREADS": threads}
    ) as server:
        for stream in (False, True):
            measure(server, *sizes, stream)
            runs = [measure(server, *sizes, stream) for _ in range(given.repeats)]
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            print(
                f"{'streamed' if stream else 'not streamed':12} "
                f"{100 * middle['tok_s'] / alone:5.1f} % {middle['tok_s']:8.0f} tok/s",
                middle,
            )


if __name__ == "__main__":
    main()
