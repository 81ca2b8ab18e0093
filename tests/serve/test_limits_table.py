"""The table of limits in docs/serving.md has the code's numbers, and every number of the code is
there or is known to be no limit."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("fastapi") is None:
    pytest.skip("needs the extra `serve`", allow_module_level=True)

from pydantic import BaseModel

from rorqual import errors, request
from rorqual.config.option import options_of
from rorqual.engine import config as engine_config
from rorqual.engine.config import EngineConfig
from rorqual.platforms import cuda
from rorqual.platforms.cpu import CpuPlatform
from rorqual.platforms.cuda import CudaPlatform
from rorqual.serve import errors as serve_errors
from rorqual.serve import launch, limits
from rorqual.serve.config import ServeConfig
from rorqual.serve.engines import engine_metrics, pool
from rorqual.serve.engines.client import EngineClient
from rorqual.serve.http import (
    app,
    auth,
    clients,
    dashboard,
    history,
    protocol,
    request_builder,
    response,
    structured_output,
    unknown_fields,
)
from rorqual.serve.http.blocks import tagged
from rorqual.serve.http.resume import replay
from rorqual.serve.http.tracing import routes
from rorqual.serve.limits import ServerLimits
from rorqual.telemetry import limits as span_limits
from rorqual.text import chat_template, grammar_process
from rorqual.text.grammar_limits import GrammarLimits
from rorqual.text.schemas import enforced, forms, keywords, patterns

ROOT = Path(__file__).resolve().parent.parent.parent
SERVER = ServerLimits()
GRAMMAR = GrammarLimits()
UVICORN = launch._uvicorn(None, SERVER)


def most(model: type[BaseModel], field: str, key: str) -> list[Any]:
    """The bounds called `key` that a field's schema names, at any depth."""
    schema = model.model_json_schema()

    def search(part: Any) -> Iterator[Any]:
        if isinstance(part, dict):
            if key in part:
                yield part[key]
            if "$ref" in part:
                yield from search(schema["$defs"][part["$ref"].rsplit("/", 1)[1]])
            for inner in part.values():
                yield from search(inner)
        elif isinstance(part, list):
            for inner in part:
                yield from search(inner)

    return sorted(set(search(schema["properties"][field])))


COMPLETION = protocol.CompletionRequest


def ended_kept() -> int:
    """How many requests' times the API process keeps of an engine."""
    source = ast.parse(
        Path(str(importlib.import_module(EngineClient.__module__).__file__)).read_text()
    )
    (found,) = (
        word.value.value
        for call in ast.walk(source)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "deque"
        for word in call.keywords
        if word.arg == "maxlen" and isinstance(word.value, ast.Constant)
    )
    return int(found)


