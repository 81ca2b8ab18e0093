"""Steps with prompts on a GPU, captured in pieces and launched operation by operation: the same
tokens and log probabilities, whatever is in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM, SamplingParams
from tests.gpu.choice import rarely
from tests.models.checkpoints import VOCAB, save, save_with_mtp

LENGTHS = (1, 5, 30, 64, 65, 120, 200, 33)


@pytest.fixture(scope="module", params=["v3", "qwen"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "v3":
        save_with_mtp(path)
    else:
        save(request.param, path)
    return path


def answers(folder: Path, piecewise_tokens: int, **options: Any) -> list[Any]:
    """Requests come and go at different times, so most steps mix prompts and decoding."""
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=96,
        piecewise_tokens=piecewise_tokens,
        seed=3,
        **options,
    )
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (n,), generator=random).tolist() for n in LENGTHS]
    params = [
        SamplingParams(temperature=0, max_tokens=6 + 5 * i, logprobs=2, prompt_logprobs=1)
        for i in range(len(prompts))
    ]
    found = []
    for _ in range(2):  # the second time over cached prefixes
        for out in llm.generate(prompts, params):
            said = out.outputs[0]
            found.append((said.token_ids, said.logprobs, out.prompt_logprobs))
    pieces = llm.engine.worker.runner.pieces
    assert (pieces is not None and bool(pieces.graphs)) == (piecewise_tokens > 0)
    assert pieces is None or pieces.attention.decodes, "decoding requests were attended to eagerly"
    assert pieces is None or pieces.attention.prompts, "prompts were attended to eagerly"
    llm.engine.close()
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"num_speculative_tokens": 1}, *rarely({"chunked_prefill_size": 17})],
    ids=str,
)
def test_pieces_give_what_eager_steps_give(folder: Path, options: dict[str, Any]) -> None:
    given = dict(options)
    if "num_speculative_tokens" in given and folder.name.startswith("qwen"):
        given["drafter"] = "ngram"
    eager = answers(folder, 0, **given)
    pieces = answers(folder, 4096, **given)
    for one, other in zip(eager, pieces, strict=True):
        assert one[0] == other[0]
        for before, after in zip((*one[1], *one[2][1:]), (*other[1], *other[2][1:]), strict=True):
            assert before.keys() == after.keys()
            for token, entry in before.items():
                assert after[token].logprob == pytest.approx(entry.logprob, abs=1e-3)


def test_launches_wait_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose last token alone is not cached, fresh ones and such that begin with a cached
    prefix come while others decode. torch raises where the host would wait for the GPU."""
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4, page_size=64)
    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (n,), generator=random).tolist() for n in (65, 129, 100, 190)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    wanted = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    runner = llm.engine.worker.runner
    launch = runner.launch
    launched = []

    def strict(output: Any, metadata: Any) -> Any:
        launched.append(len(output.new_requests))
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(output, metadata)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(runner, "launch", strict)
    fresh = torch.randint(VOCAB, (70,), generator=random).tolist()
    found = [out.outputs[0].token_ids for out in llm.generate([*prompts, fresh], params)]
    assert found[:4] == wanted
    assert sum(launched) == 5
    llm.engine.close()
