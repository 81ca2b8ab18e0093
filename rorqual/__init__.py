"""Rorqual: an inference engine for sparse mixture-of-experts language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rorqual.request import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from rorqual.llm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM pulls in torch; `import rorqual` alone does not."""
    if name == "LLM":
        from rorqual.llm.llm import LLM

        return LLM
    raise AttributeError(f"module 'rorqual' has no attribute {name!r}")
