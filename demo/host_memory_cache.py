"""Time to the first token of a long prompt: computed, found in the device's cache, and copied from
host memory, in turns in one run. The cache is so small that one prompt pushes out another.

`python demo/host_memory_cache.py` takes the bundled checkpoint; on a shared machine look at the
ratios."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from rorqual import LLM, SamplingParams

WAYS = ("computed", "device", "host memory")


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """(seconds, the token)."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    (out,) = llm.generate(prompt, params)
    return time.perf_counter() - start, out.outputs[0].token_ids[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt-len", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kv-host-memory", type=float, default=1.0)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    pages = -(-args.prompt_len // args.page_size) + 1
    llm = LLM(
        args.model,
        device=args.device,
        max_num_seqs=4,
        page_size=args.page_size,
        num_pages=pages + 8,
        kv_host_memory=args.kv_host_memory,
        threads=args.threads,
    )
    draw = random.Random(0)
    vocab = llm.engine.model_config.vocab_size

    def fresh() -> list[int]:
        return [draw.randrange(vocab // 2) for _ in range(args.prompt_len)]

    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    first_token(llm, fresh())
    for _ in range(args.turns):
        prompt = fresh()
        said = []
        for way in WAYS:
            if way == "host memory":
                first_token(llm, fresh())
            before = llm.engine.scheduler.usage()
            took, token = first_token(llm, prompt)
            after = llm.engine.scheduler.usage()
            seconds[way].append(took)
            said.append(token)
            found = after.prefix_hits - before.prefix_hits
            copied = after.host_hits - before.host_hits
            expected = 0 if way == "computed" else args.prompt_len - args.page_size
            assert found >= expected, f"{way}: {found} tokens were cached"
            assert (copied > 0) == (way == "host memory"), f"{way}: {copied} tokens were copied"
        print("tokens:", *said, "" if len(set(said)) == 1 else "(bf16: they may differ)")
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    for way, median in medians.items():
        ratio = median / medians["computed"]
        print(f"{way:12} {1e3 * median:8.1f} ms  {ratio:6.3f} of computing")
    print(json.dumps({"prompt_len": args.prompt_len, **medians}))


if __name__ == "__main__":
    main()
