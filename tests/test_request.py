"""What a caller may ask for: every bad value is refused with its name, the value and what is
accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rorqual.errors import RequestError, RorqualError
from rorqual.request import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP,
    CompletionOutput,
    Request,
    SamplingParams,
    StructuredOutput,
)

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 101),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", "all"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", None),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("presence_penalty", 2.1),
    ("presence_penalty", float("-inf")),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 101),
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("seed", 2**63),
    ("seed", 1.5),
    ("seed", "one"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", "many"),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("min_tokens", 1.0),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 3]),
    ("stop", 5),
    ("stop", [str(i) for i in range(MAX_STOP + 1)]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["2"]),
    ("stop_token_ids", 2),
    ("stop_token_ids", list(range(MAX_STOP + 1))),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("logprobs", 1.5),
    ("logprobs", "5"),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"7": 1.0}),
    ("logit_bias", {7: 101}),
    ("logit_bias", {7: float("nan")}),
    ("logit_bias", {7: "up"}),
    ("logit_bias", [7]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", ["7"]),
    ("allowed_token_ids", 7),
    ("allowed_token_ids", [0] * (MAX_ALLOWED + 1)),
    ("bad_words", "word"),
    ("bad_words", [" "]),
    ("bad_words", [7]),
    ("bad_words", [str(i) for i in range(MAX_BAD_WORDS + 1)]),
    ("bad_word_ids", 7),
    ("bad_word_ids", [7]),
    ("bad_word_ids", [[]]),
    ("bad_word_ids", [[-1]]),
    ("bad_word_ids", [[1] * (MAX_BAD_WORD_TOKENS + 1)]),
    ("bad_word_ids", [[1]] * (2 * MAX_BAD_WORDS + 1)),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 1.5),
    ("structured", "json_object"),
    ("structured", {"type": "object"}),
    ("structured", StructuredOutput),
]


@pytest.mark.parametrize(
    ("name", "value"), BAD, ids=[f"{name}={str(value)[:20]}" for name, value in BAD]
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}"):
        SamplingParams(**{name: value})


GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 100, "top_p": 1, "top_k": -1, "min_p": 1},
    {"top_p": 1e-9},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 100},
    {"n": 128, "seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"max_tokens": 1, "min_tokens": 1},
    {"max_tokens": None, "min_tokens": 10**6},
    {"logprobs": 0},
    {"logprobs": MAX_LOGPROBS},
    {"logit_bias": {0: -100, 10**6: 100.0}},
    {"stop": None, "stop_token_ids": None, "logit_bias": None},
]


@pytest.mark.parametrize("params", GOOD, ids=str)
def test_the_ends_of_every_range_are_accepted(params: dict[str, Any]) -> None:
    SamplingParams(**params)


def test_values_are_brought_into_one_form() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], top_k=-1, logit_bias={3: 1})
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.top_k == 0
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert replace(params, n=1) == params, "a changed copy passes the checks again"


def test_several_greedy_samples_are_refused() -> None:
    with pytest.raises(RequestError, match="n=2"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(stop=["a"], detokenize=False)


@pytest.mark.parametrize(
    ("params", "greedy", "filters", "edits"),
    [
        ({}, False, False, False),
        ({"temperature": 0, "top_k": 4}, True, False, False),
        ({"top_k": 4}, False, True, False),
        ({"top_p": 0.9}, False, True, False),
        ({"min_p": 0.1}, False, True, False),
        ({"presence_penalty": -0.1}, False, False, True),
        ({"frequency_penalty": 0.1}, False, False, True),
        ({"repetition_penalty": 1.1}, False, False, True),
        ({"logit_bias": {1: 1.0}}, False, False, True),
        ({"min_tokens": 1}, False, False, True),
    ],
)
def test_which_variant_of_the_sampler_is_needed(
    params: dict[str, Any], greedy: bool, filters: bool, edits: bool
) -> None:
    found = SamplingParams(**params)
    assert (found.greedy, found.filters, found.edits_logits) == (greedy, filters, edits)


def test_stop_ids_join_the_callers_and_the_models() -> None:
    params = SamplingParams(stop_token_ids=[5])
    assert Request("r", (1,), params, (7, 8)).stop_ids == {5, 7, 8}
    assert Request("r", (1,), replace(params, ignore_eos=True), (7, 8)).stop_ids == {5}


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [("ignore_eos", True, "False"), ("min_tokens", 1, "0")],
)
def test_what_keeps_structured_output_from_ending_is_refused(
    name: str,
    value: Any,
    accepted: str,
) -> None:
    """The grammar allows nothing but the end once its text is complete."""
    structured = StructuredOutput("regex", "[ab]+")
    said = f"^{name}={value} is out of range; accepted: {accepted} with structured output"
    with pytest.raises(RequestError, match=said):
        SamplingParams(structured=structured, **{name: value})
    with pytest.raises(RequestError, match=said):
        replace(SamplingParams(**{name: value}), structured=structured)
    plain = SamplingParams(structured=structured, ignore_eos=False, min_tokens=0)
    assert plain.structured == structured


@pytest.mark.parametrize("value", [{"type": "object"}, b"[ab]+", 5, None])
def test_a_structure_is_text(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^value=.* is out of range; accepted: text"):
        StructuredOutput("regex", value)


def test_data_cannot_be_changed_behind_the_engines_back() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = 0.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Request("r", (1,), params).prompt = ()  # type: ignore[misc]
    bias = {1: 1.0}
    held = SamplingParams(logit_bias=bias)
    bias[2] = 1000.0
    assert held.logit_bias == {1: 1.0}


def test_an_output_is_finished_when_it_has_a_reason() -> None:
    assert not CompletionOutput(0, "", []).finished
    assert CompletionOutput(0, "", [], finish_reason="stop").finished


def test_every_error_is_one_users_can_catch() -> None:
    assert issubclass(RequestError, RorqualError)
