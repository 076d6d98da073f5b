"""The cluster's client: where sequences are opened, and how they are recovered."""

import concurrent.futures
import gc
import inspect
import os
import signal
import threading
import unittest
import weakref
from unittest import mock

from mla_client import Client, Prefix, errors
from mla_client.base import schemes
from mla_client.cluster import client as cluster_client
from mla_client.cluster.owners import MARK_ROWS, Marks
from mla_client.cluster.placement import Probe
from mla_client.types import SequenceState

from fakes import FakeClient, Fleet

TOKENS = list(range(800))
ROOM = {"bytes_free": 1 << 30, "bytes_total": 1 << 31}
GONE = errors.Unavailable("no connection")


class ConnectTest(unittest.TestCase):
    def test_every_argument_reaches_the_connections_to_its_servers(self):
        # A cluster's client follows moves by itself; `cluster` is taken apart.
        names = set(inspect.signature(Client.connect).parameters) - {
            "target", "follow_moves", "cluster"}
        given = {name: object() for name in names}
        with mock.patch.object(schemes, "connector_of") as connector_of:
            Client.connect("a:1,b:2", cluster={"subset": 3}, **given)
        connector_of.return_value.assert_called_once_with("a:1,b:2", subset=3, **given)


class StreamTest(unittest.TestCase):
    def test_streams_of_servers_that_are_gone_are_not_kept(self):
        streams = cluster_client.ClusterStream()

        def server():
            made = mock.Mock()
            made.open_stream = lambda: mock.Mock(broken=None)
            return made
        lasting = server()
        first = streams.of(lasting)
        for _ in range(3):
            restarted = server()
            gone = weakref.ref(restarted)
            streams.of(restarted).broken = errors.Unavailable("the server has restarted")
            del restarted
            streams.of(server())
            gc.collect()
            self.assertIsNone(gone())
        self.assertIs(streams.of(lasting), first)
        first.broken = errors.Unavailable("the connection is lost")
        self.assertIsNot(streams.of(lasting), first)


