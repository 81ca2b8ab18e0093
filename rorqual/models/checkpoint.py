"""The tensors in the safetensors files of a folder, and where their bytes are."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rorqual.errors import LoadError

NAMES_SHOWN = 5
DIGESTED = 4096  # bytes of each tensor that experts_digest reads
EXPERT_TENSOR = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.mlp\.(?:gate\.weight|"
    r"experts\.(?:(?P<expert>\d+)\.)?down_proj(?:\.weight|\.weight_packed|\.qweight)?)"
)
LENGTH = 8  # bytes of the header's length, before the header
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """offset: first byte in the file. dtype: safetensors' name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class CheckpointFile:
    """One file, open until `close`. Several threads may read from it."""

    def __init__(self, path: Path):
        """Raises LoadError if the header is invalid or does not match the file's length."""
        self.path = path
        try:
            with safe_open(path, framework="pt"):
                pass
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (SafetensorError, OSError) as error:
            raise self.damaged(error) from None
        # the kernel reads further ahead
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def damaged(self, error: object) -> LoadError:
        return LoadError(f"{self.path} is damaged or truncated: {error}")

    def close(self) -> None:
        os.close(self.descriptor)

    def tensors(self) -> Iterator[StoredTensor]:
        length = int.from_bytes(os.pread(self.descriptor, LENGTH, 0), "little")
        header = json.loads(os.pread(self.descriptor, length, LENGTH))
        for name, found in header.items():
            if name != "__metadata__":
                offset = LENGTH + length + found["data_offsets"][0]
                yield StoredTensor(name, found["dtype"], tuple(found["shape"]), offset)

    def whole(self, stored: StoredTensor) -> Tensor:
        """Read a tensor to new host memory."""
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise LoadError(f"{stored.name} in {self.path.name} is {stored.dtype}")
        found = torch.empty(stored.shape, dtype=dtype)
        self.read(stored.offset, found)
        return found

    def read(self, start: int, into: Tensor) -> None:
        """Fill `into`, contiguous host memory, with the bytes from `start` on."""
        memory = into.reshape(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.descriptor, [memory[done:]], start + done)
            except OSError as error:
                raise self.damaged(error) from None
            if not count:
                raise self.damaged(f"it ends at byte {start + done}")
            done += count

    def mapped(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The values from `start` on, memory-mapped: only what is accessed is read. The mapping
        lives as long as the tensor."""
        offset = start % mmap.ALLOCATIONGRANULARITY
        size = shape[0] * shape[1] * dtype.itemsize
        try:
            # private, since torch wants writable memory
            memory = mmap.mmap(
                self.descriptor,
                offset + size,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=start - offset,
            )
        except (OSError, ValueError) as error:
            raise self.damaged(error) from None
        found = torch.frombuffer(memory, dtype=torch.uint8, offset=offset)
        if offset % dtype.itemsize:
            found = found.clone()  # misaligned: tensors of narrower types precede it
        return found.view(dtype).view(shape)


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that the index names, or every *.safetensors of the folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            outside = any("/" in name or name.startswith(".") for name in names)
        except (
            json.JSONDecodeError,
            KeyError,
            AttributeError,
            TypeError,
            UnicodeDecodeError,
        ) as error:
            raise LoadError(f"{index} is not a valid index: {error!r}") from None
        if outside:
            raise LoadError(f"{index} names files outside its folder")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        raise LoadError(
            f"{folder} lacks {', '.join(missing[:NAMES_SHOWN]) or 'any .safetensors file'}"
        )
    return files


def experts_digest(folder: Path) -> str:
    """Distinguishes checkpoints with different experts. Hashes a little of each layer: the first
    bytes of its router and of the first and last expert's down projection, and their names, dtypes
    and shapes."""
    found: dict[str, bytes] = {}
    last: dict[str, tuple[int, str]] = {}
    for path in checkpoint_files(folder):
        file = CheckpointFile(path)
        try:
            for stored in file.tensors():
                match = EXPERT_TENSOR.fullmatch(stored.name)
                if match is None:
                    continue
                layer, expert = match["layer"], int(match["expert"] or 0)
                if expert and expert < last.get(layer, (0, ""))[0]:
                    continue
                data = os.pread(file.descriptor, DIGESTED, stored.offset)
                if expert:
                    found.pop(last.get(layer, (0, ""))[1], None)
                    last[layer] = (expert, stored.name)
                found[stored.name] = repr((stored.dtype, stored.shape)).encode() + data
        finally:
            file.close()
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + b"\0" + found[name])
    return digest.hexdigest()[:16]
