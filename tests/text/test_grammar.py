"""Matchers over the bundled vocabulary: what they allow, that they can be taken back, and that
nothing hostile gets through."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch

pytest.importorskip("xgrammar")

from rorqual.engine.execution.grammar import mask_words
from rorqual.errors import BusyError, RequestError
from rorqual.models.hub import BUNDLED
from rorqual.request import StructuredOutput
from rorqual.serve.http.structured_output import after_thinking, tag
from rorqual.text.grammar import XGrammars
from rorqual.text.grammar_limits import GrammarLimits
from rorqual.text.schemas.enforced import enforced
from rorqual.text.tokenizer import Tokenizer
from rorqual.text.tool_calls import FORMATS

VOCAB = 4096
EOS = 1


@pytest.fixture(scope="module")
def grammars() -> Iterator[XGrammars]:
    limits = GrammarLimits(seconds=2.0, regex=512, size=10_000, kept=4)
    made = XGrammars.make(BUNDLED, VOCAB, (EOS,), limits)
    assert made is not None
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED)


def allowed(matcher: object, rows: int = 3) -> set[int]:
    mask = torch.zeros(rows, mask_words(VOCAB), dtype=torch.int32)
    matcher.fill(mask, rows - 1)  # type: ignore[attr-defined]
    assert not mask[: rows - 1].any(), "only its own row"
    words = mask[rows - 1].tolist()
    return {32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


CASES = [
    (StructuredOutput("regex", "[a-c]+x"), "abcax", "abd"),
    (
        StructuredOutput("choice", json.dumps(["yes", "yesterday", 'a "quoted" one'])),
        "yesterday",
        "yet",
    ),
    (StructuredOutput("json_object"), '{"a": [1, {"b": null}]}', "[1]"),
    (
        StructuredOutput(
            "json_schema",
            json.dumps(
                {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
            ),
        ),
        '{"n": -12}',
        '{"n": 1.5',
    ),
    (StructuredOutput("grammar", 'root ::= "a" root | "b"'), "aaab", "ac"),
    (
        StructuredOutput(
            "structural_tag",
            json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "sequence",
                        "elements": [
                            {
                                "type": "tag",
                                "begin": "",
                                "content": {"type": "any_text"},
                                "end": "</think>",
                            },
                            {"type": "regex", "pattern": "[0-9]+"},
                        ],
                    },
                }
            ),
        ),
        "well, let me see</think>42",
        "well</think>x",
    ),
]


@pytest.mark.parametrize(("structure", "good", "bad"), CASES, ids=[case[0].kind for case in CASES])
def test_accepts_what_matches_and_nothing_else(
    grammars: XGrammars, tokenizer: Tokenizer, structure: StructuredOutput, good: str, bad: str
):
    matcher = grammars.matcher(structure)
    for token in ids(tokenizer, good):
        assert token in allowed(matcher)
        assert matcher.accept(token)
    assert EOS in allowed(matcher)
    assert not matcher.done
    assert matcher.accept(EOS)
    assert matcher.done
    assert not matcher.accept(EOS)
    other = grammars.matcher(structure)
    assert not all(other.accept(token) for token in ids(tokenizer, bad))


@pytest.mark.parametrize(("structure", "good", "bad"), CASES, ids=[case[0].kind for case in CASES])
def test_rollback_restores_every_mask(
    grammars: XGrammars, tokenizer: Tokenizer, structure: StructuredOutput, good: str, bad: str
):
    matcher = grammars.matcher(structure)
    masks = []
    tokens = [*ids(tokenizer, good), EOS]
    for token in tokens:
        masks.append(allowed(matcher))
        assert matcher.accept(token)
    for back in range(len(tokens), 0, -1):
        matcher.rollback(back)
        assert allowed(matcher) == masks[-back]
        assert not matcher.done
        assert all(matcher.accept(token) for token in tokens[-back:])


def test_a_refused_token_moves_nothing(grammars: XGrammars, tokenizer: Tokenizer):
    matcher = grammars.matcher(StructuredOutput("regex", "[a-c]+x"))
    before = allowed(matcher)
    assert not matcher.accept(ids(tokenizer, "z")[0])
    assert allowed(matcher) == before


def test_special_tokens_are_never_allowed(grammars: XGrammars, tokenizer: Tokenizer):
    matcher = grammars.matcher(StructuredOutput("regex", "(.|\n)*"))
    found = allowed(matcher)
    assert len(found) > 3000
    assert found & tokenizer.special_ids <= {EOS}


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (StructuredOutput("regex", "[a"), "cannot be compiled"),
        (StructuredOutput("regex", "a" * 600), "at most 512"),
        (StructuredOutput("json_schema", "{"), "cannot be compiled"),
        (StructuredOutput("json_schema", '{"$ref": "#"}'), "no text"),
        (StructuredOutput("grammar", "root ::= root"), "cannot be compiled"),
        (StructuredOutput("grammar", "x" * 10_001), "at most 10000"),
        (StructuredOutput("structural_tag", "{}"), "cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    grammars: XGrammars, structure: StructuredOutput, words: str
):
    with pytest.raises(RequestError, match=words):
        grammars.matcher(structure)


def test_memory_and_time_are_bounded_and_the_process_survives(
    grammars: XGrammars, monkeypatch: pytest.MonkeyPatch
):
    """A grammar of exponential size; then an innocent one, from the same process."""
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1} r{i + 1} r{i + 1} | [a-z]\n" for i in range(12))
    start = time.monotonic()
    with pytest.raises(RequestError, match="more than 2 s"):
        grammars.matcher(
            StructuredOutput("grammar", "root ::= r0\n" + rules + 'r12 ::= "x"{0,3000}')
        )
    assert time.monotonic() - start < 60  # of which 2 s computing
    assert grammars.first.helper is not None
    before = grammars.first.helper.child.pid
    assert grammars.matcher(StructuredOutput("regex", "a+"))
    assert grammars.first.helper.child.pid == before


def test_a_killed_helper_is_an_error_and_comes_back(grammars: XGrammars):
    grammars.matcher(StructuredOutput("regex", "first"))
    assert grammars.first.helper is not None
    grammars.first.helper.child.kill()
    grammars.first.helper.child.wait()
    with pytest.raises(RequestError, match="could not be compiled"):
        grammars.matcher(StructuredOutput("regex", "second"))
    assert grammars.matcher(StructuredOutput("regex", "third"))


def test_prepare_brings_it_in_beside_the_caller(grammars: XGrammars):
    structure = StructuredOutput("regex", "prepared[0-9]")
    done = threading.Event()
    errors: list[Exception | None] = []
    assert not grammars.ready(structure)
    grammars.prepare(structure, lambda error: (errors.append(error), done.set()))  # type: ignore[func-returns-value]
    assert done.wait(30)
    assert errors == [None]
    assert grammars.ready(structure)


def test_only_so_many_are_kept_and_those_in_use_stay(grammars: XGrammars):
    first = StructuredOutput("regex", "kept")
    grammars.matcher(first)
    held = grammars.hold(first)
    for i in range(8):
        grammars.matcher(StructuredOutput("regex", f"other{i}"))
    assert len(grammars.compiled) == 4
    assert not grammars.ready(first)
    assert grammars.hold(first) is held, "a live request's grammar needs no compiling"


class Compiled:
    """As large as its structure says."""


def sized(monkeypatch: pytest.MonkeyPatch, **limits: int) -> XGrammars:
    made = XGrammars.make(BUNDLED, VOCAB, (EOS,), GrammarLimits(**limits))
    assert made is not None
    monkeypatch.setattr(made, "_compile", lambda it, *_: (Compiled(), int(it.value)))
    return made


def find(grammars: XGrammars, size: int) -> StructuredOutput:
    structure = StructuredOutput("regex", str(size))
    grammars._find(structure, grammars.first, 1.0)
    return structure


def test_what_is_kept_is_so_large_at_most(monkeypatch: pytest.MonkeyPatch):
    """64 MiB each, 128 of them would be some 26 GiB in memory."""
    grammars = sized(monkeypatch, kept_size=100)
    for size in (10, 20, 60, 40, 99):
        find(grammars, size)
        assert sum(grammars.sizes[it] for it in grammars.compiled) <= 100
    assert [it.value for it in grammars.compiled] == ["99"], "the newest stays"
    find(grammars, 1)
    assert [it.value for it in grammars.compiled] == ["99", "1"]


def test_what_open_requests_hold_is_so_large_at_most(monkeypatch: pytest.MonkeyPatch):
    grammars = sized(monkeypatch, kept_size=100, in_use=200)
    held = [grammars.hold(find(grammars, size)) for size in (90, 91, 92)]
    with pytest.raises(BusyError, match="take 181 characters and this one 93, of 200"):
        find(grammars, 93)
    assert grammars.hold(find(grammars, 5)), "a small one has room"
    held.clear()
    find(grammars, 93)
    assert sum(grammars.sizes.values()) <= 100 + 93


def test_a_job_keeps_what_it_found_until_whoever_waits_has_it(monkeypatch: pytest.MonkeyPatch):
    """Else another large one could drop it, and the engine's thread would compile it again."""
    grammars = sized(monkeypatch, kept_size=100)
    structure = StructuredOutput("regex", "80")
    heard: SimpleQueue[Any] = SimpleQueue()

    def done(error: Exception | None) -> None:
        find(grammars, 90)
        heard.put(grammars.hold(structure))

    grammars.prepare(structure, done)
    assert isinstance(heard.get(timeout=60), Compiled)
    assert [it.value for it in grammars.compiled] == ["90"]
    grammars.close()


