"""etcd's requests and answers as JSON, which etcd itself serves (its gRPC gateway, from v3.4 on):
keys and values in base64, numbers of 64 bits as text. And a client for those who write there.

No package is needed for it. Of those for Python etcd3 has had no release since 2020, aetcd brings
gRPC, and etcd3gw, which speaks this JSON too, waits in threads and does not tell of a watch that
broke off.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from typing import Any

from rorqual.registry.address import EtcdAddress

SECONDS = 3.0  # for an answer
MAX_ANSWER_BYTES = 8 << 20
MAX_RECORDS = 4096  # that are read


class EtcdError(Exception):
    """etcd does not answer, or says no. gone: the lease is none any more."""

    def __init__(self, why: str, gone: bool = False):
        super().__init__(why)
        self.gone = gone


def encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def keys_below(prefix: str) -> dict[str, str]:
    """All keys that begin so; it ends with a slash."""
    return {"key": encoded(prefix), "range_end": encoded(prefix[:-1] + chr(ord("/") + 1))}


def decoded(kv: dict[str, Any]) -> tuple[str, bytes]:
    """Key and value. Raises EtcdError."""
    try:
        key = base64.b64decode(kv["key"], validate=True).decode()
        return key, base64.b64decode(kv.get("value", ""), validate=True)
    except (KeyError, TypeError, ValueError):
        raise EtcdError("a key or a value is not in base64") from None


class EtcdClient:
    """Each call waits SECONDS at most for each member of the cluster, until one answers. Raises
    EtcdError."""

    def __init__(self, address: EtcdAddress):
        self.bases = list(address.bases)

    def grant(self, seconds: float) -> str:
        """A lease of so many seconds; its name."""
        return str(self._ask("lease/grant", {"TTL": int(seconds)})["ID"])

    def put(self, key: str, value: bytes, lease: str) -> None:
        """There until the lease ends."""
        self._ask("kv/put", {"key": encoded(key), "value": encoded(value), "lease": lease})

    def keep_alive(self, lease: str) -> None:
        """From now on for all of its seconds again."""
        found = self._ask("lease/keepalive", {"ID": lease})
        if int(found.get("result", {}).get("TTL", 0)) <= 0:
            raise EtcdError("the lease has ended", gone=True)

    def below(self, prefix: str, most: int = MAX_RECORDS) -> tuple[str, int, dict[str, bytes]]:
        """All that is there under keys that begin so: the cluster's name, its revision, and values
        by key."""
        found = self._ask("kv/range", {**keys_below(prefix), "limit": str(most)})
        try:
            head = found["header"]
            cluster, revision = str(head.get("cluster_id", "")), int(head["revision"])
            kvs = list(found.get("kvs", ()))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EtcdError("it answers something else than a list") from None
        return cluster, revision, dict(map(decoded, kvs))

    def revoke(self, lease: str) -> None:
        """With all that is there until it ends."""
        self._ask("lease/revoke", {"ID": lease})

    def _ask(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        errors = []
        for base in list(self.bases):
            try:
                return self._post(f"{base}/v3/{path}", fields)
            except (OSError, ValueError) as error:
                errors.append(f"{base}: {getattr(error, 'reason', error)}")
                self.bases.append(self.bases.pop(0))  # the next one first, from now on
        raise EtcdError("; ".join(errors))

    def _post(self, url: str, fields: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            url, json.dumps(fields).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                found = json.loads(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            text = error.read(300).decode(errors="replace")
            if error.code >= 500:  # no leader, say: another member may have one
                raise OSError(f"it answers {error.code} {text}") from None
            gone = error.code == 404 and "lease not found" in text
            raise EtcdError(f"it answers {error.code} {text}", gone) from None
        if not isinstance(found, dict):
            raise ValueError("it answers something else than an object")
        return found
