"""From a model on a layout of devices to the pools of a simulation: how many pages a rank has, and
which costs its steps. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rorqual.config.parallel import ParallelConfig
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs.shards import rank_kv_bytes_per_token
from rorqual.planner.simulator.expert_drift import ExpertDrift
from rorqual.planner.simulator.layout_costs import ModelCosts, SplitCosts
from rorqual.planner.simulator.settings import SimulationSettings
from rorqual.planner.simulator.simulator import Deployment, Pool
from rorqual.planner.timing.page_times import PageTimes
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.timing.split import PLACEMENTS, split_memory, transfer_seconds


@dataclass(frozen=True)
class PoolSettings:
    """Settings of every rank's scheduler, as the engine has them. max_num_seqs None: as many as
    have pages at `context` tokens each, 256 at most (an engine alone on a large GPU runs more).
    acceptance: probability of each of num_speculative_tokens drafts, given that those before it
    were right. expert_drift: how experts over so many ranks are used. Defaults are those of
    SimulationSettings."""

    context: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = SimulationSettings.max_num_batched_tokens
    max_model_len: int | None = None
    chunked_prefill_size: int | None = None
    itl_ms: str = SimulationSettings.itl_ms
    page_size: int = SimulationSettings.page_size
    num_pages: int | None = None
    prefix_caching: bool = SimulationSettings.prefix_caching
    acceptance: tuple[float, ...] = ()
    steps_in_flight: int = SimulationSettings.steps_in_flight
    micro_batches: int = SimulationSettings.micro_batches
    slow: Mapping[int, float] = field(default_factory=dict)
    expert_drift: Callable[[int], ExpertDrift] | None = None

    @property
    def longest(self) -> int:
        """Tokens of a request, at most."""
        return self.max_model_len or self.context + 1

    def scheduler(
        self, tokens: int, remote: bool = False, first_only: bool = False
    ) -> SchedulerConfig:
        """For a rank whose cache holds `tokens` tokens. Prompts that arrive with their cache
        (remote) do not use a step's budget."""
        pages = self.num_pages or tokens // self.page_size + 1
        num_speculative_tokens = 0 if first_only else len(self.acceptance)
        seqs = self.max_num_seqs or max(1, min(256, (pages - 1) * self.page_size // self.context))
        if pages - 1 < -(-self.context // self.page_size):
            raise ConfigError(
                f"the cache of a rank holds {(pages - 1) * self.page_size:,} tokens, "
                f"less than one request of {self.context:,}"
            )
        budget = max(self.max_num_batched_tokens, seqs * (num_speculative_tokens + 1)) + (
            seqs * self.longest if remote else 0
        )
        return SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.longest,
            num_pages=pages,
            page_size=self.page_size,
            prefix_caching=self.prefix_caching and not remote,
            chunked_prefill_size=None if remote else self.chunked_prefill_size,
            max_waiting=1 << 40,
            num_speculative_tokens=num_speculative_tokens,
            lookahead=min(num_speculative_tokens, 1),
        )


def _pool(
    name: str,
    model: StepModel,
    engine: PoolSettings,
    replicas: int,
    remote: bool = False,
    first_only: bool = False,
) -> Pool:
    sizes = model.sizes
    sized = replace(model, longest=engine.longest)
    mtp = bool(engine.acceptance)
    tokens = sized.cache_tokens(engine.max_num_batched_tokens, mtp=mtp) // sizes.pp
    costs = ModelCosts(model, engine.micro_batches, engine.slow)
    drifts = engine.expert_drift is not None and sizes.ep > 1
    return Pool(
        name=name,
        scheduler=engine.scheduler(tokens, remote, first_only),
        costs=costs,
        replicas=replicas,
        ranks=sizes.dp,
        groups=sizes.pp,
        gpus=sizes.world,
        steps_in_flight=engine.steps_in_flight,
        acceptance=() if first_only else engine.acceptance,
        remote=remote,
        first_only=first_only,
        drift=engine.expert_drift(sizes.ep) if drifts and engine.expert_drift else None,
        balanced=costs.balanced if drifts else None,
        itl_ms=engine.itl_ms,
    )


def delivery(model: StepModel) -> float:
    return model.profile.first_token_us * 1e-6


def together(
    model: StepModel,
    engine: PoolSettings,
    replicas: int,
    routing: str = SimulationSettings.balancing,
) -> Deployment:
    """Every replica computes prompts and decodes."""
    return Deployment(
        (_pool("all", model, engine, replicas),), delivery=delivery(model), routing=routing
    )


def disaggregated(
    prefill: StepModel,
    decode: StepModel,
    engine: PoolSettings,
    replicas: tuple[int, int],
    routing: str = SimulationSettings.balancing,
    page_times: PageTimes | None = None,
) -> Deployment:
    """(prefill, decode) replicas; caches are sent over the devices' network. page_times: measured
    between two of our engines, of which the decode engine samples the first token. The router's
    second request takes as long as a client's."""
    pools = (
        _pool("prefill", prefill, engine, replicas[0], first_only=True),
        _pool("decode", decode, engine, replicas[1], remote=True),
    )
    late = delivery(decode)
    if page_times is None:
        return Deployment(pools, lambda tokens: transfer_seconds(prefill, tokens), late, routing)
    size = rank_kv_bytes_per_token(prefill.config, prefill.sizes, prefill.fmt)

    def transfer(tokens: int) -> float:
        pages = -(-tokens // engine.page_size)
        return late + page_times.seconds(pages * engine.page_size * size)

    return Deployment(pools, transfer, late, routing, redraws=True)


def split(
    model: StepModel,
    engine: PoolSettings,
    attention: int,
    experts: int,
    placement: str,
    replicas: int,
    routing: str = SimulationSettings.balancing,
) -> Deployment:
    """Attention devices, one rank each, before expert devices. The model's own sizes must be those
    of one device."""
    if placement not in PLACEMENTS:
        raise ConfigError(
            f"placement={placement!r} is not known; accepted: {', '.join(PLACEMENTS)}"
        )
    if model.sizes != ParallelConfig():
        raise ConfigError(
            f"attention GPUs are a rank each; the layout {model.sizes} does not go with "
            "attention:experts"
        )
    if engine.acceptance:
        raise ConfigError(
            "speculation on GPUs split by role is not modelled; num_speculative_tokens must be 0"
        )
    sized = replace(model, longest=engine.longest)
    memory = split_memory(sized, experts, placement, engine.max_num_batched_tokens)
    if not memory.fits:
        raise ConfigError(
            f"weights and activations do not fit: {memory.left / 1e9:.1f} GB left on an "
            "attention GPU, "
            f"{memory.experts_left / 1e9:.1f} GB on an expert GPU"
        )
    tokens = int(memory.left // rank_kv_bytes_per_token(model.config, model.sizes, model.fmt))
    pool = Pool(
        name="all",
        scheduler=engine.scheduler(tokens),
        costs=SplitCosts(model, attention, experts, placement, engine.micro_batches, engine.slow),
        replicas=replicas,
        ranks=attention,
        gpus=attention + experts,
        steps_in_flight=engine.steps_in_flight,
        itl_ms=engine.itl_ms,
    )
    return Deployment((pool,), delivery=delivery(model), routing=routing)
