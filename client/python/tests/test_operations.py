"""Calls of operators: quotas, eviction, undoing a drain."""

import contextlib
import unittest
from unittest import mock

import mla_client
import server_binary
from mla_client.gen import sequence_pb2

SPEC = mla_client.ModelSpec("m", mla_client.Geometry(2, 16, 8), layers=1, softmax_scale=0.5)


class OperationsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = server_binary.start()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def connect(self, tenant):
        client = mla_client.Client.connect(self.server.target, tenant=tenant)
        self.addCleanup(client.close)
        return client

    def test_a_bound_set_at_run_time_refuses_and_is_undone(self):
        operator, worker = self.connect("operator"), self.connect("bounded")
        model = worker.register_model(SPEC)
        quota = operator.set_quota("bounded", {"sequences": 1}, weight=3)
        self.assertEqual((quota.tenant, quota.weight), ("bounded", 3))
        self.assertEqual(quota.resources["sequences"].bound, 1)
        self.assertEqual(quota.resources["sequences"].source, "runtime")
        with model.open_sequence():
            with self.assertRaises(mla_client.ResourceExhausted) as refused:
                model.open_sequence()
            detail = refused.exception.detail
            self.assertEqual((detail.reason, detail.resource, detail.bound_of, detail.bound,
                              detail.wanted, detail.free),
                             ("sequences_exhausted", "sequences", "tenant", 1, 1, 0))
            own = worker.quota()
            self.assertEqual(own.tenant, "bounded")
            self.assertEqual(own.resources["sequences"].used, 1)
            self.assertGreaterEqual(own.resources["sequences"].refused, 1)
            tenants, server = operator.quotas()
            self.assertIn("bounded", [entry.tenant for entry in tenants])
            self.assertGreaterEqual(server["sequences"].used, 1)
            quota = operator.set_quota("bounded", {}, reset=True)
            self.assertEqual(quota.resources["sequences"].source, "default")
            model.open_sequence().release()

    def test_an_unknown_resource_is_named(self):
        with self.assertRaisesRegex(ValueError, "pages"):
            self.connect("operator").set_quota("bounded", {"pages": 1})

    def test_sequences_of_all_tenants(self):
        operator = self.connect("operator")
        with contextlib.ExitStack() as held:
            opened = {}
            for tenant in ("one", "two"):
                model = self.connect(tenant).register_model(SPEC)
                opened.update((held.enter_context(model.open_sequence()).id, tenant)
                              for _ in range(3))
            # In parts of two.
            get = operator._sequences.Get
            with mock.patch.object(operator, "_sequences") as parts:
                parts.Get = mock.Mock(side_effect=lambda request, **rest: get(
                    sequence_pb2.GetRequest(all_tenants=request.all_tenants, most=2,
                                            after=request.after), **rest))
                found = operator.all_sequences()
                self.assertGreaterEqual(parts.Get.call_count, 3)
            self.assertEqual({one.sequence_id: one.tenant for one in found}, opened)
            self.assertEqual([one.sequence_id for one in found], sorted(opened))
            self.assertTrue(all(one.age_ms is not None for one in found))
            self.assertEqual(operator.all_sequences("none"), [])
            self.assertEqual(operator.sequences(), [])

    def test_sequences_of_all_tenants_are_for_operators(self):
        server = server_binary.start("--server-plain-operators=none")
        self.addCleanup(server.stop)
        client = mla_client.Client.connect(server.target)
        self.addCleanup(client.close)
        self.assertEqual(client.sequences(), [])
        with self.assertRaises(mla_client.PermissionDenied) as refused:
            client.all_sequences()
        self.assertEqual(refused.exception.detail.reason, "not_an_operator")

    def test_eviction(self):
        operator, worker = self.connect("operator"), self.connect("evicted")
        model = worker.register_model(SPEC)
        sequences = [model.open_sequence() for _ in range(3)]
        self.assertEqual(operator.evict_sequences("evicted", [sequences[0].id, 7]),
                         (1, [7]))
        with self.assertRaises(mla_client.NotFound):
            sequences[0].refresh()
        self.assertEqual(operator.evict_sequences("evicted", client_id="another"), (0, []))
        self.assertEqual(operator.evict_model("evicted", "m"), 2)
        self.assertEqual(worker.models(), [])

    def test_a_leased_model_goes(self):
        worker = self.connect("leased")
        worker.register_model(SPEC, lease_ms=100)
        while worker.models():
            pass

    def test_a_drain_is_undone(self):
        server = server_binary.start()
        self.addCleanup(server.stop)
        with mla_client.Client.connect(server.target) as client:
            model = client.register_model(SPEC)
            self.assertTrue(client.drain().drained)
            with self.assertRaises(mla_client.Unavailable):
                model.open_sequence()
            client.cancel_drain()
            model.open_sequence().release()
            with self.assertRaises(mla_client.FailedPrecondition):
                client.cancel_drain()

    def test_a_drain_by_the_servers_deadline_outlasts_other_calls(self):
        server = server_binary.start("--server-drain-deadline-ms=2000")
        self.addCleanup(server.stop)
        with mla_client.Client.connect(server.target) as worker, \
                mla_client.Client.connect(server.target) as operator:
            sequence = worker.register_model(SPEC).open_sequence()
            worker.step([(sequence, 1)], lease_ms=60000).begin()
            operator.timeout_s = 0.5
            reply = operator.drain()
            self.assertEqual((reply.drained, reply.aborted_steps), (False, 1))


if __name__ == "__main__":
    unittest.main()
