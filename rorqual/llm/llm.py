"""The offline API, with vLLM's names and result shapes: LLM(...).generate(prompts,
SamplingParams(...))."""

from __future__ import annotations

import importlib.util
import itertools
import os
import reprlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from numbers import Integral
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rorqual.config.option import by_field
from rorqual.config.process import loaded_unscanned
from rorqual.engine.config import EngineConfig
from rorqual.engine.engine import Engine
from rorqual.errors import ConfigError, EngineError, RequestError
from rorqual.llm.calls import Deltas, OpenCall, SharedEngine
from rorqual.models.hub import model_folder
from rorqual.request import Request, RequestOutput, SamplingParams
from rorqual.text.bad_words import with_bad_words
from rorqual.text.detokenizer import Completion
from rorqual.text.generation_config import read_generation
from rorqual.text.tokenizer import Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from rorqual.engine.execution.grammar import Grammars

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

ACCEPTED = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": a list}'

# Accepted so that vLLM scripts run, and ignored: remote code is never run, and the others have no
# effect here.
WITHOUT_EFFECT = frozenset(("trust_remote_code", "disable_log_stats", "swap_space"))


class LLM:
    """A model ready to generate. `model` is a folder, a Hugging Face id, or None for the bundled
    checkpoint.

    Keyword arguments are the fields of EngineConfig or their aliases (next_n), among them vLLM's
    names (gpu_memory_utilization, block_size), and load_format="dummy". With skip_tokenizer_init
    prompts are token ids and outputs have no text. `tokenizer` is a folder or an id, in place of
    the model's own; see tokenizer_of.

    Any number of calls may be open at once, in one thread or several, and each gets its own tokens.
    A failed step ends all calls: those that did not run it raise EngineError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ):
        folder = model_folder(model)
        self.engine = Engine(EngineConfig(str(folder), **_engine_options(options)))
        self.tokenizer: Tokenizer | None = None
        self.defaults = read_generation(folder, self.engine.model_config)
        if not skip_tokenizer_init:
            vocab_size = self.engine.model_config.vocab_size
            random = self.engine.config.weights == "random"
            self.tokenizer = tokenizer_of(folder, vocab_size, tokenizer, random)
            where = self.tokenizer.folder
            self.engine.grammars = _grammars(where, vocab_size, self.defaults.eos_token_ids)
        self._pid = os.getpid()
        self._ids = itertools.count()
        self._shared = SharedEngine(self.engine)

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("there is no tokenizer: skip_tokenizer_init was set")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of generation_config.json."""
        return self.defaults.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt (text, token ids, or {"prompt": ...} / {"prompt_token_ids":
        ...}); results in the prompts' order."""
        results, deltas = self._submit(_as_list(prompts), sampling_params)
        total = sum(len(result.outputs) for result in results)
        # a full garbage collection takes 0.1 s, and other ranks would wait for it
        with closing(deltas), loaded_unscanned(), _progress(total, use_tqdm) as done:
            for delta in deltas:
                if delta.finish_reason is not None:
                    done(1)
        return results

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Deltas:
        """Yield what each step adds, completion by completion. Closing the iterator cancels the
        rest."""
        _, deltas = self._submit(_as_list(prompts), sampling_params)
        return deltas

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        render = self.get_tokenizer().apply_chat_template
        prompts = [render(m, add_generation_prompt) for m in several]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    # ---- requests

    def _submit(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
    ) -> tuple[list[RequestOutput], Deltas]:
        """Queue all requests, or none."""
        if os.getpid() != self._pid:
            raise EngineError(
                f"this LLM belongs to process {self._pid}: its threads do not live on after a fork"
            )
        given = self.defaults.params() if sampling_params is None else sampling_params
        params = list(given) if isinstance(given, Sequence) else [given] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
        results: list[RequestOutput] = []
        work: list[tuple[Request, Completion]] = []
        for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            if not isinstance(wanted, SamplingParams):
                what = reprlib.repr(wanted)
                raise RequestError(f"sampling_params={what}; accepted: SamplingParams, or a list")
            results.append(self._prepare(number, prompt, wanted, work))
        call = OpenCall()
        # first: it cancels queued requests however this ends
        deltas = Deltas(self._shared, call)
        self._shared.submit(call, work)
        return results, deltas

    def _prepare(
        self,
        number: int,
        prompt: Prompt,
        params: SamplingParams,
        work: list[tuple[Request, Completion]],
    ) -> RequestOutput:
        text, ids = self._prompt_ids(prompt)
        kept = params.kept_prompt(len(ids), self.engine.scheduler.config.max_model_len)
        ids = ids[len(ids) - kept :]
        params = with_bad_words(params, self.tokenizer)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; skip_tokenizer_init was set")
        result = RequestOutput(str(next(self._ids)), text, ids)
        for sample in range(params.n):
            child = params
            if params.n > 1:
                child = replace(
                    params,
                    n=1,
                    seed=None if params.seed is None else params.seed + sample,
                    prompt_logprobs=None if sample else params.prompt_logprobs,
                )
            name = f"{result.request_id}-{sample}"
            eos = self.defaults.eos_token_ids
            completion = Completion(number, sample, child, self.tokenizer)
            completion.result = result
            result.outputs.append(completion.out)
            work.append((Request(name, tuple(ids), child, eos, time.monotonic()), completion))
        return result

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            given = prompt.get("prompt") if ids is None else ids
        if isinstance(given, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer; skip_tokenizer_init was set")
            try:
                given.encode()
            except UnicodeEncodeError as error:  # a lone surrogate
                raise RequestError(f"{reprlib.repr(given)} is not Unicode text: {error}") from None
            return given, self.tokenizer.encode(given)
        try:
            return None, [index(token) for token in _items(given)]
        except TypeError as error:
            raise _not_a_prompt(prompt) from error


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Map aliases to our names; rejects unknown names, and an option given under two names."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name == "load_format":
            if value not in ("auto", "safetensors", "dummy"):
                raise ConfigError(
                    f"load_format={value!r} is not supported; accepted: auto, safetensors, dummy"
                )
            found["weights"] = "random" if value == "dummy" else "checkpoint"
        elif name == "enforce_eager":
            found["exe_mode"] = "eager" if value else "auto"
        elif name not in WITHOUT_EFFECT:
            found[name] = value
    found = by_field(EngineConfig, found)
    unknown = sorted(set(found) - set(EngineConfig.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"LLM does not know the option {unknown[0]!r}")
    return found


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    try:
        found = list(_items(prompts))
    except TypeError as error:
        raise _not_a_prompt(prompts) from error
    return [found] if found and isinstance(found[0], Integral) else found


def _items(prompts: Any) -> Iterator[Any]:
    if isinstance(prompts, (bytes, bytearray, memoryview)):  # their items are numbers
        raise TypeError("bytes")
    return iter(prompts)


def _not_a_prompt(prompt: object) -> RequestError:
    return RequestError(f"{reprlib.repr(prompt)} is not a prompt; accepted: {ACCEPTED}")


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Any]:
    if not show:
        yield lambda n: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("sequences", total=total)
        yield lambda n: bar.advance(task, n)


def _grammars(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars | None:
    """For structured output, if its packages are installed (the extra `serve`)."""
    if not all(importlib.util.find_spec(name) for name in ("msgspec", "transformers", "xgrammar")):
        return None
    from rorqual.text.grammar import XGrammars
    from rorqual.text.grammar_limits import GrammarLimits

    return XGrammars.make(folder, vocab_size, eos_token_ids, GrammarLimits())
