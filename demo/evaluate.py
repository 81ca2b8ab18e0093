"""Measure the demo model with the engine: held-out text, expert load, multi-token prediction,
continuations.

    python demo/evaluate.py [HELDOUT_TEXT] [--out demo/results.json]
        [--markdown demo/continuations.md]

HELDOUT_TEXT is a file as corpus.py writes it (any plain text works too); the default is the sample
beside this file. The text is read as in training: documents packed one after another, in separate
windows of 2048 tokens. With --out the figures are added to a JSON file under the text's name. Needs
the package `rorqual`, and `transformers` for the comparison with that library, which is left out
where it is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizer import documents
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.config.model import MLAConfig, ModelConfig
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.hub import model_folder
from rorqual.models.loader import checkpoint_files
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.overlap import run_one

SAMPLE = Path(__file__).parent / "heldout-sample.txt"
PAGE = 16
TOLERANCE = 1e-3  # of logits, against transformers in fp32
COMPARED = 1024  # tokens of the passage for that
CONTINUED = 40  # tokens of each continuation
TEMPERATURE = 0.8
TOP_P = 0.95

PROMPTS = [
    ("novel", "It was a dark and stormy night, and"),
    ("novel", "The old gentleman looked at her for a moment and said,"),
    ("novel", "Elizabeth had not expected to see him again, and when the door opened"),
    ("detective story", '"My dear Watson," said Sherlock Holmes,'),
    ("sea story", "The captain stood upon the deck and watched the whale"),
    ("Bible", "And it came to pass in those days, that the king of Israel"),
    ("Bible", "Blessed is the man who"),
    ("play", "KING.\nWhat news, my lord? Speak, and"),
    ("history", "In the year 1776 the colonies"),
    ("speech", "Fellow citizens of the Senate and House of Representatives:"),
    ("speech", "The relations of the United States with foreign powers"),
    ("science", "If a ray of light pass through a prism,"),
    ("SQL", "To create a new table in the database, use the"),
    ("SQL", "The SELECT statement returns"),
    ("Python", "def __init__(self, name, value=None):\n"),
    ("Python", "import os\nimport sys\n\n\ndef main():\n"),
    ("Python documentation", "The following example shows how to open a file in Python:"),
    ("Rust", "fn main() {\n    let mut"),
    ("Rust documentation", "In Rust, every value has an owner. When the owner goes out of scope,"),
    ("networks", "To configure the server, edit the file"),
]

# What is summed over the tokens of each kind of text. Main model: tokens, their bytes, loss in
# nats, first guesses that were right. MTP: the same of its guesses of the token after; those
# comparable with the main model's first guess, and equal to it.
COLUMNS = [
    "tokens",
    "bytes",
    "nats",
    "right",
    "mtp_tokens",
    "mtp_nats",
    "mtp_right",
    "mtp_compared",
    "mtp_same",
]

# ---------------------------------------------------------------- text


class Text:
    """A token stream with the bytes and the kind of each token; documents are sorted by kind, as
    in training."""

    def __init__(self, path: Path, llm: LLM):
        raw = llm.get_tokenizer().raw
        special = set(llm.get_tokenizer().special_ids)
        # Byte-level BPE writes one character for each byte.
        width = [
            0 if i in special else len(raw.id_to_token(i) or "")
            for i in range(raw.get_vocab_size())
        ]
        end = llm.engine.model_config.eos_token_ids[0]
        found = sorted(documents(path), key=lambda document: document[0])
        self.kinds = sorted({kind for kind, _ in found})
        ids = []
        labels = []
        for kind, text in found:
            tokens = [*raw.encode(text).ids, end]
            assert sum(width[token] for token in tokens) == len(text.encode()), (
                "the tokens are not the text"
            )
            ids += tokens
            labels += [self.kinds.index(kind)] * len(tokens)
        self.name = path.name
        self.documents = len(found)
        self.ids = torch.tensor(ids)
        self.labels = torch.tensor(labels)
        self.bytes = torch.tensor(width)[self.ids]


# ---------------------------------------------------------------- main model


class Reader:
    """Runs the engine's model over one window of known tokens, through a cache of its own;
    kv_dtype as the engine's kv_cache_dtype."""

    def __init__(self, llm: LLM, length: int, kv_dtype: str = "auto"):
        self.model: Transformer = llm.engine.model
        self.device = self.model.embedding.device
        dtype = str(self.model.dtype).removeprefix("torch.")
        pages = -(-length // PAGE)
        spec = kv_spec(
            self.model.config, PAGE, kv_dtype, llm.engine.config.mla_decode, activations=dtype
        )
        self.pool = KVPool(spec, pages + 1, self.device)
        self.table = torch.arange(1, pages + 1, device=self.device)

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states after the final norm, [L, hidden]."""
        count = len(ids)
        positions = torch.arange(count, device=self.device)
        slots = self.table[positions // PAGE] * PAGE + positions % PAGE
        segment = AttentionMetadata(
            self.table[None], torch.tensor([count], device=self.device), (count,), (count,)
        )
        places = TokenPlaces(*self.model.rotary.rows(positions), slots)
        step = ForwardBatch(ids, positions, places, positions, self.pool, prefill=segment)
        return run_one(self.model.forward(step))


# ---------------------------------------------------------------- multi-token prediction


class Predictor:
    """The multi-token prediction module in plain torch and fp32; embedding and head are the main
    model's.

    From the embedding of token t + 1 and the main model's hidden state at t it guesses token t + 2.
    """

    def __init__(self, model: Transformer, folder: Path):
        config = model.config
        assert isinstance(config.attention, MLAConfig)
        assert config.num_mtp_layers == 1
        self.model = model
        self.config = config
        self.mla = config.attention
        device = model.embedding.device
        self.weights = {
            name: tensor.to(device).float() for name, tensor in mtp_tensors(config, folder).items()
        }
        prefixes = [f"mlp.experts.{expert}" for expert in range(config.moe.num_experts)]
        self.experts = [
            torch.stack([self.weights[f"{p}.{part}_proj.weight"] for p in prefixes])
            for part in ("gate", "up", "down")
        ]
        self.load = torch.zeros(config.moe.num_experts, device=device)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.norm_eps)

    def logits(self, following: Tensor, hidden: Tensor) -> Tensor:
        """following [L]: tokens 1 to L of a window; hidden [L, hidden]: the main model's states
        at 0 to L - 1. [L, V] fp32."""
        embedded = F.embedding(following, self.model.embedding).float()
        x = self.linear(
            torch.cat([self.norm(embedded, "enorm"), self.norm(hidden.float(), "hnorm")], -1),
            "eh_proj",
        )
        x = x + self.attention(self.norm(x, "input_layernorm"))
        x = x + self.moe(self.norm(x, "post_attention_layernorm"))
        return self.model.logits(self.norm(x, "shared_head.norm").to(self.model.dtype))

    def attention(self, x: Tensor) -> Tensor:
        mla = self.mla
        count = len(x)
        latent, k_rope = self.linear(x, "self_attn.kv_a_proj_with_mqa").split(
            [mla.kv_lora_rank, mla.rope_dim], -1
        )
        q = self.linear(
            self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm"),
            "self_attn.q_b_proj",
        )
        kv = self.linear(self.norm(latent, "self_attn.kv_a_layernorm"), "self_attn.kv_b_proj")
        q_nope, q_rope = (
            q.view(count, mla.num_heads, -1).transpose(0, 1).split([mla.nope_dim, mla.rope_dim], -1)
        )
        k_nope, value = (
            kv.view(count, mla.num_heads, -1).transpose(0, 1).split([mla.nope_dim, mla.v_dim], -1)
        )
        query = torch.cat([q_nope, self.rotate(q_rope)], -1)
        key = torch.cat([k_nope, self.rotate(k_rope).expand(mla.num_heads, -1, -1)], -1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.linear(out.transpose(0, 1).reshape(count, -1), "self_attn.o_proj")

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of neighbouring pairs; queries and keys may come out in any order
        that is the same for both."""
        dim = self.config.rope.dim
        frequency = self.config.rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = (
            torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), frequency)
            .float()
            .to(x.device)
        )
        even = x[..., 0::2]
        odd = x[..., 1::2]
        return torch.cat(
            [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], -1
        )

    def moe(self, x: Tensor) -> Tensor:
        """Every expert for every token, weighted with zero where not chosen."""
        weights = self.route(x)
        gate, up, down = self.experts
        inner = F.silu(torch.einsum("td,eid->tei", x, gate)) * torch.einsum("td,eid->tei", x, up)
        routed = torch.einsum("tei,edi->td", inner * weights[..., None], down)
        shared = F.silu(self.linear(x, "mlp.shared_experts.gate_proj")) * self.linear(
            x, "mlp.shared_experts.up_proj"
        )
        return routed + self.linear(shared, "mlp.shared_experts.down_proj")

    def route(self, x: Tensor) -> Tensor:
        """Weights [L, experts], zero where not chosen: the groups with the best two experts,
        then the best experts in them."""
        moe = self.config.moe
        scores = self.linear(x, "mlp.gate").sigmoid()
        biased = (scores + self.weights["mlp.gate.e_score_correction_bias"]).unflatten(
            -1, (moe.n_group, -1)
        )
        groups = biased.topk(2, -1).values.sum(-1).topk(moe.topk_group, -1).indices
        allowed = torch.zeros(biased.shape[:2], dtype=torch.bool, device=x.device).scatter_(
            1, groups, True
        )
        chosen = (
            biased.masked_fill(~allowed[..., None], -math.inf)
            .flatten(1)
            .topk(moe.top_k, -1)
            .indices
        )
        picked = scores.gather(1, chosen)
        self.load += torch.bincount(chosen.flatten(), minlength=moe.num_experts)
        return torch.zeros_like(scores).scatter_(
            1, chosen, picked / picked.sum(-1, keepdim=True) * moe.scaling
        )


