"""What the planner is asked, as a user says it. Imports little: the command line reads the options
whenever it starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rorqual.config.option import check_options, option

_question = partial(option, group="Question")
_costs = partial(option, group="Costs")


@dataclass(frozen=True)
class PlanSettings:
    """Everything but the model. tpot is in milliseconds."""

    gpu: str = _question("h200", "A GPU that ships (list: --gpus), or a YAML file of one.")
    count: int = _question(8, "How many.", least=1, most=100_000)
    prompt: int = _question(1024, "Tokens of a prompt.", least=1)
    output: int = _question(1024, "Tokens of an answer.", least=1)
    ttft: float | None = _question(None, "Time to first token, in seconds at most.", above=0)
    tpot: float | None = _question(None, "Time per output token, in milliseconds at most.", above=0)
    num_speculative_tokens: tuple[int, ...] = _question(
        (0,), "Draft counts to try, comma-separated.", aliases=("next_n",)
    )
    # 85 to 90 % in arXiv 2412.19437, section 5.4.3; further drafts decay by the same factor each
    acceptance: float = _question(0.85, "Probability that a draft is taken.", least=0, most=1)
    routing: str = _question(
        "uniform", "uniform, zipf:EXPONENT or recorded:FILE, with /placed or /perfect."
    )
    network: float | None = _question(
        None, "Gbit/s a GPU between nodes, in place of the GPU's.", above=0
    )
    memory_utilization: float = _question(0.9, "Share of a GPU's memory to use.", above=0, most=1)
    splits: bool = _question(
        True, "Also prefill and decode, attention and experts, on GPUs of their own."
    )
    profile: str = _costs(
        "auto", "Engine: auto, rorqual, sglang, ascend, calibrated, or roofline for lower bounds."
    )
    kernels: str | None = _costs(
        None, "Times of our kernels: a file.json that `rorqual bench calibrate --full` wrote."
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

    def __post_init__(self) -> None:
        check_options(self)
