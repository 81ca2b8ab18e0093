"""rorqual bench: measure the engine and its parts."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from rorqual.bench.cpu.work import CpuWork
from rorqual.bench.offline.work import OfflineWork
from rorqual.cli.bench_comm import bench_comm, bench_hop, bench_pages
from rorqual.cli.bench_llama_cpp import bench_llama_cpp
from rorqual.cli.bench_micro_batches import bench_micro_batches
from rorqual.cli.bench_peers import bench_peers
from rorqual.cli.bench_serve import bench_serve
from rorqual.cli.options import (
    Device,
    Dtype,
    Flags,
    Given,
    Json,
    Model,
    Recipe,
    Settings,
    engine_options,
    load,
    numbers,
    with_options,
)
from rorqual.cli.output import check_output, checked_output, write_output
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure the engine and its parts.")
app.command("serve")(bench_serve)
app.command("comm")(bench_comm)
app.command("hop")(bench_hop)
app.command("pages")(bench_pages)
app.command("peers")(bench_peers)
app.command("llama-cpp")(bench_llama_cpp)
app.command("micro-batches")(bench_micro_batches)


# Set from the concurrency, the lengths and --next-n unless given as flags.
DERIVED = dict.fromkeys(("max_num_seqs", "max_model_len"), "what the requests need")
MANY_TOKENS = 8192


@app.command("offline")
@with_options(
    work=OfflineWork,
    engine=Flags(
        EngineConfig,
        without=("num_speculative_tokens",),
        defaults={**DERIVED, "max_num_batched_tokens": MANY_TOKENS},
    ),
)
def bench_offline(
    work: Given,
    engine: Given,
    model: Model = None,
    concurrency: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,16",
    compare: Annotated[
        str | None,
        typer.Option(
            help="transformers, transformers-compiled (minutes to compile), or vllm (on a "
            "GPU, where installed): measured in the same run."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens",
            "--next-n",
            help="Speculative drafts a step; several, comma-separated, are compared.",
            show_default="0",
        ),
    ] = None,
    config: Recipe = None,
    settings: Settings = None,
    json_file: Json = None,
) -> None:
    """Tokens/s of the whole engine by batch size, beside the memory-bandwidth floor."""
    from rorqual.bench.offline import run as offline
    from rorqual.bench.offline import vllm_baseline

    if compare not in (None, *offline.IN_PROCESS, "vllm"):
        raise typer.BadParameter(f"{compare!r}; accepted: {', '.join(offline.IN_PROCESS)}, vllm")
    if compare == "vllm":
        vllm_baseline.check_installed()
    batches = numbers(concurrency)
    _, asked = engine_options(config, settings, engine)
    counts = _draft_counts(num_speculative_tokens, asked)
    _check_batches(batches, asked)
    wanted = OfflineWork(**work)
    engine |= _load_options(wanted, asked)
    report = offline.Report()
    for count in counts:
        options = _sized(asked, engine, count, max(batches), wanted.prompt + wanted.output)
        llm = load(model, config, settings, options, skip_tokenizer_init=wanted.data is None)
        if compare == "vllm":
            vllm_baseline.check(llm.engine.config)
        offline.run(report, llm, batches, wanted, compare if not report.rows else None)
        offline.write_load(llm, wanted)
        llm.engine.close()
        platform = llm.engine.platform
        measured = (llm.engine.config, llm.engine.dtype, llm.engine.model_config.num_layers)
        del llm
        gc.collect()  # engines contain reference cycles
        platform.release_memory()  # for the next one
    try:
        if compare == "vllm":
            report.beside(vllm_baseline.measure(*measured, list(report.rows), wanted))
    finally:
        offline.print_report(report)
        if json_file:
            report.write(json_file)


def _load_options(work: OfflineWork, asked: Given) -> Given:
    """Engine options implied by --expert-load and --rank."""
    alone = asked.get("single_rank_bench")
    if work.rank is not None and not (work.expert_load and alone):
        raise typer.BadParameter("--rank goes with --single-rank-bench and --expert-load alone")
    if work.expert_load is None:
        return {}
    if alone:
        path = str(work.expert_load)
        return {"simulated_expert_load": path, "simulated_rank": work.rank or "hottest"}
    check_output(work.expert_load, "--expert-load")
    return {"record_expert_load": True}


def _draft_counts(text: str | None, asked: Given) -> list[int]:
    if text is None:
        return [asked.get("num_speculative_tokens", 0)]
    counts = numbers(text, least=0)
    if asked.get("launcher") == "torchrun" and len(counts) > 1:
        raise typer.BadParameter(
            f"num_speculative_tokens={text}: torchrun starts the ranks of one engine; accepted: "
            "one number"
        )
    return counts


def _check_batches(batches: list[int], asked: Given) -> None:
    dp = asked.get("dp", 1)
    uneven = [count for count in batches if asked.get("single_rank_bench") and count % dp]
    if uneven:
        raise ConfigError(
            f"concurrency={uneven[0]}: one rank of dp={dp} runs its share of the requests; "
            "accepted: multiples of dp"
        )


def _sized(asked: Given, flags: Given, count: int, concurrency: int, length: int) -> Given:
    """`flags`, plus sizes derived from the requests, which override a recipe's. asked: flags,
    recipe and --set together."""
    derived = {"max_num_seqs": -(-concurrency // asked.get("dp", 1))}
    if asked.get("weights") == "random":
        derived["max_model_len"] = length + 8
    found = {**derived, **flags}
    tokens = asked.get("max_num_batched_tokens", MANY_TOKENS)
    found["max_num_batched_tokens"] = max(tokens, found["max_num_seqs"] * (count + 1))
    found["num_speculative_tokens"] = count
    if "simulated_acceptance" in asked:
        found["simulated_acceptance"] = tuple(asked["simulated_acceptance"])[:count]
    return found


@app.command("cpu")
@with_options(work=Flags(CpuWork))
def bench_cpu(work: Given, json_file: Json = None) -> None:
    """Decode steps and prompts of shapes drawn at random, beside transformers at its best
    settings, memory bandwidth and torch's large product, in one run."""
    from rorqual.bench.cpu import run as cpu

    cpu.print_table(cpu.run(CpuWork(**work), lambda line: typer.echo(line, err=True), json_file))


