"""llama.cpp in a process of its own, for peer.py: a request a line of JSON on standard input, its
answer a line of standard output behind MARK.

It is run by path under the interpreter that has llama-cpp-python, which need not have rorqual, so
it imports nothing of it. Of llama-cpp-python only the functions of llama.h are used: written for
0.3.36 (ggml 0.25.3).
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

MARK = "rorqual-peer "
FLASH = {False: 0, True: 1}  # enum llama_flash_attn_type


class LoadedModel:
    """A model, and at most one context of it."""

    def __init__(self, llama: Any):
        self.llama = llama
        self.model: Any = None
        self.context: Any = None
        self.positions: list[int] = []  # tokens of each sequence that are in the cache
        self.newest: list[int] = []  # the next token of each
        self.clock = time.perf_counter

    def count(self, processor_time: bool) -> dict[str, Any]:
        """Select which seconds are reported from now on."""
        self.clock = time.process_time if processor_time else time.perf_counter
        return {}

    def load(self, path: str, repack: bool) -> dict[str, Any]:
        llama = self.llama
        self.unload()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        return {
            "bytes": llama.llama_model_size(self.model),
            "system": llama.llama_print_system_info().decode(),
        }

    def open(
        self, sequences: int, length: int, ubatch: int, flash: bool, threads: int
    ) -> dict[str, Any]:
        """A context for so many sequences of `length` tokens."""
        llama = self.llama
        self.close()
        params = llama.llama_context_default_params()
        params.n_ctx = sequences * -(-length // 256) * 256
        params.n_seq_max = sequences
        params.n_batch = max(ubatch, sequences * length)
        params.n_ubatch = ubatch
        params.flash_attn_type = FLASH[flash]
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make this context")
        self.batch = llama.llama_batch_init(params.n_batch, 0, 1)
        return {}

    def prompt(self, tokens: list[list[int]]) -> dict[str, Any]:
        """Seconds from nothing to the first token of every sequence's answer."""
        llama = self.llama
        llama.llama_memory_clear(llama.llama_get_memory(self.context), False)
        start = self.clock()
        self.batch.n_tokens = 0
        last = []
        for sequence, ids in enumerate(tokens):
            for position, token in enumerate(ids):
                self._add(token, position, sequence, position == len(ids) - 1)
            last.append(self.batch.n_tokens - 1)
        self._decode()
        self.newest = [self._likeliest(place) for place in last]
        self.positions = [len(ids) for ids in tokens]
        return {"seconds": self.clock() - start, "tokens": self.newest}

    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of so many greedy steps of all sequences, and their tokens."""
        found = []
        start = self.clock()
        for _ in range(steps):
            self.batch.n_tokens = 0
            for sequence, token in enumerate(self.newest):
                self._add(token, self.positions[sequence], sequence, True)
                self.positions[sequence] += 1
            self._decode()
            self.newest = [self._likeliest(place) for place in range(len(self.newest))]
            found.append(self.newest)
        return {"seconds": self.clock() - start, "tokens": found}

    def logits(self, tokens: list[int]) -> dict[str, Any]:
        """[tokens, vocabulary] of one sequence."""
        llama = self.llama
        llama.llama_memory_clear(llama.llama_get_memory(self.context), False)
        self.batch.n_tokens = 0
        for position, token in enumerate(tokens):
            self._add(token, position, 0, True)
        self._decode()
        return {"logits": [self._row(place).tolist() for place in range(len(tokens))]}

    def _add(self, token: int, position: int, sequence: int, wanted: bool) -> None:
        place = self.batch.n_tokens
        self.batch.token[place] = token
        self.batch.pos[place] = position
        self.batch.n_seq_id[place] = 1
        self.batch.seq_id[place][0] = sequence
        self.batch.logits[place] = wanted
        self.batch.n_tokens += 1

    def _decode(self) -> None:
        status = self.llama.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode ended with {status}")

    def _row(self, place: int) -> Any:
        import numpy as np

        pointer = self.llama.llama_get_logits_ith(self.context, place)
        return np.ctypeslib.as_array(pointer, (self.vocab,))

    def _likeliest(self, place: int) -> int:
        return int(self._row(place).argmax())

    def close(self) -> None:
        if self.context:
            self.llama.llama_batch_free(self.batch)
            self.llama.llama_free(self.context)
            self.context = None

    def unload(self) -> dict[str, Any]:
        self.close()
        if self.model:
            self.llama.llama_model_free(self.model)
            self.model = None
        return {}


def tell(**answer: Any) -> None:
    print(MARK + json.dumps(answer), flush=True)


def main() -> None:
    import llama_cpp

    # the library logs only warnings and errors, to stderr
    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
        if level in (3, 4):
            sys.stderr.write(text.decode(errors="replace"))

    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    tell(version=llama_cpp.__version__)
    model = LoadedModel(llama_cpp)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            tell(**getattr(model, request.pop("do"))(**request))
        except (RuntimeError, ValueError) as error:
            tell(error=str(error))
    model.unload()


if __name__ == "__main__":
    main()
