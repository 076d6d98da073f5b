"""Mutual TLS from Python: who gets in, and who they are."""

import threading
import unittest

import numpy

import mla_client
from service_contract import GEOMETRY, SCALE
from tests import peers

AUTHORITY = None
SERVER = None
PORT = 0


def setUpModule():
    global AUTHORITY, SERVER, PORT
    AUTHORITY = peers.Authority()
    AUTHORITY.make_ca("stranger")
    for name in ("red", "blue"):
        AUTHORITY.make(name)
    AUTHORITY.make("expired", days="-1")
    AUTHORITY.make("forged", "DNS:red", ca="stranger")
    SERVER, PORT = AUTHORITY.serve()


def tearDownModule():
    SERVER.stop()
    AUTHORITY.close()


def connect(name, ca="ca", port=0, **options):
    return AUTHORITY.connect(name, port or PORT, ca, **options)


class TlsTest(unittest.TestCase):
    def test_the_certificate_is_the_tenant(self):
        with connect("red") as red, connect("red") as again, connect("blue") as blue:
            model = red.register_model(mla_client.ModelSpec("secret", GEOMETRY, 1, SCALE))
            self.assertEqual([spec.model_id for spec in again.models()], ["secret"])
            self.assertEqual(blue.models(), [])
            with model.open_sequence() as sequence:
                self.assertEqual(blue._get([sequence.id]), ([], [sequence.id]))

    def test_a_tenant_in_metadata_does_not_count(self):
        with connect("red") as red, connect("blue") as blue:
            model = red.register_model(mla_client.ModelSpec("mine", GEOMETRY, 1, SCALE))
            blue._metadata = (("mla-tenant", "red"),)
            self.assertNotIn("mine", [spec.model_id for spec in blue.models()])
            model.unregister()

    def test_who_is_kept_out(self):
        for name in ("forged", "expired"):
            with self.subTest(name=name), self.assertRaises(mla_client.Unavailable):
                connect(name).close()

    def test_a_server_of_another_authority_is_not_trusted(self):
        with self.assertRaises(mla_client.Unavailable):
            connect("red", ca="stranger").close()

    def test_plain_text_is_kept_out(self):
        with self.assertRaises(mla_client.Unavailable):
            mla_client.Client.connect(f"127.0.0.1:{PORT}", timeout_s=3.0).close()

    def two_servers(self):
        """Their ports; each is an operator of the other."""
        self.pair = peers.Peers(AUTHORITY)
        self.addCleanup(self.pair.close)
        return self.pair.ports

    def test_a_drain_hands_sequences_over(self):
        ports = self.two_servers()
        spec = mla_client.ModelSpec("m", GEOMETRY, 1, SCALE)
        rows = numpy.zeros((5, GEOMETRY.kv_lora_rank + GEOMETRY.rope_dim), numpy.uint16)
        peer = f"localhost:{ports[1]}"
        with connect("red", port=ports[0]) as red, connect("blue", port=ports[0]) as blue:
            model = red.register_model(spec)
            sequence = model.open_sequence()
            with red.step([(sequence, 5)]) as step:
                step.attend(0, None, rows, mla_client.Profile.APPEND_ONLY)
                step.end()
            # The first one is away, so it is passed over.
            reply = blue.drain(to=["localhost:1", peer])
            self.assertEqual([one.outcome for one in reply.handed_over], [1], reply)
            self.assertEqual((reply.handed_over[0].tenant, reply.handed_over[0].peer),
                             ("red", peer))
            self.assertEqual([one.reason for one in reply.peers], ["peer_unreachable", ""])
            with self.assertRaises(mla_client.NotFound) as moved:
                red.step([(sequence, 1)]).__enter__()
            self.assertEqual((moved.exception.detail.reason, moved.exception.detail.peer),
                             ("moved", peer))
            with self.assertRaises(mla_client.NotFound) as moved:
                red.attach(model, sequence.id)
            self.assertEqual(moved.exception.detail.peer, peer)
        with connect("red", port=ports[1]) as red:
            model = red.register_model(spec)
            with red.attach(model, sequence.id) as there:
                self.assertEqual(there.length, 5)
            with self.assertRaises(mla_client.NotFound) as gone:
                red.attach(model, sequence.id)
            self.assertEqual(gone.exception.detail.reason, "sequence_not_found")

    def test_clients_follow_sequences(self):
        ports = self.two_servers()
        peer = f"localhost:{ports[1]}"
        seen = []
        with connect("red", port=ports[0], follow_moves=True, on_peer=seen.append) as red, \
                connect("blue", port=ports[0]) as blue, connect("blue", port=ports[1]) as there:
            local = Tracked(mla_client.LocalReference())
            remote = Tracked(red)
            for _ in range(4):
                for tracked in (local, remote):
                    tracked.open()
            for tracked in (local, remote):
                tracked.step([0, 1, 2, 3], 5)
            moving = threading.Thread(target=blue.drain, kwargs={"to": peer})
            moving.start()
            # While they go, and once they have gone.
            for turn in range(6):
                numpy.testing.assert_allclose(remote.step([0, 1], 1), local.step([0, 1], 1),
                                              atol=2e-2)
                if turn == 2:
                    moving.join()
            self.assertEqual([model.spec.model_id for model in seen], ["m"])
            for tracked in (local, remote):
                tracked.sequences[0].truncate(7)
                tracked.sequences.append(tracked.sequences[2].fork(3))
                tracked.open()  # the old server takes no new ones
                tracked.step([5], 2)
            numpy.testing.assert_allclose(remote.step([0, 4, 5], 2), local.step([0, 4, 5], 2),
                                          atol=2e-2)
            self.assertEqual(remote.sequences[1].refresh().length, 11)
            self.assertEqual(there.stats().sequences, 6)
            self.assertEqual(blue.stats().sequences, 0)
            # One of another client's; and one that was not asked for since it moved.
            self.assertEqual(remote.model.adopt_sequence(remote.sequences[3].id).length, 5)
            for sequence in remote.sequences:
                sequence.release()
            self.assertEqual(there.stats().sequences, 0)

    def test_a_sequence_without_rows_joins_those_that_have_moved(self):
        ports = self.two_servers()
        with connect("red", port=ports[0], follow_moves=True, timeout_s=5.0) as red, \
                connect("blue", port=ports[0]) as blue, connect("blue", port=ports[1]) as there:
            local, remote = Tracked(mla_client.LocalReference()), Tracked(red)
            for tracked in (local, remote):
                tracked.open()
                tracked.open()
                tracked.step([0], 5)
            blue.drain(to=f"localhost:{ports[1]}")
            numpy.testing.assert_allclose(remote.step([0], 1), local.step([0], 1), atol=2e-2)
            numpy.testing.assert_allclose(remote.step([1, 0], 2), local.step([1, 0], 2), atol=2e-2)
            self.assertEqual(there.stats().sequences, 2)
            self.assertEqual(blue.stats().sequences, 0)

    def test_sequences_are_found_once_another_process_has_the_drained_servers_port(self):
        ports = self.two_servers()
        with connect("red", port=ports[0], follow_moves=True) as red, \
                connect("blue", port=ports[0]) as blue:
            local, remote = Tracked(mla_client.LocalReference()), Tracked(red)
            for tracked in (local, remote):
                tracked.open()
                tracked.open()
                tracked.step([0, 1], 5)
            blue.drain(to=f"localhost:{ports[1]}")
            for tracked in (local, remote):
                tracked.step([0], 1)  # this one's client has been told
            self.pair.replace(0)
            numpy.testing.assert_allclose(remote.step([1], 1), local.step([1], 1), atol=2e-2)
            # A sequence that has not moved is lost with its server.
            remote.sequences[1].release()
            self.pair.replace(1)
            with self.assertRaises(mla_client.NotFound):
                remote.step([0], 1)

    def test_what_can_not_be_followed_names_the_peer(self):
        ports = self.two_servers()
        peer = f"localhost:{ports[1]}"
        with self.assertRaisesRegex(mla_client.InvalidArgument, "follow_moves"):
            mla_client.Client.connect(f"127.0.0.1:{ports[0]}", follow_moves=True)
        with connect("red", port=ports[0]) as red, connect("blue", port=ports[0]) as blue, \
                connect("red", port=ports[0], client_id=red.client_id,
                        follow_moves=True) as follower:
            tracked, other = Tracked(red), Tracked(follower)
            for one in (tracked, other):
                one.open()
                one.step([0], 5)
            stream = follower.open_stream()
            blue.drain(to=peer)
            with self.assertRaisesRegex(mla_client.NotFound, peer):
                tracked.step([0], 1)
            with self.assertRaisesRegex(mla_client.Unavailable, peer):
                tracked.open()
            with self.assertRaisesRegex(mla_client.NotFound, peer):
                follower.step([(other.sequences[0], 1)], stream=stream).begin()
            # Another client of the tenant has changed it there first.
            with connect("red", port=ports[1]) as there:
                model = there.register_model(other.model.spec)
                there.attach(model, other.sequences[0].id).truncate(3)
            with self.assertRaisesRegex(mla_client.FailedPrecondition, "3 rows, not 5"):
                other.step([0], 1)


