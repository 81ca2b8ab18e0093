"""What an 8-bit latent cache costs in quality: the demo model over held-out text, the text itself
fed back at every step.

    python demo/fp8_cache.py [HELDOUT_TEXT] [--model FOLDER] [--length 2048]

Windows of the text go through the engine's model with a cache in the activations' dtype and with
one in fp8 or int8; every token attends to what the cache holds, as in serving. Printed for each:
loss, and how often the likeliest next token is that of the exact engine (fp32 throughout). The rows
in bf16 show how much the activations' dtype alone does. Takes two minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from evaluate import SAMPLE, Reader, Text, make_llm
from torch import Tensor

from rorqual import LLM
from rorqual.models.hub import model_folder

CACHES = ("auto", "fp8", "int8")


@torch.inference_mode()
def read(llm: LLM, text: Text, length: int, kv_dtype: str) -> tuple[float, Tensor]:
    """(loss in nats a token, the likeliest token after each of the text's)."""
    reader = Reader(llm, length, kv_dtype)
    nats = 0.0
    guesses = []
    for at in range(0, len(text.ids) - 1, length):
        ids = text.ids[at : at + length + 1].to(reader.device)
        logits = reader.model.logits(reader.hidden(ids[:-1])).float()
        nats += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        guesses.append(logits.argmax(-1).cpu())
    return nats / (len(text.ids) - 1), torch.cat(guesses)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "text",
        type=Path,
        nargs="?",
        default=SAMPLE,
        help="held-out text (default: the sample beside this file)",
    )
    parser.add_argument("--model", help="another folder than the bundled checkpoint's")
    parser.add_argument("--length", type=int, default=2048, help="tokens per window")
    options = parser.parse_args()
    exact: Tensor | None = None
    for dtype in ("float32", "bfloat16"):
        llm = make_llm(model_folder(options.model), dtype)
        text = Text(options.text, llm)
        for kv_dtype in CACHES:
            nats, guesses = read(llm, text, options.length, kv_dtype)
            exact = guesses if exact is None else exact
            same = (guesses == exact).double().mean().item()
            print(
                f"{dtype:9} cache {kv_dtype:5} {nats:.4f} nats a token, perplexity "
                f"{math.exp(nats):.3f}, same first token {same:.2%}"
            )


if __name__ == "__main__":
    main()
