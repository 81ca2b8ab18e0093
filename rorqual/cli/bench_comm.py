"""rorqual bench comm, hop and pages: how long processes take to talk to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.options import Device, Json, numbers
from rorqual.cli.output import write_output
from rorqual.disagg.transfer_config import MAX_STAGING_MB, TRANSPORTS


def bench_comm(
    ranks: Annotated[
        int,
        typer.Option(
            help="Processes to start on this host; torchrun's number where it started them."
        ),
    ] = 2,
    rows: Annotated[str, typer.Option(help="Comma-separated rows of each rank.")] = "1,16,128",
    hidden: Annotated[int, typer.Option(help="Columns of a row.")] = 7168,
    experts: Annotated[int, typer.Option()] = 256,
    top_k: Annotated[int, typer.Option()] = 8,
    repeats: Annotated[int, typer.Option(help="Medians are taken over this many runs.")] = 10,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """Time collectives and expert exchanges between ranks: NCCL on GPUs, gloo on the CPU."""
    from rorqual.bench.comm import run as comm
    from rorqual.platforms import device_of

    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"{dtype!r}; accepted: bfloat16, float16, float32")
    setup = comm.CommSetup(
        ranks, device_of(device).type, tuple(numbers(rows)), hidden, experts, top_k, repeats, dtype
    )
    found = comm.bench(setup)
    comm.print_table(found, setup)
    if json_file and found:
        write_output(json_file, comm.as_json(found, setup) + "\n")


HopTransport = Annotated[
    str,
    typer.Option(
        help="tcp; handles: memory that GPUs share, many hops in one captured graph; group: "
        "a process group, NCCL on GPUs, in one captured graph too, gloo on a CPU, with tcp "
        "beside it. The latter two with rows in fp8 and in bf16."
    ),
]
ServerDevice = Annotated[
    str | None,
    typer.Option(
        help="With handles, the servers' GPU: such as cuda:1; by default --device, where the "
        "two take turns, so rows are checked and times mean nothing. With group the first "
        "server's; each has one of its own."
    ),
]
BusyUs = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1e5,
        help="With handles, microseconds for which a server's GPU computes before it answers, as "
        "experts would; they are taken off the times.",
    ),
]


def bench_hop(
    servers: Annotated[int, typer.Option(min=1, max=64, help="Expert servers to start.")] = 1,
    rows: Annotated[str, typer.Option(help="Comma-separated rows of a call.")] = "1,8,64,256",
    hidden: Annotated[int, typer.Option(min=128, help="Columns of a row.")] = 7168,
    experts: Annotated[int, typer.Option(min=1)] = 256,
    top_k: Annotated[int, typer.Option(min=1, max=64)] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are taken over this many.")] = 200,
    fp8: Annotated[
        bool, typer.Option("--fp8/--no-fp8", help="Rows travel in fp8 with scales, or in bf16.")
    ] = True,
    intermediate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Columns of experts that are read here too, by one row, for comparison "
            "(DeepSeek-V3: 2048); 0: none are.",
        ),
    ] = 0,
    transport: HopTransport = "tcp",
    server_device: ServerDevice = None,
    busy_us: BusyUs = 0.0,
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """Time rows to expert servers of this host and back, without the experts' time."""
    from rorqual.bench.comm import expert_hop
    from rorqual.bench.comm.expert_reads import bench_reads
    from rorqual.platforms import device_of

    if experts < max(servers, top_k):
        raise typer.BadParameter(f"{experts} experts for {servers} servers and top_k {top_k}")
    counts = tuple(numbers(rows))
    if transport not in ("tcp", "handles", "group"):
        raise typer.BadParameter(f"{transport!r}; accepted: tcp, handles, group")
    if busy_us and transport != "handles":
        raise typer.BadParameter(f"--busy-us goes with --transport handles, not {transport}")
    sizes = (servers, hidden, experts, top_k)
    devices = (device, server_device)
    if transport == "handles":
        _hop_by_handles(counts, sizes, repeats, devices, busy_us, json_file)
        return
    if transport == "group":
        _hop_by_group(counts, sizes, repeats, devices, json_file)
        return
    setup = expert_hop.HopSetup(
        counts, servers, hidden, experts, top_k, repeats, fp8, device_of(device).type, intermediate
    )
    found = expert_hop.bench(setup)
    expert_hop.print_table(found, setup)
    reads = None
    if intermediate:
        reads = bench_reads(hidden, intermediate, top_k, setup.device, repeats)
        expert_hop.print_reads(reads, found, setup)
    if json_file:
        write_output(json_file, expert_hop.as_json(found, setup, reads) + "\n")


