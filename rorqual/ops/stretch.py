"""How much of the cache an MLA layer in form CC decompresses at once ("a stretch", vLLM's context
chunk), and the memory for it.

The layer, the engine's memory sizing and the planner use the same figures. No torch.

CC decompresses keys and values of all heads from cached latents: 114 KiB per token of DeepSeek-V3
with all 128 heads on one GPU, 15 GB in every layer at 131,072 tokens. A request whose cache exceeds
a limit is computed stretch by stretch, and the results are merged by their log-sum-exp.

The limit on a GPU is 1 GiB, 9,088 tokens of DeepSeek-V3 with all heads, and at most 8,192 tokens,
which take 129 MiB with the 16 heads of tp=8. A prompt of 8,192 tokens, a GPU's default step budget,
is one stretch. Each stretch launches a kernel, and reads and writes the result so far. On an H100,
2,048 tokens after a context of 16,384 or 65,536 took 3 or 4 % longer with all heads than when
decompressed at once, which took 1.8 and 7.1 GiB (with 512 MiB 7 or 8 %, with 256 MiB 14 to 17 %),
and 6 % longer with 16 heads; that was a kernel of half the speed. On a CPU the limit is 64 MiB:
memory is shared with everything else, and longer stretches gain little, since products of a
thousand rows already keep the cores busy.

A stretch starts at a page, so it has at least one page.
"""

from __future__ import annotations

from rorqual.config.model import MLAConfig

STRETCH_BYTES = {"cpu": 64 * 2**20}
GPU_STRETCH_BYTES = 2**30
GPU_STRETCH_TOKENS = 8192
# Attention without a kernel computes heads and queries in blocks: most fp32 elements of scores, of
# keys and values, or of results in a block. Four such tensors are alive at once.
SCORES = 2**20
SCORE_BYTES = 4 * 4 * SCORES


def token_bytes(mla: MLAConfig, width: int) -> int:
    """Bytes of one decompressed token, with elements of `width` bytes. The product with kv_b gives
    keys without rope, and values; whole keys are concatenated from them. The latent exists twice:
    as gathered, and without the rope key."""
    heads = mla.num_heads * (2 * mla.nope_dim + mla.rope_dim + mla.v_dim)
    return width * (heads + 2 * mla.kv_lora_rank + mla.rope_dim)


def stretch_tokens(mla: MLAConfig, width: int, device: str, page: int) -> int:
    """Cached tokens that are decompressed at once on a kind of device: whole pages, at least one.
    `mla` counts one rank's heads."""
    tokens = STRETCH_BYTES.get(device, GPU_STRETCH_BYTES) // token_bytes(mla, width)
    if device not in STRETCH_BYTES:
        tokens = min(tokens, GPU_STRETCH_TOKENS)
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
    """Memory of attention in form CC, in addition to weights and cache: one decompressed stretch
    and, if a request can be longer, its queries' results in fp32 with their log-sum-exp.

    A step has at most `requests` requests of at most `longest` cached tokens and `queries` query
    tokens each."""
    tokens = stretch_tokens(mla, width, device, page)
    most = min(tokens, requests * longest)
    held = most * token_bytes(mla, width)
    if device == "cpu":  # torch's attention wants values as wide as keys, a mask as bool and fp32
        held += most * mla.num_heads * mla.qk_dim * width + 5 * queries * min(most, longest)
    if longest <= tokens:
        return held
    return held + queries * mla.num_heads * (mla.v_dim + 1) * 4 + SCORE_BYTES
