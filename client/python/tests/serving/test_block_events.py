"""Cached rows as blocks for routers: on scripted events, and on those of a real server."""

import queue
import threading
import time
import types
import unittest

import numpy as np

import mla_client
import server_binary
from mla_client import errors
from mla_client.pages import block_events
from mla_client.pages.block_events import BlockEvents, Cleared, Removed, Stored
from mla_client.pages.events import CacheEvent, EventKind
from mla_client.serving import Admission, Link, Options, Passes, Pause

BLOCK = 4
END_S = 60.0


class Watch:
    """Events that a test tells."""

    def __init__(self):
        self.told = queue.Queue()
        self.closed = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        lists = self.told.get()
        if isinstance(lists, Exception):
            raise lists
        return lists

    def close(self):
        self.closed.set()
        self.told.put(StopIteration())


class Server:
    """A client of a server that tells what it is told to tell."""

    def __init__(self):
        self.watches = []
        self.number = 40

    def watch_events(self):
        self.watches.append(Watch())
        self.watches[-1].told.put([])
        return self.watches[-1]

    def tell(self, *events, skip=0):
        """Events of (kind, fields)."""
        made = []
        for kind, fields in events:
            self.number += 1 + skip
            made.append(CacheEvent(**{
                "number": self.number, "kind": kind, "model_id": "m", "sequence_id": 0,
                "first_row": 0, "rows": BLOCK, "key": b"", "parent": b"", "unix_ms": 0, **fields}))
        self.watches[-1].told.put(made)

    def stored(self, sequence, place):
        return EventKind.STORED, {"sequence_id": sequence, "first_row": place * BLOCK,
                                  "key": b"%d/%d" % (sequence, place)}


class Case(unittest.TestCase):
    def setUp(self):
        self.server = Server()
        self.events = BlockEvents("m", BLOCK)
        self.addCleanup(self.events.close)
        self.assertEqual(self.events.take(), [Cleared()])

    def admit(self, request, sequence, tokens, found=0, end="absent"):
        self.events.admitted(self.server, request, sequence, tokens, found, end)

    def take(self, *events, **how):
        """What comes of events that the server tells."""
        if events:
            self.server.tell(*events, **how)
        until = time.monotonic() + END_S
        while not self.events._heard and time.monotonic() < until:
            time.sleep(0.001)
        return self.events.take()


