"""Whether llama.cpp computes the model that the file was meant to be: a small one of the same
layout, fp32 on both sides, the same weights, and log probabilities of every position compared."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rorqual.bench.llama_cpp.drawn_weights import DrawnWeights
from rorqual.bench.llama_cpp.gguf_file import write
from rorqual.bench.llama_cpp.peer import LlamaCpp, PeerSetting
from rorqual.config.hf import read_config
from rorqual.errors import TargetError
from rorqual.llm.llm import LLM
from rorqual.request import SamplingParams

TOKENS = 40
SHOWN = 20  # log probabilities compared at each position
SEED = 3
# Largest difference of a log probability. Products of fp32 in another order differ by about 1e-5;
# llama.cpp keeps keys and values in fp16, which brings it to 5e-4.
BOUND = 0.005
SMALLER: dict[str, int] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "intermediate_size": 320,
    "moe_intermediate_size": 96,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 64,
    "n_routed_experts": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 96,
}


@dataclass(frozen=True)
class Agreement:
    """difference: the largest of a log probability; greedy: positions of so many whose likeliest
    token is the same."""

    difference: float
    greedy: int
    positions: int

    def __str__(self) -> str:
        return (
            f"a small model of this layout in fp32: log probabilities differ by at most "
            f"{self.difference:.5f} (bound {BOUND}), the likeliest token is the same at "
            f"{self.greedy} of {self.positions} positions"
        )


def smaller(data: dict[str, Any]) -> dict[str, Any]:
    """The same architecture in a small size: only sizes in the configuration change, and expert
    groups are not introduced where there was one."""
    found = dict(data)
    for name, size in SMALLER.items():
        given = data.get(name)
        if isinstance(given, int) and given > size:
            found[name] = size
    if data.get("num_key_value_heads"):
        kept = data["num_key_value_heads"] == data["num_attention_heads"]
        found["num_key_value_heads"] = found["num_attention_heads"] // (1 if kept else 2)
    return found


def check(data: dict[str, Any], peer: LlamaCpp) -> Agreement:
    """`data`: the config.json of the model that is measured. Raises TargetError beyond the
    bound."""
    small = smaller(data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(small))
        config = read_config(small)
        path = folder / "small.gguf"
        write(path, DrawnWeights(config, SEED, torch.float32), "F32", threads=1)
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(config.vocab_size, (TOKENS,), generator=generator).tolist()
        ours = _ours(folder, ids)
        peer.use(path, PeerSetting(flash=False), sequences=1, length=TOKENS)
        logits = torch.tensor(peer.ask("logits", tokens=ids)["logits"])
    found = _compare(ours, logits.log_softmax(-1))
    if found.difference > BOUND:
        raise TargetError(f"llama.cpp computes another model: {found}")
    return found


def _ours(folder: Path, ids: list[int]) -> list[dict[int, Any]]:
    """The likeliest tokens behind each position but the last."""
    llm = LLM(
        folder,
        device="cpu",
        dtype="float32",
        load_format="dummy",
        seed=SEED,
        skip_tokenizer_init=True,
        max_model_len=2 * TOKENS,
        kv_cache_bytes=16 * 2**20,
    )
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=SHOWN
    )
    (out,) = llm.generate([ids], params)
    llm.engine.close()
    assert out.prompt_logprobs is not None
    return [entry for entry in out.prompt_logprobs if entry is not None]


def _compare(ours: list[dict[int, Any]], theirs: torch.Tensor) -> Agreement:
    """Entry i of `ours` is of the token behind position i, as row i of `theirs` is."""
    difference, greedy = 0.0, 0
    for entry, row in zip(ours, theirs, strict=False):
        for token, found in entry.items():
            difference = max(difference, abs(found.logprob - float(row[token])))
        best = max(entry, key=lambda token: entry[token].logprob)
        greedy += int(row.argmax()) == best
    return Agreement(difference, greedy, len(ours))
