"""The command ring: steps that travel through shared memory instead of gRPC.

Submissions and completions are 64-byte entries in slots; the writer fills an entry and publishes it
by storing its sequence word last. fence.py says when plain stores are enough for that. A side that
sleeps says so in its waiter flag, and only then does the other pay for a wake-up.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple, Optional

from mla_client import errors
from mla_client.shm import fence, futex
from mla_client.shm.handshake import ENTRY_BYTES, RING_HEADER_BYTES
from mla_client.shm.shared_memory import SharedMemory

# The fields of entries after the sequence word, in the order of proto/wire/ring_layout.h.
SUBMISSION = struct.Struct("<BBBBQQIIIIIIQQ")
COMPLETION = struct.Struct("<BBHQQIIIIIIQII")
ATTEND, MESSAGE = 1, 2
HAS_KV, WANT_LSE, HAS_LISTS, SELECTS, WANT_LISTS, FP8_KV, ON_DEVICE = 1, 2, 4, 8, 16, 32, 64
PLAN_REUSED = 1
# 4-byte words of the header; the 8-byte word COMPLETIONS_TAKEN counts 8-byte words.
SUBMIT_DOORBELL, SERVER_WAITS = 16, 17
COMPLETE_DOORBELL, CLIENT_WAITS = 32, 33
COMPLETIONS_TAKEN = 24
CLOSED = 64
# A sleeper looks at the connection at least this often.
LONGEST_SLEEP_S = 0.1
SPINS_A_CLOCK = 16

# Why this machine cannot use a ring; empty: it can.
WHY_NOT = fence.WHY_NOT or futex.WHY_NOT


class Completion(NamedTuple):
    """One entry, taken from the ring."""

    kind: int
    flags: int
    launch_layers: int
    tag: int
    boot_id: int
    queue_us: int
    plan_us: int
    kernel_us: int
    write_us: int
    launch_requests: int
    launch_clients: int
    message: Optional[bytes]  # of MESSAGE; None too if it lies outside the region


class Ring:
    """The client's end. Threading: `submit` from one thread at a time, `take` and `wait` from one
    at a time. An interrupt of `wait` changes nothing; after one of `submit` or `take` nothing is
    known of the ring."""

    def __init__(self, memory: SharedMemory, spin_s: float) -> None:
        self._memory = memory
        self._spin_s = spin_s
        self._map = memoryview(memory.map)
        self._words = self._map.cast("I")
        self._longs = self._map.cast("Q")
        self.entries = memory.ring_entries
        self._mask = self.entries - 1
        self._completions = RING_HEADER_BYTES + self.entries * ENTRY_BYTES
        self._submitted = 0
        self._taken = 0  # as the server has been told

    def full(self) -> bool:
        """True if as many requests as there are entries have completions that were not taken."""
        return self._submitted - self._taken >= self.entries

    def record(self, stream: int) -> None:
        """Has the entry that is submitted next wait for what the GPU's stream has been given."""
        assert self._memory.device is not None
        self._memory.device.record(self._submitted & self._mask, stream)

    def submit(self, *fields: int) -> None:
        """Publishes an entry and wakes the server if it sleeps. REQUIRES: not full()."""
        offset = RING_HEADER_BYTES + (self._submitted & self._mask) * ENTRY_BYTES
        SUBMISSION.pack_into(self._map, offset + 4, *fields)
        fence.ordered()
        self._submitted += 1
        words = self._words
        words[offset >> 2] = self._submitted & 0xFFFFFFFF
        fence.full()
        if words[SERVER_WAITS]:
            words[SUBMIT_DOORBELL] = (words[SUBMIT_DOORBELL] + 1) & 0xFFFFFFFF
            futex.wake(self._memory.address + 4 * SUBMIT_DOORBELL)

    def ready(self) -> bool:
        """True if there is a completion to take."""
        at = self._completions + (self._taken & self._mask) * ENTRY_BYTES
        return self._words[at >> 2] == (self._taken + 1) & 0xFFFFFFFF

    def take(self) -> Completion:
        """The next completion; its slots may be written again afterwards. REQUIRES: ready()."""
        fence.ordered()
        at = self._completions + (self._taken & self._mask) * ENTRY_BYTES
        fields = COMPLETION.unpack_from(self._map, at + 4)
        message = None
        if fields[0] == MESSAGE:
            offset, length = fields[11], fields[12]
            if offset <= len(self._map) and length <= len(self._map) - offset:
                message = bytes(self._map[offset:offset + length])
        fence.ordered()
        self._longs[COMPLETIONS_TAKEN] = self._taken + 1
        self._taken += 1
        return Completion._make((*fields[:11], message))

    def connected(self) -> bool:
        """False once the server has ended the ring or the connection is gone."""
        return not self._words[CLOSED] and self._memory.connected()

    def wait(self, deadline: float) -> bool:
        """Waits for a completion: spins, then sleeps. False at the deadline; Unavailable when the
        connection has ended and nothing is left to take."""
        if self.ready():
            return True
        if time.monotonic() < deadline and self._spin():
            return True
        words = self._words
        while True:
            doorbell = words[COMPLETE_DOORBELL]
            words[CLIENT_WAITS] = 1
            fence.full()
            remaining_s = deadline - time.monotonic()
            try:
                if not self.ready() and remaining_s > 0 and not self._memory.ended:
                    futex.wait(self._memory.address + 4 * COMPLETE_DOORBELL, doorbell,
                               min(remaining_s, LONGEST_SLEEP_S))
            finally:
                words[CLIENT_WAITS] = 0
            if self.ready():
                return True
            # Requests completed before the end can still be taken, so this check comes last.
            if not self.connected() and not self.ready():
                raise errors.Unavailable("the shared memory has ended")
            if remaining_s <= 0:
                return False

    def _spin(self) -> bool:
        if self._spin_s <= 0:
            return False
        index = (self._completions + (self._taken & self._mask) * ENTRY_BYTES) >> 2
        wanted = (self._taken + 1) & 0xFFFFFFFF
        words, clock = self._words, time.monotonic
        end = clock() + self._spin_s
        while clock() < end:
            for _ in range(SPINS_A_CLOCK):
                if words[index] == wanted:
                    return True
        return False

    def wake_waiter(self) -> None:
        """Makes a sleeping `wait` look at the connection."""
        self._words[COMPLETE_DOORBELL] = (self._words[COMPLETE_DOORBELL] + 1) & 0xFFFFFFFF
        futex.wake(self._memory.address + 4 * COMPLETE_DOORBELL)
