"""Train the demo's byte-level BPE tokenizer and encode the corpus with it.

    python demo/tokenizer.py WORK OUT

reads WORK/train.txt and WORK/heldout.txt as corpus.py writes them, and writes OUT/tokenizer/
(tokenizer.json and tokenizer_config.json), OUT/train-<kind>.npy.xz and OUT/heldout.npy.xz (uint16
token numbers) and OUT/data.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 4096
BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
PAD = "<|pad|>"
BATCH = 256  # documents encoded at a time
SAMPLE_BYTES = 36_000_000  # BPE merges settle long before the whole corpus has been counted

# Words with their leading space, contractions, single digits, runs of punctuation, line ends, other
# space.
PIECES = r"'(?:s|t|m|d|re|ve|ll)\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"


def documents(path: Path) -> Iterator[tuple[str, str]]:
    """The (kind, text) pairs of a corpus file, whose documents open with a form-feed line."""
    kind = ""
    lines: list[str] = []
    with path.open(encoding="utf-8", newline="\n") as source:
        for line in source:
            if line.startswith("\f"):
                if lines:
                    yield kind, "".join(lines)
                kind = line[1:].split(" ", 1)[0]
                lines = []
            else:
                lines.append(line)
    if lines:
        yield kind, "".join(lines)


def training_sample(path: Path) -> Iterator[str]:
    """All books, and other kinds up to the sample's size (the file's order is already shuffled)."""
    others = 0
    for kind, text in documents(path):
        if kind != "book" and others > SAMPLE_BYTES - 20_000_000:
            continue
        others += len(text) if kind != "book" else 0
        yield text


def train_bpe(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of exactly VOCABULARY tokens, the three special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert tokenizer.token_to_id(PAD) == 2
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 0)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files that transformers' AutoTokenizer needs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_round_trip(tokenizer: Tokenizer) -> None:
    """Any UTF-8 text must come back unchanged, whatever the training text held."""
    samples = [
        "",
        " ",
        "\n\n \t x  y\r\n",
        "it's  WE'LL 12345 3.14",
        "naïve — “quoted” 漢字 🐋\u200d\u0000",
        "é\u0301ﬁ",
    ]
    for text in samples:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text, text


def encode(tokenizer: Tokenizer, path: Path) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Token streams by kind of document, each document as BEGIN text END, and the text bytes of
    each kind."""
    streams: dict[str, list[np.ndarray]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    batches: dict[str, list[str]] = defaultdict(list)

    def drain(kind: str) -> None:
        for encoded in tokenizer.encode_batch_fast(batches.pop(kind)):
            streams[kind].append(np.array([*encoded.ids, 1], dtype=np.uint16))

    for kind, text in documents(path):
        batches[kind].append(text)
        sizes[kind] += len(text.encode())
        if len(batches[kind]) == BATCH:
            drain(kind)
    for kind in list(batches):
        drain(kind)
    return {kind: np.concatenate(arrays) for kind, arrays in streams.items()}, dict(sizes)


def store(job: tuple[Path, np.ndarray]) -> None:
    """Save one array compressed: a token stream shrinks to about half, which matters where it
    has to travel."""
    path, array = job
    with lzma.open(
        path, "wb", filters=[{"id": lzma.FILTER_LZMA2, "preset": 4, "lc": 0, "lp": 1, "pb": 1}]
    ) as out:
        np.save(out, array)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path, help="folder with train.txt and heldout.txt")
    parser.add_argument("out", type=Path, help="folder for the tokenizer and the token streams")
    arguments = parser.parse_args()
    tokenizer = train_bpe(training_sample(arguments.work / "train.txt"))
    check_round_trip(tokenizer)
    save(tokenizer, arguments.out / "tokenizer")
    train, train_sizes = encode(tokenizer, arguments.work / "train.txt")
    heldout, heldout_sizes = encode(tokenizer, arguments.work / "heldout.txt")
    held = np.concatenate([heldout[kind] for kind in sorted(heldout)])
    jobs = [(arguments.out / f"train-{kind}.npy.xz", array) for kind, array in train.items()]
    with Pool(2) as pool:
        pool.map(store, [*jobs, (arguments.out / "heldout.npy.xz", held)], chunksize=1)
    facts = {
        "train_bytes": train_sizes,
        "train_tokens": {kind: len(array) for kind, array in train.items()},
        "heldout_bytes": heldout_sizes,
        "heldout_tokens": {kind: len(heldout[kind]) for kind in sorted(heldout)},
        "bytes_per_token": sum(train_sizes.values()) / sum(map(len, train.values())),
        "heldout_bytes_per_token": sum(heldout_sizes.values()) / len(held),
    }
    (arguments.out / "data.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
