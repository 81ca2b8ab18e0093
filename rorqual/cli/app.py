"""The command line. Without MODEL the bundled checkpoint is used."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from rorqual import __version__
from rorqual.cli import bench
from rorqual.cli.eplb import eplb
from rorqual.cli.experts import experts
from rorqual.cli.options import (
    Flags,
    Given,
    Model,
    Recipe,
    Settings,
    TokenizerName,
    load,
    with_options,
)
from rorqual.cli.plan import plan
from rorqual.cli.route import route
from rorqual.cli.serve import serve
from rorqual.cli.simulate import simulate
from rorqual.config.option import options_of
from rorqual.engine.config import EngineConfig
from rorqual.request import SamplingParams

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)
app.add_typer(bench.app, name="bench")
app.command()(serve)
app.command()(experts)
app.command()(route)
app.command()(plan)
app.command()(simulate)
app.command()(eplb)

DEMO_PROMPT = "My dear Elizabeth,"

# enough for one conversation or text
FEW = {"max_num_seqs": 8}
ENGINE = Flags(EngineConfig, defaults=FEW)
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "stop", "seed")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def _sampling(max_tokens: int) -> Flags:
    """max_tokens: the default. Other defaults are the model's."""
    defaults = dict.fromkeys((*SAMPLED, *PENALTIES), "the model's")
    return Flags(
        SamplingParams,
        only=("max_tokens", *defaults),
        defaults={**defaults, "max_tokens": max_tokens, "seed": None, "stop": None},
    )


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command()
@with_options(sampling=_sampling(128), engine=ENGINE)
def generate(
    sampling: Given,
    engine: Given,
    model: Model = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Text to continue; '-' reads standard input."),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print the text alone, without the line of figures."),
    ] = False,
    tokenizer: TokenizerName = None,
    config: Recipe = None,
    settings: Settings = None,
) -> None:
    """Continue a prompt, streaming."""
    start = time.perf_counter()
    llm = load(model, config, settings, engine, FEW, tokenizer=tokenizer)
    text = _read_input() if prompt == "-" else DEMO_PROMPT if prompt is None else prompt
    params = llm.defaults.params(**{"max_tokens": 128, **sampling})
    loaded = time.perf_counter()
    deltas = llm.stream(text, params)
    print(text, end="", flush=True)
    count, first = _print_stream(deltas)
    done = time.perf_counter()
    if not quiet and count > 1:
        rate = (count - 1) / (done - first)
        times = f"loaded in {loaded - start:.2f} s, first token after {first - loaded:.3f} s"
        drafts = llm.engine.config.num_speculative_tokens
        steps = f", {count / llm.engine.stats.steps:.2f} a step" if drafts else ""
        print(f"[{times}, {count} tokens, {rate:.0f} tokens/s{steps}]", file=sys.stderr)


def _read_input() -> str:
    """All of standard input; nothing where it is closed."""
    return "" if sys.stdin is None else sys.stdin.read()


def _print_stream(deltas: Any) -> tuple[int, float]:
    """Print text as it is generated; returns the number of tokens and the time of the first."""
    count = 0
    first = time.perf_counter()
    for delta in deltas:
        if not count:
            first = time.perf_counter()
        count += len(delta.token_ids)
        print(delta.text, end="", flush=True)
    print()
    return count, first


@app.command()
@with_options(sampling=_sampling(512), engine=ENGINE)
def chat(
    sampling: Given,
    engine: Given,
    model: Model = None,
    url: Annotated[
        str | None,
        typer.Option(help="Talk with a server of the OpenAI API instead of loading a model."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RORQUAL_API_KEY", help="The server's key.")
    ] = None,
    tokenizer: TokenizerName = None,
    config: Recipe = None,
    settings: Settings = None,
) -> None:
    """Talk with a model, line by line; an empty line or Ctrl-D ends. A base model continues the
    conversation as plain text."""
    sampling = {"max_tokens": 512, **sampling}
    if url is not None:
        _chat_with_server(url, api_key, {**sampling, "model": model})
        return
    llm = load(model, config, settings, engine, FEW, tokenizer=tokenizer)
    params = llm.defaults.params(**sampling)
    base = llm.get_tokenizer().template is None
    if base:
        print(
            "This is a base model: it has no chat template and continues text rather than "
            "answering.",
            file=sys.stderr,
        )
    messages: list[dict[str, str]] = []
    while line := _read_line():
        messages.append({"role": "user", "content": line})
        prompt = line if base else llm.get_tokenizer().apply_chat_template(messages)
        answer = "".join(_echo(delta.text) for delta in llm.stream(prompt, params))
        print()
        messages.append({"role": "assistant", "content": answer})


def _chat_with_server(url: str, key: str | None, settings: dict[str, Any]) -> None:
    from rorqual.cli.remote import answer, served_model

    settings = {name: value for name, value in settings.items() if value is not None}
    settings.setdefault("model", served_model(url, key))
    messages: list[dict[str, str]] = []
    while line := _read_line():
        messages.append({"role": "user", "content": line})
        text = "".join(
            _echo(piece) for piece in answer(url, {**settings, "messages": messages}, key)
        )
        print()
        messages.append({"role": "assistant", "content": text})


def _read_line() -> str:
    if sys.stdin is None:  # closed, for which input() raises RuntimeError
        return ""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _echo(text: str) -> str:
    print(text, end="", flush=True)
    return text


@app.command()
def info(
    model: Model = None,
    memory: Annotated[
        float | None,
        typer.Option(help="Device memory in GiB to plan for; common GPUs if left out."),
    ] = None,
    kv_host_memory: Annotated[
        float | None,
        typer.Option(help="Host memory of a rank in GiB: the tokens of evicted prefixes it holds."),
    ] = None,
    ignore_config_field: Annotated[
        list[str] | None, typer.Option(help=options_of(EngineConfig)["ignore_config_fields"].help)
    ] = None,
) -> None:
    """Parameters, bytes, cache per token, and what fits in how much memory."""
    from rorqual.bench.info import info as show

    show(model, memory, tuple(ignore_config_field or ()), host_gib=kv_host_memory)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Folder or id of a bf16 checkpoint.")],
    out: Annotated[str, typer.Argument(help="A new folder.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="w4a16, w8a8, fp8 (blocks of 128x128), w4a8 or w4afp8 (w4a16's weights, rows in "
            "int8 or fp8).",
        ),
    ],
    group: Annotated[
        int | None,
        typer.Option(help="Columns that share a scale in four bits: 128 (if left out), 64, 32."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="A text like those the model will see: matrices are rounded for the rows that it "
            "brings them. The model must fit in memory."
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(help="A text whose perplexity is measured before and after."),
    ] = None,
) -> None:
    """Write a checkpoint in eight or four bits (compressed-tensors)."""
    from rich.console import Console

    from rorqual.bench.quantize.run import quantize as run
    from rorqual.bench.quantize.run import report

    done = run(model, out, form, group, calibration, evaluate)
    report(done, Console())
