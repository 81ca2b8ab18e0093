"""A question from what a user says; see PlanSettings. No torch."""

from __future__ import annotations

from rorqual.config.hardware import load_device
from rorqual.planner.costs.catalog import model_of
from rorqual.planner.costs.costs import Format
from rorqual.planner.costs.routing import Routing
from rorqual.planner.search.deployments import Goal, Question
from rorqual.planner.search.settings import PlanSettings
from rorqual.planner.timing.profiles import load_profile, profile_for, with_kernels
from rorqual.planner.timing.roofline import with_link


def question_of(model: str, asked: PlanSettings) -> Question:
    device = with_link(load_device(asked.gpu), asked.network)
    profile = profile_for(device) if asked.profile == "auto" else load_profile(asked.profile)
    tpot = None if asked.tpot is None else asked.tpot / 1e3
    return Question(
        model_of(model, asked.quant),
        device,
        asked.count,
        with_kernels(profile, asked.kernels),
        Goal(asked.prompt, asked.output, asked.ttft, tpot),
        Format(kv_dtype=asked.kv_dtype, split_latent=device.is_npu),
        Routing.parse(asked.routing),
        asked.num_speculative_tokens,
        asked.acceptance,
        asked.memory_utilization,
        asked.splits,
    )
