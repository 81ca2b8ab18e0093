"""rorqual serve: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer

from rorqual import __version__
from rorqual.cli.options import (
    Decode,
    Device,
    Dp,
    Drafter,
    Dtype,
    Ep,
    Ignored,
    Interface,
    KvDtype,
    Launcher,
    Length,
    Mode,
    Model,
    Policy,
    Pp,
    Prefill,
    Recipe,
    SecretFile,
    Settings,
    Threads,
    TokenizerName,
    Tp,
    Weights,
    become_rank,
    engine_options,
)
from rorqual.errors import ConfigError

Key = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="RORQUAL_API_KEY", help="Needed on every route but /live and /health."
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", help="A name to answer to; may be repeated."),
]


def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Key = None,
    served_model_name: Names = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start a dead engine again; else the server ends.")
    ] = False,
    replicas: Annotated[
        int, typer.Option(help="Engine processes behind this server, each with the whole model.")
    ] = 1,
    tool_format: Annotated[
        str, typer.Option(help="auto, hermes, deepseek_v3 or deepseek_v31.")
    ] = "auto",
    reasoning: Annotated[str, typer.Option(help="Split <think> off: auto, on or off.")] = "auto",
    structured_output: Annotated[
        bool, typer.Option(help="Offer grammars; needs xgrammar and a process to compile in.")
    ] = True,
    max_waiting: Annotated[int, typer.Option(help="Sequences that may wait; beyond, 429.")] = 1024,
    request_timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds open requests have after SIGTERM.")
    ] = 30.0,
    stall_seconds: Annotated[
        float,
        typer.Option(help="Seconds without a word after which a working engine counts as dead."),
    ] = 300.0,
    max_body_bytes: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 4 << 20,
    max_header_bytes: Annotated[int, typer.Option(help="Bytes of a request's headers.")] = 64 << 10,
    max_n: Annotated[int, typer.Option(help="Completions of one prompt.")] = 32,
    max_choices: Annotated[int, typer.Option(help="Completions of one request.")] = 256,
    max_logprobs: Annotated[int, typer.Option(help="Most likely tokens to list.")] = 20,
    max_tools: Annotated[int, typer.Option(help="Functions of one request.")] = 128,
    max_buffered_tokens: Annotated[
        int, typer.Option(help="Tokens kept for a slow reader before its request is cancelled.")
    ] = 4096,
    client_seconds: Annotated[
        float, typer.Option(help="Seconds a client has to send its request.")
    ] = 30.0,
    max_grammar_size: Annotated[
        int, typer.Option(help="Characters of a schema, grammar or list of choices.")
    ] = 65_536,
    max_regex_size: Annotated[
        int, typer.Option(help="Characters of a regular expression.")
    ] = 4_096,
    grammar_seconds: Annotated[
        float, typer.Option(help="Processor seconds to compile one.")
    ] = 10.0,
    grammar_memory: Annotated[int, typer.Option(help="MiB to compile one.")] = 1024,
    dtype: Dtype = "auto",
    device: Device = "auto",
    weights: Weights = "checkpoint",
    tokenizer: TokenizerName = None,
    max_model_len: Length = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Sequences that run at once in one engine.")
    ] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 2048,
    chunked_prefill_size: Annotated[
        int | None, typer.Option(help="Most prompt tokens of one request in a step.")
    ] = None,
    memory_utilization: Annotated[
        float, typer.Option(help="Share of a card's memory to use.")
    ] = 0.9,
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep and find pages of common prefixes.")
    ] = True,
    record_expert_load: Annotated[
        bool, typer.Option("--record-expert-load", help="Count tokens by layer and expert.")
    ] = False,
    num_speculative_tokens: Annotated[
        int, typer.Option("--next-n", help="Speculative drafts a step; 0 for none.")
    ] = 0,
    drafter: Drafter = "auto",
    speculative_policy: Policy = "fixed",
    kv_cache_dtype: KvDtype = "auto",
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the cache; as many as fit if left out.")
    ] = None,
    exe_mode: Mode = "auto",
    threads: Threads = None,
    tp: Tp = 1,
    dp: Dp = 1,
    pp: Pp = 1,
    ep: Ep = 1,
    launcher: Launcher = "local",
    interface: Interface = None,
    secret_file: SecretFile = None,
    mla_prefill: Prefill = "CC",
    mla_decode: Decode = "A_CC_ME",
    ignore_config_field: Ignored = None,
    config: Recipe = None,
    settings: Settings = None,
) -> None:
    """Serve a model through the OpenAI API."""
    launch, limits, grammar = _server()
    options = {
        "dtype": dtype,
        "device": device,
        "weights": weights,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "chunked_prefill_size": chunked_prefill_size,
        "memory_utilization": memory_utilization,
        "enable_prefix_caching": prefix_caching,
        "record_expert_load": record_expert_load,
        "num_speculative_tokens": num_speculative_tokens,
        "drafter": drafter,
        "speculative_policy": speculative_policy,
        "kv_cache_dtype": kv_cache_dtype,
        "num_pages": num_pages,
        "exe_mode": exe_mode,
        "threads": threads,
        "tp": tp,
        "dp": dp,
        "pp": pp,
        "ep": ep,
        "launcher": launcher,
        "interface": interface,
        "secret_file": secret_file,
        "mla_prefill": mla_prefill,
        "mla_decode": mla_decode,
        "ignore_config_fields": tuple(ignore_config_field or ()),
    }
    named, engine = engine_options(config, settings, options)
    become_rank(model or named, engine)
    serving = launch.ServeConfig(
        model=model or named,
        tokenizer=tokenizer,
        host=host,
        port=port,
        api_key=api_key,
        names=tuple(served_model_name or ()),
        restart=restart,
        replicas=replicas,
        stall=stall_seconds,
        tool_format=tool_format,
        reasoning=reasoning,
        structured=structured_output,
        engine=engine,
        limits=limits.ServerLimits(
            body=max_body_bytes,
            headers=max_header_bytes,
            n=max_n,
            choices=max_choices,
            logprobs=max_logprobs,
            tools=max_tools,
            waiting=max_waiting,
            timeout=request_timeout,
            drain=drain_seconds,
            buffered=max_buffered_tokens,
            patience=client_seconds,
            grammar=grammar.GrammarLimits(
                max_grammar_size, max_regex_size, grammar_seconds, grammar_memory << 20
            ),
        ),
    )
    logging.getLogger("rorqual").setLevel(logging.INFO)
    sys.exit(launch.run(serving, __version__))


def _server() -> tuple[Any, Any, Any]:
    """The server's modules, or which extra brings what they need."""
    try:
        from rorqual.serve import launch, limits
        from rorqual.text import grammar
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rorqual serve needs the package {error.name!r}; install rorqual[serve]"
        ) from None
    return launch, limits, grammar