class Tracked:
    """Sequences of a service, and steps of rows that follow from their place."""

    def __init__(self, service):
        self.model = service.register_model(mla_client.ModelSpec("m", GEOMETRY, 1, SCALE))
        self.service = service
        self.sequences = []

    def open(self):
        self.sequences.append(self.model.open_sequence())

    def step(self, places, rows):
        """Outputs of a step that adds `rows` rows to each of these sequences."""
        entries = [(self.sequences[place], rows) for place in places]
        keys = [(place, sequence.length + row) for place, (sequence, _) in zip(places, entries)
                for row in range(rows)]
        def drawn(key, *shape):
            return numpy.random.default_rng(key).standard_normal(shape, numpy.float32) / 4
        dim = GEOMETRY.kv_lora_rank + GEOMETRY.rope_dim
        kv = numpy.stack([drawn((1, *key), dim) for key in keys])
        q = numpy.stack([drawn((2, *key), GEOMETRY.num_heads,
                               GEOMETRY.q_dim(mla_client.Profile.ABSORBED)) for key in keys])
        with self.service.step(entries) as step:
            return numpy.asarray(step.attend(0, q, kv, mla_client.Profile.ABSORBED,
                                             o_dtype=mla_client.DType.F32).o)


if __name__ == "__main__":
    unittest.main()
