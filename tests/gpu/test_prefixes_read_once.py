"""Requests with common prefixes on a GPU: captured steps that read a prefix once for all of its
requests give the tokens of steps in which nothing is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM, SamplingParams
from rorqual.ops.triton.attention import prefix_groups
from rorqual.ops.triton.attention.prefix_groups import FEWEST_REQUESTS, SHORTEST_PREFIX
from tests.models.checkpoints import VOCAB, rewrite_config, save

PREFIXES = 3
REQUESTS = FEWEST_REQUESTS + 5


def answers(folder: Path, shared: bool, **options: Any) -> list[list[int]]:
    """Requests end at different times, so groups become smaller and end too."""
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=SHORTEST_PREFIX + 256,
        max_num_seqs=REQUESTS + 3,
        enable_prefix_caching=shared,
        **options,
    )
    random = torch.Generator().manual_seed(1)

    def drawn(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=random).tolist()

    prefixes = [drawn(SHORTEST_PREFIX + 40 * i) for i in range(PREFIXES)]
    prompts = [prefixes[i % PREFIXES] + drawn(1 + i) for i in range(REQUESTS)]
    params = [SamplingParams(temperature=0, max_tokens=20 + i) for i in range(REQUESTS)]
    # the first of each, so that the others find their pages
    llm.generate(prompts[:PREFIXES], params[:PREFIXES])
    found = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    llm.engine.close()
    return found


@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 1, "drafter": "ngram"}])
def test_tokens_do_not_depend_on_sharing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    save("qwen", tmp_path)
    rewrite_config(tmp_path, max_position_embeddings=2048)
    calls: list[int] = []
    find = prefix_groups.find

    def counted(tables: torch.Tensor, *given: Any) -> Any:
        calls.append(len(tables))
        return find(tables, *given)

    monkeypatch.setattr(prefix_groups, "find", counted)
    alone = answers(tmp_path, False, **options)
    assert not calls
    assert answers(tmp_path, True, **options) == alone
    assert max(calls) >= FEWEST_REQUESTS
