"""generation_config.json: the model's end-of-sequence ids and default sampling parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rorqual.config.model import ModelConfig
from rorqual.errors import LoadError
from rorqual.request import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationDefaults:
    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=dict)

    def params(self, **changes: Any) -> SamplingParams:
        """SamplingParams with the model's defaults, overridden by `changes`."""
        return replace(
            SamplingParams(),
            **{**self.sampling, **{k: v for k, v in changes.items() if v is not None}},
        )


def read_generation(folder: Path, model: ModelConfig) -> GenerationDefaults:
    path = folder / "generation_config.json"
    try:
        data = json.loads(path.read_text()) if path.exists() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from None
    eos = data.get("eos_token_id")
    ids = (
        model.eos_token_ids if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    )
    sampling = {name: data[name] for name in SAMPLING if data.get(name) is not None}
    if data.get("do_sample") is False:
        sampling = {"temperature": 0.0}
    if data.get("max_new_tokens"):
        sampling["max_tokens"] = int(data["max_new_tokens"])
    return GenerationDefaults(ids, sampling)
