"""Text to tokens and back, over the `tokenizers` library; chat templates through transformers,
imported only when one is used."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream
from tokenizers.processors import TemplateProcessing

from rorqual.errors import ConfigError, LoadError, RequestError
from rorqual.models.hub import BUNDLED, model_folder
from rorqual.text import tiktoken_file
from rorqual.text.token_length import longest_token

log = logging.getLogger("rorqual.serve")

REPLACEMENT = "\ufffd"
# Classes that add tokens around a text by their settings; others leave that to tokenizer.json.
LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")


class Tokenizer:
    """A model folder's tokenizer.json, or tiktoken.model, with its tokenizer_config.json."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        ranks = self.folder / tiktoken_file.FILE
        if not path.exists() and not ranks.exists():
            ways = "name a tokenizer, or pass skip_tokenizer_init to work with token ids alone"
            raise LoadError(f"{self.folder} holds no tokenizer.json; {ways}")
        self.settings = _read_json(self.folder / "tokenizer_config.json")
        if path.exists():
            try:
                self.raw = RawTokenizer.from_file(str(path))
            except Exception as error:  # the library raises plain Exception
                raise LoadError(f"{path} cannot be read: {error}") from None
        else:
            self.raw = tiktoken_file.tiktoken_tokenizer(ranks, self.settings)
        self._follow_settings()
        self.template = self._find_template()
        self.special_ids = frozenset(
            i for i, token in self.raw.get_added_tokens_decoder().items() if token.special
        )

    def _follow_settings(self) -> None:
        """DeepSeek's models name Llama's tokenizer class. Their tokenizer.json adds no tokens: only
        `add_bos_token` says that a text begins with BOS. Where neither flag is given,
        tokenizer.json already has them, as newer transformers writes them."""
        given = [self.settings.get(name) for name in ("add_bos_token", "add_eos_token")]
        if self.settings.get("tokenizer_class") not in LLAMA or given == [None, None]:
            return
        # the class's defaults
        begins = given[0] is None or bool(given[0])
        ends = bool(given[1])
        before = [self._named("bos_token")] if begins else []
        after = [self._named("eos_token")] if ends else []
        around = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
        self.raw.post_processor = TemplateProcessing(single=around, special_tokens=before + after)

    def _named(self, name: str) -> tuple[str, int]:
        """A special token that must exist, and its id."""
        text = _text(self.settings.get(name))
        found = None if text is None else self.raw.token_to_id(text)
        if text is None or found is None:
            path = self.folder / "tokenizer_config.json"
            raise LoadError(f"{path} sets add_{name}, but {name}={text!r} is not in the vocabulary")
        return text, found

    def _find_template(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        template = file.read_text() if file.exists() else self.settings.get("chat_template")
        return template if isinstance(template, str) else None

    def info(self) -> dict[str, Any]:
        """As vLLM's /tokenizer_info: tokenizer_config.json, each named token as its text, and the
        chat template from wherever it is stored."""
        named = {
            name: _text(value) if name.endswith("_token") else value
            for name, value in self.settings.items()
            if name != "added_tokens_decoder"
        }
        kind = self.settings.get("tokenizer_class")
        return {**named, "tokenizer_class": kind, "chat_template": self.template}

    def cover(self, vocab_size: int) -> None:
        """Use this tokenizer for a model with another vocabulary size. Ids that only the model has
        are decoded as <ID>; tokens that only the tokenizer has would have no embedding row, and are
        rejected."""
        known = self.raw.get_vocab(with_added_tokens=True)
        count = max(known.values(), default=-1) + 1
        if count > vocab_size:
            message = f"the tokenizer in {self.folder} has {count} tokens"
            accepted = f"at most the model's vocab_size={vocab_size} (--tokenizer names another)"
            raise ConfigError(f"{message}; accepted: {accepted}")
        names = [f"<{token}>" for token in range(count, vocab_size)]
        if len(known) == count and not any(name in known for name in names):
            # Added tokens get the next ids, so none may be skipped.
            self.raw.add_tokens([AddedToken(name, normalized=False) for name in names])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for each text. Releases the interpreter lock meanwhile, which `encode` does
        not."""
        found = self.raw.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [item.ids for item in found]

    @cached_property
    def longest(self) -> int | None:
        """Most characters of a text that become one token; None if unknown."""
        return longest_token(self.raw)

    @cached_property
    def joins_bytes(self) -> bool:
        """Whether a text is just its tokens' bytes concatenated."""
        return isinstance(self.raw.decoder, ByteLevel)

    def whole_text(self, token_id: int) -> str | None:
        """What a token adds to a text that ends with a whole character; None where it ends inside
        one, or its text depends on other tokens."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            text = self.token(token_id) if self.joins_bytes else REPLACEMENT
            found = self._whole_texts[token_id] = None if REPLACEMENT in text else text
            return found

    @cached_property
    def _whole_texts(self) -> dict[int, str | None]:
        return {}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The text of a single token, for log probabilities."""
        return self.raw.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, by the model's own template."""
        if self.template is None:
            raise RequestError("this is a base model: it has no chat template; use generate")
        from transformers import PreTrainedTokenizerFast

        special = {
            name: _text(self.settings.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        given = {name: value for name, value in special.items() if value is not None}
        fast = PreTrainedTokenizerFast(
            tokenizer_object=self.raw, chat_template=self.template, **given
        )
        text = fast.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return self.encode(str(text), add_special_tokens=False)


def tokenizer_of(
    folder: Path,
    vocab_size: int,
    named: str | Path | None,
    random: bool,
) -> Tokenizer:
    """The tokenizer of the model in `folder`: the `named` one (a folder or an id), else the model's
    own. With random weights the bundled one serves."""
    if named is None and (not random or (folder / "tokenizer.json").exists()):
        return Tokenizer(folder)
    tokenizer = Tokenizer(BUNDLED if named is None else model_folder(named, weights=False))
    if named is None:
        why = "the weights are random and no tokenizer lies beside them"
        log.warning("%s: the bundled checkpoint's is used, other ids are shown as <ID>", why)
    tokenizer.cover(vocab_size)
    return tokenizer


class TextStream:
    """Incremental detokenizing of one request that never returns partial characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip = skip_special_tokens
        self.stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self.hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.ids: list[int] = []
        self.length = 0
        self.inside = False  # the text so far ends inside a character

    def push(self, token: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        if token in self.hidden:
            return ""  # the stream would keep it, and decode it again with every later token
        self.ids.append(token)
        if not self.inside:
            whole = self.tokenizer.whole_text(token)
            if whole is not None:
                self.length += len(whole)
                return whole
        return self._step(token)

    def _step(self, token: int) -> str:
        if not self.inside:
            # the text before is whole characters, which this token's text does not depend on
            self.stream = DecodeStream(skip_special_tokens=self.skip)
        try:
            text = self.stream.step(self.tokenizer.raw, token) or ""
            self.inside = not text or not self.tokenizer.joins_bytes
        except Exception:
            # Byte fallback: one invalid byte changes the decoding of those before it, and the
            # library fails.
            self.stream = DecodeStream(skip_special_tokens=self.skip)
            text = self.tokenizer.decode(self.ids, self.skip)[self.length :]
        self.length += len(text)
        return text

    def flush(self) -> str:
        """The remaining text: bytes of an incomplete character become a replacement character."""
        rest = self.tokenizer.decode(self.ids, self.skip)[self.length :]
        self.length += len(rest)
        return rest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def _text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value
