"""The rule behind exchange="auto": which exchange a step uses. A pure function of what every rank
knows. No torch.

The first that applies:

1. dp = 1 and no sequence parallelism: `local`. Every rank has every token, so nothing is sent; one
   all-reduce adds the partial sums.
2. ep = 1: `allgather_tp`. Every rank needs every token anyway.
3. A decode step, or fewer than ALLTOALL_ROWS rows per rank: exchanging counts would block the host.
   Up to GATHER_RANKS ranks `allgather_ep`, which sends no more bytes than a padded all-to-all and
   adds in a fixed order; above, `low_latency`, which can send fp8.
4. A longer step: `alltoall` if a token is sent to less than GATHER_SHARE of the other ranks, else
   `allgather_ep`. A shared expert split over several ranks counts as copies to these, since only
   the all-gather sends its rows too.

The thresholds are estimates from published figures until they have been measured here
(docs/parallelism.md).
"""

from __future__ import annotations

from rorqual.config.model import MLAConfig, ModelConfig, MoEConfig
from rorqual.config.parallel import REMOTE, ParallelConfig

GATHER_RANKS = 8
FP8_GATHER_PAIRS = 256
ALLTOALL_ROWS = 512
GATHER_SHARE = 0.75
NEEDS_SHARDS = ("alltoall", "low_latency", REMOTE)  # one rank only may dispatch a token


def destinations(ep: int, moe: MoEConfig, placed: bool = False) -> float:
    """Expected number of expert-parallel ranks that hold at least one of a token's experts, under
    uniform routing. Group-limited routing (arXiv 2412.19437, section 2.1.2) bounds it, since
    experts of a group are on the same ranks, unless experts are `placed` by load."""
    uniform = ep * (1 - (1 - 1 / ep) ** moe.top_k)
    if moe.method == "greedy" or moe.n_group == 1 or placed:
        return uniform
    return min(uniform, moe.topk_group * max(1.0, ep / moe.n_group))


def chosen_exchange(sizes: ParallelConfig, moe: MoEConfig, rows: int, decode: bool) -> str:
    """`rows`: the most tokens on any rank. `decode`: no rank has a prefill chunk."""
    if sizes.exchange != "auto":
        return sizes.exchange
    if sizes.dp == 1 and not shards_tokens(sizes, ""):
        return "local"
    if sizes.ep == 1:
        return "allgather_tp"
    if decode or rows < ALLTOALL_ROWS:
        return "allgather_ep" if sizes.stage <= GATHER_RANKS else "low_latency"
    found = destinations(sizes.ep, moe, sizes.places_experts)
    others = found * sizes.expert_tp * (sizes.stage - 1) / sizes.stage
    if moe.num_shared:
        others += (sizes.dense_tp or 1) - 1
    return "alltoall" if others < GATHER_SHARE * (sizes.stage - 1) else "allgather_ep"


def captured_prompt_tokens(sizes: ParallelConfig, moe: MoEConfig, tokens: int) -> int:
    """Up to how many of `tokens` a rank steps with prompts can be captured in pieces: those whose
    exchange does not count rows first. 0 with pipeline stages or expert servers."""
    if sizes.pp > 1:
        return 0
    for most in (tokens, min(tokens, ALLTOALL_ROWS - 1)):
        if chosen_exchange(sizes, moe, most, decode=False) not in ("alltoall", REMOTE):
            return most
    return 0


def gathers_fp8(fp8_experts: bool, pairs: int, dense_rows: bool) -> bool:
    """Whether an all-gather sends rows as e4m3 with scales, as the experts quantize them anyway:
    half the bytes of bf16. fp8_experts: their weights are e4m3 with one scale per 128 x 128 block,
    and take activations with one per 128 columns. pairs: gathered (token, expert) pairs; for a few,
    kernels may leave the rows wide. dense_rows: shared experts use the gathered rows too, and need
    them wide."""
    return fp8_experts and pairs > FP8_GATHER_PAIRS and not dense_rows


def shards_tokens(sizes: ParallelConfig, exchange: str) -> bool:
    """Whether the residual stream is sharded by tokens over the ranks of an attention group."""
    return sizes.tp > 1 and (
        sizes.sequence_parallel or (sizes.dense_tp or 1) < sizes.tp or exchange in NEEDS_SHARDS
    )


def gathers_latents(model: ModelConfig) -> bool:
    """Whether attention over sharded tokens gathers [query latent | key-value latent | rope key]
    instead of hidden states, which it does if these are fewer columns. Queries projected from
    hidden states (no query latent, grouped-query attention) need the hidden states."""
    return _latent_columns(model) < model.hidden_size


def gathered_columns(model: ModelConfig) -> int:
    """Columns per token that attention over sharded tokens gathers."""
    return min(_latent_columns(model), model.hidden_size)


def _latent_columns(model: ModelConfig) -> int:
    mla = model.attention
    if not isinstance(mla, MLAConfig) or mla.q_lora_rank is None:
        return model.hidden_size
    return mla.q_lora_rank + mla.latent_dim


def possible_exchanges(sizes: ParallelConfig, moe: MoEConfig) -> tuple[str, ...]:
    """The exchanges that steps of this configuration may use."""
    steps = ((1, True), (1, False), (ALLTOALL_ROWS, False))
    return tuple(dict.fromkeys(chosen_exchange(sizes, moe, rows, decode) for rows, decode in steps))
