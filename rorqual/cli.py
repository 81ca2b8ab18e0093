"""The command line: generate | chat | info | bench layers | bench offline. Without MODEL the bundled checkpoint is used."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual import __version__
from rorqual.errors import RorqualError
from rorqual.request import SamplingParams

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Measure the engine and its parts.")
app.add_typer(bench, name="bench")

DEMO_PROMPT = "My dear Elizabeth,"

Model = Annotated[str | None, typer.Argument(help="A folder or a Hugging Face id; the bundled checkpoint if left out.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Weights = Annotated[str, typer.Option(help="checkpoint, or random: a config.json is enough.")]
Length = Annotated[int | None, typer.Option(help="Longest sequence, prompt and output together.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
Prefill = Annotated[str, typer.Option("--mla-prefill", help="MLA form for prompts: CD, CC, A_CC, A_CC_ME or AM_CC_ME.")]
Decode = Annotated[str, typer.Option("--mla-decode", help="MLA form for decode steps.")]
Ignored = Annotated[list[str] | None, typer.Option("--ignore-config-field", help="A config.json field to disregard; may be repeated.")]
Mode = Annotated[str, typer.Option("--exe-mode", help="auto, eager or graph (also acl_graph, reduce-overhead).")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


def main() -> None:
    """Entry point: a user's mistake becomes one sentence and exit status 2, an interruption 130."""
    logging.basicConfig(level=logging.WARNING, format="rorqual: %(message)s")
    try:
        app()
    except RorqualError as error:
        print(f"rorqual: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _llm(model: str | None, **options: Any) -> Any:
    from rorqual.serve.llm import LLM

    given = {name: value for name, value in options.items() if value is not None}
    given["ignore_config_fields"] = tuple(given.get("ignore_config_fields", ()))
    return LLM(model, **given)


def _params(llm: Any, **given: Any) -> SamplingParams:
    return llm.defaults.params(**given)


@app.command()
def generate(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue; '-' reads standard input.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the model's default if left out.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the text alone, without the line of figures.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    weights: Weights = "checkpoint",
    max_model_len: Length = None,
    threads: Threads = None,
    mla_prefill: Prefill = "CC",
    mla_decode: Decode = "A_CC_ME",
    ignore_config_field: Ignored = None,
) -> None:
    """Continue a prompt, streaming."""
    start = time.perf_counter()
    common = {"dtype": dtype, "device": device, "weights": weights, "max_model_len": max_model_len, "threads": threads}
    forms = {"mla_prefill": mla_prefill, "mla_decode": mla_decode, "ignore_config_fields": ignore_config_field or ()}
    llm = _llm(model, max_num_seqs=8, **common, **forms)
    text = sys.stdin.read() if prompt == "-" else DEMO_PROMPT if prompt is None else prompt
    params = _params(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop)
    loaded = time.perf_counter()
    deltas = llm.stream(text, params)
    print(text, end="", flush=True)
    count, first = _print_stream(deltas)
    done = time.perf_counter()
    if not quiet and count > 1:
        rate = (count - 1) / (done - first)
        times = f"loaded in {loaded - start:.2f} s, first token after {first - loaded:.3f} s"
        print(f"[{times}, {count} tokens, {rate:.0f} tokens/s]", file=sys.stderr)


def _print_stream(deltas: Any) -> tuple[int, float]:
    """Print as it comes; returns the number of tokens and the time of the first."""
    count, first = 0, time.perf_counter()
    for delta in deltas:
        if not count:
            first = time.perf_counter()
        count += len(delta.token_ids)
        print(delta.text, end="", flush=True)
    print()
    return count, first


@app.command()
def chat(
    model: Model = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n")] = 512,
    temperature: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: Length = None,
) -> None:
    """Talk with a model, line by line; an empty line or Ctrl-D ends. A base model continues the conversation as plain text."""
    llm = _llm(model, dtype=dtype, device=device, max_model_len=max_model_len, max_num_seqs=8)
    params = _params(llm, max_tokens=max_tokens, temperature=temperature, seed=seed)
    base = llm.get_tokenizer().template is None
    if base:
        print("This is a base model: it has no chat template and continues text rather than answering.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    while line := _read_line():
        messages.append({"role": "user", "content": line})
        prompt = line if base else llm.get_tokenizer().apply_chat_template(messages)
        answer = "".join(_echo(delta.text) for delta in llm.stream(prompt, params))
        print()
        messages.append({"role": "assistant", "content": answer})


def _read_line() -> str:
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
    memory: Annotated[float | None, typer.Option(help="Device memory in GiB to plan for; common cards if left out.")] = None,
    ignore_config_field: Ignored = None,
) -> None:
    """Parameters, bytes, cache per token, and what fits in how much memory."""
    from rorqual.bench.info import info as show

    show(model, memory_gib=memory, ignore_fields=tuple(ignore_config_field or ()))


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no comma-separated list of integers") from None
    if not found or min(found) < 1:
        raise typer.BadParameter("every number must be at least 1")
    return found


@bench.command("offline")
def bench_offline(
    model: Model = None,
    concurrency: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,16",
    prompt_len: Annotated[int, typer.Option()] = 128,
    output_len: Annotated[int, typer.Option()] = 128,
    repeats: Annotated[int, typer.Option(help="Medians are taken over this many runs.")] = 3,
    compare: Annotated[
        str | None, typer.Option(help="transformers, or transformers-compiled (minutes to compile): measured in the same run.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A text file to take prompts from; random tokens if left out.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    weights: Weights = "checkpoint",
    threads: Threads = None,
    max_num_batched_tokens: Annotated[int, typer.Option()] = 8192,
    layers: Annotated[int | None, typer.Option(help="Cut a random model to this many layers.")] = None,
    exe_mode: Mode = "auto",
    json_file: Json = None,
) -> None:
    """Tokens/s of the whole engine by batch size, beside the memory-bandwidth floor."""
    from rorqual.bench import offline

    if compare not in (None, "transformers", "transformers-compiled"):
        raise typer.BadParameter(f"{compare!r}; accepted: transformers, transformers-compiled")
    batches = _numbers(concurrency)
    llm = _llm(
        model,
        dtype=dtype,
        device=device,
        weights=weights,
        threads=threads,
        num_layers=layers,
        exe_mode=exe_mode,
        max_model_len=None if weights == "checkpoint" else prompt_len + output_len + 8,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(max_num_batched_tokens, max(batches)),
        skip_tokenizer_init=data is None,
    )
    report = offline.run(llm, batches, prompt_len, output_len, repeats, compare, data)
    offline.print_report(report)
    if json_file:
        report.write(json_file)


@bench.command("kernels")
def bench_kernels(
    only: Annotated[str | None, typer.Option(help="Comma-separated beginnings of row names.")] = None,
    check: Annotated[bool, typer.Option(help="Compare every result with the reference.")] = True,
    tune: Annotated[bool, typer.Option(help="Search each row's configurations and print the best.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which no further row is started.")] = 540.0,
    json_file: Json = None,
) -> None:
    """Time the card's kernels on the shapes of the real models, beside their floors and their peers' figures."""
    from rorqual.platforms import make_platform

    make_platform("cuda")  # says clearly when there is no card; the kernels' own imports would not
    from rorqual.bench import kernels

    kernels.run(only=only, check=check, tune=tune, json=json_file, limit=limit)


@bench.command("layers")
def bench_layers(
    model: Model = None,
    modules: Annotated[str | None, typer.Option(help="Comma-separated: embed_tokens, mlp, mla, gqa, dense_layer, moe, backbone.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Comma-separated token counts.")] = None,
    repeats: Annotated[int, typer.Option()] = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """Time each module by itself: embedding, MLPs, attention in all forms, experts under three kinds of routing."""
    from rorqual.bench import layers

    rows = layers.bench(
        model,
        modules=modules.split(",") if modules else None,
        tokens=_numbers(tokens) if tokens else None,
        device=device,
        dtype=dtype,
        repeats=repeats,
    )
    layers.print_table(rows)
    if json_file:
        json_file.write_text(layers.as_json(rows) + "\n")


if __name__ == "__main__":
    main()
