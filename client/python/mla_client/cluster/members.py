"""The servers of a cluster, as their registry has them, and a list that outlives the registry.

A member's value in a registry is JSON that the member's own announcer wrote. All who may write to
the registry decide where clients connect, so the registry belongs to the operators of the servers.
Values are checked nevertheless: a value that does not describe a member is left out and counted.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from mla_client import errors

# Members of a cluster, and bytes of one's value: beyond them something is wrong with the registry.
MOST_MEMBERS = 4096
MOST_VALUE_BYTES = 64 << 10
MOST_TEXT = 256
MOST_DIGESTS = 256
# A list is read again so often, and used for so long while the registry does not answer.
REFRESH_S = 1.0
KEEP_S = 600.0
# After a fault of this program the pauses grow up to this.
LONGEST_PAUSE_S = 30.0

LOG = logging.getLogger("mla_client")


@dataclasses.dataclass(frozen=True)
class Member:
    """A server of the cluster. All but the address may be unknown, and is empty or 0 then."""

    address: str                 # HOST:PORT, or unix:PATH
    boot_id: int = 0
    node: str = ""               # name of its host: a worker there may use the socket
    socket: str = ""             # path of its unix socket on that host
    device: str = ""
    version: str = ""
    draining: bool = False
    bytes_free: int = 0
    bytes_cached: int = 0         # of these, what the prefix cache keeps
    bytes_total: int = 0
    sequences: int = 0
    models: Tuple[str, ...] = ()  # digests of their weights, in hex

    def to_json(self) -> str:
        """Returns the member in the form in which a registry keeps it."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Member":
        """Parses a member. Raises InvalidArgument, with the field, if `text` is not one. Ignores
        unknown fields, which a newer announcer may write."""
        if len(text) > MOST_VALUE_BYTES:
            raise _wrong("value", f"{len(text)} characters", f"at most {MOST_VALUE_BYTES}")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _wrong("value", str(error), "JSON") from error
        if not isinstance(fields, dict):
            raise _wrong("value", type(fields).__name__, "an object")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls.checked({name: value for name, value in fields.items() if name in known})

    @classmethod
    def checked(cls, fields: Mapping[str, Any]) -> "Member":
        """Makes a member of unchecked fields. Raises InvalidArgument, with the field."""
        good: Dict[str, Any] = {}
        for name, value in fields.items():
            if name in ("boot_id", "bytes_free", "bytes_cached", "bytes_total", "sequences"):
                if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                    raise _wrong(name, repr(value)[:MOST_TEXT], "a number of 64 bits")
            elif name == "draining":
                if not isinstance(value, bool):
                    raise _wrong(name, repr(value)[:MOST_TEXT], "true or false")
            elif name == "models":
                if (not isinstance(value, (list, tuple)) or len(value) > MOST_DIGESTS
                        or not all(_is_text(one) for one in value)):
                    raise _wrong(name, repr(value)[:MOST_TEXT],
                                 f"at most {MOST_DIGESTS} digests in hex")
                value = tuple(value)
            elif not _is_text(value):
                raise _wrong(name, repr(value)[:MOST_TEXT],
                             f"text of at most {MOST_TEXT} printable characters")
            good[name] = value
        if not good.get("address"):
            raise _wrong("address", "none", "HOST:PORT or unix:PATH")
        return cls(**good)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()


def _wrong(field: str, got: str, limit: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(f"member.{field}: got {got}, must be {limit}",
                                  errors.ErrorDetail(field="member." + field, got=got, limit=limit))


class MemberList:
    """The members, read again and again, and kept for `keep_s` while the registry is away.

    Threading: any thread. `start` begins a thread that reads; without it `refresh` is the
    caller's."""

    def __init__(self, read: Callable[[], List[Member]], *, refresh_s: float = REFRESH_S,
                 keep_s: float = KEEP_S, now: Callable[[], float] = time.monotonic,
                 on_gone: Optional[Callable[[List[str]], None]] = None) -> None:
        """`read` asks the registry, and raises MlaError where it does not answer. `on_gone` gets
        the addresses of members that have left, or have another boot id."""
        self._read = read
        self._refresh_s = refresh_s
        self._keep_s = keep_s
        self._now = now
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._members: Dict[str, Member] = {}
        self._at: Optional[float] = None  # of the last good answer
        self._error: Optional[errors.MlaError] = None
        self._gone_left: List[str] = []  # which on_gone did not take yet
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Reads from now on, in a thread that ends with `close`."""
        self._thread = threading.Thread(target=self._run, name="mla-members", daemon=True)
        self._thread.start()

    def refresh(self) -> bool:
        """Asks the registry once; false if it did not answer."""
        try:
            answer = self._read()
            if len(answer) > MOST_MEMBERS:
                raise errors.ResourceExhausted(
                    f"members: got {len(answer)}, must be at most {MOST_MEMBERS}",
                    errors.ErrorDetail(field="members", got=str(len(answer)),
                                       limit=str(MOST_MEMBERS)))
        except errors.MlaError as error:
            with self._lock:
                self._error = error.again()
            return False
        with self._lock:
            before, self._members = self._members, {one.address: one for one in answer}
            self._at, self._error = self._now(), None
            gone = [address for address, one in before.items()
                    if address not in self._members or _restarted(one, self._members[address])]
            self._gone_left += [one for one in gone if one not in self._gone_left]
            gone = list(self._gone_left)
        if gone and self._on_gone is not None:
            self._on_gone(gone)  # it gets them again at the next reading if it raises
        with self._lock:
            self._gone_left = [one for one in self._gone_left if one not in gone]
        return True

    def all(self) -> List[Member]:
        """Returns the members, by address. Unavailable (reason "registry_away") where the registry
        has never answered, or not for `keep_s`.
        """
        with self._lock:
            if self._at is not None and self._now() - self._at <= self._keep_s:
                return sorted(self._members.values(), key=lambda one: one.address)
            since = ("never" if self._at is None
                     else f"not for {self._now() - self._at:.0f} s")
            why = self._error.message if self._error is not None else "it was not asked yet"
        raise errors.Unavailable(f"the registry has answered {since}: {why}",
                                 errors.ErrorDetail(reason="registry_away"))

    @property
    def age_s(self) -> float:
        """Returns the seconds since the registry has answered; infinite if it never did."""
        with self._lock:
            return float("inf") if self._at is None else self._now() - self._at

    @property
    def error(self) -> Optional[errors.MlaError]:
        """Says why the registry did not answer the last time; None if it did."""
        with self._lock:
            return self._error

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        pause = self._refresh_s
        while not self._stop.wait(pause):
            try:
                self.refresh()
                pause = self._refresh_s
            except Exception as error:  # of whatever kind: without this thread no list is read
                pause = max(self._refresh_s, min(2 * pause, LONGEST_PAUSE_S))
                LOG.exception("a fault while the members of the cluster were read; again in %g s",
                              pause)
                with self._lock:
                    self._error = errors.Internal(f"{type(error).__name__}: {error}")


def _restarted(before: Member, after: Member) -> bool:
    return before.boot_id != after.boot_id and 0 not in (before.boot_id, after.boot_id)
