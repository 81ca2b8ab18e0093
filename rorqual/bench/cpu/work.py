"""What a CPU benchmark runs."""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.config.option import option
from rorqual.config.quant import quantization_named
from rorqual.errors import ConfigError

LARGEST = 2000
SETTLING = 2  # steps of both engines before the first that counts


@dataclass
class CpuWork:
    """What is measured of every shape."""

    shapes: int = option(9, "Shapes to draw: 20-100 M, 100-500 M and 0.5-2 B parameters in turn.")
    seed: int | None = option(None, "Draw these shapes again; a new seed if left out.")
    prompt: int = option(512, "Tokens of the prompt.", flags=("--prompt-len",))
    context: int = option(64, "Tokens of the prompts whose decode steps are timed.")
    steps: int = option(6, "Decode steps of an engine's turn.")
    turns: int = option(5, "Turns of either engine; medians are taken over them.")
    seconds: float = option(
        60.0, "Most seconds that trying transformers' settings takes, for each row of a shape."
    )
    compiled: bool = option(False, "Also torch.compile transformers: minutes a shape.")
    threads: int | None = option(None, "Of both engines; the processor's cores if left out.")
    processor_time: bool = option(
        False, "Count time on the processor, of one thread: for machines that do other work too."
    )
    formats: str = option(
        "", "Beside bf16 time these of --quantization, with commas between; no transformers."
    )
    largest: int = option(2000, "Leave out shapes of more millions of parameters.")

    @property
    def format_names(self) -> tuple[str, ...]:
        return tuple(self.formats.split(",")) if self.formats else ()

    @property
    def max_model_len(self) -> int:
        return max(self.prompt, self.context + SETTLING + (self.turns + 2) * self.steps) + 24

    def __post_init__(self) -> None:
        for name in self.format_names:
            quantization_named(name)
        least = {"shapes": 1, "prompt": 1, "context": 1, "steps": 1, "turns": 1, "largest": 20}
        for name, number in least.items():
            if getattr(self, name) < number:
                problem = f"{name}={getattr(self, name)} is out of range"
                raise ConfigError(f"{problem}; accepted: at least {number}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads} is out of range; accepted: at least 1")
