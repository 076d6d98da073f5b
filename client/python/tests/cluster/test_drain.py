"""Emptying a server, and what commands say."""

import contextlib
import io
import json
import unittest
from unittest import mock

from mla_client import errors
from mla_client.cluster import registry, targets
from mla_client.cluster.operations import command, drain
from mla_client.cluster.members import Member
from mla_client.cluster.placement import Probe
from mla_client.gen import admin_pb2

MOVED, KEPT, REFUSED = (admin_pb2.HAND_OVER_OUTCOME_MOVED, admin_pb2.HAND_OVER_OUTCOME_KEPT,
                        admin_pb2.HAND_OVER_OUTCOME_REFUSED)


class Server:
    """A server that has sequences, and peers that take some of them. With `knows_one` it is of a
    release whose drains have one peer."""

    def __init__(self, rooms, sequences, knows_one=False):
        self.rooms = dict(rooms)
        self.sequences = list(sequences)
        self.knows_one = knows_one
        self.calls = []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def drain(self, deadline_ms, exit, to):
        self.calls.append(to)
        reply = admin_pb2.DrainReply(drained=True)
        rooms = {one: self.rooms[one] for one in to[:1 if self.knows_one else None]}
        for address, room in rooms.items():
            if isinstance(room, Exception):
                reply.peers.add(address=address, reason="peer_unreachable", message=str(room))
            elif not self.knows_one:
                reply.peers.add(address=address)
        if all(isinstance(room, Exception) for room in rooms.values()):
            raise errors.Unavailable("peer_unreachable")
        for one in self.sequences:
            takers = [address for address, room in rooms.items()
                      if not isinstance(room, Exception) and room > 0]
            if takers:
                rooms[takers[0]] -= 1
                reply.handed_over.add(sequence_id=one, rows=8, outcome=MOVED,
                                      peer="" if self.knows_one else takers[0])
            else:
                reply.handed_over.add(sequence_id=one, rows=8, outcome=REFUSED,
                                      reason="pages_exhausted")
        return reply


class Tombstones(registry.EtcdRegistry):
    """A registry in memory."""

    def __init__(self, members):
        super().__init__(targets.etcd_target("etcd://e/f"))
        self.members, self.values = members, {}

    def read(self):
        return self.members

    def grant(self, ttl_s):
        return ttl_s

    def put(self, name, text, lease=None):
        self.values[name] = (text, lease)


MEMBERS = [Member("a:1", bytes_free=10), Member("b:1", bytes_free=50), Member("c:1", bytes_free=90),
           Member("d:1", bytes_free=99, draining=True)]


