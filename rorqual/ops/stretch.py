"""How much of the cache an MLA layer in form CC decompresses at once, and the memory that takes.

The layer, the engine's memory sizing and the planner read the same figures. No torch.

CC makes keys and values of all heads from cached latents: in DeepSeek-V3, with its 128 heads on
one GPU, 114 KiB a token, 15 GB in every layer at 131,072 tokens. So a request whose cache does not
fit into a bound is attended to stretch by stretch, and these are joined by their log-sum-exp.

The bound on a GPU is 1 GiB, 9,088 tokens of DeepSeek-V3 with all heads, and 8,192 tokens, which
take 129 MiB with the 16 heads of tp=8: prompts up to that are one stretch. Each stretch starts a
kernel, and reads and writes the sums so far. On an H100, 2,048 tokens behind a context of 16,384 or
65,536 took 3 or 4 % longer with all heads than decompressed whole, which took 1.8 and 7.1 GiB (with
512 MiB 7 or 8 %, with 256 MiB 14 to 17 %), and 6 % longer with 16 heads; that was a kernel of half
the speed. A prompt of 8,192 tokens, a GPU's default budget of a step, is one stretch. On a CPU the
bound is 64 MiB: memory is shared with all else there, and longer stretches gain little, for
products of a thousand rows keep the cores busy as they are.

Below a page it cannot go: a stretch starts where a page does.
"""

from __future__ import annotations

from rorqual.config.model import MLAConfig

STRETCH_BYTES = {"cpu": 64 * 2**20}
CARD_STRETCH_BYTES = 2**30
CARD_STRETCH_TOKENS = 8192
# Attention without a kernel of its own takes heads and queries in blocks: the most fp32 numbers of
# scores, of keys and values, or of results in one, of which four such tensors live at once.
SCORES = 2**20
SCORE_BYTES = 4 * 4 * SCORES


def token_bytes(mla: MLAConfig, width: int) -> int:
    """Of one decompressed token in numbers of `width` bytes. The product with kv_b gives keys
    without their rope part, and values; whole keys are joined beside it. The latent is there twice:
    as it was gathered, and without the rope key."""
    heads = mla.num_heads * (2 * mla.nope_dim + mla.rope_dim + mla.v_dim)
    return width * (heads + 2 * mla.kv_lora_rank + mla.rope_dim)


def stretch_tokens(mla: MLAConfig, width: int, device: str, page: int) -> int:
    """Cached tokens that are decompressed at once on that kind of device: whole pages, at least
    one. `mla` counts one rank's heads."""
    tokens = STRETCH_BYTES.get(device, CARD_STRETCH_BYTES) // token_bytes(mla, width)
    if device not in STRETCH_BYTES:
        tokens = min(tokens, CARD_STRETCH_TOKENS)
    return max(1, tokens // page) * page


def workspace_bytes(
    mla: MLAConfig,
    width: int,
    device: str,
    page: int,
    requests: int,
    longest: int,
    queries: int,
) -> int:
    """What attention in form CC takes beside weights and cache: one stretch decompressed and, where
    a request can be longer, the sums of its queries in fp32 with their log-sum-exp.

    A step has at most so many requests of at most `longest` cached tokens; one brings at most
    `queries` tokens."""
    tokens = stretch_tokens(mla, width, device, page)
    most = min(tokens, requests * longest)
    held = most * token_bytes(mla, width)
    if device == "cpu":  # torch's attention wants values as wide as keys, a mask as bool and fp32
        held += most * mla.num_heads * mla.qk_dim * width + 5 * queries * min(most, longest)
    if longest <= tokens:
        return held
    return held + queries * mla.num_heads * (mla.v_dim + 1) * 4 + SCORE_BYTES
