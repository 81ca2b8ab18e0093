"""The random weights that an engine of a seed has, one tensor of the checkpoint at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.config.model import ModelConfig
from rorqual.engine.execution.worker import RESIDUAL_GAIN
from rorqual.layers.parameter import Build, Target
from rorqual.models.loader import fill_normal
from rorqual.models.registry import make_model
from rorqual.ops.select import ops_for

ANY_LENGTH = 64  # max_len of a model that is created only for its tensors' names


class DrawnWeights:
    """As rorqual.models.loader.random_weights draws them for a model of `dtype`, before anything is
    rounded. shapes: by checkpoint name, in the model's order."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype = torch.bfloat16):
        self.config = config
        self.seed = seed
        self.dtype = dtype
        self.ops = ops_for("cpu")
        gain = RESIDUAL_GAIN * (2 * config.num_layers) ** -0.5
        build = Build(self.ops, dtype, torch.device("meta"), None, gain)
        targets = make_model(config, build, ANY_LENGTH).targets()
        self.targets: dict[str, Target] = {
            target.name: target for target in targets if not target.covers
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: target.shape for name, target in self.targets.items()}

    def draw(self, name: str) -> Tensor:
        """Of `dtype`, as a file would hold it."""
        target = self.targets[name]
        found = torch.empty(target.shape, dtype=self.dtype)
        if target.std is None:
            return found.fill_(target.fill)
        origin = (0,) * len(target.shape)
        draw = self.ops.draw_normal
        fill_normal(found, name, self.seed, target.std, target.shape, origin, draw)
        return found