def _hop_by_handles(
    rows: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    repeats: int,
    devices: tuple[str, str | None],
    busy: float,
    json_file: Path | None,
) -> None:
    from rorqual.bench.comm import handle_hop
    from rorqual.platforms import device_of

    own = str(device_of(devices[0]))
    there = str(device_of(devices[1] or own))
    if busy and there.startswith("cpu"):
        raise typer.BadParameter("--busy-us needs a GPU, whose servers compute so long")
    few = there == own
    setup = handle_hop.HandleHopSetup(
        rows,
        *sizes,
        repeats=min(repeats, 3) if few else repeats,
        hops=10 if few else 200,
        device=own,
        server_device=there,
        busy=busy,
    )
    found = handle_hop.bench(setup)
    handle_hop.print_table(found, setup)
    if json_file:
        write_output(json_file, handle_hop.as_json(found, setup) + "\n")
    if not all(hop.right for hop in found):
        raise typer.Exit(1)


def _hop_by_group(
    rows: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    repeats: int,
    devices: tuple[str, str | None],
    json_file: Path | None,
) -> None:
    from rorqual.bench.comm import expert_hop, group_hop, handle_hop
    from rorqual.platforms import device_of

    device = device_of(devices[0])
    own = str(device)
    there = str(device_of(devices[1] or own))
    if device.type == "cuda" and there == own:
        raise typer.BadParameter("NCCL wants a GPU for each: name another by --server-device")
    few = device.type == "cpu"
    setup = handle_hop.HandleHopSetup(
        rows,
        *sizes,
        repeats=max(1, repeats // 10) if few else repeats,
        hops=10 if few else 200,
        device=own,
        server_device=there,
        own_gpus=True,
    )
    found = group_hop.bench(setup)
    handle_hop.print_table(found, setup, " in a process group")
    for fp8 in (True, False) if device.type == "cpu" else ():
        tcp = expert_hop.HopSetup(rows, *sizes, repeats, fp8, "cpu")
        expert_hop.print_table(expert_hop.bench(tcp), tcp)
    if json_file:
        write_output(json_file, handle_hop.as_json(found, setup) + "\n")
    if not all(hop.right for hop in found):
        raise typer.Exit(1)


def bench_pages(
    model: Annotated[
        str, typer.Argument(help="A folder or a Hugging Face id; of it, the shape of the cache.")
    ] = "deepseek-v2-lite",
    tokens: Annotated[str, typer.Option(help="Of the prompt; several: 256,2048.")] = "2048",
    page_size: Annotated[int, typer.Option(min=1)] = 64,
    transports: Annotated[
        str,
        typer.Option(
            "--transports", "--transport", help="Comma-separated: tcp, nixl, mooncake, handles."
        ),
    ] = "tcp",
    repeats: Annotated[int, typer.Option(min=1, help="Medians are taken over this many.")] = 5,
    staging_mb: Annotated[
        int, typer.Option(min=32, max=MAX_STAGING_MB, help="As --kv-staging-mb.")
    ] = 128,
    devices: Annotated[
        str, typer.Option(help="Where the pages are and where they are to be: cuda:0,cuda:1.")
    ] = "cpu,cpu",
    request_after_ms: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            help="From the lease's opening until its pages are asked for; its response takes some "
            "milliseconds through a router.",
        ),
    ] = 0,
    json_file: Json = None,
) -> None:
    """Time a prompt's pages between two processes of this host, by each transport."""
    from rorqual.bench.comm import page_transfers
    from rorqual.bench.comm.transfer_setup import TransferSetup

    names = tuple(transports.split(","))
    for name in names:
        if name not in TRANSPORTS:
            raise typer.BadParameter(f"{name!r}; accepted: {', '.join(TRANSPORTS)}")
    there, _, here = devices.partition(",")
    if not here or "," in here:
        raise typer.BadParameter(f"{devices!r}; accepted: two devices, as cuda:0,cuda:1")
    runs = []
    for length in numbers(tokens):
        if length < page_size:
            raise typer.BadParameter(f"{length} tokens are less than a page of {page_size}")
        setup = TransferSetup(
            *(model, length, page_size, names, repeats, staging_mb, (there, here)),
            request_after=request_after_ms / 1e3,
        )
        found = page_transfers.bench(setup)
        page_transfers.print_table(found, setup)
        runs.append((setup, found))
    if json_file:
        write_output(json_file, page_transfers.as_json(runs) + "\n")