FOREIGN = ["http://example.org/a.json\nrorqual: \x1b[31mforged", "#anchor", "other.json#/a", ""]
AROUND = [
    lambda ref: ref,
    lambda ref: {"type": "object", "properties": {"default": ref}},
    lambda ref: {"type": "array", "items": {"anyOf": [{"type": "null"}, ref]}},
    lambda ref: {"$defs": {"enum": ref}, "$ref": "#/$defs/enum"},
]


@pytest.mark.parametrize("pattern", ["^(?=.*[0-9])[a-z0-9]{6}$", "(?!x)a", "a(?<=a)b", "b(?<!a)c"])
def test_lookarounds_are_refused(grammars: XGrammars, pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    named = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    given = [("regex", pattern)]
    given += [("json_schema", json.dumps(schema)), ("json_schema", json.dumps(named))]
    given.append(("structural_tag", json.dumps(tag)))
    for kind, value in given:
        with pytest.raises(RequestError, match="without lookahead and lookbehind"):
            grammars.matcher(StructuredOutput(kind, value))


@pytest.mark.parametrize("pattern", [r"\(?=a", "[(?=]+", "[]](?:a|b)", "[^](?=]x", "(?:ab)+"])
def test_what_only_looks_like_a_lookaround(pattern: str) -> None:
    enforced(StructuredOutput("regex", pattern))
    enforced(StructuredOutput("json_schema", json.dumps({"const": {"pattern": "(?=a)"}})))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("ref", FOREIGN)
def test_a_reference_that_is_not_followed_is_refused(grammars: XGrammars, ref: str, around: Any):
    schema = around({"$ref": ref})
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for kind, value in (("json_schema", schema), ("structural_tag", tag)):
        with pytest.raises(RequestError, match="accepted as \\$ref") as found:
            grammars.matcher(StructuredOutput(kind, json.dumps(value)))
        assert str(found.value).isprintable()


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"$ref": {"type": "integer"}}, "required": ["$ref"]},
        {"enum": [{"$ref": "http://example.org"}]},
        {"type": "object", "properties": {"a": {"const": {"$ref": "x"}, "default": {"$ref": "x"}}}},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    ],
)
def test_other_references_and_what_only_looks_like_one(grammars: XGrammars, schema: Any):
    assert grammars.matcher(StructuredOutput("json_schema", json.dumps(schema)))


