"""MLA in form CC over more context than it decompresses at once: equal logits, bounded memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.config.model import MLAConfig
from rorqual.layers.mla import MLA
from rorqual.ops import interface, stretch
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import AttentionMetadata, Ops
from tests.models.checkpoints import VOCAB, save
from tests.models.driver import CPU, PAGE, Driver, all_logits, load

pytestmark = pytest.mark.exhaustive(but_first=True)

LENGTH = 23
CUTS = [[LENGTH], [1, 9, 17], [16]]  # whole; chunked, then decode steps; a whole number of pages
BOUND = 1e-4
FITS = -(-2 * LENGTH // PAGE) * PAGE  # both requests, in whole pages


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """(folder, logits by transformers)"""
    folder = tmp_path_factory.mktemp("v3")
    reference = save("v3", folder)
    with torch.no_grad():
        return folder, reference(tokens()).logits


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))


@contextmanager
def decompressing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of tokens that were decompressed at once, as they come."""
    found: list[int] = []
    plain = MLA.decompress

    def decompress(self: MLA, entries: Tensor) -> tuple[Tensor, Tensor]:
        found.append(entries.shape[0])
        return plain(self, entries)

    with monkeypatch.context() as patch:
        patch.setattr(MLA, "decompress", decompress)
        yield found


def bounded(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """A limit in bytes that allows so many tokens of the tiny models in fp32."""
    each = 4 * (4 * (2 * 24 + 16 + 20) + 2 * 32 + 16)
    monkeypatch.setitem(stretch.STRETCH_BYTES, "cpu", tokens * each)


@pytest.mark.parametrize("tokens_at_once", [PAGE, 3 * PAGE, FITS])
@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["reference", "cpu"])
@pytest.mark.parametrize("forms", [("CC", "A_CC_ME"), ("CC", "CC")], ids="-".join)
def test_logits_do_not_depend_on_the_bound(
    saved: tuple[Path, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    forms: tuple[str, str],
    ops: Ops,
    tokens_at_once: int,
) -> None:
    """Requests of one step have different contexts, some more than fits; with what fits, the bits
    are those of no bound at all."""
    folder, want = saved
    model = load(folder, ops, forms=forms)
    for cuts in CUTS:
        unbounded = all_logits(model, tokens(), cuts)
        with monkeypatch.context() as patch, decompressing(patch) as seen:
            bounded(patch, tokens_at_once)
            got = all_logits(model, tokens(), cuts)
        assert (got - want).abs().max() < BOUND, cuts
        assert max(seen) <= tokens_at_once
        assert torch.equal(got, unbounded) == (tokens_at_once == FITS)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_requests_with_and_without_context_in_one_step(
    saved: tuple[Path, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    kv_dtype: str,
) -> None:
    """The first behind 17 cached tokens, the second with none."""
    ids = tokens()
    model = load(saved[0], CpuOps())
    found = []
    for at_once in (PAGE, 1000):
        bounded(monkeypatch, at_once)
        driver = Driver(model, 2, LENGTH, kv_dtype=kv_dtype)
        driver.logits(driver.step([ids[0, :17]], [0], decode=False))
        found.append(driver.logits(driver.step([ids[0, 17:], ids[1, :5]], [17, 0], decode=False)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert not torch.equal(*found)
    if kv_dtype == "auto":
        want = torch.cat((saved[1][0, 17:], saved[1][1, :5]))
        assert (found[0] - want).abs().max() < BOUND


# ---- memory


class Live(TorchDispatchMode):
    """The most bytes of tensors, made while this is on, that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self.key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and self.key(leaf) not in {*given, *self.sizes}:
                storage = leaf.untyped_storage()
                self.sizes[self.key(leaf)] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, self.key(leaf))
        self.most = max(self.most, sum(self.sizes.values()))
        return out

    @staticmethod
    def key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("length", "ops"), [(256, CpuOps()), (6000, CpuOps()), (6000, Ops())])
def test_attention_makes_no_more_than_is_planned(
    saved: tuple[Path, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    ops: Ops,
    kv_dtype: str,
) -> None:
    """One request that just fits or is much longer, beside a short one. Decompressed whole, the
    longer would take 10 MB; 0.7 are planned."""
    queries = 50
    monkeypatch.setattr(interface, "SCORES", 2**10)
    monkeypatch.setattr(stretch, "SCORE_BYTES", 4 * 4 * 2**10)
    bounded(monkeypatch, 256)
    model = load(saved[0], ops)
    attention = model.layers[0].attention
    spec = kv_spec(model.config, PAGE, kv_dtype, "CC", activations="float32")
    pages = -(-length // PAGE)
    plane = KVPool(spec, pages + 10, CPU).layers[0]["latent"]
    plane.zero_()
    tables = torch.stack((torch.arange(pages) + 10, torch.arange(pages) % 10))
    segment = AttentionMetadata(tables, torch.tensor([length, 30]), (queries, 3), (length, 30))
    q = torch.randn(queries + 3, attention.config.num_heads, attention.config.qk_dim)
    with torch.inference_mode(), decompressing(monkeypatch) as seen, Live() as live:
        attention._attend_decompressed(q, plane, segment)
    assert sum(seen) == length + 30
    assert max(seen) == 256
    planned = stretch.workspace_bytes(attention.config, 4, "cpu", PAGE, 2, length, queries)
    assert planned < 700_000
    assert live.most <= planned
    assert live.most > planned // 2, "nothing like what is planned is used"


# ---- sizes


def published(heads: int = 128) -> MLAConfig:
    """DeepSeek-V3's."""
    return MLAConfig(heads, 1536, 512, 128, 64, 128)


@pytest.mark.parametrize(
    ("mla", "width", "device", "page"),
    [
        (published(256), 2, "cuda", 64),
        (published(256), 2, "cuda", 1),
        (published(), 4, "cpu", 16),
        (published(16), 4, "cpu", 16),
    ],
)
def test_stretches_are_whole_pages_within_the_limit(
    mla: MLAConfig,
    width: int,
    device: str,
    page: int,
) -> None:
    limit = 64 * 2**20 if device == "cpu" else 2**30
    tokens = stretch.stretch_tokens(mla, width, device, page)
    each = stretch.token_bytes(mla, width)
    assert tokens % page == 0
    assert limit - page * each < tokens * each <= limit
    assert each >= width * mla.num_heads * (mla.qk_dim + mla.v_dim)


def test_deepseek_v3() -> None:
    """A prompt of 8,192 tokens is one stretch; the longest request takes what one of 16,384
    does, and a stretch is at least a page."""
    assert stretch.stretch_tokens(published(), 2, "cuda", 64) == 8192
    assert stretch.stretch_tokens(published(16), 2, "cuda", 64) == 8192
    given = (published(), 2, "cuda", 64, 256)
    sums = 2048 * 128 * 129 * 4
    planned = [stretch.workspace_bytes(*given, longest, 2048) for longest in (16384, 131072)]
    assert planned[0] == planned[1] <= 2**30 + sums + stretch.SCORE_BYTES
    assert 131072 * stretch.token_bytes(published(), 2) > 10 * planned[1]
    assert stretch.stretch_tokens(published(), 2, "cuda", 16384) == 16384


def test_what_no_step_can_use_is_not_planned() -> None:
    """As of a model whose requests are short."""
    few = stretch.workspace_bytes(published(), 2, "cuda", 64, 3, 100, 2048)
    assert few == 300 * stretch.token_bytes(published(), 2)