class BlockEventsTest(Case):
    def test_pages_are_named_by_their_tokens(self):
        self.admit("a", 7, range(10))
        got = self.take(self.server.stored(7, 0), self.server.stored(7, 1))
        self.assertEqual(len(got), 1)
        self.assertEqual((got[0].parent, got[0].tokens, got[0].block_size),
                         (None, tuple(range(8)), BLOCK))
        self.assertEqual(len(set(got[0].hashes)), 2)
        self.events.ended("a", range(13))
        more = self.take(self.server.stored(7, 2))
        self.assertEqual(more, [Stored(more[0].hashes, got[0].hashes[1], (8, 9, 10, 11), BLOCK)])

    def test_hashes_are_equal_where_all_tokens_so_far_are(self):
        self.admit("a", 1, [1, 2, 3, 4, 5, 6, 7, 8], found=8, end="all")
        first = self.events.take()[0].hashes
        other = BlockEvents("m", BLOCK)
        self.addCleanup(other.close)
        other.take()
        other.admitted(self.server, "b", 2, [1, 2, 3, 4, 5, 6, 7, 9], 8, "all")
        second = other.take()[0].hashes
        self.assertEqual(first[0], second[0])
        self.assertNotEqual(first[1], second[1])
        self.assertTrue(all(0 <= one < 1 << 64 for one in first))

    def test_rows_that_are_found_are_published_once(self):
        self.admit("a", 1, range(9), found=8, end="all")
        self.assertEqual([one.tokens for one in self.events.take()], [tuple(range(8))])
        self.admit("b", 2, range(13), found=8)
        self.assertEqual(self.events.take(), [])
        got = self.take(self.server.stored(2, 2))
        self.assertEqual([(type(one), one.tokens) for one in got],
                         [(Stored, (8, 9, 10, 11))])

    def test_evicted_pages_are_removed(self):
        self.admit("a", 7, range(8))
        stored = self.take(self.server.stored(7, 0), self.server.stored(7, 1))[0]
        got = self.take((EventKind.EVICTED, {"key": b"7/1"}), (EventKind.EVICTED, {"key": b"?"}),
                        (EventKind.DEMOTED, {"key": b"7/0"}), (EventKind.DAMAGED, {"key": b"7/0"}))
        self.assertEqual(got, [Removed((stored.hashes[1], stored.hashes[0]))])
        self.assertEqual(self.take((EventKind.EVICTED, {"key": b"7/1"})), [])
        self.assertEqual(self.take(self.server.stored(7, 1)), [stored])  # its parent comes first

    def test_rows_that_a_match_does_not_find_are_removed(self):
        self.admit("a", 1, range(12), found=12, end="all")
        names = self.events.take()[0].hashes
        self.admit("b", 2, range(13), found=4, end="deferred")  # they come back from a slower tier
        self.assertEqual(self.events.take(), [])
        self.admit("c", 3, range(12), found=4, end="evicted")
        self.assertEqual(self.events.take(), [Removed((names[1],))])  # of the last one none asked

    def test_what_is_not_known_is_left_out(self):
        self.admit("a", 7, range(9))
        kind, fields = self.server.stored(7, 0)
        self.assertEqual(self.take(
            self.server.stored(8, 0), self.server.stored(7, 2), (kind, {**fields, "rows": 3}),
            (kind, {**fields, "model_id": "other"}), (kind, {**fields, "key": b""}),
            (99, fields)), [])

    def test_all_blocks_are_withdrawn_when_events_are_missing(self):
        for what in ("gap", "dropped", "restart"):
            with self.subTest(what=what):
                self.admit("a", 7, range(9))
                self.events.take()
                self.assertEqual(len(self.take(self.server.stored(7, 0))), 1)
                if what == "gap":
                    got = self.take(self.server.stored(7, 1), skip=1)
                    self.assertEqual([type(one) for one in got], [Cleared, Stored])
                    self.assertEqual(got[1].tokens, tuple(range(8)))
                elif what == "dropped":
                    self.assertEqual(self.take((EventKind.DROPPED, {})), [Cleared()])
                else:
                    self.server.watches[-1].told.put(errors.ServerRestarted("another boot"))
                    self.assertEqual(self.take(), [Cleared()])
        count = len(self.server.watches)
        self.admit("b", 8, range(9))  # which watches the new process
        self.assertEqual(len(self.server.watches), count + 1)

    def test_bounds(self):
        for name, value in (("MOST_BLOCKS", 2), ("MOST_ENDED", 1), ("MOST_HEARD", 3)):
            self.addCleanup(setattr, block_events, name, getattr(block_events, name))
            setattr(block_events, name, value)
        self.admit("a", 7, range(12), found=12, end="all")
        stored, removed = self.events.take()
        self.assertEqual(removed, Removed(stored.hashes[:1]))
        for number, request in enumerate("bcd"):
            self.admit(request, 10 + number, range(100 * number, 100 * number + 9))
            self.events.ended(request, range(100 * number, 100 * number + 9))
        self.assertEqual(sorted(self.events._sequences), [7, 12])
        got = self.take(*[self.server.stored(12, 0)] * 4)
        self.assertEqual(got, [Cleared()])
        self.assertTrue(self.server.watches[-1].closed.is_set())

    def test_a_server_without_events_is_asked_once(self):
        def refuse():
            refused.append(1)
            raise errors.Unimplemented("no events")
        refused, self.server.watch_events = [], refuse
        with self.assertLogs("mla_client", "WARNING"):
            self.admit("a", 1, range(9), found=8, end="all")
        self.admit("b", 2, range(9))
        self.assertEqual(len(refused), 1)
        self.assertEqual(len(self.events.take()), 2)

    def test_all_servers_of_a_cluster_are_watched(self):
        other = Server()
        cluster = types.SimpleNamespace(owners=types.SimpleNamespace(all=lambda: [
            types.SimpleNamespace(connected=one) for one in (self.server, None, other)]))
        self.events.admitted(cluster, "a", 7, range(9), 0, "absent")
        self.assertEqual(len(other.watches), 1)
        other.tell(other.stored(7, 0))
        self.assertEqual([type(one) for one in self.take()], [Stored])
        self.assertEqual(self.take((EventKind.EXPIRED, {})), [])
        # A key is that of its server.
        self.assertEqual(self.take((EventKind.EVICTED, {"key": b"7/0"})), [])


