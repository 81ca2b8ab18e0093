"""Bad words as the token sequences that would write them."""

from __future__ import annotations

from dataclasses import replace

from rorqual.errors import RequestError, quoted
from rorqual.request import MAX_BAD_WORD_TOKENS, SamplingParams
from rorqual.text.tokenizer import Tokenizer


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The parameters with `bad_word_ids` for `bad_words`: each word at a text's start, and after a
    space. Other tokenizations of a word are not banned, as in vLLM."""
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer; skip_tokenizer_init was set")
    found = list(params.bad_word_ids)
    for word in params.bad_words:
        bare = word.lstrip()
        for text in (bare, " " + bare):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words={quoted(word)} has {len(ids)} tokens; accepted: at most "
                    f"{MAX_BAD_WORD_TOKENS}"
                )
            if ids and ids not in found:
                found.append(ids)
    return replace(params, bad_words=(), bad_word_ids=tuple(found))