class DrainTest(unittest.TestCase):
    def test_sequences_go_to_the_emptiest_and_what_is_left_to_the_next(self):
        source = Tombstones(MEMBERS)
        server = Server({"c:1": 3, "b:1": 9}, range(1, 6))
        self.assertEqual(drain.drain(source, lambda address: server, "a:1"), 0)
        self.assertEqual(server.calls, [["c:1", "b:1"]])
        self.assertEqual(source.values, {
            f"moved/{one:016x}": ("c:1" if one < 4 else "b:1", drain.TOMBSTONE_S)
            for one in range(1, 6)})

    def test_a_server_that_knows_one_peer_gives_that_one_alone(self):
        source = Tombstones(MEMBERS)
        server = Server({"c:1": 1, "b:1": 9}, [1, 2], knows_one=True)
        self.assertEqual(drain.drain(source, lambda address: server, "a:1"), 1)
        self.assertEqual(source.values, {f"moved/{1:016x}": ("c:1", drain.TOMBSTONE_S)})

    def test_a_peer_that_does_not_answer_is_passed_over(self):
        server = Server({"c:1": errors.Unavailable("peer_unreachable"), "b:1": 9}, [1])
        said = []
        self.assertEqual(
            drain.drain(Tombstones(MEMBERS), lambda address: server, "a:1", say=said.append), 0)
        self.assertIn("peer_unreachable", "".join(said))
        server = Server({"c:1": errors.Unavailable("x"), "b:1": errors.Unavailable("x")}, [1])
        with self.assertRaises(errors.Unavailable):
            drain.drain(Tombstones(MEMBERS), lambda address: server, "a:1")

    def test_what_no_peer_takes_is_said(self):
        server = Server({"c:1": 1, "b:1": 0}, [1, 2])
        self.assertEqual(drain.drain(Tombstones(MEMBERS), lambda address: server, "a:1"), 1)

    def test_what_has_moved_is_said_also_if_the_registry_fails(self):
        source, said = Tombstones(MEMBERS), []
        put = source.put

        def refuse(name, text, lease=None):
            if text == "c:1":
                raise errors.Unavailable("etcd is away")
            put(name, text, lease)
        source.put = refuse
        server = Server({"c:1": 1, "b:1": 1}, [1, 2, 3])
        with self.assertRaisesRegex(errors.Unavailable, "etcd is away"):
            drain.drain(source, lambda address: server, "a:1", say=said.append)
        self.assertEqual(said, [
            "c:1: 1 sequences have moved",
            "c:1: the registry did not take the places of all of these: etcd is away",
            "b:1: 1 sequences have moved", "1 sequences are left"])
        self.assertEqual(list(source.values), [f"moved/{2:016x}"])

    def test_a_server_without_peers_is_refused(self):
        with self.assertRaises(errors.FailedPrecondition):
            drain.drain(Tombstones(MEMBERS[:1]), lambda address: None, "a:1")


class Answering:
    """A client of a server that answers, or not."""

    def __init__(self, probe):
        self.probe = probe

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def _probe(self, model_id, prefix, timeout_s):
        return lambda: self.probe


class CommandTest(unittest.TestCase):
    def run_it(self, servers, *arguments):
        def connect(args, address):
            if isinstance(servers[address], Exception):
                raise servers[address]
            return Answering(servers[address])
        out, err = io.StringIO(), io.StringIO()
        with mock.patch.object(command, "_connect", connect), contextlib.redirect_stdout(out), \
                contextlib.redirect_stderr(err):
            status = command.main(list(arguments))
        return status, out.getvalue(), err.getvalue()

    def test_status_says_how_each_member_is(self):
        servers = {"a:1": Probe(bytes_free=25, bytes_total=100, sequences=7),
                   "b:1": Probe(draining=True), "c:1": errors.Unavailable("no connection")}
        status, out, _ = self.run_it(servers, "status", "--cluster=a:1,b:1,c:1", "--json")
        self.assertEqual(status, command.NOT_SERVING)
        rows = {row["address"]: row for row in json.loads(out)}
        self.assertEqual([rows[one]["state"] for one in ("a:1", "b:1", "c:1")],
                         ["serving", "draining", "away"])
        self.assertEqual((rows["a:1"]["kv_percent"], rows["a:1"]["sequences"]), (75, 7))
        self.assertIn("no connection", rows["c:1"]["why"])
        status, out, _ = self.run_it({"a:1": servers["a:1"], "d:1": servers["a:1"]}, "status",
                                     "--cluster=a:1,d:1")
        self.assertEqual(status, command.GOOD)
        self.assertIn("serving", out)

    def test_bad_targets_are_said_and_none_is_a_trace(self):
        for arguments in (("status", "--cluster=a:1,a:1"),
                          ("announce", "--registry=a:1,b:1", "--target=a:1", "--address=a:1"),
                          ("quotas", "--cluster=a:1,b:1", "--file=/nonexistent")):
            status, _, err = self.run_it({}, *arguments)
            self.assertEqual(status, command.REFUSED, arguments)
            self.assertTrue(err.startswith("mla_client.cluster: "), err)


if __name__ == "__main__":
    unittest.main()
