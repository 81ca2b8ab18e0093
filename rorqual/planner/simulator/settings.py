"""What a simulation is asked for, as a user says it. Imports little: the command line reads the
options whenever it starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rorqual.config.option import check_options, option

MOST_REQUESTS = 10_000_000

_deployment = partial(option, group="Deployment")
_workload = partial(option, group="Workload")
_engine = partial(option, group="Engine")
_costs = partial(option, group="Costs")
_report = partial(option, group="Report")


@dataclass(frozen=True)
class SimulationSettings:
    """What is simulated, and what is shown of it."""

    gpu: str = _deployment(
        "h200", "A GPU that ships (list: rorqual plan --gpus), or a YAML file of one."
    )
    count: int | None = _deployment(
        None, "GPUs in all: as many replicas as they make, in place of --replicas."
    )
    layout: str | None = _deployment(
        None,
        "Sizes of a replica, such as tp=8 or dp=64,ep=64; the others as `serve` has them. "
        "Left out: tp=8, or less where that does not divide --count.",
    )
    replicas: int | None = _deployment(
        None, "Replicas, 1 if left out; those that decode where prompts have GPUs of their own."
    )
    prefill_replicas: int = _deployment(
        0, "Replicas for prompts alone; 0 computes prompts where tokens are decoded."
    )
    prefill_layout: str | None = _deployment(None, "Their sizes; --layout if left out.")
    page_times: Path | None = option(
        None,
        "What `rorqual bench pages --json` measured: in place of the network's figures, for caches "
        "of prompts that are computed apart.",
        group="Deployment",
    )
    page_transport: str = _deployment("tcp", "page_times: by which transport.")
    attention: int = _deployment(
        0, "Attention GPUs of a replica whose experts lie on GPUs of their own."
    )
    experts: int = _deployment(0, "Expert GPUs of such a replica.")
    placement: str = _deployment(
        "experts", "An expert GPU holds `experts` of every layer, or whole `layers`."
    )
    network: float | None = _deployment(
        None, "Gbit/s a GPU between nodes, in place of the GPU's.", above=0
    )
    network_latency: float | None = _deployment(
        None, "Microseconds of a message between nodes, likewise.", least=0
    )
    balancing: str = _deployment(
        "live-tokens", "A request goes to the rank with the fewest live-tokens, or round-robin."
    )
    slow: tuple[str, ...] = _deployment(
        (), "RANK=FACTOR: a rank of every replica that computes so much more slowly."
    )
    fail: tuple[str, ...] = _deployment(
        (),
        "[POOL:]REPLICA@DOWN[-UP]: a replica is gone after DOWN seconds, its requests go on "
        "elsewhere, and it is back at UP; may be repeated.",
    )
    failover: float = _deployment(
        0.0, "Seconds until requests of a replica that died are sent elsewhere.", least=0
    )
    autoscale: tuple[str, ...] = _deployment(
        (),
        "[POOL=]LEAST:MOST replicas, as many as --target-requests asks for; may be repeated.",
    )
    target_requests: float | None = _deployment(
        None,
        "autoscale: requests that a replica should have; 0.7 of those it can run if left out.",
        above=0,
    )
    scale_interval: float = _deployment(15.0, "autoscale: seconds between two looks.", least=0.001)
    scale_down_after: float = _deployment(
        300.0, "autoscale: seconds for which fewer replicas must have been enough.", least=0
    )
    start_seconds: float = _deployment(
        60.0, "autoscale: seconds from the order of a replica to its first request.", least=0
    )
    expert_load: tuple[Path, ...] = _deployment(
        (),
        "Counts of picks (JSON with `logical_count`) of one workload after another; may be "
        "repeated. Experts lie on --layout's ep ranks.",
    )
    expert_load_seconds: float = _deployment(
        60.0, "expert_load: seconds from one file's load to the next one's.", above=0
    )
    redundant_experts: int = _deployment(0, "Slots for second copies, as in `rorqual serve`.")
    enable_eplb: bool = _deployment(
        False, "Experts are moved while the deployment serves, by the engine's own rule."
    )
    eplb_window: int = _deployment(100, "Steps of one count of picks, as in `rorqual serve`.")
    eplb_threshold: float = _deployment(0.9, "Balancedness under which experts are moved.")
    arrivals: str = _workload("poisson", "poisson, gamma, fixed, at-once or closed.")
    rate: float = _workload(10.0, "Requests/s.", above=0)
    burstiness: float = _workload(
        1.0, "gamma: shape of the intervals; below 1 is burstier than Poisson.", above=0
    )
    clients: int = _workload(
        16,
        "closed: how many send their next request when the last is answered.",
        least=1,
        most=1_000_000,
    )
    requests: int | None = _workload(None, "Requests in all.", least=1, most=MOST_REQUESTS)
    seconds: float | None = _workload(
        None, "Requests arrive for so long; 60 if neither is given.", above=0
    )
    input_len: str = _workload("1000", "Tokens in: N, uniform:LOW:HIGH or lognormal:MEAN:SPREAD.")
    output_len: str = _workload("300", "Tokens out, likewise.")
    prefix_groups: int = _workload(
        0, "Prompts begin with one of so many shared prefixes.", least=0, most=1_000_000
    )
    prefix_len: int = _workload(0, "Tokens of a shared prefix, before --input-len.", least=0)
    prefix_zipf: float = _workload(0.0, "Exponent of the prefixes' popularity; 0 is even.", least=0)
    trace: Path | None = option(
        None,
        "JSON lines of timestamp (ms), input_length, output_length, hash_ids.",
        group="Workload",
    )
    trace_block: int = _workload(512, "Tokens a hash_id stands for.", least=1)
    speed: float = _workload(1.0, "2 replays a trace twice as fast.", above=0)
    seed: int = _workload(0, "The same seed gives the same run.")
    micro_batches: int = _engine(
        1, "Batches in flight: one computes while another is sent.", least=1, most=64
    )
    max_num_seqs: int | None = _engine(
        None,
        "Sequences at once on a rank. If left out as many as fit, 256 at most, also where `serve` "
        "takes more.",
        least=1,
        most=1_000_000,
    )
    max_num_batched_tokens: int = _engine(
        8192, "Tokens of a rank's step; the engine's on a GPU or NPU if left out.", least=1
    )
    max_model_len: int | None = _engine(
        None, "Longest sequence; what the workload needs if left out.", least=1
    )
    chunked_prefill_size: int | None = _engine(None, "Most prompt tokens of one request in a step.")
    itl_ms: str = _engine(
        "off",
        "How long a step with prompts may hold up those that decode, as `serve` has it; a server "
        "on a CPU takes auto.",
    )
    page_size: int = _engine(64, "Tokens of a cache page.", least=1)
    num_pages: int | None = _engine(
        None, "Pages of a rank; as many as its memory holds if left out.", least=1
    )
    prefix_caching: bool = _engine(True, "Keep and find pages of common prefixes.")
    acceptance: tuple[float, ...] = _engine(
        (), "Speculation: probability of each of num_speculative_tokens drafts, such as 0.85,0.7."
    )
    steps_in_flight: int = _engine(2, "2: a step is planned while the one before runs.")
    memory_utilization: float = _engine(0.9, "Share of a GPU's memory to use.", above=0, most=1)
    routing: str = _costs(
        "uniform", "uniform, zipf:EXPONENT (/placed, /perfect), or a JSON list of counts."
    )
    profile: str = _costs(
        "auto", "Engine: auto, rorqual, sglang, ascend, or roofline for lower bounds."
    )
    quant: str = _costs(
        "auto", "auto as published, fp8, none, w8a8, w4a16 or another of --quantization."
    )
    kv_dtype: str | None = _costs(
        None,
        "The cache's dtype, say fp8; the model's if left out.",
        flags=(
            "--kv-dtype",
            "--kv-cache-dtype",
        ),
    )
    warm_up: float = _report(
        0.0, "Latencies are of requests that arrive after so many seconds.", least=0
    )
    interval: float = _report(
        1.0, "Seconds between two points of what is recorded over time.", above=0
    )
    gantt: tuple[Path, ...] = _report(
        (),
        "Draw a few steps to this .html, .svg, .png, .json (for ui.perfetto.dev), or - for here; "
        "may be repeated.",
        output=True,
    )
    gantt_at: float = _report(10.0, "Seconds from which on steps are drawn.", least=0)
    gantt_steps: int = _report(2, "How many.", least=1, most=1000)

    def __post_init__(self) -> None:
        check_options(self)
        timed = self.arrivals in ("poisson", "gamma", "fixed")
        if timed and self.requests is None and self.seconds is None and self.trace is None:
            object.__setattr__(self, "seconds", 60.0)
