"""Who may be taken for a server: what is signed, by whom, for where and until when."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from rorqual.errors import ConfigError
from rorqual.registry import records
from rorqual.registry.address import PREFIX, etcd_address
from rorqual.registry.records import MAX_RECORD_BYTES, SIGNED_SECONDS, BadRecord, ServerRecord

SECRET = "of all who join the router"
ROLES = ("replica", "decode")
URL = "http://10.0.0.7:8000"


def read(value: bytes, secret: str = SECRET) -> ServerRecord:
    return records.read_record(value, secret, ROLES)


def test_what_is_signed_is_read() -> None:
    record = ServerRecord.new(URL, "decode")
    assert read(record.signed(SECRET)) == record
    assert abs(record.expires - time.time() - SIGNED_SECONDS) < 5
    other = ServerRecord.new(URL, "replica")
    assert record.key("/a/") != other.key("/a/")
    assert record.key("/a/").startswith("/a/decode/")


def changed(**fields: object) -> bytes:
    """With another's words under a signature that was good."""
    outer = json.loads(ServerRecord.new(URL, "decode").signed(SECRET))
    outer["record"] = json.dumps({**json.loads(outer["record"]), **fields})
    return json.dumps(outer).encode()


def signed(text: str) -> bytes:
    return json.dumps({"record": text, "mac": records._mac(SECRET, text)}).encode()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (ServerRecord.new(URL, "decode").signed("of others"), "another secret"),
        (changed(url="http://10.0.0.8:8000"), "another secret"),
        (changed(expires=time.time() + 9999), "another secret"),
        (ServerRecord(URL, "decode", time.time() - 1).signed(SECRET), r"ended \d+ s ago"),
        (ServerRecord(URL, "decode", time.time() + 9999).signed(SECRET), "too far"),
        (ServerRecord(URL, "decode", float("nan")).signed(SECRET), "too far"),
        (lambda: ServerRecord.new(URL, "prefill").signed(SECRET), "role 'prefill'"),
        (lambda: ServerRecord.new("http://8.8.8.8:80", "decode").signed(SECRET), "public"),
        (lambda: ServerRecord.new("http://0.0.0.0:80", "decode").signed(SECRET), "public"),
        (signed("{}"), "says no URL"),
        (signed("[]"), "says no URL"),
        (signed('{"url": "http://[", "role": "decode", "expires": 1}'), "says no URL"),
        (b"", "no signed record"),
        (b"[]", "no signed record"),
        (b'{"record": 3, "mac": "x"}', "no signed record"),
        (b'{"record": "x", "mac": 3}', "no signed record"),
        (b"[" * 1000, "no signed record"),
        (b" " * (MAX_RECORD_BYTES + 1), "more than 2048 bytes"),
    ],
)
def test_anything_else_does_not_count(value: bytes | Callable[[], bytes], why: str) -> None:
    """What is right but for one thing is signed here: a signature does not outlast a long run."""
    made = value() if callable(value) else value
    with pytest.raises(BadRecord, match=why):
        read(made)


def test_addresses_of_etcd() -> None:
    found = etcd_address("etcd://127.0.0.1:2379")
    assert (found.bases, found.prefix) == (("http://127.0.0.1:2379",), PREFIX + "/")
    found = etcd_address("etcd://etcd-0:2379,[fd00::1]:2379/east/servers/")
    assert found.bases == ("http://etcd-0:2379", "http://[fd00::1]:2379")
    assert found.prefix == "/east/servers/"


@pytest.mark.parametrize(
    "given",
    [
        *("http://127.0.0.1:2379", "etcd://", "etcd://127.0.0.1", "etcd://127.0.0.1:0"),
        *("etcd://8.8.8.8:2379", "etcd://0.0.0.0:2379", "etcd://a:1,,b:2", "etcd://u@h:2379"),
        *("etcd://h:2379/a b", "etcd://h:99999", "etcd://h:2379?x=1"),
    ],
)
def test_wrong_addresses_of_etcd(given: str) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        etcd_address(given)
