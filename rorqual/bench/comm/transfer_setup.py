"""What the two sides of `bench comm --pages` share: what is moved, by what, and how it is named."""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.spec import KVSpec, kv_spec
from rorqual.config.hf import read_config_file
from rorqual.disagg.transports.installed import HANDLES, TCP
from rorqual.disagg.transports.start import PageStaging, start_handles, start_staging
from rorqual.models.hub import model_folder

HOST = "127.0.0.1"
CHUNK = 16 * 2**20  # bytes of a plain socket's buffer


@dataclass(frozen=True)
class TransferSetup:
    """model: a folder or a name in rorqual/shapes; tokens: of the prompt, whole pages count.
    devices: where the pages are, and where they are to be. request_after: seconds from a lease's
    opening until its pages are asked for."""

    model: str
    tokens: int = 2048
    page_size: int = 64
    transports: tuple[str, ...] = (TCP,)
    repeats: int = 5
    staging_mb: int = 128
    devices: tuple[str, str] = ("cpu", "cpu")
    request_after: float = 0.0

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size


def spec_of(setup: TransferSetup) -> KVSpec:
    config = read_config_file(model_folder(setup.model, weights=False))
    return kv_spec(config, setup.page_size, "auto")


def staging_of(
    transport: str, setup: TransferSetup, memory: PageMemory, sends: bool, fetches: bool
) -> PageStaging | None:
    if transport == TCP:
        return None
    if transport == HANDLES:
        return start_handles(setup.staging_mb, memory.size, memory.platform, sends, fetches)
    return start_staging(transport, setup.staging_mb, memory.size, HOST, sends, fetches)


def keys_of(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]
