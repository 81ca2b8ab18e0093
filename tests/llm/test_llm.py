"""The offline API over the bundled checkpoint: what a user's script sees."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.errors import CapacityError, ConfigError, RequestError
from rorqual.models.hub import BUNDLED
from rorqual.request import StructuredOutput

PROMPTS = ["The old gentleman looked at her and said", "To create a new table,", "In the beginning"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_num_seqs=64, max_model_len=512)


def test_result_shapes_follow_vllm(llm: LLM):
    outs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    assert [out.prompt for out in outs] == PROMPTS
    for out in outs:
        assert out.finished
        assert out.prompt_token_ids == llm.get_tokenizer().encode(out.prompt)
        first = out.outputs[0]
        assert first.index == 0
        assert len(first.token_ids) == 12
        assert first.text == llm.get_tokenizer().decode(first.token_ids)
        assert first.finish_reason == "length"
        assert first.logprobs is None


def test_prompts_in_every_accepted_form_mean_the_same(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms = [
        PROMPTS[0],
        [PROMPTS[0]],
        ids,
        [ids],
        {"prompt": PROMPTS[0]},
        [{"prompt_token_ids": ids}],
    ]
    results = {tuple(llm.generate(form, params)[0].outputs[0].token_ids) for form in forms}
    assert len(results) == 1


def test_seeded_requests_repeat_whatever_else_is_in_the_batch(llm: LLM):
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=20)
    alone = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    others = [
        SamplingParams(temperature=t / 10, top_k=t, max_tokens=20 + t, presence_penalty=0.1 * t)
        for t in range(1, 9)
    ]
    crowd = llm.generate([PROMPTS[0], *[PROMPTS[1]] * 8], [params, *others])
    assert crowd[0].outputs[0].token_ids == alone
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == alone
    changed = SamplingParams(temperature=0.9, top_p=0.9, seed=12, max_tokens=20)
    assert llm.generate(PROMPTS[0], changed)[0].outputs[0].token_ids != alone


def test_bad_words_and_the_end_of_a_prompt(llm: LLM):
    plain = SamplingParams(temperature=0, max_tokens=12)
    said = llm.generate(PROMPTS[0], plain)[0].outputs[0].text
    word = next(word for word in said.split() if word.isalpha())
    banned = llm.generate(PROMPTS[0], replace(plain, bad_words=[word]))[0].outputs[0].text
    assert word not in banned.split()
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    out = llm.generate(PROMPTS[0], replace(plain, truncate_prompt_tokens=3))[0]
    assert out.prompt_token_ids == ids[-3:]
    assert out.outputs[0].token_ids == llm.generate(ids[-3:], plain)[0].outputs[0].token_ids


def test_n_gives_several_different_completions(llm: LLM):
    out = llm.generate(PROMPTS[0], SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10))[0]
    assert [completion.index for completion in out.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in out.outputs}) == 3


def test_logprobs(llm: LLM):
    out = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=5, logprobs=3))[
        0
    ].outputs[0]
    assert len(out.logprobs) == 5
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert len(entry) == 3
        assert entry[token].rank == 1
        assert entry[token].logprob == max(item.logprob for item in entry.values())
        assert entry[token].decoded_token == llm.get_tokenizer().token(token)
    assert out.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs, strict=True))
    )


def test_logprob_of_an_unlikely_token_is_added(llm: LLM):
    token = 7
    out = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=1, logprobs=1, logit_bias={token: 100})
    )[0].outputs[0]
    assert out.token_ids == [token]
    assert len(out.logprobs[0]) == 2
    assert out.logprobs[0][token].rank > 1


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(llm: LLM, include: bool):
    """The stop string is taken from the middle of the text, so that it starts and ends inside
    tokens."""
    plain = (
        llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].text
    )
    stop = plain[21:28]
    params = SamplingParams(
        temperature=0, max_tokens=40, stop=["\x00never", stop], include_stop_str_in_output=include
    )
    deltas = list(llm.stream(PROMPTS[2], params))
    text = "".join(delta.text for delta in deltas)
    end = plain.index(stop)
    assert text == plain[: end + len(stop) * include]
    out = llm.generate(PROMPTS[2], params)[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (text, "stop", stop)
    assert len(out.token_ids) < 40


def test_stop_token_ids_and_ignore_eos(llm: LLM):
    tokens = (
        llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=20))[0]
        .outputs[0]
        .token_ids
    )
    stop = tokens[7]
    out = llm.generate(
        PROMPTS[2], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
    )[0].outputs[0]
    assert out.token_ids == tokens[: tokens.index(stop) + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    forced = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], min_tokens=15)
    later = llm.generate(PROMPTS[2], forced)[0].outputs[0]
    assert len(later.token_ids) >= 15
    assert stop not in later.token_ids[:15]


def test_min_tokens_holds_the_end_of_sequence_back(llm: LLM):
    eos = llm.defaults.eos_token_ids[0]
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=6, logit_bias={eos: 100})
    out = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert len(out.token_ids) == 7
    assert out.token_ids[-1] == eos
    assert (out.finish_reason, out.stop_reason) == ("stop", None)
    on = SamplingParams(temperature=0, max_tokens=12, logit_bias={eos: 100}, ignore_eos=True)
    assert llm.generate(PROMPTS[0], on)[0].outputs[0].token_ids == [eos] * 12


def test_stream_equals_generate_and_closing_it_frees_everything(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=16)
    texts = ["", "", ""]
    for delta in llm.stream(PROMPTS, params):
        texts[delta.index] += delta.text
    assert texts == [out.outputs[0].text for out in llm.generate(PROMPTS, params)]
    stream = llm.stream(PROMPTS, params)
    next(stream)
    stream.close()
    scheduler = llm.engine.scheduler.schedulers[0]
    assert not llm.engine.has_work
    assert scheduler.prefix.available == scheduler.allocator.capacity


def interrupted() -> Any:
    raise KeyboardInterrupt


def test_collections_while_it_generates_leave_out_what_was_there(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    """Scanning all of torch takes 0.1 s. What the caller drops is freed afterwards."""
    gc.unfreeze()  # what other tests did
    frozen: list[int] = []
    step = llm.engine.step

    def noted() -> Any:
        frozen.append(gc.get_freeze_count())
        return step()

    monkeypatch.setattr(llm.engine, "step", noted)
    llm.generate("Once", SamplingParams(max_tokens=3))
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0
    with pytest.raises(RequestError):
        llm.generate([1, -1])
    assert gc.get_freeze_count() == 0
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Once", SamplingParams(max_tokens=3))
    assert gc.get_freeze_count() == 0
    gc.freeze()  # the caller's own
    try:
        kept = gc.get_freeze_count()
        llm.generate("Once", SamplingParams(max_tokens=3))
        assert gc.get_freeze_count() >= kept - 100
    finally:
        gc.unfreeze()


def test_a_refused_prompt_takes_the_others_back(llm: LLM):
    with pytest.raises(RequestError, match="513 tokens"):
        llm.generate([[5] * 10, [5] * 513], SamplingParams(max_tokens=4))
    assert not llm.engine.has_work


NO_PROMPTS = [None, 3, 1.5, {}, {"prompt": None}, {"text": "ok"}, [1.5], [1, None], ["ok"], b"ok"]


@pytest.mark.parametrize("prompt", [*NO_PROMPTS, "\ud800"])
def test_what_is_no_prompt_is_refused_and_takes_the_others_back(llm: LLM, prompt: object):
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=r"not a prompt; accepted: text|not Unicode"):
            call(["ok", prompt], SamplingParams(max_tokens=4))
        assert not llm.engine.has_work


@pytest.mark.parametrize("prompts", [None, 3, b"ok", [1, None], {"text": "ok"}])
def test_prompts_that_are_none_at_all(llm: LLM, prompts: object):
    with pytest.raises(RequestError, match="is not a prompt; accepted: text, a list"):
        llm.generate(prompts, SamplingParams(max_tokens=4))


@pytest.mark.parametrize("token", [-1, 4096, 2**40, 2**63, -(2**70)])
def test_token_ids_must_be_in_the_vocabulary(llm: LLM, token: int):
    for place in range(3):
        ids = [0, 4095, 7]
        ids[place] = token
        with pytest.raises(RequestError, match=rf"holds token id {token}; accepted: 0 to 4095"):
            llm.generate(ids, SamplingParams(max_tokens=4))
        assert not llm.engine.has_work


def test_token_ids_of_numpy(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = [5, 6, 7]
    array = np.array(ids)
    forms = [ids, array, [array], np.array([ids]), {"prompt_token_ids": array}]
    outs = [llm.generate(form, params)[0] for form in forms]
    assert [out.prompt_token_ids for out in outs] == [ids] * len(forms)
    assert len({tuple(out.outputs[0].token_ids) for out in outs}) == 1


@pytest.mark.parametrize("params", [{"temperature": 0}, [None, None], "greedy", 3])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: object):
    with pytest.raises(RequestError, match=r"sampling.param"):
        llm.generate(["a", "b"], params)
    assert not llm.engine.has_work


def test_context_end_finishes_with_length(llm: LLM):
    out = llm.generate(
        [list(range(3, 3 + 500))], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )[0].outputs[0]
    assert len(out.token_ids) == 12
    assert out.finish_reason == "length"


def test_defaults_come_from_generation_config(llm: LLM):
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p) == (0.8, 0.95)


def test_every_end_of_sequence_id_of_generation_config_ends_a_request(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    path = folder / "generation_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 77], "do_sample": False})
    )
    llm = LLM(folder, dtype="float32", max_num_seqs=4, max_model_len=64)
    assert llm.get_default_sampling_params().greedy
    for eos in (1, 77):
        out = llm.generate(
            PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, logit_bias={eos: 100})
        )[0].outputs[0]
        assert (out.token_ids, out.finish_reason) == ([eos], "stop")


def ending_with(folder: Path, ids: list[int]) -> LLM:
    """The bundled model, of 4096 ids, where these end a sequence."""
    shutil.copytree(BUNDLED, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    llm = LLM(folder, dtype="float32", max_num_seqs=4, max_model_len=64)
    assert llm.defaults.eos_token_ids == tuple(ids)
    return llm


@pytest.mark.parametrize(("ids", "length"), [([4096, 1, -1], 7), ([4096, 10**6], 8)])
def test_end_of_sequence_ids_beyond_the_vocabulary_end_nothing(
    tmp_path: Path,
    ids: list[int],
    length: int,
):
    """With `min_tokens` every id that may end the request is held back, token by token."""
    llm = ending_with(tmp_path / "model", ids)
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=6, logit_bias={1: 100})
    assert len(llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids) == length


def test_structured_output_needs_an_end_of_sequence_id_in_the_vocabulary(tmp_path: Path):
    """Without one a grammar allows no token at all after its text."""
    pytest.importorskip("xgrammar")
    params = SamplingParams(temperature=0, structured=StructuredOutput("regex", "[ab]{3}"))
    out = ending_with(tmp_path / "some", [4096, 1]).generate(PROMPTS[0], params)[0].outputs[0]
    assert (len(out.text), out.finish_reason) == (3, "stop")
    llm = ending_with(tmp_path / "none", [4096])
    with pytest.raises(RequestError, match=r"ids 0 to 4095; .* \[4096\]"):
        llm.generate(PROMPTS[0], params)


def test_the_callers_stop_ids_must_be_in_the_vocabulary(llm: LLM):
    said = "^stop_token_ids=4096 .*accepted: 0 to 4095"
    with pytest.raises(RequestError, match=said):
        llm.generate(PROMPTS[0], SamplingParams(stop_token_ids=[5, 4096]))
    assert not llm.engine.has_work


def test_a_base_model_says_so(llm: LLM):
    with pytest.raises(RequestError, match="base model"):
        llm.chat([{"role": "user", "content": "Hello"}])


def test_without_a_tokenizer():
    llm = LLM(skip_tokenizer_init=True, dtype="float32", max_num_seqs=2, max_model_len=64)
    out = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3))[0]
    assert out.outputs[0].text == ""
    assert len(out.outputs[0].token_ids) == 3
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate("text", SamplingParams(max_tokens=3))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tensor_parallel_size": 3}, ConfigError, "tp=3"),
        ({"nonsense": 1}, ConfigError, "nonsense"),
        ({"dtype": "int4"}, ConfigError, "int4"),
        ({"max_model_len": 10**6}, ConfigError, "4096 positions"),
        ({"mla_decode": "CD"}, ConfigError, "different caches"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs=0"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 8},
            ConfigError,
            "max_num_batched_tokens=8",
        ),
        ({"kv_cache_bytes": 100}, CapacityError, "cache page"),
        ({"device": "tpu"}, ConfigError, "tpu"),
    ],
)
def test_bad_options_are_named(options: dict, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        LLM(**options)


def test_not_enough_memory_is_said_before_allocating(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "rorqual.platforms.cpu.CpuPlatform.available_memory", lambda self: 10 * 2**20
    )
    with pytest.raises(CapacityError, match="the weights need"):
        LLM()


def test_random_weights_by_vllms_name():
    llm = LLM(
        load_format="dummy", seed=3, dtype="float32", max_num_seqs=2, max_model_len=64, block_size=8
    )
    again = LLM(load_format="dummy", seed=3, dtype="float32", max_num_seqs=2, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=6)
    assert (
        llm.generate([4, 5], params)[0].outputs[0].token_ids
        == again.generate([4, 5], params)[0].outputs[0].token_ids
    )


@pytest.mark.exhaustive
@pytest.mark.longest
def test_many_requests_with_random_cancels_leave_every_page_free():
    """2,000 requests of random lengths through the real engine; a third are cancelled on the
    way."""
    import random

    from rorqual.request import Request

    chance = random.Random(1)
    sizes = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 96,
        "num_pages": 64,
    }
    engine = LLM(skip_tokenizer_init=True, dtype="float32", **sizes).engine
    waiting = [f"r{i}" for i in range(2000)]
    live: set[str] = set()
    while waiting or engine.has_work:
        while waiting and len(live) < 64:
            name = waiting.pop()
            prompt = tuple(chance.randrange(3, 4096) for _ in range(chance.randint(1, 40)))
            engine.add(
                Request(
                    name,
                    prompt,
                    SamplingParams(temperature=0, max_tokens=chance.randint(1, 6), ignore_eos=True),
                )
            )
            live.add(name)
        for out in engine.step():
            if out.finish is not None:
                live.discard(out.sequence.request.id)
        for name in chance.sample(sorted(live), min(len(live), chance.choice([0, 0, 1, 3]))):
            engine.abort(name)
            live.discard(name)
    scheduler = engine.scheduler.schedulers[0]
    assert scheduler.prefix.available == scheduler.allocator.capacity
    scheduler.prefix.clear()
    assert len(scheduler.allocator.free) == scheduler.allocator.capacity
    assert not any(scheduler.allocator.holders)
    assert len(scheduler.free_slots) == 32


def test_counts_of_drafts_stay_as_they_were_returned():
    """A step in flight when the request ended still counts its drafts, for the engine alone."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}
    llm = LLM(dtype="float32", num_speculative_tokens=2, steps_in_flight=2, **sizes)
    stop = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop[21:28]])
    out = llm.generate(PROMPTS[2], params)[0].outputs[0]
    assert out.finish_reason == "stop"
    assert llm.engine.in_flight
    before = (list(out.drafted), list(out.accepted))
    llm.generate(PROMPTS[0], params)
    assert sum(out.drafted) > 0
    assert (out.drafted, out.accepted) == before


def test_made_where_a_user_is_in_inference_mode() -> None:
    """Threads that read weights are in the mode of the one that made them."""
    params = SamplingParams(temperature=0, max_tokens=4)
    with torch.inference_mode():
        inside = LLM(num_pages=16).generate("It was", params)[0].outputs[0].token_ids
    assert inside == LLM(num_pages=16).generate("It was", params)[0].outputs[0].token_ids
