"""A model over windows of known text, without scheduler or sampler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.config.hf import read_config_file
from rorqual.errors import ConfigError
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import AttentionMetadata, Ops, TokenPlaces
from rorqual.parallel.overlap import run_one
from rorqual.text.tokenizer import tokenizer_of

WINDOW = 2048  # tokens that see each other
PAGE = 16
FORM = "A_CC_ME"  # of MLA's decode; prompts take CC


@dataclass
class Score:
    """How well a model guesses a text."""

    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / max(1, self.tokens))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(1, self.bytes)


def load_on_cpu(folder: Path, ops: Ops) -> Transformer:
    """In its own dtype."""
    config = read_config_file(folder)
    build = Build(ops, getattr(torch, config.dtype), torch.device("cpu"), config.quant)
    model = make_model(config, build, min(WINDOW, config.max_position), "CC", FORM)
    load_weights(model, folder)
    return model


class TextReader:
    """Reads windows of a text with a model, each through the same small cache."""

    def __init__(self, model: Transformer):
        config = model.config
        self.model = model
        self.length = min(WINDOW, config.max_position)
        pages = -(-self.length // PAGE)
        dtype = str(model.dtype).removeprefix("torch.")
        spec = kv_spec(config, PAGE, "auto", FORM, activations=dtype)
        self.pool = KVPool(spec, pages + 1, torch.device("cpu"))
        self.table = torch.arange(1, pages + 1)[None]

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """Of every position of a window, [L, vocabulary] fp32."""
        positions = torch.arange(len(ids))
        slots = self.table[0, positions // PAGE] * PAGE + positions % PAGE
        segment = AttentionMetadata(self.table, torch.tensor([len(ids)]), (len(ids),), (len(ids),))
        places = TokenPlaces(*self.model.rotary.rows(positions), slots)
        step = ForwardBatch(ids, positions, places, positions, self.pool, prefill=segment)
        return self.model.logits(run_one(self.model.forward(step)))

    def windows(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(a window, the tokens that follow each of its own)"""
        for start in range(0, len(ids) - 1, self.length):
            here = ids[start : start + self.length + 1]
            yield here[:-1], here[1:]

    def score(self, ids: Tensor, size: int) -> Score:
        """Of a text of `size` bytes."""
        score = Score(bytes=size)
        for window, following in self.windows(ids):
            guesses = self.logits(window).log_softmax(-1)
            score.nats -= float(guesses.gather(1, following[:, None]).double().sum())
            score.tokens += len(following)
        return score


def read_text(file: str | Path, folder: Path, vocabulary: int) -> tuple[Tensor, int]:
    """(token ids, bytes) of a text. Raises ConfigError."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as text: {error}") from None
    ids = tokenizer_of(folder, vocabulary, None, False).raw.encode(text).ids
    if len(ids) < 2:
        raise ConfigError(f"{file} holds {len(ids)} tokens; accepted: at least 2")
    return torch.tensor(ids), len(text.encode())