# the beginning of a row's first cell, and the numbers of its second
ROWS: dict[str, list[Any]] = {
    "body |": [SERVER.body],
    "pages copied to or from host memory": [
        CudaPlatform.host_step_bytes,
        CpuPlatform.host_step_bytes,
    ],
    "host memory of a rank": [engine_config.MAX_HOST_MEMORY * 2**30],
    "headers": [SERVER.headers],
    "time to send each request": [SERVER.patience],
    "time between requests": [UVICORN.timeout_keep_alive],
    "time a request may take": [SERVER.timeout],
    "sequences that run": [
        engine_config.DEFAULT_NUM_SEQS,
        engine_config.MOST_NUM_SEQS,
        cuda.LARGE_MEMORY,
    ],
    "sequences that wait": [SERVER.waiting],
    "sequences that one client": [SERVER.client_sequences],
    "tokens of one client's open": [SERVER.client_tokens],
    "n |": [SERVER.n],
    "completions of one request": [SERVER.choices],
    "max_tokens, min_tokens": [request.MAX_COUNT],
    "characters of a prompt, where": [],
    "log probabilities a token": [SERVER.logprobs],
    "log probabilities of a request's prompts": [SERVER.prompt_logprobs],
    "stop strings": [
        *most(COMPLETION, "stop", "maxItems"),
        *most(COMPLETION, "stop", "maxLength"),
    ],
    "messages of a chat": most(protocol.ChatRequest, "messages", "maxItems")[-1:],
    "tools": [SERVER.tools],
    "characters of a schema": [GRAMMAR.size],
    "nesting of a schema": [2 * structured_output.SCHEMA_DEPTH],
    "steps of rewriting a schema": [enforced.MOST_STEPS],
    "options of a `oneOf`": [enforced.MOST_OPTIONS],
    "`multipleOf`": [forms.MOST_VALUES, forms.LARGEST_MULTIPLE],
    "lengths and counts in a schema": [keywords.LONGEST],
    "groups of a schema's pattern": [patterns.DEEPEST],
    "choices of a list": most(COMPLETION, "guided_choice", "maxItems"),
    "characters of a regular": [GRAMMAR.regex],
    "compiling one": [GRAMMAR.seconds, GRAMMAR.memory_mib << 20, GRAMMAR.compiled],
    "first try at": [GRAMMAR.quick],
    "short try before the first one": [GRAMMAR.short],
    "grammars that wait for their first": [GRAMMAR.waiting],
    "grammars that wait for their second": [GRAMMAR.slow_waiting],
    "compiled grammars kept": [GRAMMAR.kept, GRAMMAR.kept_size],
    "compiled grammars of open": [GRAMMAR.in_use],
    "tokens kept for a slow reader": [SERVER.buffered],
    "socket buffer": [launch.SEND_BUFFER],
    "characters of a rendered": [chat_template.BIGGEST_PROMPT],
    "cache_salt": most(COMPLETION, "cache_salt", "maxLength"),
    "allowed_token_ids": [request.MAX_ALLOWED],
    "bad_words": [
        request.MAX_BAD_WORDS,
        *most(COMPLETION, "bad_words", "maxLength"),
        request.MAX_BAD_WORD_TOKENS,
    ],
    "kv_transfer_params": [request.MAX_TRANSFER, request.DEEPEST_TRANSFER],
    "host staging memory": [ServeConfig.kv_staging_mb << 20],
    "id of a continued stream": [
        *map(int, re.findall(r"1,(\d+)", str(protocol.Resume.model_fields["id"].metadata))),
        replay.LONG_ANSWER,
    ],
    "chat_template_kwargs": [
        chat_template.MAX_VARIABLES,
        chat_template.DEEPEST_VARIABLES,
        chat_template.MAX_NUMBER,
    ],
    "numbers that a chat template": [chat_template.MAX_RANGE_NUMBERS],
    "items of a list": [tagged.MAX_ITEMS],
    "digits of a key": [request_builder.MAX_DIGITS],
    "temperature, repetition": most(COMPLETION, "temperature", "maximum"),
    "priority": [-request.MAX_PRIORITY, request.MAX_PRIORITY],
    "unknown fields": [unknown_fields.MOST],
    "of these: named": [unknown_fields.LISTED, unknown_fields.LONGEST, unknown_fields.WARNED],
    "X-Request-Id": [limits.MAX_REQUEST_ID_LENGTH],
    "`user`": [clients.MAX_USER_LENGTH],
    "wrong API keys": [SERVER.wrong_keys],
    "addresses remembered": [limits.MAX_GUESSERS],
    "characters of a caller's text": [errors.ECHOED],
    "bytes logged of": [grammar_process.MAX_OUTPUT_BYTES],
    "body of a login": [dashboard.MAX_LOGIN_BYTES],
    "session of the dashboard": [dashboard.SESSION_SECONDS],
    "read of a refused body": [auth.DISCARDED, auth.DISCARD_SECONDS],
    "time to send a stream's last events": [response.GRACE],
    "connections that the kernel": [UVICORN.backlog],
    "open files": [launch.SPARE_FILES],
    "part of the queue": [clients.RESERVE],
    "live tokens counted": [pool.EXPECTED],
    "prefixes by which": [
        pool.AFFINITY_BLOCK,
        pool.AFFINITY_BLOCKS,
        pool.AFFINITY_KEPT,
        pool.SLACK,
    ],
    "characters tokenized": [request_builder.LONG_TEXT],
    "Retry-After": [app.MAX_RETRY_SECONDS, serve_errors.BUSY_SECONDS],
    "silence of an engine": [ServeConfig.stall],
    "restarts of an engine": [len(pool.BACKOFF), pool.CALM],
    "time that open requests have": [SERVER.drain],
    "time that a server without": [launch.RED_SECONDS],
    "history of the dashboard": [history.KEPT_SECONDS, history.LATENCY_SECONDS],
    "steps of a profile": [routes.MAX_STEPS, routes.DEFAULT_STEPS],
    "profiles in the folder": [routes.MAX_PROFILES],
    "characters of a profile's name": [routes.MAX_NAME_LENGTH],
    "time that /stop_profile waits": [routes.WRITE_SECONDS],
    "spans that wait": [
        span_limits.QUEUED,
        span_limits.MAX_VALUE_LENGTH,
        int(span_limits.FLUSH_SECONDS),
    ],
    "requests in recent": [ended_kept(), engine_metrics.MAX_ENDED],
}

