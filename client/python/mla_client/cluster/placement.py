"""Where a sequence is to be: pure functions over what members say of themselves.

A turn of a conversation asks at most MOST_CANDIDATES servers what they hold of its prefix: the last
owner, and of the servers that are not fuller than BOUND times the mean the home, the first two by
rendezvous hash of the prefix's first pages, and the emptier of two random ones. The cheapest gets
it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

from mla_client.types import Prefix, Probe, fill_of

MOST_CANDIDATES = 4
BY_HASH = 2
# A server whose fill is more than this multiple of the mean is passed over, unless the difference
# is smaller than SLACK of a whole server: at the beginning all are nearly empty.
BOUND = 1.25
SLACK = 0.05
# Rows that decide which servers a prefix belongs to: its first ones.
KEY_ROWS = 256
# Bytes of a page's name under a fleet's salt.
NAME_BYTES = 16
IMPOSSIBLE = float("inf")


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs that placement compares, in seconds. The defaults fit DeepSeek-V3 on one GPU. Only
    their ratios matter."""

    prefill_row_s: float = 100e-6    # of a row that is computed again, in the worker and here
    host_row_s: float = 4e-6         # of a row that comes back from host memory
    file_row_s: float = 25e-6        # and from a file
    requests: int = 61 * 16          # of a turn, each of which waits in the queue
    full_s: float = 6.0              # of a pool that is full; the square of its fill counts
    away_s: float = 2e-3             # of a server that is not the worker's home


class Choice(NamedTuple):
    """A candidate, and what it would cost."""

    address: str
    cost_s: float
    probe: Optional[Probe]


def key_of(model: str, prefix: Prefix) -> bytes:
    """Returns the key by which a prefix chooses its servers. Equal first rows, models and salts
    give equal keys."""
    hasher = hashlib.blake2b(digest_size=16)
    for text in (model.encode(), prefix.salt.encode()):
        hasher.update(struct.pack("<I", len(text)) + text)
    if len(prefix.page_keys) > 0:
        hasher.update(bytes(prefix.page_keys[0]))
    else:
        for token in prefix.token_ids[:KEY_ROWS]:
            hasher.update(struct.pack("<I", int(token)))
    return hasher.digest()


def page_names(token_ids: Sequence[int], page_size: int, salt: bytes) -> List[bytes]:
    """Names of 16 bytes for whole pages, for Prefix.page_keys: each stands for its page's tokens
    and all before them, and says nothing of them to who does not have the fleet's salt. 32k tokens
    in pages of 64 rows are 8 KB of names. Every client of the fleet must use the same salt, of at
    most 64 bytes. Rows named in this way and rows of token ids do not find each other."""
    names: List[bytes] = []
    last = b""
    for begin in range(0, len(token_ids) - page_size + 1, page_size):
        page = token_ids[begin:begin + page_size]
        last = hashlib.blake2b(last + struct.pack(f"<{page_size}I", *page), key=salt,
                               digest_size=NAME_BYTES).digest()
        names.append(last)
    return names


def by_hash(key: bytes, addresses: Sequence[str]) -> List[str]:
    """Rendezvous hashing: returns all addresses, best first for this key. If an address comes or
    goes, the order of the others stays."""
    def weight(address: str) -> bytes:
        return hashlib.blake2b(address.encode(), key=key[:64], digest_size=8).digest()
    return sorted(addresses, key=weight, reverse=True)


def bounded(addresses: Sequence[str], fills: Mapping[str, float]) -> List[str]:
    """Returns the servers that are not fuller than BOUND times the mean of those whose fill is
    known. A server of which nothing is known is returned, too."""
    known = [fills[address] for address in addresses if address in fills]
    mean = sum(known) / len(known) if known else 0.0
    most = max(BOUND * mean, mean + SLACK)
    return [address for address in addresses if fills.get(address, 0.0) <= most]


def candidates(key: Optional[bytes], addresses: Sequence[str], fills: Mapping[str, float],
               rng: random.Random, last: str = "", home: str = "") -> List[str]:
    """Whom to ask, at most MOST_CANDIDATES, without repeats. `addresses`: of members that take new
    sequences. Without a key (a prompt that shares nothing) the home and a random one. Servers that
    are too full keep what they have and get nothing new."""
    chosen: List[str] = []
    with_room = bounded(addresses, fills)

    def add(address: str) -> None:
        if address and address in addresses and address not in chosen:
            chosen.append(address)
    add(last or (home if home in with_room else ""))
    if key is not None:
        for address in by_hash(key, with_room)[:BY_HASH]:
            add(address)
    rest = [address for address in with_room if address not in chosen]
    if rest:
        some = rng.sample(rest, min(2, len(rest)))
        add(min(some, key=lambda one: fills.get(one, 0.0)))
    return chosen[:MOST_CANDIDATES]


def cost(probe: Optional[Probe], rows: int, bytes_wanted: int, costs: Costs,
         at_home: bool) -> float:
    """Seconds that a turn of `rows` rows costs there; IMPOSSIBLE where it drains, has no room or
    did not answer. `bytes_wanted`: of the rows that are not found."""
    if probe is None or probe.draining or probe.bytes_free < bytes_wanted:
        return IMPOSSIBLE
    missing = max(0, rows - probe.rows)
    return (missing * costs.prefill_row_s
            + probe.rows_in_host * costs.host_row_s + probe.rows_in_file * costs.file_row_s
            + probe.wait_s * costs.requests
            + probe.fill ** 2 * costs.full_s
            + (0.0 if at_home else costs.away_s))


def ranked(probes: Mapping[str, Optional[Probe]], rows: int, bytes_of_rows: Dict[str, int],
           costs: Costs, home: str = "") -> List[Choice]:
    """The candidates by cost, the impossible ones last; of equals, in the order of `probes`.
    `bytes_of_rows`: what the missing rows take at each."""
    choices = [Choice(address, cost(probe, rows, bytes_of_rows.get(address, 0), costs,
                                    address == home), probe)
               for address, probe in probes.items()]
    return sorted(choices, key=lambda choice: choice.cost_s)


def subset_of(worker: str, addresses: Sequence[str], limit: int) -> List[str]:
    """Returns the servers that a worker uses, its home first; with `limit` 0 all. A member that
    comes or goes changes nothing in the order of the others."""
    order = by_hash(hashlib.blake2b(worker.encode(), digest_size=16).digest(), addresses)
    return order[:limit] if limit > 0 else order