@app.command("kernels")
def bench_kernels(
    only: Annotated[
        str | None, typer.Option(help="Comma-separated beginnings of row names.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare every result with the reference.")] = True,
    tune: Annotated[
        bool,
        typer.Option(
            help="Search each row's configurations; print the best, and keep it for this GPU."
        ),
    ] = False,
    peer: Annotated[
        bool,
        typer.Option(
            help="Run vLLM's kernels, where it is installed, on the same data in the same process."
        ),
    ] = False,
    limit: Annotated[
        float, typer.Option(help="Seconds after which no further row is started.")
    ] = 540.0,
    json_file: Json = None,
) -> None:
    """Time the GPU's kernels on the shapes of the real models, beside their floors and their
    peers' figures."""
    from rorqual.platforms import make_platform

    make_platform("cuda")  # raises a clear error without a GPU; the kernels' imports would not
    from rorqual.bench.kernels import run as kernels

    kernels.run(only=only, check=check, tune=tune, json=json_file, limit=limit, peer=peer)


@app.command("layers")
def bench_layers(
    model: Model = None,
    modules: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: embed_tokens, mlp, mla, gqa, dense_layer, moe, backbone."
        ),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Comma-separated token counts.")] = None,
    repeats: Annotated[int, typer.Option()] = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    timing: Annotated[
        str,
        typer.Option(
            help="call: alone, launches included; graph: captured, many in a row; auto: graph "
            "where the device has it, but for prompts and embeddings."
        ),
    ] = "auto",
    limit: Annotated[
        float, typer.Option(help="Seconds after which no further case is measured.")
    ] = 600.0,
    json_file: Json = None,
) -> None:
    """Time each module by itself: embedding (on a GPU with its table there and in host memory),
    MLPs, attention in all forms, experts under three kinds of routing, all layers without experts;
    on a GPU beside floors."""
    from rorqual.bench.layers import run as layers

    rows = layers.bench(
        model,
        modules=modules.split(",") if modules else None,
        tokens=numbers(tokens) if tokens else None,
        device=device,
        dtype=dtype,
        repeats=repeats,
        timing=timing,
        limit=limit,
    )
    layers.print_table(rows)
    if json_file:
        write_output(json_file, layers.as_json(rows) + "\n")


