"""Prompts that are computed here and answered by another engine: rank 0 keeps their pages under
leases, which every rank that holds a part of them serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rorqual.config.parallel import ParallelConfig
from rorqual.disagg.leases import Leases
from rorqual.disagg.page_sources import Address
from rorqual.disagg.rank_messages import LeaseOpened, LeasesClosed, ToRank
from rorqual.engine.cached_pages import CachedPages
from rorqual.engine.scheduling.sequence import Sequence


class Offers:
    """tell: all ranks, in the order of the steps. addresses: of the page servers, by rank."""

    def __init__(
        self,
        cache: CachedPages,
        leases: Leases,
        tell: Callable[[ToRank], None],
        sizes: ParallelConfig,
        engine_id: str,
    ):
        self.cache = cache
        self.leases = leases
        self.tell = tell
        self.sizes = sizes
        self.engine_id = engine_id
        self.addresses: list[Address] = []
        self.refused = 0  # answers that were offered to nobody since too much was held

    def offer(self, sequence: Sequence) -> dict[str, Any]:
        """kv_transfer_params of the answer to a request whose tokens go on elsewhere. To be called
        before the next step."""
        request = sequence.request
        dp_rank, pages = self.cache.hold(request.prompt, request.cache_salt)
        prefix = self.cache.prefix(dp_rank)
        name = self.leases.make(prefix, dp_rank, pages) if pages else None
        if name is None:
            prefix.release(list(pages.values()))
            self.refused += bool(pages)
        else:
            self.tell(LeaseOpened(name, dp_rank, list(pages), list(pages.values())))
        host, port = self.addresses[0]
        return {
            "do_remote_prefill": name is not None,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": name.hex() if name else None,
            "remote_host": host,
            "remote_port": port,
            "remote_num_pages": len(pages) if name else 0,
            "remote_page_size": prefix.page_size,
            "tp_size": self.sizes.tp,
            "pp_size": self.sizes.pp,
            "remote_ranks": [list(self.addresses[rank]) for rank in self._ranks(dp_rank)],
        }

    def _ranks(self, dp_rank: int) -> list[int]:
        """Of a data-parallel rank, stage after stage."""
        first = dp_rank * self.sizes.tp
        return [
            stage * self.sizes.stage + first + tp_rank
            for stage in range(self.sizes.pp)
            for tp_rank in range(self.sizes.tp)
        ]

    def settle(self) -> None:
        """Let go of what was read, or not in time."""
        self.leases.settle(self.cache.prefixes, lambda names: self.tell(LeasesClosed(names)))
