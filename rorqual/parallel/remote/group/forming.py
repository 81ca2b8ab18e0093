"""How a caller and its expert servers form the process groups of their lanes.

Forming is collective, and may wait for a process that has ended: so it begins when every server has
agreed to take part, on a thread that is abandoned where one is lost or time is up.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from rorqual.parallel.remote.control import ServerLink, said
from rorqual.parallel.remote.group.lane_group import LaneGroup
from rorqual.parallel.remote.group.messages import (
    MAX_GROUP_BYTES,
    MAX_MEMBERS,
    TOKEN,
    GroupOffer,
    read_group_made,
)
from rorqual.parallel.remote.group.store import CallerStore, serve_store
from rorqual.parallel.remote.link import LinkError, receive, send, shut
from rorqual.parallel.remote.wire import ExpertMessage

OFFER_SECONDS = 120.0  # for a server to compile and load kernels
FORM_SECONDS = 60.0  # for servers to import what they need, and for communicators to connect
LOOK_SECONDS = 0.05
STEP_MESSAGE_SECONDS = 2.0  # for a server to take a step's message


@dataclass(eq=False)
class GroupMember:
    """A server of the group: rank `number` + 1. sock: on which steps are announced."""

    number: int
    link: ServerLink
    sock: socket.socket
    sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rank(self) -> int:
        return self.number + 1

    def send(self, kind: int, data: bytes = b"") -> None:
        """Raises OSError."""
        with self.sending:
            send(self.sock, kind, data)

    def leave(self) -> None:
        with suppress(OSError):
            self.send(ExpertMessage.GROUP_END)
        shut(self.sock)
        self.sock.close()


class GroupForming:
    """offer: what servers are offered, as rank 1. bind: has NCCL take the interface of an address.
    given_up: why it can no longer succeed, or nothing."""

    def __init__(
        self,
        offer: GroupOffer,
        device: torch.device,
        bind: Callable[[str], None],
        given_up: Callable[[], str],
    ):
        self.offer = offer
        self.device = device
        self.bind = bind
        self.given_up = given_up
        self.store = CallerStore(FORM_SECONDS)
        self.members: list[GroupMember] = []
        self.groups: list[LaneGroup] = []
        self.failure = ""

    def run(
        self, links: Sequence[ServerLink], join: Callable[[ServerLink], socket.socket]
    ) -> tuple[list[GroupMember], list[LaneGroup]]:
        """With the servers of these links. join: opens another link to one. Raises LinkError."""
        if len(links) > MAX_MEMBERS:
            raise LinkError(f"{len(links)} servers; accepted: at most {MAX_MEMBERS}")
        try:
            for number, link in enumerate(links):
                _naming(link, partial(self._join, number, link, join))
            for member in self.members:
                _naming(member.link, partial(_read_made, member))
                member.sock.settimeout(FORM_SECONDS)
            self._form(self._address())
        except BaseException:
            self.store.close()
            for member in self.members:
                shut(member.sock)
                member.sock.close()
            for group in self.groups:
                threading.Thread(target=group.abort, daemon=True).start()
            raise
        for member in self.members:
            member.sock.settimeout(STEP_MESSAGE_SECONDS)
        return self.members, self.groups

    def _join(
        self, number: int, link: ServerLink, join: Callable[[ServerLink], socket.socket]
    ) -> None:
        member = GroupMember(number, link, join(link))
        self.members.append(member)
        member.sock.settimeout(OFFER_SECONDS)
        member.send(ExpertMessage.GROUP, replace(self.offer, rank=member.rank).pack())

    def _address(self) -> str:
        """Of this host, as all servers reach it."""
        found = sorted({member.sock.getsockname()[0] for member in self.members})
        if len(found) > 1:
            raise LinkError(
                f"servers are reached from {' and '.join(found)}; accepted: one network's addresses"
            )
        return str(found[0])

    def _form(self, address: str) -> None:
        tokens = {member.rank: secrets.token_bytes(TOKEN) for member in self.members}
        works: list[Callable[[], None]] = [partial(self._connect, address, tokens)]
        for member in self.members:
            begin = partial(member.send, ExpertMessage.GROUP_BEGIN, tokens[member.rank])
            _naming(member.link, begin)
            works.append(partial(serve_store, member.sock, self.store))
        threads = [
            threading.Thread(target=self._run, args=(work,), name="expert group", daemon=True)
            for work in works
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + FORM_SECONDS
        while alive := [thread for thread in threads if thread.is_alive()]:
            reason = self.failure or self.given_up()
            if not reason and time.monotonic() > deadline:
                reason = f"it was not formed in {FORM_SECONDS:g} s"
            if reason:
                raise LinkError(reason)
            alive[0].join(LOOK_SECONDS)
        if self.failure:
            raise LinkError(self.failure)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised again by the thread that waits
            self.failure = self.failure or said(error)
            self.store.close()

    def _connect(self, address: str, tokens: dict[int, bytes]) -> None:
        offer = self.offer
        if offer.backend == "nccl":
            self.bind(address)
            torch.cuda.set_device(self.device)
        for lane in range(offer.lanes):
            group = LaneGroup(
                offer.backend, self.store, lane, 0, offer.size, self.device, address, FORM_SECONDS
            )
            self.groups.append(group)
            group.prove(tokens, FORM_SECONDS)


def _naming(link: ServerLink, work: Callable[[], None]) -> None:
    """Raises LinkError that names the server."""
    try:
        work()
    except (OSError, LinkError) as error:
        raise LinkError(f"{link.name}: {said(error)}") from None


def _read_made(member: GroupMember) -> None:
    kind, data = receive(member.sock, MAX_GROUP_BYTES)
    if kind != ExpertMessage.GROUP_MADE:
        raise LinkError(f"a message of kind {kind} came where a group was to")
    read_group_made(data)
