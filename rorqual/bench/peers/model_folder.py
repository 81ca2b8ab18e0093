"""A model folder that all engines accept: config.json of a shape, and a tokenizer with text for
every id of its vocabulary, so that each step streams a chunk."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from rorqual.errors import ConfigError
from rorqual.models.hub import model_folder

SPACE = "\u0120"  # how byte-level vocabularies write one
NEWLINE = "\u010a"
LETTERS = 4  # of a word; 26 ** 4 words are more than any vocabulary has
PLAIN = (*sorted(set(string.printable[:94])), SPACE, NEWLINE)


@dataclass(frozen=True)
class ServedModel:
    """random: there is only a config.json; weights are drawn from a seed."""

    name: str
    folder: Path
    random: bool
    config: dict[str, Any]

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])


def served_model(name: str | None, scratch: Path, layers: int | None = None) -> ServedModel:
    """The folder to serve: a folder with weights unchanged; for one without, or a shape's name, a
    new folder under `scratch`, with only `layers` layers if given."""
    source = model_folder(name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    title = Path(name).name if name else "bundled"
    if any(source.glob("*.safetensors")):
        if layers is not None:
            raise ConfigError(f"layers={layers}: {source} has weights; accepted with a shape")
        return ServedModel(title, source, False, config)
    if layers is not None:
        config["num_hidden_layers"] = layers
        title += f"-{layers}-layers"
    folder = scratch / title
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(folder, int(config["vocab_size"]), special_ids(config))
    return ServedModel(title, folder, True, config)


def special_ids(config: dict[str, Any]) -> dict[str, int]:
    """By role, as far as the vocabulary has them; the end of a sequence is always there."""
    found: dict[str, int] = {}
    for role in ("eos", "bos"):
        given = config.get(f"{role}_token_id")
        token = given[0] if isinstance(given, list) else given
        if token is not None and token < config["vocab_size"] and token not in found.values():
            found[role] = token
    return {"eos": config["vocab_size"] - 1} | found


def write_tokenizer(folder: Path, size: int, special: dict[str, int]) -> None:
    """tokenizer.json and tokenizer_config.json: printable characters, then words of a space and
    four letters; decoded text encodes to the same ids."""
    words = ("".join(letters) for letters in product(string.ascii_lowercase, repeat=LETTERS))
    texts = [*PLAIN, *(SPACE + word for word in islice(words, max(0, size - len(PLAIN))))][:size]
    if len(texts) < size:
        raise ConfigError(f"vocab_size={size}; accepted: at most {len(PLAIN) + 26**LETTERS}")
    for role, token in special.items():
        texts[token] = f"<|{role}|>"
    vocabulary = {text: token for token, text in enumerate(texts)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    added = [AddedToken(texts[token], special=True) for token in special.values()]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": texts[token] for role, token in special.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "pad_token": texts[special["eos"]],
        **roles,
    }
    text = json.dumps(settings, indent=1)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
