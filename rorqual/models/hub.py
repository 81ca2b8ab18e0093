"""Resolve a model name: the bundled checkpoint, a local folder, or a Hugging Face id (needs a
network)."""

from __future__ import annotations

from pathlib import Path

from rorqual.errors import LoadError

PACKAGE = Path(__file__).resolve().parent.parent
BUNDLED = PACKAGE / "bundled"
SHAPES = PACKAGE / "shapes"  # config.json of published models, for random weights and cost figures
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model"]


def model_folder(name: str | Path | None, weights: bool = True) -> Path:
    """The folder of a model. None: the bundled one; a published shape's name (deepseek-v3, ...):
    a folder with only its config.json. Downloads from the hub only what loading needs."""
    if name is None:
        return BUNDLED
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if (SHAPES / str(name) / "config.json").is_file():
        return SHAPES / str(name)
    text = str(name)
    if path.exists() or text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise LoadError(f"{text!r} is neither a folder nor a Hugging Face model id")
    return _fetch(text, PATTERNS if weights else ["*.json", "*.jinja", "tiktoken.model"])


def loaded_as(name: str | Path | None, folder: Path) -> str:
    """The name by which other processes load the model: its id if it came from the hub, which
    works on any host, else the folder that model_folder found."""
    hub = name is not None and not Path(name).expanduser().is_dir() and folder.parent != SHAPES
    return str(name if hub else folder.resolve())


def _fetch(repo: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # offline, unknown, gated: the library raises many types
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(
            f"{repo!r} is no local folder and could not be fetched from the Hugging Face "
            f"hub: {first}"
        ) from None
