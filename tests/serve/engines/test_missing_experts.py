"""What an engine process tells of experts that no server holds."""

from __future__ import annotations

from typing import Any

from rorqual.serve.engines.engine_metrics import EngineMetrics


class Servers:
    """Links that come and go, as ExpertServers has them: replaced as a whole."""

    def __init__(self) -> None:
        self.links: tuple[str, ...] = ("all",)
        self.looks = 0

    def without_holder(self) -> str:
        self.looks += 1
        return "" if "all" in self.links else "no server holds 0-15 of layer 1"


def test_it_is_looked_for_when_links_change_and_not_at_every_snapshot() -> None:
    engine: Any = None
    meter = EngineMetrics(engine)
    servers: Any = Servers()

    def told() -> list[str]:
        return [meter._experts_missing(servers) for _ in range(3)]

    assert told() == [""] * 3
    servers.links = ()
    assert told() == ["no server holds 0-15 of layer 1"] * 3
    servers.links = ("half",)
    assert told() == ["no server holds 0-15 of layer 1"] * 3
    servers.links = ("half", "all")
    assert told() == [""] * 3
    assert servers.looks == 4
