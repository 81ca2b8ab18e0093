"""rorqual bench: measure the engine and its parts."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.bench_comm import bench_comm
from rorqual.cli.bench_serve import bench_serve
from rorqual.cli.options import (
    Device,
    Dp,
    Drafter,
    Dtype,
    Embed,
    Ep,
    Interface,
    Json,
    KvDtype,
    Launcher,
    Mode,
    Model,
    Policy,
    Pp,
    Recipe,
    SecretFile,
    Settings,
    Threads,
    Tp,
    Weights,
    load,
    numbers,
    shares,
)
from rorqual.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure the engine and its parts.")
app.command("serve")(bench_serve)
app.command("comm")(bench_comm)


@app.command("offline")
def bench_offline(
    model: Model = None,
    concurrency: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,16",
    prompt_len: Annotated[int, typer.Option()] = 128,
    output_len: Annotated[int, typer.Option()] = 128,
    repeats: Annotated[int, typer.Option(help="Medians are taken over this many runs.")] = 3,
    compare: Annotated[
        str | None,
        typer.Option(
            help="transformers, transformers-compiled (minutes to compile), or vllm (on a "
            "card, where installed): measured in the same run."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A text file to take prompts from; random tokens if left out."),
    ] = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvDtype = "auto",
    device: Device = "auto",
    weights: Weights = "checkpoint",
    threads: Threads = None,
    max_num_batched_tokens: Annotated[int, typer.Option()] = 8192,
    layers: Annotated[
        int | None, typer.Option(help="Cut a random model to this many layers.")
    ] = None,
    exe_mode: Mode = "auto",
    embed_device: Embed = "auto",
    groups: Annotated[
        int, typer.Option(help="Batches of different prompts, one after the other.")
    ] = 1,
    temperature: Annotated[float, typer.Option()] = 0.0,
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            "--next-n", help="Speculative drafts a step; several, comma-separated, are compared."
        ),
    ] = "0",
    drafter: Drafter = "auto",
    speculative_policy: Policy = "fixed",
    draft_window: Annotated[
        bool,
        typer.Option(help="The prediction module sees every row of a step, not the last alone."),
    ] = True,
    simulated_acceptance: Annotated[
        str | None,
        typer.Option(
            help="Probabilities by place that a draft is taken whatever it says, for random "
            "weights."
        ),
    ] = None,
    tp: Tp = 1,
    dp: Dp = 1,
    pp: Pp = 1,
    ep: Ep = 1,
    single_rank_bench: Annotated[
        bool,
        typer.Option(
            "--lone-rank",
            help="Compute what one rank of the layout computes, without the others: nothing is "
            "sent.",
        ),
    ] = False,
    launcher: Launcher = "local",
    interface: Interface = None,
    secret_file: SecretFile = None,
    config: Recipe = None,
    settings: Settings = None,
    profile: Annotated[
        int,
        typer.Option(
            min=0, help="Decode steps to look at in a profiler: time by kernel, waits between them."
        ),
    ] = 0,
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
    rates = shares(simulated_acceptance)
    report = offline.Report()
    work = offline.OfflineWork(prompt_len, output_len, repeats, data, groups, temperature, profile)
    counts = numbers(num_speculative_tokens, least=0)
    if launcher == "torchrun" and len(counts) > 1:
        raise typer.BadParameter(
            f"num_speculative_tokens={num_speculative_tokens}: torchrun starts the ranks "
            "of one engine; accepted: one number"
        )
    uneven = [count for count in batches if single_rank_bench and count % dp]
    if uneven:
        raise ConfigError(
            f"concurrency={uneven[0]}: a lone rank of dp={dp} has its share of requests, and "
            "needs a multiple of it"
        )
    for count in counts:
        most = -(-max(batches) // dp)
        llm = load(
            model,
            config,
            settings,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            weights=weights,
            threads=threads,
            num_layers=layers,
            exe_mode=exe_mode,
            embed_device=embed_device,
            tp=tp,
            dp=dp,
            pp=pp,
            ep=ep,
            single_rank_bench=single_rank_bench,
            launcher=launcher,
            interface=interface,
            secret_file=secret_file,
            max_model_len=None if weights == "checkpoint" else prompt_len + output_len + 8,
            max_num_seqs=most,
            max_num_batched_tokens=max(max_num_batched_tokens, most * (count + 1)),
            skip_tokenizer_init=data is None,
            num_speculative_tokens=count,
            drafter=drafter,
            speculative_policy=speculative_policy,
            draft_window=draft_window,
            simulated_acceptance=rates[:count],
        )
        if compare == "vllm":
            vllm_baseline.check(llm.engine.config)
        offline.run(report, llm, batches, work, compare if not report.rows else None)
        llm.engine.close()
        platform = llm.engine.platform
        measured = (llm.engine.config, llm.engine.dtype, llm.engine.model_config.num_layers)
        del llm
        gc.collect()  # engines hold themselves in circles
        platform.release_memory()  # for the next one
    try:
        if compare == "vllm":
            report.beside(vllm_baseline.measure(*measured, list(report.rows), work))
    finally:
        offline.print_report(report)
        if json_file:
            report.write(json_file)


@app.command("kernels")
def bench_kernels(
    only: Annotated[
        str | None, typer.Option(help="Comma-separated beginnings of row names.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare every result with the reference.")] = True,
    tune: Annotated[
        bool,
        typer.Option(
            help="Search each row's configurations; print the best, and keep it for this card."
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
    """Time the card's kernels on the shapes of the real models, beside their floors and their
    peers' figures."""
    from rorqual.platforms import make_platform

    make_platform("cuda")  # says clearly when there is no card; the kernels' own imports would not
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
    json_file: Json = None,
) -> None:
    """Time each module by itself: embedding (on a card with its table there and in host memory),
    MLPs, attention in all forms, experts under three kinds of routing."""
    from rorqual.bench.layers import run as layers

    rows = layers.bench(
        model,
        modules=modules.split(",") if modules else None,
        tokens=numbers(tokens) if tokens else None,
        device=device,
        dtype=dtype,
        repeats=repeats,
    )
    layers.print_table(rows)
    if json_file:
        json_file.write_text(layers.as_json(rows) + "\n")


@app.command("calibrate")
def bench_calibrate(
    name: Annotated[str, typer.Option(help="What the card is called in the file.")] = "local",
    based_on: Annotated[
        str | None,
        typer.Option(help="A card that ships, for peaks and links; this run says what is reached."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; NAME.yaml if left out.")
    ] = None,
    limit: Annotated[
        float, typer.Option(help="Seconds after which no further product is measured.")
    ] = 240.0,
    device: Device = "auto",
) -> None:
    """Measure this card: launch gap, bandwidth, products, collectives under torchrun. Writes
    what `rorqual plan --gpu FILE` reads."""
    from rorqual.bench import calibrate

    print(calibrate.run(device, name, based_on, out, limit))