def test_the_schema_that_cannot_be_compiled_is_named(grammars: XGrammars):
    """One of several in a structure."""
    schemas = [{"type": "object"}, {"type": "integer", "minimum": 10**30}]
    tools = [{"function": {"name": "f", "parameters": schema}} for schema in schemas]
    form = FORMATS["hermes"].forced(tools, several=True, numbers=[2, 5])
    with pytest.raises(RequestError) as found:
        grammars.matcher(tag(form))
    start = "tools.5.function.parameters: the schema cannot be compiled: "
    assert str(found.value).startswith(start)


@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_is_called_without_arguments(
    grammars: XGrammars, tokenizer: Tokenizer, more: dict[str, Any]
):
    found = FORMATS["hermes"]
    calls = tag(found.forced([{"function": {"name": "f", **more}}], several=False))
    begin = found.begin.format(name="f")
    for text, fits in (("{}", True), ('{"a": 1}', False)):
        matcher = grammars.matcher(calls)
        tokens = (*ids(tokenizer, begin + text + found.end), EOS)
        assert all(matcher.accept(token) for token in tokens) is fits


@pytest.mark.parametrize("name", ["f", "title"])
def test_what_is_compiled_is_what_can_be_enforced(
    grammars: XGrammars, tokenizer: Tokenizer, name: str
):
    """Also in forced calls, and with an anyOf beside other keywords."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"}},
        "anyOf": [{"required": [name]}],
        "additionalProperties": False,
    }
    found = FORMATS["hermes"]
    form = found.forced([{"function": {"name": "f", "parameters": schema}}], several=False)
    begin = found.begin.format(name="f")
    calls = tag(form)
    plain = StructuredOutput("json_schema", json.dumps(schema))
    for structure, before, after in ((calls, begin, found.end), (plain, "", "")):
        for text, fits in ((f'{{"{name}": true}}', True), ("1", False), ("{}", False)):
            matcher = grammars.matcher(structure)
            tokens = (*ids(tokenizer, before + text + after), EOS)
            assert all(matcher.accept(token) for token in tokens) is fits


@pytest.mark.longest
@pytest.mark.exhaustive
def test_what_the_compiler_prints_is_logged_on_one_line(capfd: pytest.CaptureFixture[str]):
    """xgrammar warns of a name that a schema gives, and writes it as it came."""
    code = (
        "import logging, sys\n"
        "from pathlib import Path\n"
        "from rorqual.config.log import log_to_stderr\n"
        "from rorqual.models.hub import BUNDLED\n"
        "from rorqual.text.grammar import tokenizer_info\n"
        "from rorqual.text.grammar_limits import GrammarLimits\n"
        "from rorqual.text.grammar_process import limited\n"
        "log_to_stderr('rorqual grammar: %(message)s', logging.WARNING)\n"
        f"info = tokenizer_info(Path(BUNDLED), {VOCAB}, ({EOS},))\n"
        "limited(info, 'json_schema', sys.stdin.read(), GrammarLimits())\n"
    )
    for ref in ("a\nrorqual: \x1b[31mforged", "a\n" * 100_000):
        text = json.dumps({"$ref": ref})
        subprocess.run([sys.executable, "-c", code], input=text, text=True, check=True)
        out, err = capfd.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert line.isprintable()
        assert line.startswith("rorqual grammar: ")
        assert r"a\nrorqual: \x1b[31mforged" in line or len(line) < 5000


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_forced_calls_are_what_a_model_was_taught(
    grammars: XGrammars, tokenizer: Tokenizer, name: str, thinking: bool
):
    """Calls as the family's chat template writes them are allowed, one where one was named and
    several where one of all was required; other functions, other arguments and text are not."""
    found = FORMATS[name]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"function": {"name": f, "parameters": schema}} for f in ("f", "g.h")]

    def written(*functions: str, a: str = "1") -> str:
        calls = []
        for i, function in enumerate(functions):
            number = str(i) + found.index if found.index else ""
            calls.append(f'{found.begin.format(name=function)}{number}{{"a": {a}}}{found.end}')
        return found.before + found.separator.join(calls) + found.after

    def ends(form: dict[str, Any], text: str) -> bool:
        structure = tag(after_thinking(form) if thinking else form)
        matcher = grammars.matcher(structure)
        said = ("hm</think>" if thinking else "") + text
        return all(matcher.accept(token) for token in (*ids(tokenizer, said), EOS))

    named = found.forced(tools[1:], several=False)
    assert ends(named, written("g.h"))
    assert not ends(named, written("g.h", "g.h"))
    assert not ends(named, written("f"))
    required = found.forced(tools, several=True)
    assert ends(required, written("f", "g.h", "f"))
    assert not ends(required, written("f", a='"x"'))
    assert not ends(required, "Let me see. " + written("f"))
    assert not ends(required, found.before + found.after)
