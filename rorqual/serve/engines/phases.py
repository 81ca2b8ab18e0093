"""Adds an engine's RequestPhase messages as children of the request's span."""

from __future__ import annotations

from rorqual.serve.messages import RequestPhase
from rorqual.telemetry.spans import RequestSpan, Value

# latency attributes by vLLM's and SGLang's names, seconds, by the phase whose duration they are
LATENCIES = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
}


def note_phase(span: RequestSpan, choice: int, phase: RequestPhase) -> None:
    """choice: which of the request's sequences; latencies of the request are those of the first."""
    attributes: dict[str, Value] = {"rorqual.choice": choice, **phase.details}
    child = span.child(phase.name, attributes, start=phase.start)
    if "error.type" in phase.details:
        child.fail(str(phase.details["error.type"]))
    child.end(phase.end)
    if choice:
        return
    if phase.name in LATENCIES:
        span.set({LATENCIES[phase.name]: phase.end - phase.start})
    if phase.name == "prefill":
        span.set({"gen_ai.latency.time_to_first_token": phase.end - phase.arrival})
    if phase.name == "decode":
        span.set({"gen_ai.latency.e2e": phase.end - phase.arrival})
