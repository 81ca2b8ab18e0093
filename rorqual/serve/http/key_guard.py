"""Rate limit of wrong API keys per address."""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict

from rorqual.serve.errors import ApiError
from rorqual.serve.http.clients import ApiKeys, network_of
from rorqual.serve.limits import GUESS_SECONDS, MAX_GUESSERS


class KeyGuard:
    """Each distinct wrong key of an address counts once: a misconfigured client that repeats one
    key is not guessing. An address that has tried `most` of them within GUESS_SECONDS is rejected,
    whatever it sends, until that time is over."""

    def __init__(self, keys: ApiKeys, most: int):
        self.keys = keys
        self.most = most
        # by address: end of its time window, and hashes of the keys tried; oldest first
        self.guesses: OrderedDict[str, tuple[float, set[bytes]]] = OrderedDict()

    def refusal(self, given: bytes | None, address: str) -> ApiError | None:
        """given: the key sent, if any."""
        if not self.keys.keys:
            return None
        if self.guesses:
            wait = self._wait(network_of(address), time.monotonic())
            if wait > 0:
                return too_many_guesses(wait)
        if given is not None and self.keys.holder(given) is not None:
            return None
        if given is not None:
            self._note(network_of(address), given, time.monotonic())
        return ApiError(
            401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key"
        )

    def _wait(self, network: str, now: float) -> float:
        """Seconds for which this address is still rejected."""
        until, tried = self.guesses.get(network, (0.0, set()))
        if until <= now:
            self.guesses.pop(network, None)
            return 0.0
        return until - now if len(tried) >= self.most else 0.0

    def _note(self, network: str, given: bytes, now: float) -> None:
        _, tried = self.guesses.setdefault(network, (now + GUESS_SECONDS, set()))
        tried.add(hashlib.blake2b(given, digest_size=16).digest())
        while len(self.guesses) > MAX_GUESSERS:
            self.guesses.popitem(last=False)


def too_many_guesses(wait: float) -> ApiError:
    return ApiError(
        429,
        "too many wrong API keys came from this address; try again later",
        "rate_limit_error",
        code="too_many_wrong_keys",
        retry_after=math.ceil(wait),
    )