@app.command("calibrate")
def bench_calibrate(
    name: Annotated[str, typer.Option(help="What the GPU is called in the file.")] = "local",
    based_on: Annotated[
        str | None,
        typer.Option(help="A GPU that ships, for peaks and links; this run says what is reached."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; NAME.yaml (NAME.json) if left out.", callback=checked_output
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Instead, every time of our kernels that the planner reads, with digests of the "
            "kernels, as --kernels of rorqual plan takes it; goes on with a file that is there.",
        ),
    ] = False,
    only: Annotated[
        str | None, typer.Option(help="With --full: comma-separated parts of rows' names.")
    ] = None,
    list_rows: Annotated[
        bool, typer.Option("--list", help="With --full: print the rows' names, measure nothing.")
    ] = False,
    limit: Annotated[
        float, typer.Option(help="Seconds after which nothing further is measured.")
    ] = 240.0,
    device: Device = "auto",
) -> None:
    """Measure this GPU: launch gap, bandwidth, products, collectives under torchrun. Writes
    what `rorqual plan --gpu FILE` reads."""
    from rorqual.bench import calibrate

    if full:
        _calibrate_full(based_on, out or Path(f"{name}.json"), limit, only, list_rows)
        return
    if only or list_rows:
        raise typer.BadParameter("--only and --list go with --full")
    print(calibrate.run(device, name, based_on, out, limit))


def _calibrate_full(
    based_on: str | None, out: Path, limit: float, only: str | None, list_rows: bool
) -> None:
    """Exits with 1 while rows are missing."""
    from rorqual.bench.kernel_times import run as times
    from rorqual.bench.kernel_times.rows import rows
    from rorqual.bench.step_times.rows import steps

    if list_rows:
        names = [row.name for row in rows()] + [step.name for step in steps(learnt=True)]
        print("\n".join(names))
        return
    if based_on is None:
        raise typer.BadParameter("--full needs --based-on: the GPU as rorqual plan --gpus names it")
    from rorqual.platforms import make_platform

    platform = make_platform("cuda")  # raises a clear error without a GPU
    from rorqual.bench.kernel_times.measure import RowTimer
    from rorqual.bench.step_times.measure import StepTimer, rates
    from rorqual.ops.select import ops_for

    timer = RowTimer(ops_for("cuda"), platform.device).microseconds
    given = (timer, times.conditions_here(), StepTimer, rates(platform))
    held, wanted = times.run(based_on, out, limit, only, *given)
    _tell_rows(out, held, wanted)


def _tell_rows(out: Path, held: int, wanted: int) -> None:
    print(f"{out}: {held} of {wanted} rows")
    if held < wanted:
        print("call it again to go on; what failed stands in the file")
        raise typer.Exit(1)


@app.command("steps")
def bench_steps(
    based_on: Annotated[
        str | None, typer.Option(help="The GPU as `rorqual plan --gpus` names it.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The file to write; goes on with one that is there.")
    ] = Path("steps.json"),
    only: Annotated[str | None, typer.Option(help="Comma-separated parts of steps' names.")] = None,
    list_rows: Annotated[
        bool, typer.Option("--list", help="Print the steps' names, measure nothing.")
    ] = False,
    limit: Annotated[
        float, typer.Option(help="Seconds after which nothing further is measured.")
    ] = 540.0,
) -> None:
    """Time steps of whole engines with random weights, for `rorqual plan --validate --steps FILE`;
    none is among those that `calibrate --full` learns from."""
    from rorqual.bench.step_times.rows import asked, steps

    wanted = [step for step in steps(learnt=False) if asked(step.name, only)]
    if list_rows:
        print("\n".join(step.name for step in wanted))
        return
    if based_on is None:
        raise typer.BadParameter("--based-on is needed: the GPU as rorqual plan --gpus names it")
    check_output(out, "--out")
    from rorqual.bench.kernel_times.run import conditions_here
    from rorqual.bench.step_times import run as step_times
    from rorqual.platforms import make_platform

    platform = make_platform("cuda")
    from rorqual.bench.step_times.measure import StepTimer, rates

    given = (conditions_here(), rates(platform))
    held, count = step_times.run(based_on, out, limit, wanted, StepTimer, *given)
    _tell_rows(out, held, count)