class RealServerTest(unittest.TestCase):
    """An engine's two sides on a server with room for few pages."""

    def setUp(self):
        self.server = server_binary.start("--kv-cache-bytes=1MiB", "--tenants-kv-bytes=1MiB",
                                          "--tenants-kv-slab-bytes=1MiB")
        self.addCleanup(self.server.stop)
        self.spec = mla_client.ModelSpec("m", mla_client.Geometry(1, 512, 64), 1, 0.25, 16)
        made = Options.of({"target": self.server.target}, "m", "engine")
        self.worker = Link(made, pause=Pause(0.0, 0.0))
        self.worker.start(self.spec, None)
        self.admission = Admission(Link(made, pause=Pause(0.0, 0.0)), "salt ", tells=True)
        self.addCleanup(self.worker.close)
        self.addCleanup(self.admission.close)
        self.passes = Passes(self.worker, 1, name="engine")
        self.there = {}  # tokens up to a block's end, by its hash, as a router knows them

    def serve(self, name, tokens, salt=""):
        """A request from its first pass to its end; returns the rows that were found."""
        found = self.admission.admit(name, tokens, salt)
        plan = self.admission.plan({name: (found, len(tokens) - found)}, ())
        made = self.passes.begin(plan.scheduled, plan.gone, plan.said, plan.number)
        rows = np.zeros((len(tokens) - found, 576), np.float32)
        made.step.attend(0, None, rows, mla_client.Profile.APPEND_ONLY)
        self.passes.layer_done(made)
        self.passes.end()
        self.admission.ended(name, [*tokens, 7])
        plan = self.admission.plan({}, [name])
        self.passes.begin(plan.scheduled, plan.gone, plan.said, plan.number)
        self.passes.end()
        return found

    def hear(self, condition):
        """Takes events as a router does until they fulfil the condition."""
        until = time.monotonic() + END_S
        while True:
            for event in self.admission.block_events():
                if isinstance(event, Cleared):
                    self.there.clear()
                elif isinstance(event, Removed):
                    for name in event.hashes:
                        del self.there[name]
                else:
                    before = self.there[event.parent] if event.parent is not None else ()
                    for place, name in enumerate(event.hashes):
                        begin = place * event.block_size
                        before += event.tokens[begin:begin + event.block_size]
                        self.there[name] = before
            if condition():
                return
            self.assertLess(time.monotonic(), until, self.there)
            time.sleep(0.01)

    def knows(self, tokens):
        """True if all whole blocks of these tokens are published."""
        return all(tuple(tokens[:end]) in self.there.values()
                   for end in range(16, len(tokens) + 1, 16))

    def test_a_router_knows_what_a_request_would_find(self):
        first = [*range(100, 164)]
        self.assertEqual(self.serve("a", first), 0)
        self.hear(lambda: self.knows(first))
        self.assertEqual(len(self.there), 4)
        self.serve("b", first, salt="a user's own")
        other = [*first[:32], *range(500, 532)]
        self.assertEqual(self.serve("c", other), 32)
        self.hear(lambda: self.knows(other))
        self.assertEqual(len(self.there), 6)
        # Other prompts take all room, so that the first ones' pages go.
        for number in range(20):
            self.serve(f"more-{number}", [*range(1000 * number + 2000, 1000 * number + 2064)])
        self.hear(lambda: not self.knows(first) and not self.knows(other))
        last = [*range(21_000, 21_064)]
        self.hear(lambda: self.knows(last))
        self.assertEqual(self.serve("again", [*last, 1]), 64)


if __name__ == "__main__":
    unittest.main()
