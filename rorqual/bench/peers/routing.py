"""Whether steps are too short for tokens that spread over the experts."""

from __future__ import annotations

from rorqual.bench.peers.model_folder import ServedModel
from rorqual.bench.peers.rows import Row
from rorqual.bench.serving.metrics import Figures
from rorqual.config.hardware import DeviceSpec, load_device
from rorqual.config.hf import read_config
from rorqual.planner.costs.costs import decode_floor_seconds

CARDS = ("h200", "h100", "h800", "b200", "a100")
MAX_REQUESTS = 256  # of more it is not known how many decode together


def card_of(text: str) -> DeviceSpec | None:
    return next((load_device(name) for name in CARDS if name in text.lower()), None)


def below_floor(model: ServedModel, row: Row, figures: Figures, card: str) -> str | None:
    """Why a row's steps cannot have read what tokens that spread evenly read, by the card's
    bandwidth on paper; None where nothing speaks against it."""
    device = card_of(card)
    step = figures["median_tpot_ms"]
    known_batch = row.kind == "closed" and row.count <= MAX_REQUESTS
    if device is None or step is None or not known_batch or figures["num_prompts"] < row.count:
        return None
    config = read_config(model.config)
    floor = 1e3 * decode_floor_seconds(config, row.count, row.input_len, device.bandwidth)
    if step >= floor:
        return None
    return (
        f"a step of {step:.2f} ms is shorter than the {floor:.2f} ms that {device.title} takes to "
        "read the experts of tokens that spread"
    )