class PlacementTest(unittest.TestCase):
    def test_a_prefix_goes_where_its_rows_are(self):
        fleet = Fleet(4)
        fleet.servers["s:3"].probe = Probe(rows_asked=800, rows_in_pool=800, **ROOM)
        sequence = fleet.model.open_sequence(prefix=Prefix(TOKENS), last="s:3")
        self.assertEqual(fleet.client.address_of(sequence), "s:3")

    def test_at_most_four_servers_are_asked_and_each_once(self):
        fleet = Fleet(16)
        for server in fleet.servers.values():
            server.calls.clear()
        fleet.model.open_sequence(prefix=Prefix(TOKENS))
        asked = [one.calls.count("probe") for one in fleet.servers.values()]
        self.assertLessEqual(sum(asked), 4)
        self.assertEqual(max(asked), 1)

    def test_nothing_is_asked_for_a_sequence_that_shares_nothing(self):
        fleet = Fleet(4)
        home = fleet.client.home
        sequence = fleet.model.open_sequence()
        self.assertEqual(fleet.client.address_of(sequence), home)
        self.assertEqual(sum(one.calls.count("probe") for one in fleet.servers.values()), 0)

    def test_a_home_that_is_full_spills(self):
        fleet = Fleet(4)
        home = fleet.client.home
        fleet.servers[home].errors["open"] = errors.ResourceExhausted(
            "no pages", errors.ErrorDetail(reason="pages_exhausted"))
        sequence = fleet.model.open_sequence()
        self.assertNotEqual(fleet.client.address_of(sequence), home)
        self.assertEqual(fleet.client.counts["spilled"], 1)

    def test_a_conversation_goes_on_where_it_was(self):
        fleet = Fleet(16)
        first = fleet.model.open_sequence(prefix=Prefix(TOKENS[:400]))
        where = fleet.client.address_of(first)
        server = fleet.servers[where]
        server.probe = Probe(rows_asked=800, rows_in_pool=400, **ROOM)
        again = fleet.model.open_sequence(prefix=Prefix(TOKENS))
        self.assertEqual(fleet.client.address_of(again), where)

    def test_the_last_owner_is_asked_although_nothing_else_leads_there(self):
        fleet = Fleet(16, home="s:1", subset=0)
        fleet.servers["s:1"].errors["open"] = errors.ResourceExhausted("no pages")
        text = list(range(MARK_ROWS + 200))
        where = fleet.client.address_of(
            fleet.model.open_sequence(prefix=Prefix(text[:MARK_ROWS + 100])))
        # So full that neither its hash nor chance chooses it.
        fleet.servers[where].probe = Probe(bytes_free=1, bytes_total=1 << 31)
        fleet.client.owners.probe([where], "m", Prefix())
        fleet.servers[where].calls.clear()
        fleet.model.open_sequence(prefix=Prefix(text))
        self.assertIn("probe", fleet.servers[where].calls)

    def test_members_that_are_announced_as_draining_are_not_used(self):
        fleet = Fleet(2)
        fleet.servers["s:1"].draining = True
        fleet.members.refresh()
        self.assertEqual([one.address for one in fleet.client.usable()], ["s:2"])
        fleet.servers["s:2"].draining = True
        fleet.members.refresh()
        with self.assertRaises(errors.Unavailable) as caught:
            fleet.model.open_sequence()
        self.assertEqual(caught.exception.detail.reason, "no_servers")

    def test_a_server_that_drains_gets_nothing_new(self):
        fleet = Fleet(2)
        fleet.servers["s:1"].probe = Probe(draining=True, rows_in_pool=800, **ROOM)
        sequence = fleet.model.open_sequence(prefix=Prefix(TOKENS), last="s:1")
        self.assertEqual(fleet.client.address_of(sequence), "s:2")

    def test_all_that_are_full_say_so(self):
        fleet = Fleet(3)
        for server in fleet.servers.values():
            server.errors["open"] = errors.ResourceExhausted("no pages")
        with self.assertRaises(errors.ResourceExhausted):
            fleet.model.open_sequence(prefix=Prefix(TOKENS))
        self.assertEqual([one.calls.count("open") for one in fleet.servers.values()], [1, 1, 1])

    def test_no_more_servers_are_tried_than_there_is_a_bound_for(self):
        fleet = Fleet(40)
        for server in fleet.servers.values():
            server.errors["open"] = errors.ResourceExhausted("no pages")
        with self.assertRaises(errors.ResourceExhausted):
            fleet.model.open_sequence(prefix=Prefix(TOKENS))
        self.assertEqual(sum(one.calls.count("open") for one in fleet.servers.values()),
                         cluster_client.MOST_TRIED)

    def test_a_wrong_request_is_not_tried_elsewhere(self):
        fleet = Fleet(4)
        for server in fleet.servers.values():
            server.errors["open"] = errors.InvalidArgument("prefix")
        with self.assertRaises(errors.InvalidArgument):
            fleet.model.open_sequence()
        self.assertEqual(sum(one.calls.count("open") for one in fleet.servers.values()), 1)

    def test_a_server_that_failed_is_left_alone_for_a_while(self):
        fleet = Fleet(2)
        fleet.servers["s:1"].error = GONE
        for _ in range(20):
            sequence = fleet.model.open_sequence(prefix=Prefix(TOKENS))
            self.assertEqual(fleet.client.address_of(sequence), "s:2")
        self.assertLessEqual(len(fleet.servers["s:1"].calls), 2)
        fleet.servers["s:1"].error = None
        fleet.now += 60
        self.assertEqual([one.address for one in fleet.client.usable()], ["s:1", "s:2"])

    def test_older_servers_that_cannot_be_probed_are_used(self):
        fleet = Fleet(1)
        fleet.servers["s:1"].errors["probe"] = errors.Unimplemented("no such method")
        self.assertEqual(fleet.model.open_sequence(prefix=Prefix(TOKENS)).length, 0)

    def test_a_worker_uses_its_subset(self):
        fleet = Fleet(32)
        fleet.servers[fleet.client.home].probe = Probe(bytes_free=1 << 29, bytes_total=1 << 31)
        for number in range(200):
            fleet.model.open_sequence(prefix=Prefix(range(number, number + 300)))
        used = sum(bool(one.sequences) for one in fleet.servers.values())
        self.assertLessEqual(used, cluster_client.SUBSET)
        self.assertGreaterEqual(used, cluster_client.SUBSET // 2)


class RecoveryTest(unittest.TestCase):
    def setUp(self):
        self.where = ""
        self.fleet = Fleet(4, moved=lambda sequence_id: self.where)
        self.sequence = self.fleet.model.open_sequence()
        self.owner = self.fleet.client.address_of(self.sequence)
        self.sequence.length = 100
        self.others = [one for address, one in self.fleet.servers.items() if address != self.owner]

    def recover(self, prefix=None):
        return self.fleet.client.recover(self.sequence, prefix)

    def test_a_server_that_has_it_still_keeps_it(self):
        state = SequenceState(self.sequence.id, 1, 101)
        self.fleet.servers[self.owner].sequences[self.sequence.id] = state
        self.assertEqual(self.recover(), ("alive", self.owner, 101, 0))
        self.assertEqual(self.sequence.length, 101)

    def test_a_tombstone_leads_to_where_a_drain_has_moved_it(self):
        self.fleet.servers[self.owner].error = GONE
        self.where = self.others[1].address
        self.others[1].sequences[self.sequence.id] = SequenceState(self.sequence.id, 5, 100)
        self.assertEqual(self.recover(), ("moved", self.where, 100, 0))
        self.assertEqual(self.sequence.epoch, 5)

    def test_a_tombstone_of_a_server_that_is_gone_too_is_no_end(self):
        self.fleet.servers[self.owner].error = GONE
        self.where = self.others[1].address
        self.others[1].error = GONE
        self.assertEqual(self.recover().how, "none")

    def moved_to(self, peer):
        """The owner has ended, and the tombstone says that `peer` has the sequence."""
        self.fleet.servers[self.owner].error = GONE
        self.where = peer.address

    def test_a_tombstone_leads_to_a_server_that_was_started_again_since(self):
        peer = self.others[1]
        peer.old.add(self.fleet.client.model_at(peer.address, self.fleet.model).service)
        peer.sequences[self.sequence.id] = SequenceState(self.sequence.id, 5, 100)
        self.moved_to(peer)
        self.assertEqual(self.recover(), ("moved", peer.address, 100, 0))

    def test_a_tombstone_leads_over_a_server_that_has_drained_since(self):
        first, second = self.others[:2]
        first.errors["attach"] = errors.NotFound("moved", errors.ErrorDetail(
            reason="moved", peer=second.address))
        second.sequences[self.sequence.id] = SequenceState(self.sequence.id, 6, 100)
        self.moved_to(first)
        self.assertEqual(self.recover(), ("moved", second.address, 100, 0))

    def test_a_sequence_that_a_drain_has_moved_is_released_where_it_is(self):
        service, own = self.sequence.model.service, self.sequence.id
        for peer in self.others:  # one of them may be this worker's home
            peer.sequences[own] = SequenceState(own, 5, 100)
            with mock.patch.object(service, "_moved", lambda ids, to=peer: [(ids[0], to.address)]):
                self.assertEqual(service._release_moved([own]), [])
            self.assertEqual([one.released for one in self.others], [
                [own] if one is peer else [] for one in self.others])
            peer.released.clear()

    def test_a_peer_that_drains_itself_registers_nothing_and_has_the_sequence(self):
        peer = self.others[1]
        peer.errors["register"] = errors.Unavailable("draining", errors.ErrorDetail(
            reason="draining"))
        peer.sequences[self.sequence.id] = SequenceState(self.sequence.id, 5, 100)
        self.moved_to(peer)
        self.assertEqual(self.recover(), ("moved", peer.address, 100, 0))

    def test_a_server_that_was_given_up_and_is_there_again_still_has_it(self):
        self.fleet.servers[self.owner].sequences[self.sequence.id] = SequenceState(
            self.sequence.id, 1, 101)
        self.fleet.client.owners.at(self.owner).drop()
        self.assertEqual(self.recover(), ("alive", self.owner, 101, 0))

    def test_a_checkpoint_comes_before_rows_of_a_peer(self):
        self.fleet.servers[self.owner].error = GONE
        for server in self.others:
            server.checkpoints = {self.sequence.id: 64}
            server.probe = Probe(rows_asked=96, rows_in_pool=96, **ROOM)
        found = self.recover(Prefix(range(100)))
        self.assertEqual((found.how, found.rows, found.lost), ("checkpoint", 64, 36))
        self.assertEqual(self.sequence.epoch, 7)

    def test_a_server_that_was_started_again_restores_its_checkpoint(self):
        server = self.fleet.servers[self.owner]
        server.checkpoints = {self.sequence.id: 80}
        server.sequences.clear()
        server.errors["probe"] = errors.ServerRestarted("gone")
        # As the call that has failed says; the next connection is to the new process.
        self.fleet.client.owners.at(self.owner).failed(errors.ServerRestarted("gone"))
        del server.errors["probe"]
        self.assertEqual(self.recover(), ("checkpoint", self.owner, 80, 20))

    def test_rows_of_a_peer_are_found_there(self):
        self.fleet.servers[self.owner].error = GONE
        for server in self.others:
            server.probe = Probe(rows_asked=96, rows_in_pool=96, **ROOM)
        found = self.recover(Prefix(range(100)))
        self.assertEqual((found.how, found.rows, found.lost), ("peer", 96, 4))

    def test_rows_of_a_peer_that_is_full_are_fetched(self):
        fleet = Fleet(2)
        sequence = fleet.client.model_at("s:1", fleet.model).open_sequence()
        sequence.length = 100_000
        del fleet.servers["s:1"].sequences[sequence.id]  # it was lost, the server was not
        # All rows are there, and so little room that no others fit.
        fleet.servers["s:1"].probe = Probe(rows_asked=100_000, rows_in_pool=90_000,
                                           bytes_free=10, bytes_total=1 << 31)
        found = fleet.client.recover(sequence, Prefix(range(100_000)))
        self.assertEqual((found.how, found.address, found.rows), ("peer", "s:2", 90_000))
        self.assertIn("export", fleet.servers["s:1"].calls)
        self.assertIn("match", fleet.servers["s:2"].calls)
        self.assertEqual(len(fleet.servers["s:1"].sequences), 0)  # the one that was opened for it

    def test_without_all_of_these_rows_are_to_be_sent_again(self):
        self.fleet.servers[self.owner].error = GONE
        before = self.sequence.id
        found = self.recover(Prefix(range(100)))
        self.assertEqual((found.how, found.rows, found.lost), ("none", 0, 100))
        self.assertNotEqual(self.sequence.id, before)
        self.assertNotEqual(self.fleet.client.address_of(self.sequence), self.owner)

    def test_a_restarted_server_is_connected_to_again(self):
        self.fleet.servers[self.owner].errors["probe"] = errors.ServerRestarted("gone")
        old = self.sequence.model.service
        self.assertEqual(self.recover().how, "none")
        self.assertTrue(old.closed)

    def test_a_fleet_that_is_gone_says_so_and_leaves_the_sequence_as_it_was(self):
        for server in self.fleet.servers.values():
            server.error = GONE
        before = self.sequence.id
        with self.assertRaises(errors.Unavailable):
            self.recover(Prefix(range(100)))
        self.assertEqual(self.sequence.id, before)

    def test_a_member_that_left_the_registry_is_given_up_only_if_it_does_not_answer(self):
        service = self.sequence.model.service
        self.fleet.client.gone([self.owner])
        self.assertFalse(service.closed)
        server = self.fleet.servers[self.owner]
        server.error, server.probe = GONE, Probe(boot_id=5)
        service.boot_id = 5
        self.fleet.members.refresh()  # it tells, and the connection is of this very process
        self.assertFalse(service.closed)
        service.boot_id = 4
        self.fleet.client.gone([self.owner])
        self.assertTrue(service.closed)


class AttachTest(unittest.TestCase):
    def test_whichever_server_has_a_sequence_is_found(self):
        fleet = Fleet(4)
        fleet.servers["s:3"].sequences[77] = SequenceState(77, 2, 5)
        found = fleet.client.attach(fleet.model, 77)
        self.assertEqual((found.length, fleet.client.address_of(found)), (5, "s:3"))
        with self.assertRaises(errors.NotFound):
            fleet.client.attach(fleet.model, 78)

    def test_sequences_are_released_wherever_they_are(self):
        fleet = Fleet(3)
        made = fleet.sequences(3)
        self.assertEqual(fleet.client._release([*(one.id for one in made), 5]), [5])
        self.assertEqual([len(one.sequences) for one in fleet.servers.values()], [0, 0, 0])

    def test_a_server_that_is_away_keeps_no_other_from_release_and_renewal(self):
        fleet = Fleet(3)
        away, kept, released = fleet.sequences(3)
        fleet.servers["s:1"].error = GONE
        self.assertEqual(fleet.client._release([released.id]), [])
        self.assertEqual(fleet.servers["s:3"].sequences, {})
        with self.assertRaises(errors.Unavailable):
            fleet.client._release([away.id, kept.id])
        self.assertEqual(fleet.servers["s:2"].released.count(kept.id), 1)
        with self.assertRaises(errors.Unavailable):
            fleet.client.renew_leases()
        self.assertEqual([server.calls.count("renew") for server in fleet.servers.values()],
                         [1, 1, 1])

    def test_a_value_that_no_server_takes_is_the_callers_error(self):
        for threads in (0, 8):
            fleet = Fleet(3, threads=threads)
            fleet.sequences(3)
            fleet.servers["s:3"].errors["renew"] = ValueError("lease_ms")
            with self.assertRaises(ValueError):
                fleet.client.renew_leases(-1)

    def test_streams_are_one_a_server(self):
        stream = cluster_client.ClusterStream()

        class Opened:
            broken = None

        class Service:
            def open_stream(self):
                return Opened()
        one, two = Service(), Service()
        first = stream.of(one)
        self.assertIs(stream.of(one), first)
        self.assertIsNot(stream.of(two), first)
        first.broken = GONE
        self.assertIsNot(stream.of(one), first)


def occupy(owners, release):
    """Occupies all threads of the pool until `release` is set, and returns its work."""
    began = threading.Barrier(9)

    def work():
        began.wait(60)
        release.wait()
    made = [owners._pool.submit(work) for _ in range(8)]
    began.wait(60)
    return made


class CallsAtTheSameTimeTest(unittest.TestCase):
    """Releases and renewals of a client that has threads."""

    def setUp(self):
        self.fleet = Fleet(3, threads=8)
        self.made = self.fleet.sequences(3)
        self.release = threading.Event()
        self.addCleanup(self.fleet.client.owners.close)
        self.addCleanup(self.release.set)

    def renew_and_release(self):
        self.assertEqual(self.fleet.client.renew_leases(), 3)
        self.assertEqual(self.fleet.client._release([*(one.id for one in self.made), 5]), [5])
        self.assertEqual([server.calls for server in self.fleet.servers.values()],
                         [["renew", "release"]] * 3)

    def test_servers_are_called_at_the_same_time(self):
        together = threading.Barrier(3)
        with mock.patch.object(FakeClient, "renew_leases",
                               lambda client, lease_ms: together.wait(60) >= 0):
            self.assertEqual(self.fleet.client.renew_leases(), 3)

    def test_threads_that_wait_for_servers_delay_nothing(self):
        occupy(self.fleet.client.owners, self.release)
        self.renew_and_release()

    def test_the_callers_thread_is_used_where_there_are_no_more(self):
        with mock.patch.object(threading.Thread, "start",
                               side_effect=RuntimeError("can't start new thread")):
            self.renew_and_release()

    def test_the_pool_may_have_ended_before_the_last_release(self):
        # As in a handler of atexit.
        self.fleet.client.owners._pool.shutdown()
        self.renew_and_release()

    def test_probes_connect_in_the_callers_thread_where_there_are_no_more(self):
        fleet = Fleet(3, threads=8)
        self.addCleanup(fleet.client.owners.close)
        fleet.client.owners._pool.shutdown()
        found = fleet.client.owners.probe(list(fleet.servers), "m", Prefix())
        self.assertNotIn(None, found.values())

    def test_a_forked_child_does_not_wait_for_threads_of_its_parent(self):
        work = occupy(self.fleet.client.owners, self.release)
        self.release.set()
        concurrent.futures.wait(work)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs ends itself, which counts as a failure
            try:
                self.renew_and_release()
            except BaseException:
                os._exit(1)
            os._exit(0)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)


class MarksTest(unittest.TestCase):
    def test_the_longest_beginning_counts(self):
        marks = Marks()
        text = list(range(5 * MARK_ROWS))
        marks.remember("m", Prefix(text[:MARK_ROWS + 10]), "a")
        self.assertEqual(marks.recall("m", Prefix(text)), "a")
        marks.remember("m", Prefix(text[:3 * MARK_ROWS]), "b")
        self.assertEqual(marks.recall("m", Prefix(text)), "b")
        other = [*text[:2 * MARK_ROWS], 1, *text[2 * MARK_ROWS + 1:]]
        self.assertEqual(marks.recall("m", Prefix(other)), "b")  # two marks agree
        self.assertEqual(marks.recall("n", Prefix(text)), "")
        self.assertEqual(marks.recall("m", Prefix(text, salt="s")), "")
        self.assertEqual(marks.recall("m", Prefix()), "")

    def test_they_are_bounded(self):
        marks = Marks(most=4)
        for number in range(10):
            marks.remember("m", Prefix([number] * 8), f"s:{number}")
        self.assertEqual([marks.recall("m", Prefix([number] * 8)) for number in (5, 6, 9)],
                         ["", "s:6", "s:9"])


if __name__ == "__main__":
    unittest.main()
