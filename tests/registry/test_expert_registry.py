"""Where expert servers tell that they are there: what counts in etcd, and addresses and secrets
that are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rorqual.errors import ConfigError
from rorqual.registry import expert_registry as registry_module
from rorqual.registry.expert_registry import (
    PURPOSE,
    EtcdExperts,
    ExpertMembership,
    RouterExperts,
    check_registry,
    expert_registry,
)
from rorqual.registry.experts import ExpertRecord, RegistryError
from rorqual.registry.gateway import EtcdClient, encoded
from rorqual.registry.records import sealed
from tests.registry.etcds import FakeEtcd

SECRET = b"a secret that is long enough"
ONE = ExpertRecord("10.0.0.7:9400", "0-63", "all")
TWO = ExpertRecord("10.0.0.8:9400", "64-127", "3-7")


@pytest.fixture
def store() -> Iterator[FakeEtcd]:
    made = FakeEtcd()
    made.start()
    try:
        yield made
    finally:
        made.stop()


def at(store: FakeEtcd, secret: bytes = SECRET) -> EtcdExperts:
    found = expert_registry(store.address, secret, None, "register")
    assert isinstance(found, EtcdExperts)
    return found


def put(store: FakeEtcd, key: str, value: bytes) -> None:
    store.ask("kv/put", {"key": encoded(key), "value": encoded(value)})


def test_records_in_etcd(store: FakeEtcd) -> None:
    first, second, reader = at(store), at(store), at(store)
    first.join(ONE)
    second.join(TWO)
    assert set(reader.find().records) == {ONE, TWO}
    first.join(ONE)
    first.leave(ONE)
    assert reader.find().records == (TWO,)
    first.join(ONE)  # one that came too late
    assert reader.find().records == (TWO,)
    assert at(store, b"the secret of others").find().records == ()


def test_an_epoch_ends_where_etcd_forgets(store: FakeEtcd) -> None:
    first, reader = at(store), at(store)
    first.join(ONE)
    before = reader.find().epoch
    first.join(ONE)
    assert reader.find().epoch == before
    store.wipe()
    assert reader.find().epoch != before
    assert reader.find().records == ()
    first.join(ONE)
    assert reader.find().records == (ONE,)


def record_fields(**changes: Any) -> dict[str, Any]:
    found = {"address": "10.0.0.9:9400", "slots": "all", "layers": "all"}
    return {**found, "expires": time.time() + 100, **changes}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (sealed(record_fields(), b"another secret, as long", PURPOSE), "another secret"),
        (sealed(record_fields(), SECRET, b"rorqual server record 1\0"), "another secret"),
        (sealed(record_fields(expires=time.time() - 1), SECRET, PURPOSE), "ended"),
        (sealed(record_fields(expires=time.time() + 9999), SECRET, PURPOSE), "too far"),
        (sealed(record_fields(expires="soon"), SECRET, PURPOSE), "no address, slots"),
        (sealed(record_fields(address="8.8.8.8:9400"), SECRET, PURPOSE), "not accepted"),
        (sealed(record_fields(address=7), SECRET, PURPOSE), "not accepted"),
        (sealed(record_fields(slots="x"), SECRET, PURPOSE), "no range"),
        (sealed({}, SECRET, PURPOSE), "no address, slots"),
        (b"x" * 5000, "more than"),
        (b"[]", "no signed record"),
        (b'{"record": 1, "mac": "x"}', "no signed record"),
        (json.dumps({"record": "[" * 9000, "mac": ""}).encode(), "more than"),
    ],
)
def test_records_that_do_not_count(
    value: bytes, why: str, store: FakeEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    reader = at(store)
    put(store, reader._key("10.0.0.9:9400"), value)
    for _ in range(2):
        assert reader.find().records == ()
    warned = [one.getMessage() for one in caplog.records if why in one.getMessage()]
    assert len(warned) == 1


def test_a_record_under_another_s_key(store: FakeEtcd) -> None:
    reader = at(store)
    put(store, reader._key("10.0.0.1:1"), sealed(record_fields(), SECRET, PURPOSE))
    assert reader.find().records == ()


def test_an_etcd_that_answers_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [{}, {"header": 1}, {"header": {"revision": "x"}}]
    answers += [{"header": {"revision": "1"}, "kvs": [{}]}, {"header": {"revision": 1}, "kvs": 7}]
    for answer in answers:
        monkeypatch.setattr(EtcdClient, "_ask", lambda self, path, fields, a=answer: a)
        with pytest.raises(RegistryError):
            EtcdExperts("etcd://127.0.0.1:9", SECRET).find()


NO_ADDRESSES = """
127.0.0.1:8080 http://8.8.8.8:80 http:// http://a:1/path http://u@10.0.0.1:1 http://10.0.0.1:x
etcd:// etcd://8.8.8.8:2379 etcd://10.0.0.1 ftp://10.0.0.1:1
"""


@pytest.mark.parametrize("given", NO_ADDRESSES.split())
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        check_registry(given)


def test_a_router_asks_for_its_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    url = "http://127.0.0.1:8080/"
    with pytest.raises(ConfigError, match="needs register_secret_file"):
        expert_registry(url, SECRET, None, "register")
    with pytest.raises(ConfigError, match="cannot be read"):
        expert_registry(url, SECRET, str(path), "register")
    path.write_text("short")
    with pytest.raises(ConfigError, match="at least 16"):
        expert_registry(url, SECRET, str(path), "register")
    path.write_text("of all who join the router\n")
    found = expert_registry(url, SECRET, str(path), "register")
    assert isinstance(found, RouterExperts)
    assert (found.name, found.secret) == ("http://127.0.0.1:8080", "of all who join the router")
    with pytest.raises(ConfigError, match="does not go with"):
        expert_registry("etcd://127.0.0.1:2379", SECRET, str(path), "register")


def test_a_server_stays_a_member_through_an_absence(
    store: FakeEtcd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry_module, "LEASE_SECONDS", 0.25)
    reader = at(store)
    member = ExpertMembership(at(store), ONE)
    until(lambda: reader.find().records == (ONE,))
    store.stop()
    until(lambda: "does not take this server" in caplog.text)
    store.wipe()
    store.start()
    until(lambda: reader.find().records == (ONE,))
    member.leave()
    assert reader.find().records == ()
    assert "takes this server again" in caplog.text


def until(done: Any) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
