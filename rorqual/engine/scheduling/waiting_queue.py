"""Requests that wait for a row, in the order in which they are to get one. No torch.

By priority first, the lowest number first. Within a priority by client, the least served first:
each client has an account of the tokens computed for it, prompt and output alike, so that one
request beside another client's four hundred is next. A client that comes back after a pause starts
no lower than where the queue stands, so nobody saves up for a burst. This is the virtual token
counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024) with equal weights,
and with the answer's expected length charged beforehand: else all rows that come free at once would
go to one client.
A client's share is divided among its users by the same rule, and a user's requests come in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from rorqual.engine.scheduling.sequence import Account, Sequence

MOST_IDLE = 1_000  # accounts with nothing waiting, or void heap entries, before they are cleared


class Accounts:
    """Names with something waiting, the least served first. floor: what the name that came last
    had been served then; an account that has fallen behind it counts as this much."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.floor = 0
        self.waiting = 0  # names
        # (served, entry, account); served may lag behind, and an entry that is not the account's
        # own is void
        self.heap: list[tuple[int, int, Account]] = []
        self.entries = 0

    def of(self, name: str) -> Account:
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = Account(name, self.floor)
        return account

    def enter(self, account: Account) -> None:
        """Something waits in this name."""
        if account.entry:
            return
        account.served = max(account.served, self.floor)
        self.entries += 1
        self.waiting += 1
        account.entry = self.entries
        if len(self.heap) > 2 * self.waiting + MOST_IDLE:
            self.heap = [place for place in self.heap if place[1] == place[2].entry]
            heapify(self.heap)
        heappush(self.heap, (account.served, account.entry, account))

    def leave(self, account: Account) -> None:
        """Nothing does any more. The account is kept while it says more than the floor does."""
        account.entry = 0
        self.waiting -= 1
        if len(self.accounts) > 2 * self.waiting + MOST_IDLE:
            self.accounts = {
                name: other
                for name, other in self.accounts.items()
                if other.entry or other.served > self.floor
            }

    def refund(self, account: Account, tokens: int) -> None:
        account.served -= tokens
        if account.entry:  # its place in the heap is too far back
            self.waiting -= 1
            account.entry = 0
            self.enter(account)

    def first(self) -> Account:
        while True:
            served, entry, account = self.heap[0]
            if account.entry != entry:
                heappop(self.heap)
            elif served < account.served:
                heapreplace(self.heap, (account.served, entry, account))
            else:
                return account


class UserQueues:
    """One client's waiting requests, by user."""

    def __init__(self) -> None:
        self.users = Accounts()
        self.queues: dict[str, deque[Sequence]] = {}


class PriorityLevel:
    """The waiting requests of one priority, by client. Queues of a client's users are kept while
    something of it waits; users start anew after."""

    def __init__(self) -> None:
        self.clients = Accounts()
        self.queues: dict[str, UserQueues] = {}

    def queue(self, sequence: Sequence) -> deque[Sequence]:
        """Where the sequence is about to wait."""
        request = sequence.request
        client = sequence.client_account = self.clients.of(request.client)
        self.clients.enter(client)
        queues = self.queues.get(request.client)
        if queues is None:
            queues = self.queues[request.client] = UserQueues()
        user = sequence.user_account = queues.users.of(request.user)
        queues.users.enter(user)
        queue = queues.queues.get(request.user)
        if queue is None:
            queue = queues.queues[request.user] = deque()
        return queue

    def head(self) -> Sequence:
        queues = self.queues[self.clients.first().name]
        return queues.queues[queues.users.first().name][0]

    def advance(self, sequence: Sequence) -> None:
        """The head is about to leave for a row."""
        self.clients.floor = max(self.clients.floor, sequence.client_account.served)
        users = self.queues[sequence.request.client].users
        users.floor = max(users.floor, sequence.user_account.served)

    def remove(self, sequence: Sequence) -> None:
        request = sequence.request
        queues = self.queues[request.client]
        queue = queues.queues[request.user]
        queue.remove(sequence)
        if not queue:
            del queues.queues[request.user]
            queues.users.leave(sequence.user_account)
        if not queues.queues:
            del self.queues[request.client]
            self.clients.leave(sequence.client_account)


class WaitingQueue:
    """The order in which waiting requests get a row; see the module."""

    def __init__(self) -> None:
        self.levels: dict[int, PriorityLevel] = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sequence]:
        """By priority, client and user, which is not the order in which they will come."""
        for priority in sorted(self.levels):
            for queues in self.levels[priority].queues.values():
                for queue in queues.queues.values():
                    yield from queue

    def append(self, sequence: Sequence) -> None:
        self._level(sequence).queue(sequence).append(sequence)
        self.count += 1

    def append_left(self, sequence: Sequence) -> None:
        """Before all others of its user: it has run already."""
        self._level(sequence).queue(sequence).appendleft(sequence)
        self.count += 1

    def _level(self, sequence: Sequence) -> PriorityLevel:
        level = self.levels.get(sequence.request.priority)
        if level is None:
            level = self.levels[sequence.request.priority] = PriorityLevel()
        return level

    @property
    def head(self) -> Sequence:
        """The next request; there must be one."""
        return self.levels[min(p for p, level in self.levels.items() if level.queues)].head()

    def pop_head(self) -> Sequence:
        sequence = self.head
        self._level(sequence).advance(sequence)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._level(sequence).remove(sequence)
        self.count -= 1

    def refund(self, sequence: Sequence) -> None:
        """It leaves its row: what was charged beforehand and did not come."""
        tokens = sequence.reserved
        if not tokens:
            return
        sequence.reserved = 0
        level = self._level(sequence)
        level.clients.refund(sequence.client_account, tokens)
        queues = level.queues.get(sequence.request.client)
        if queues is not None:
            queues.users.refund(sequence.user_account, tokens)


def reserve(sequence: Sequence, tokens: int) -> None:
    """It gets a row, and so many tokens of answer are expected of it."""
    charge(sequence, tokens)
    sequence.reserved = tokens


def charge(sequence: Sequence, tokens: int) -> None:
    """So many tokens of prompt were computed for it."""
    sequence.client_account.served += tokens
    sequence.user_account.served += tokens


def charge_output(sequence: Sequence, tokens: int) -> None:
    """So many tokens of answer were, of which those reserved are paid for."""
    paid = min(tokens, sequence.reserved)
    sequence.reserved -= paid
    if tokens > paid:
        charge(sequence, tokens - paid)
