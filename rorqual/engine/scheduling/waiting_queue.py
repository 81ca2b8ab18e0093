"""Requests that wait for a device row, in admission order. No torch.

By priority first, the lowest number first. Within a priority by client, the least served first:
each client has an account of the tokens computed for it, prompt and output alike, so that one
request goes ahead of another client's four hundred. A client that returns after a pause starts at
the queue's current level, so no client can save up for a burst. This is the virtual token counter
of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024) with equal weights, and with
the expected output length charged in advance: else all rows freed at once would go to one client. A
client's share is divided among its users by the same rule; a user's requests are first come, first
served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from rorqual.engine.scheduling.sequence import Account, Sequence

MAX_IDLE = 1_000  # idle accounts, or stale heap entries, before they are cleared


class Accounts:
    """Names with waiting requests, the least served first. floor: `served` of the name admitted
    last, at that time; accounts below it are raised to it."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.floor = 0
        self.waiting = 0  # names
        # (served, entry, account); served may be outdated, and an entry that is not the account's
        # current one is stale
        self.heap: list[tuple[int, int, Account]] = []
        self.entries = 0

    def of(self, name: str) -> Account:
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = Account(name, self.floor)
        return account

    def enter(self, account: Account) -> None:
        """The name has a waiting request."""
        if account.entry:
            return
        account.served = max(account.served, self.floor)
        self.entries += 1
        self.waiting += 1
        account.entry = self.entries
        if len(self.heap) > 2 * self.waiting + MAX_IDLE:
            self.heap = [place for place in self.heap if place[1] == place[2].entry]
            heapify(self.heap)
        heappush(self.heap, (account.served, account.entry, account))

    def leave(self, account: Account) -> None:
        """The name has no waiting request any more. Its account is kept while above the floor."""
        account.entry = 0
        self.waiting -= 1
        if len(self.accounts) > 2 * self.waiting + MAX_IDLE:
            self.accounts = {
                name: other
                for name, other in self.accounts.items()
                if other.entry or other.served > self.floor
            }

    def refund(self, account: Account, tokens: int) -> None:
        account.served -= tokens
        if account.entry:  # its heap entry has too large a key
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
    """The waiting requests of one priority, by client. A client's user accounts are kept only while
    it has waiting requests."""

    def __init__(self) -> None:
        self.clients = Accounts()
        self.queues: dict[str, UserQueues] = {}

    def queue(self, sequence: Sequence) -> deque[Sequence]:
        """The queue that the sequence belongs to."""
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
        """The head is about to get a row: raise the floors."""
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
        """By priority, client and user; not the admission order."""
        for priority in sorted(self.levels):
            for queues in self.levels[priority].queues.values():
                for queue in queues.queues.values():
                    yield from queue

    def append(self, sequence: Sequence) -> None:
        self._level(sequence).queue(sequence).append(sequence)
        self.count += 1

    def append_left(self, sequence: Sequence) -> None:
        """Ahead of its user's others: it was preempted."""
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

    def served_without_row(self, sequence: Sequence) -> int:
        """Its client's account if it gave up its row and waited."""
        account = sequence.client_account
        return max(account.served - sequence.reserved, self._level(sequence).clients.floor)

    def refund(self, sequence: Sequence) -> None:
        """It gives up its row: return what was charged in advance and not used."""
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
    """It gets a row: charge the expected output tokens in advance."""
    charge(sequence, tokens)
    sequence.reserved = tokens


def charge(sequence: Sequence, tokens: int) -> None:
    """Charge computed prompt tokens."""
    sequence.client_account.served += tokens
    sequence.user_account.served += tokens


def charge_output(sequence: Sequence, tokens: int) -> None:
    """Charge output tokens, beyond those reserved."""
    paid = min(tokens, sequence.reserved)
    sequence.reserved -= paid
    if tokens > paid:
        charge(sequence, tokens - paid)
