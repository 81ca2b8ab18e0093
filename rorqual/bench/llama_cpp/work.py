"""What a comparison with llama.cpp is asked for. Imports little: the command line reads the options
whenever it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rorqual.config.option import check_options, option
from rorqual.config.quant import QUANTIZATIONS, QuantConfig, quantization_named
from rorqual.errors import ConfigError

WIDE = "bf16"
OFF = "off"


@dataclass
class LlamaCppWork:
    """Formats, batches and lengths; where llama.cpp is."""

    llama_python: str = option("python3", "The interpreter that has llama-cpp-python.")
    formats: str = option(
        "w4a16",
        "Our weights, with commas between: bf16 or one of --quantization. llama.cpp gets Q4_0 "
        "beside int4, Q8_0 beside int8 and BF16 beside bf16.",
    )
    quantize_head: str = option(
        OFF,
        "Our output head, as the engine's option of this name; llama.cpp's has the type of the "
        "other matrices.",
        choices=(OFF, *QUANTIZATIONS),
    )
    concurrency: str = option("1,8", "Sequences at once, with commas between.")
    prompt: int = option(64, "Tokens of a prompt.", flags=("--prompt-len",), at_least_one=True)
    output: int = option(
        40, "Greedy steps that are timed.", flags=("--output-len",), at_least_one=True
    )
    turns: int = option(
        5, "Turns of either engine; medians are taken over them.", at_least_one=True
    )
    num_layers: int | None = option(None, "Cut the model to so many layers.", at_least_one=True)
    threads: int | None = option(
        None, "Of both engines; the processor's cores if left out.", at_least_one=True
    )
    processor_time: bool = option(
        False, "Count time on the processor, of one thread: for machines that do other work too."
    )
    seed: int = option(0, "Of the weights.")
    folder: Path | None = option(
        None, "Where GGUF files are kept for the next time; removed at the end if left out."
    )
    check: bool = option(
        True, "First compare llama.cpp's log probabilities of a small model with ours."
    )
    together: bool | None = option(
        None,
        "Hold both models at once and take turns; one after the other where they do not fit into "
        "memory.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.output < self.turns:
            raise ConfigError(
                f"output={self.output} steps do not fill turns={self.turns}; accepted: at least "
                "one a turn"
            )
        if self.processor_time and self.threads != 1:
            raise ConfigError("processor_time adds up what threads take; accepted: threads=1")
        for name in self.format_names:
            kind_of(name)

    @property
    def format_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.formats.split(","))

    @property
    def steps(self) -> int:
        """Of a turn."""
        return self.output // self.turns


def kind_of(name: str) -> str:
    """llama.cpp's weight format that corresponds to ours. Raises ConfigError if it has none."""
    quant: QuantConfig | None = None if name == WIDE else quantization_named(name)
    kinds = {"int4": "Q4_0", "int8": "Q8_0"}
    if quant is None or quant.scheme is None:
        return "BF16"
    if quant.scheme.kind not in kinds:
        raise ConfigError(
            f"formats={name!r}: a GGUF file has no weights like these; accepted: bf16, w8a8, "
            "w4a16 in any group"
        )
    return kinds[quant.scheme.kind]
