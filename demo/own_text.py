"""Text of the demo model's own, to calibrate `rorqual quantize` with where no other is at hand.

python demo/own_text.py own.txt [--sequences 64] [--tokens 700]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rorqual import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=700)
    given = parser.parse_args()
    llm = LLM(max_num_seqs=min(64, given.sequences))
    begin = {"prompt_token_ids": [llm.engine.model_config.bos_token_id]}
    params = [
        SamplingParams(max_tokens=given.tokens, top_p=0.95, seed=seed, ignore_eos=True)
        for seed in range(given.sequences)
    ]
    found = llm.generate([begin] * given.sequences, params)
    given.out.write_text("\n\n".join(out.outputs[0].text for out in found), encoding="utf-8")


if __name__ == "__main__":
    main()