# numbers that bound nobody: codes, rhythms, sizes of what is drawn, and what the text tells
NO_LIMITS = {
    "BACKOFF",
    "EXACT",  # of floating point
    "LARGEST",  # of integers
    "SCHEME_AND_HOST",  # of a URL
    "BODY_GRACE",  # told in the row of the time to send
    "GUESS_SECONDS",  # told in the row of the wrong keys
    "HEAD_START_SECONDS",  # told where the start is
    "IDLE_POLL_MS",
    "BLOCKED_POLL_MS",
    "KEPT_BATCHES",  # told where routers are
    "LARGE_BODIES",  # told below the table
    "LATENCY_EVERY",
    "LOWEST",
    "PERCENTILES",
    "POLL_MS",
    "RESERVED",  # of a published tokenizer
    "RATE_SECONDS",
    "ROW_SECONDS",
    "SAMPLE_SECONDS",
    "SHARE_SECONDS",
    "SHORTEST_REQUEST",  # of a protocol
    "TIMEOUT",  # of a word to a router
    "UNSENT",  # told where routers are
    "WAITING_BATCHES",  # told where routers are
    "SNAPSHOT_SECONDS",
    "STARTUP_FAILED",
    "STEP_FAILED",
    "TRIMS",  # told below the table
    "TRIM_SECONDS",
    "WATCH_SECONDS",
    "WINDOW",  # recent latencies
    "CHARS",
    "TOKENS",
    "TTFT",
    "PER_TOKEN",
    "LATENCY",
}


def table() -> dict[str, list[str]]:
    """Cells of each row by the first one."""
    text = (ROOT / "docs" / "serving.md").read_text()
    section = text[text.index("## Limits") : text.index("## What requests may say")]
    rows = [line for line in section.split("\n") if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return {f"{found[0]} |": found[1:] for found in cells}


UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "h": 3600}


def numbers(cell: str) -> list[float]:
    """What a cell says, in bytes and seconds; "no limit" is 0."""
    cell = cell.replace("2^31 - 1", str(2**31 - 1)).replace("no limit", "0")
    found = re.findall(r"(?<![\w.])(-?\d[\d,]*(?:\.\d+)?)(?: (Ki|Mi|Gi|h)(?:B|\b))?", cell)
    return [
        float(number.rstrip(",").replace(",", "")) * UNITS.get(unit, 1) for number, unit in found
    ]


def row_of(start: str) -> list[str]:
    found = [cells for name, cells in table().items() if name.startswith(start)]
    assert len(found) == 1, f"{start!r} begins {len(found)} rows of the table"
    return found[0]


@pytest.mark.parametrize("start", ROWS)
def test_a_row_has_the_codes_numbers(start: str) -> None:
    assert numbers(row_of(start)[0]) == ROWS[start]


def test_every_row_is_compared() -> None:
    assert [name for name in table() if not any(map(name.startswith, ROWS))] == []


def test_flags_are_those_of_the_options() -> None:
    named = {flag for cells in table().values() for flag in re.findall(r"--[\w-]+", cells[1])}
    options: dict[str, Any] = {}
    for cls in (ServerLimits, GrammarLimits, ServeConfig, EngineConfig):
        for name, option in options_of(cls).items():
            flags = option.flags or (f"--{name.replace('_', '-')}",)
            options |= dict.fromkeys(flags, (cls, name))
    assert named <= {*options}
    missing = {
        flag
        for flag, (cls, _) in options.items()
        if cls in (ServerLimits, GrammarLimits) and flag not in named
    }
    assert missing == {"--unknown-fields"}, "it is no number"


NUMBERS = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple)


def constants(tree: ast.Module) -> Iterator[str]:
    """Names in capitals whose value is a number, or several."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        name = getattr(targets[0], "id", "")
        if not name.isupper() or not isinstance(value, NUMBERS):
            continue
        if any(
            isinstance(part, ast.Constant) and type(part.value) in (int, float)
            for part in ast.walk(value)
        ):
            yield name


def test_every_number_of_the_code_is_in_the_table() -> None:
    """A new one is told in docs/serving.md and compared in ROWS, or it is in NO_LIMITS."""
    compared = Path(__file__).read_text()
    found = {
        name
        for folder in ("serve", "text")
        for path in (ROOT / "rorqual" / folder).rglob("*.py")
        for name in constants(ast.parse(path.read_text()))
    }
    assert len(found) > 40
    left = {name for name in found if not re.search(rf"\w\.{name}\b", compared)} - NO_LIMITS
    assert left == set()
    assert found >= NO_LIMITS, "no such number any more"
    fields = {
        item.name for cls in (ServerLimits, GrammarLimits) for item in dataclasses.fields(cls)
    }
    untold = {name for name in fields if not re.search(rf"(SERVER|GRAMMAR)\.{name}\b", compared)}
    assert untold == {"unknown_fields", "grammar"}


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("4 MiB", [4 << 20]),
        ("10 s, 1 GiB, 64 MiB", [10, 1 << 30, 64 << 20]),
        ("2^31 - 1", [2**31 - 1]),
        ("64 each, 1,024 characters a string", [64, 1024]),
        ("no limit", [0]),
        ("-100 to 100", [-100, 100]),
        ("12 h", [12 * 3600]),
        ("16 Mi", [16 << 20]),
        ("0.5 s", [0.5]),
    ],
)
def test_cells_are_read(cell: str, found: list[float]) -> None:
    assert numbers(cell) == found
