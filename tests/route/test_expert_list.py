"""Expert servers at the router's /admin: they join, renew, change and leave, and are listed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from rorqual.errors import ConfigError
from rorqual.registry.experts import (
    ExpertRecord,
    RegistryError,
    find_experts,
    forget_experts,
    register_experts,
)
from rorqual.route import admin, experts
from tests.route.fakes import FakeServer, routed, run

SECRET = "of all who join the router"


def test_they_are_listed_and_get_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "SHORTEST_LEASE", 0.1)
    monkeypatch.setattr(experts, "MAX_SERVERS", 2)
    path = tmp_path / "secret"
    path.write_text(SECRET)
    first = ExpertRecord("127.0.0.1:9400", "0-95")
    second = ExpertRecord("experts-1:9400", "32-127", "0-3,7")
    third = ExpertRecord("10.0.0.9:9400")

    async def test() -> None:
        server = FakeServer()
        async with routed(server, admin_secret_file=str(path)) as router:
            at = (router.url, SECRET)
            for record in (first, second):
                await asyncio.to_thread(register_experts, *at, record, 30)
            assert await asyncio.to_thread(find_experts, *at) == [first, second]
            assert [one.url for one in router.router.servers] == [server.url]
            with pytest.raises(RegistryError, match="503"):
                await asyncio.to_thread(register_experts, *at, third, 30)
            moved = ExpertRecord(first.address, "0-63")
            await asyncio.to_thread(register_experts, *at, moved, 0.1)
            assert moved in await asyncio.to_thread(find_experts, *at)
            await asyncio.sleep(0.2)
            assert await asyncio.to_thread(find_experts, *at) == [second]
            await asyncio.to_thread(register_experts, *at, third, 30)
            await asyncio.to_thread(forget_experts, *at, second)
            assert await asyncio.to_thread(find_experts, *at) == [third]
            with pytest.raises(RegistryError, match="404"):
                await asyncio.to_thread(forget_experts, *at, second)
            with pytest.raises(RegistryError, match="401"):
                await asyncio.to_thread(find_experts, router.url, "wrong")

    run(test())


def test_a_router_that_is_away() -> None:
    with pytest.raises(RegistryError, match=r"127\.0\.0\.1:9/"):
        find_experts("http://127.0.0.1:9", SECRET)


@pytest.mark.parametrize(
    "given",
    [
        {"address": "8.8.8.8:9400"},
        {"address": "0.0.0.0:9400"},
        {"address": "127.0.0.1"},
        {"address": "127.0.0.1:0"},
        {"address": "127.0.0.1:99999"},
        {"address": "http://127.0.0.1:9400"},
        {"address": "127.0.0.1:9400", "slots": "0-"},
        {"address": "127.0.0.1:9400", "slots": ""},
        {"address": "127.0.0.1:9400", "layers": "1," * 300 + "1"},
        {"address": "127.0.0.1:9400", "layers": 3},
    ],
)
def test_wrong_records(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        ExpertRecord(**given)
