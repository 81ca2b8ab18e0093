"""What prediction modules draft: against transformers, and whatever way the cache they read came
about. fp32, tiny checkpoints."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.engine.scheduling.sequence import Sequence
from rorqual.errors import LoadError
from rorqual.request import Request
from tests.engine.execution.test_identity import engine, prompts
from tests.models.checkpoints import VOCAB, save, save_with_mtp

pytestmark = pytest.mark.exhaustive(but_first=True)

NEXT_N = 3
Known = tuple[int, ...]


@pytest.fixture(scope="module", params=[1, 2], ids=lambda modules: f"{modules}-modules")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    save_with_mtp(path, request.param, agreement=2.0)
    return path


def one_module(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1


@dataclass
class Seen:
    """What a request had when `tokens` were all it knew: its drafts, and the modules' cache
    entries [modules, tokens - 1, width]."""

    tokens: Known
    prompt_len: int
    drafts: list[int]
    entries: Tensor


def watch(llm: LLM, batch: list[list[int]], most: int = 24) -> dict[Known, Seen]:
    """Drive the engine one step at a time; what every request had when it was last seen
    decoding, by its text."""
    seen: dict[str, Seen] = {}
    engine = llm.engine
    for index, prompt in enumerate(batch):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        engine.add(Request(f"r{index}", tuple(prompt), params))
    assert engine.depth == 1
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.decoding.values():
            if (
                len(sequence.tokens) + engine.config.num_speculative_tokens + 1
                < sequence.max_total_len
            ):
                continue  # sure to be seen again
            tokens = tuple(sequence.tokens)
            rows = engine.worker.runner.rows
            assert int(rows.num_drafts[sequence.slot]) == engine.scheduler.num_speculative_tokens
            drafted = rows.drafts[sequence.slot].tolist()
            seen[sequence.request.id] = Seen(
                tokens, sequence.prompt_len, drafted, entries_of(llm, sequence)
            )
    return {last.tokens: last for last in seen.values()}


def entries_of(llm: LLM, sequence: Sequence) -> Tensor:
    pool = llm.engine.worker.runner.pool
    depth = llm.engine.model_config.num_layers
    planes = torch.stack([layer["latent"] for layer in pool.layers[depth:]])
    return planes[:, sequence.pages].flatten(1, 2)[:, : len(sequence.tokens) - 1]


def after_whole_prefill(folder: Path, texts: list[Known]) -> dict[Known, Seen]:
    """The same when all of each text but its last token is one prompt, computed in one piece."""
    llm = engine(
        folder,
        num_speculative_tokens=NEXT_N,
        enable_prefix_caching=False,
        max_num_batched_tokens=4096,
    )
    return watch(llm, [list(text[:-1]) for text in texts], most=2)


# ---- against transformers


class Reference:
    """Main model and modules as transformers models; a module is a model of one layer that is
    given its input embeddings."""

    def __init__(self, folder: Path, scratch: Path):
        from transformers import AutoModelForCausalLM

        self.tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        self.depth = config["num_hidden_layers"]
        self.count = config["num_nextn_predict_layers"]
        self.main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.modules = []
        for i in range(self.depth, self.depth + self.count):
            place = scratch / f"module{i}"
            self._write(place, i, {**config, "num_hidden_layers": 1, "first_k_dense_replace": 0})
            self.modules.append(
                AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
            )

    def _write(self, place: Path, index: int, config: dict) -> None:
        place.mkdir()
        prefix = f"model.layers.{index}."
        kept = ("input_layernorm", "self_attn", "mlp", "post_attention_layernorm")
        named = {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}
        layer = {f"model.layers.0.{n}": t for n, t in named.items() if n.startswith(kept)}
        layer["model.norm.weight"] = named["shared_head.norm.weight"]
        layer |= {n: self.tensors[n] for n in ("model.embed_tokens.weight", "lm_head.weight")}
        save_file(layer, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(config))

    def merge(self, module: int, hidden: Tensor, tokens: list[int]) -> Tensor:
        prefix = f"model.layers.{self.depth + module}."
        embedded = self._norm(
            self.tensors["model.embed_tokens.weight"][tokens], prefix + "enorm.weight"
        )
        pair = torch.cat((embedded, self._norm(hidden, prefix + "hnorm.weight")), -1)
        return pair @ self.tensors[prefix + "eh_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.tensors[name], 1e-6)

    @torch.no_grad()
    def drafts(self, text: Known, num_speculative_tokens: int) -> list[int]:
        """Section 2.2 of arXiv 2412.19437: module k at position i joins the state before it with
        token i + k + 1. Past the last module, that one goes on from its own state."""
        hidden = self.main.model(
            input_ids=torch.tensor([text[:-1]]), use_cache=False
        ).last_hidden_state[0]
        known = list(text)
        for place in range(num_speculative_tokens):
            module = min(place, self.count - 1)
            if place < self.count:
                inputs = self.merge(module, hidden, known[place + 1 :])
            else:
                inputs = torch.cat((inputs, self.merge(module, hidden[-1:], known[-1:])))
            hidden = (
                self.modules[module]
                .model(inputs_embeds=inputs[None], use_cache=False)
                .last_hidden_state[0]
            )
            known.append(int((self.tensors["lm_head.weight"] @ hidden[-1]).argmax()))
        return known[len(text) :]


def test_drafts_are_those_of_the_paper(folder: Path, tmp_path: Path):
    reference = Reference(folder, tmp_path)
    llm = engine(folder, num_speculative_tokens=NEXT_N, max_num_batched_tokens=4096)
    found = watch(llm, prompts(12), most=2)
    assert len(found) == 12
    for text, seen in found.items():
        assert seen.drafts == reference.drafts(text, NEXT_N)


def test_the_copies_of_embedding_and_head_are_not_loaded(folder: Path):
    """They are NaN in these checkpoints; and without speculation the modules are not loaded at
    all."""
    assert len(engine(folder, num_speculative_tokens=1).engine.model.mtp) == (
        1 if one_module(folder) else 2
    )
    llm = engine(folder)
    assert not llm.engine.model.mtp
    assert len(llm.engine.worker.runner.pool.layers) == 3


def test_a_checkpoint_that_lacks_its_modules_is_refused(tmp_path: Path):
    save("v3", tmp_path)
    with pytest.raises(LoadError, match=r"model\.layers\.3\."):
        engine(tmp_path, num_speculative_tokens=1)


# ---- whatever way the cache came about


SETTINGS = [
    {"enable_prefix_caching": False},
    {},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 7},
    {"max_num_batched_tokens": 128, "max_num_seqs": 32},
    {"num_pages": 40},
    {"num_pages": 40, "enable_prefix_caching": False, "chunked_prefill_size": 5},
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()) or "default"
)
def test_what_a_module_sees_does_not_depend_on_how_it_was_computed(folder: Path, settings: dict):
    """Twice: the second time the prefix cache holds what the first left, pages full of decoded
    tokens among them."""
    llm = engine(folder, num_speculative_tokens=NEXT_N, **settings)
    for _ in range(2):
        found = watch(llm, prompts(20))
        wanted = after_whole_prefill(folder, list(found))
        assert_first_module_same(found, wanted)
        if one_module(folder):
            assert {text: seen.drafts for text, seen in found.items()} == {
                text: seen.drafts for text, seen in wanted.items()
            }
    assert "num_pages" not in settings or llm.engine.scheduler.schedulers[0].num_preemptions > 0


def assert_first_module_same(found: dict[Known, Seen], wanted: dict[Known, Seen]) -> None:
    assert found.keys() == wanted.keys()
    for text, seen in found.items():
        assert torch.allclose(seen.entries[0], wanted[text].entries[0], atol=1e-4), (
            f"{len(text)} tokens after a prompt of {seen.prompt_len}"
        )


def test_acceptance_does_not_depend_on_how_the_cache_was_computed(tmp_path: Path):
    """With whole prompts, chunks, prefix hits and small budgets as many drafts are right, place
    by place."""
    save_with_mtp(tmp_path, agreement=2.0)
    counts = []
    for settings in SETTINGS[1:5]:
        llm = engine(tmp_path, num_speculative_tokens=NEXT_N, **settings)
        for _ in range(2):
            before = [*llm.engine.stats.drafted, *llm.engine.stats.accepted]
            watch(llm, prompts(20))
            after = [*llm.engine.stats.drafted, *llm.engine.stats.accepted]
            counts.append([b - a for a, b in zip(before, after, strict=True)])
    assert counts == [counts[0]] * len(counts)
    drafted = counts[0][:NEXT_N]
    accepted = counts[0][NEXT_N:]
    assert all(0.03 * d < a < 0.9 * d for d, a in zip(drafted, accepted, strict=True)), counts[0]


def test_a_module_s_cache_is_kept_up_whatever_next_n_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """num_speculative_tokens goes up and down between steps, 0 included: what was not drafted is
    cached all the same."""
    llm = engine(folder, num_speculative_tokens=NEXT_N)
    turns = itertools.cycle([3, 0, 1, 0, 0, 2, 3, 1])
    monkeypatch.setattr(llm.engine.controller, "next_count", lambda batch: next(turns))
    found = watch(llm, prompts(20))
    assert_first_module_same(found, after_whole_prefill(folder, list(found)))


@pytest.mark.parametrize("modules", [2, 3])
@pytest.mark.parametrize("chunk", [30, 8, 3])
def test_every_module_caches_the_prompt(tmp_path: Path, modules: int, chunk: int):
    """Also in a step that finishes no prompt, and at a chunk's last row: a module further ahead
    takes the prompt's token there, not that of whichever request comes next in the batch. Lengths
    of all kinds: what is left after a chunk may be less than the modules look ahead."""
    save_with_mtp(tmp_path, modules)
    long = [token for prompt in prompts() for token in prompt]
    batch = [[*long[i:], i][: 24 + i] for i in range(9)]
    options = {"num_speculative_tokens": modules, "enable_prefix_caching": False}
    found = watch(engine(tmp_path, **options, chunked_prefill_size=chunk), batch, most=1 + modules)
    wanted = watch(engine(tmp_path, **options), batch, most=1 + modules)
    assert len(found) == len(batch)
    assert found.keys() == wanted.keys()
    for text, seen in found.items():
        wrong = (seen.entries - wanted[text].entries).abs().amax(-1) > 1e-4
        assert not wrong.any(), wrong.nonzero().tolist()
        assert seen.drafts == wanted[text].drafts


def test_a_page_is_not_shared_where_another_token_follows_it(tmp_path: Path):
    """The entry of a page's last token was computed from the token after it; so the page goes
    with that token alone."""
    save_with_mtp(tmp_path)
    page = 8
    first = prompts()[0][:33]
    for shared, hits in ((24, 16), (25, 24)):
        second = [*first[:shared], *((token + 1) % VOCAB for token in first[shared:])]
        with_module = engine(tmp_path, num_speculative_tokens=1)
        without = engine(tmp_path)
        for llm, expected in ((with_module, hits), (without, 24)):
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            llm.generate(first, params)
            assert llm.generate(second, params)[0].num_cached_tokens == expected
            assert llm.generate(first, params)[0].num_cached_tokens == 4 * page


def test_a_hit_leaves_what_the_module_would_have_computed(tmp_path: Path):
    save_with_mtp(tmp_path)
    first = prompts()[0][:33]
    llm = engine(tmp_path, num_speculative_tokens=1)
    watch(llm, [first], most=2)
    for shared in (17, 24, 25, 32):
        second = [*first[:shared], *((token + 1) % VOCAB for token in first[shared:]), 5]
        (found,) = watch(llm, [second], most=2).values()
        wanted = after_whole_prefill(tmp_path, [found.tokens])[found.tokens]
        assert torch.allclose(found.entries, wanted.entries, atol=1e-4)