def mtp_tensors(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The module's tensors, without the layer prefix."""
    prefix = f"model.layers.{config.num_layers}."
    found: dict[str, Tensor] = {}
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    return found


# ---------------------------------------------------------------- measures


def window_columns(
    reader: Reader, predictor: Predictor, ids: Tensor, width: Tensor, length: int
) -> Tensor:
    """COLUMNS for the targets of one window, [L, columns]. ids: up to length + 2 tokens; width
    [L]: bytes of the L targets."""
    count = min(length, len(ids) - 1)
    guesses = min(count, len(ids) - 2)
    hidden = reader.hidden(ids[:count])
    logits = reader.model.logits(hidden)
    first = logits.argmax(-1)
    targets = ids[1 : count + 1]
    out = torch.zeros(count, len(COLUMNS), dtype=torch.float64, device=ids.device)
    out[:, 0] = 1
    out[:, 1] = width
    out[:, 2] = F.cross_entropy(logits, targets, reduction="none")
    out[:, 3] = first == targets
    if guesses:
        ahead = predictor.logits(ids[1 : guesses + 1], hidden[:guesses])
        guess = ahead.argmax(-1)
        later = ids[2 : guesses + 2]
        out[:guesses, 4] = 1
        out[:guesses, 5] = F.cross_entropy(ahead, later, reduction="none")
        out[:guesses, 6] = guess == later
        compared = min(guesses, count - 1)
        out[:compared, 7] = 1
        out[:compared, 8] = guess[:compared] == first[1 : compared + 1]
    return out


@torch.inference_mode()
def measure(llm: LLM, folder: Path, text: Text, length: int) -> dict[str, Any]:
    """Everything that a text can tell."""
    start = time.perf_counter()
    reader = Reader(llm, length)
    predictor = Predictor(reader.model, folder)
    layers = reader.model.moe_layers()
    for layer in layers:
        layer.exchange.load.zero_()
    sums = torch.zeros(len(text.kinds), len(COLUMNS), dtype=torch.float64)
    for at in range(0, len(text.ids) - 1, length):
        ids = text.ids[at : at + length + 2].to(reader.device)
        targets = slice(at + 1, min(at + length + 1, len(text.ids)))
        columns = window_columns(
            reader, predictor, ids, text.bytes[targets].to(reader.device), length
        )
        sums.index_add_(0, text.labels[targets], columns.cpu())
    found: dict[str, Any] = {"documents": text.documents, **ratios(sums.sum(0))}
    if len(text.kinds) > 1:
        found["by_kind"] = {kind: ratios(row) for kind, row in zip(text.kinds, sums, strict=True)}
    names = [f"layer {i}" for i, moe in enumerate(reader.model.config.moe_layers) if moe]
    loads = dict(zip(names, (layer.exchange.load for layer in layers), strict=True)) | {
        "MTP": predictor.load
    }
    found["expert_load"] = {name: spread(load) for name, load in loads.items()}
    found["seconds"] = round(time.perf_counter() - start, 1)
    return found


def ratios(sums: Tensor) -> dict[str, Any]:
    """Figures out of the sums of COLUMNS."""
    s = dict(zip(COLUMNS, sums.tolist(), strict=True))
    return {
        "tokens": int(s["tokens"]),
        "bytes": int(s["bytes"]),
        "nats_per_token": round(s["nats"] / s["tokens"], 4),
        "bits_per_byte": round(s["nats"] / math.log(2) / s["bytes"], 4),
        "next_token_right": round(s["right"] / s["tokens"], 4),
        "mtp_nats_per_token": round(s["mtp_nats"] / s["mtp_tokens"], 4),
        "mtp_equals_text": round(s["mtp_right"] / s["mtp_tokens"], 4),
        "mtp_equals_main_model": round(s["mtp_same"] / s["mtp_compared"], 4),
    }


def spread(load: Tensor) -> dict[str, Any]:
    """How evenly a layer's experts were chosen; the shares add up to 1."""
    wide = load.double().cpu()
    mean = wide.mean()
    return {
        "max_over_mean": round((wide.max() / mean).item(), 3),
        "min_over_mean": round((wide.min() / mean).item(), 3),
        "shares": [round(share, 4) for share in (wide / wide.sum()).tolist()],
    }


@torch.inference_mode()
def compare(folder: Path, text: Text, llm: LLM) -> dict[str, Any]:
    """The engine's logits against those of transformers, both in fp32, over a passage of the
    text."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # transformers reports the prediction module's tensors, which it does not use
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    exact = llm if llm.engine.dtype == "float32" else make_llm(folder, "float32")
    ids = text.ids[:COMPARED]
    reader = Reader(exact, len(ids))
    ours = reader.model.logits(reader.hidden(ids.to(reader.device))).cpu()
    theirs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        .eval()(ids[None])
        .logits[0]
    )
    worst = (ours - theirs).abs().max().item()
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return {
        "tokens": len(ids),
        "largest_difference_of_logits": float(f"{worst:.2e}"),
        "same_first_token": round(same, 4),
    }


def continue_prompts(llm: LLM) -> list[dict[str, Any]]:
    """Each prompt continued greedily, and drawn with its number as the seed."""
    texts = [prompt for _, prompt in PROMPTS]
    greedy = llm.generate(texts, SamplingParams(temperature=0, max_tokens=CONTINUED))
    drawn = [
        SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed, max_tokens=CONTINUED)
        for seed in range(1, len(texts) + 1)
    ]
    sampled = llm.generate(texts, drawn)
    return [
        {
            "kind": kind,
            "prompt": prompt,
            "greedy": a.outputs[0].text,
            "sampled": b.outputs[0].text,
            "seed": params.seed,
        }
        for (kind, prompt), a, b, params in zip(PROMPTS, greedy, sampled, drawn, strict=True)
    ]


# ---------------------------------------------------------------- output


def markdown(entries: list[dict[str, Any]], dtype: str) -> str:
    """The continuations as a page."""
    lines = [
        "# What the demo model writes",
        "",
        f"Written by `demo/evaluate.py` with the engine in {dtype}, nothing picked out: "
        f"{len(entries)} fixed prompts, each continued by",
        f"up to {CONTINUED} tokens, once greedily and once drawn at temperature "
        f"{TEMPERATURE} and top-p {TOP_P}; the seed is the entry's",
        "number. The model knows neither facts nor instructions; what it has learnt is "
        "how each kind of text looks.",
    ]
    for number, entry in enumerate(entries, 1):
        lines += ["", f"## {number}. {entry['kind'][0].upper()}{entry['kind'][1:]}"]
        for name in ("prompt", "greedy", "sampled"):
            body = (entry["prompt"] if name == "prompt" else entry["prompt"] + entry[name]).strip(
                "\n"
            )
            lines += [
                "",
                f"{name.capitalize()}:",
                "",
                "```text",
                *(line.rstrip() for line in body.split("\n")),
                "```",
            ]
    return "\n".join(lines) + "\n"


def store(
    path: Path,
    text: str,
    found: dict[str, Any],
    entries: list[dict[str, Any]],
    setting: dict[str, Any],
) -> None:
    """Put the figures of one text beside those of others that the file holds."""
    held = json.loads(path.read_text()) if path.exists() else {}
    texts = held.get("texts", {}) | {f"{text}, {setting['dtype']}": {**found, **setting}}
    written = held.get("continuations", {}) | {setting["dtype"]: entries}
    shown = json.dumps({"texts": texts, "continuations": written}, indent=1, ensure_ascii=False)
    # lists of shares on one line
    flat = re.sub(r"\[[\d.,\s]+\]", lambda match: " ".join(match[0].split()), shown)
    path.write_text(flat + "\n")


def show(found: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Print the figures, without each expert's share, and the continuations."""
    brief = found | {
        "expert_load": {name: load["max_over_mean"] for name, load in found["expert_load"].items()}
    }
    print(json.dumps(brief, indent=1))
    for entry in entries:
        print(f"---- {entry['kind']}: {entry['prompt']}\n{entry['greedy']}\n~~ {entry['sampled']}")


def make_llm(
    folder: Path, dtype: str, quantization: str = "auto", quantize_head: str = "off"
) -> LLM:
    """An engine of moderate size that counts which experts are chosen."""
    return LLM(
        folder,
        dtype=dtype,
        quantization=quantization,
        quantize_head=quantize_head,
        max_num_seqs=32,
        kv_cache_bytes=2**26,
        record_expert_load=True,
    )


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "text",
        type=Path,
        nargs="?",
        default=SAMPLE,
        help="held-out text (default: the sample beside this file)",
    )
    parser.add_argument("--model", help="another folder than the bundled checkpoint's")
    parser.add_argument("--out", type=Path, metavar="JSON", help="file to add the figures to")
    parser.add_argument("--markdown", type=Path, metavar="MD", help="file for the continuations")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="type of weights and activations",
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens per window")
    parser.add_argument("--quantization", default="auto", help="as the engine's option")
    parser.add_argument("--quantize-head", default="off", help="as the engine's option")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = parse()
    folder = model_folder(options.model)
    llm = make_llm(folder, options.dtype, options.quantization, options.quantize_head)
    text = Text(options.text, llm)
    found = measure(llm, folder, text, options.length)
    wide = options.quantization == "auto" and options.quantize_head == "off"
    if wide and find_spec("transformers"):
        found["transformers"] = compare(folder, text, llm)
    entries = continue_prompts(llm)
    show(found, entries)
    if options.out:
        device = str(llm.engine.model.embedding.device)
        setting = {
            "window": options.length,
            "dtype": options.dtype,
            "quantization": options.quantization,
            "quantize_head": options.quantize_head,
            "device": device,
            "torch": str(torch.__version__),
        }
        store(options.out, text.name, found, entries, setting)
    if options.markdown:
        options.markdown.write_text(markdown(entries, options.dtype))
    if found.get("transformers", {}).get("largest_difference_of_logits", 0) >= TOLERANCE:
        sys.exit("the logits differ from transformers'")


if __name__ == "__main__":
    main()
