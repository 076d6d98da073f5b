"""Steps over sequences of several servers."""

import unittest

import numpy as np

from mla_client import Profile, errors
from mla_client.cluster.step import ClusterStep, OwnersFailed
from mla_client.service import Model
from mla_client.types import Buffers, DType

from fakes import ROW, Fleet

GONE = errors.Unavailable("no connection")


def tensors(rows):
    """Queries whose first value says which row it is, and KV rows."""
    q = np.zeros((rows, 2, ROW), np.float32)
    q[:, :, 0] = np.arange(rows)[:, None]
    return q, np.zeros((rows, ROW), np.float32)


class StepsTest(unittest.TestCase):
    def setUp(self):
        self.fleet = Fleet(4)
        self.client = self.fleet.client
        self.a, self.b, self.c = self.fleet.sequences(3)

    def test_sequences_of_one_server_have_a_step_of_that_server(self):
        step = self.client.step([(self.a, 1)], partial=True)
        self.assertNotIsInstance(step, ClusterStep)
        self.assertIs(step.service, self.a.model.service)

    def test_each_row_goes_to_its_owner_and_comes_back_to_its_place(self):
        # a and c lie around b, and b's rows between those of others.
        other = self.a.model.open_sequence()
        rows = [(self.a, 2), (self.b, 3), (other, 1), (self.c, 2)]
        with self.client.step(rows) as step:
            self.assertIsInstance(step, ClusterStep)
            self.assertEqual(step.owners, 3)
            q, kv = tensors(8)
            got = step.attend(0, q, kv, Profile.ABSORBED, want_lse=True)
        ids = np.repeat([one.id for one, _ in rows], [count for _, count in rows])
        np.testing.assert_array_equal(got.o[:, 0, 0], ids * 1000.0 + np.arange(8))
        np.testing.assert_array_equal(got.lse[:, 1], np.arange(8))
        self.assertEqual([one.length for one, _ in rows], [2, 3, 1, 2])

    def test_a_call_is_done_once_all_its_owners_are(self):
        with self.client.step([(self.a, 1), (self.b, 1)], partial=True) as step:
            q, kv = tensors(2)
            future = step.attend_async(0, q, kv, Profile.ABSORBED)
            late = future._sent[1].future
            late.late = True
            self.assertFalse(future.done())
            late.late = False
            self.assertTrue(future.done())
            late.late = True
            step.fail(future._sent[1].part, GONE)  # it is not waited for
            self.assertTrue(future.done())
            self.assertTrue(np.isnan(future.result().o[1]).all())
            self.assertTrue(future.done())

    def test_calls_to_several_servers_are_not_chained(self):
        with self.client.step([(self.a, 1), (self.b, 1)]) as step:
            self.assertIsNone(step.chain(Buffers(None, None, None, None, DType.BF16)))
            step.abort()

    def test_ranges_of_rows_are_those_of_the_whole_step(self):
        rows = [(self.a, 2), (self.b, 3), (self.c, 2)]
        with self.client.step(rows) as step:
            q, kv = tensors(7)
            parts = [step.attend(0, q[begin:end], kv[begin:end], Profile.ABSORBED,
                                 row_begin=begin).o for begin, end in ((0, 3), (3, 4), (4, 7))]
        ids = np.repeat([one.id for one, _ in rows], [2, 3, 2])
        np.testing.assert_array_equal(np.concatenate(parts)[:, 0, 0], ids * 1000.0 + np.arange(7))

    def test_outputs_go_into_buffers(self):
        with self.client.step([(self.a, 1), (self.b, 1)]) as step:
            q, kv = tensors(2)
            o = np.full((2, 2, 4), 5, np.float32)
            out = Buffers(kv, q, o, np.empty((2, 2), np.float32), DType.F32)
            got = step.attend(0, q, kv, Profile.ABSORBED, out=out)
        self.assertIs(got.o, o)
        np.testing.assert_array_equal(o[:, 0, 0], [self.a.id * 1000, self.b.id * 1000 + 1])

    def test_rows_without_outputs(self):
        with self.client.step([(self.a, 1), (self.b, 1)]) as step:
            got = step.attend(0, None, tensors(2)[1], Profile.APPEND_ONLY)
        self.assertIsNone(got.o)

    def test_an_owner_that_fails_fails_its_own_rows_and_says_whose(self):
        self.fleet.servers["s:2"].errors["answer"] = GONE
        with self.client.step([(self.a, 1), (self.b, 2), (self.c, 1)], partial=True) as step:
            got = step.attend(0, *tensors(4), Profile.ABSORBED)
            self.assertEqual(list(step.failed), [self.b])
            self.assertTrue(np.isnan(got.o[1:3]).all())
            self.assertFalse(np.isnan(got.o[[0, 3]]).any())
            step.attend(0, *tensors(4), Profile.ABSORBED)
        self.assertEqual((self.a.length, self.b.length, self.c.length), (1, 0, 1))
        self.assertEqual(self.fleet.servers["s:2"].calls.count("attend"), 1)
        self.assertIn("give_up", self.fleet.servers["s:2"].calls)
        self.assertNotIn("end", self.fleet.servers["s:2"].calls)

    def test_who_has_not_asked_for_parts_gets_an_error_that_says_the_same(self):
        self.fleet.servers["s:2"].errors["attend"] = GONE
        with self.assertRaises(OwnersFailed) as caught:
            with self.client.step([(self.a, 1), (self.b, 1)]) as step:
                step.attend(0, *tensors(2), Profile.ABSORBED)
        self.assertEqual(list(caught.exception.failed), [self.b])
        self.assertIs(caught.exception.failed[self.b], GONE)
        self.assertEqual(caught.exception.detail.reason, "owners_failed")
        self.assertFalse(np.isnan(caught.exception.result.o[0]).any())
        self.assertEqual((self.a.length, self.b.length), (0, 0))
        self.assertIn("abort", self.fleet.servers["s:1"].calls)

    def test_bf16_outputs_of_failed_owners_are_nan_too(self):
        self.fleet.servers["s:2"].errors["answer"] = GONE
        with self.client.step([(self.a, 1), (self.b, 1)], partial=True) as step:
            q, kv = tensors(2)
            o = np.zeros((2, 2, 4), np.uint16)
            step.attend(0, q, kv, Profile.ABSORBED, out=Buffers(kv, q, o, None, DType.BF16))
        self.assertTrue((o[1] == 0x7FC0).all())
        self.assertFalse((o[0] == 0x7FC0).any())

    def test_a_begin_that_fails_somewhere_leaves_no_step_elsewhere(self):
        self.fleet.servers["s:2"].errors["begin"] = errors.ResourceExhausted("no pages")
        with self.assertRaises(OwnersFailed):
            self.client.step([(self.a, 1), (self.b, 1)]).begin()
        self.assertIn("abort", self.fleet.servers["s:1"].calls)
        step = self.client.step([(self.a, 1), (self.b, 1)], partial=True).begin()
        self.assertEqual(list(step.failed), [self.b])
        self.assertEqual(step.end(), [1, 0])

    def test_all_owners_that_fail_fail_the_step(self):
        for name in ("s:1", "s:2"):
            self.fleet.servers[name].errors["attend"] = GONE
        step = self.client.step([(self.a, 1), (self.b, 1)], partial=True).begin()
        with self.assertRaises(OwnersFailed):
            step.attend(0, *tensors(2), Profile.ABSORBED)
        self.assertFalse(step.open)

    def test_an_end_that_fails_somewhere_says_what_the_others_have(self):
        self.fleet.servers["s:2"].errors["end"] = GONE
        step = self.client.step([(self.a, 1), (self.b, 1)]).begin()
        with self.assertRaises(OwnersFailed) as caught:
            step.end()
        self.assertEqual(caught.exception.lengths, [1, None])
        self.assertEqual((self.a.length, self.b.length), (1, 0))

    def test_committed_counts_go_to_their_owners(self):
        with self.client.step([(self.a, 2), (self.b, 3), (self.c, 1)]) as step:
            self.assertEqual(step.end([1, 3, 0]), [1, 3, 0])
        with self.client.step([(self.a, 1), (self.b, 1)]) as step:
            with self.assertRaises(errors.InvalidArgument):
                step.end([1])
            step.abort()

    def test_a_wrong_call_is_no_failure_of_an_owner(self):
        with self.client.step([(self.a, 1), (self.b, 1)], partial=True) as step:
            with self.assertRaises(errors.InvalidArgument):
                step.attend(0, *tensors(3), Profile.ABSORBED)
            q, _ = tensors(2)
            with self.assertRaises(errors.InvalidArgument):
                step.attend(0, q, np.zeros((2, ROW + 1), np.float32), Profile.ABSORBED)
            self.assertEqual(step.failed, {})


class MovedTest(unittest.TestCase):
    """Sequences that drains move to servers of their own."""

    def setUp(self):
        self.fleet = Fleet(4)
        self.client = self.fleet.client
        self.a, self.b, self.c = self.fleet.sequences(3)
        self.home = self.a.model.service
        self.looks = 0

    def drain(self, client, targets):
        """The server of a client has moved sequences, by id, to those of other clients."""
        def begin(step):
            if any(one.id in targets for one in step.sequences):
                raise errors.NotFound("moved", errors.ErrorDetail(reason="moved", peer="there:1"))
            return client

        def look(sequence):
            self.looks += 1
            if sequence.id in targets:
                sequence.model = Model(targets[sequence.id], sequence.model.spec, 100)
        client._begin, client._look = begin, look

    def check(self, rows):
        """A step over (sequence, rows) has the right outputs and lengths; returns it."""
        with self.client.step(rows) as step:
            q, kv = tensors(step.total_rows)
            got = step.attend(0, q, kv, Profile.ABSORBED)
        ids = np.repeat([one.id for one, _ in rows], [count for _, count in rows])
        np.testing.assert_array_equal(got.o[:, 0, 0], ids * 1000.0 + np.arange(len(ids)))
        self.assertEqual([one.length for one, _ in rows], [count for _, count in rows])
        return step

    def test_a_step_of_one_server_is_divided_where_they_have_gone(self):
        other = self.a.model.open_sequence()
        self.drain(self.home, {self.a.id: self.b.model.service, other.id: self.c.model.service})
        step = self.check([(self.a, 2), (other, 1)])
        self.assertEqual(step.owners, 2)
        self.assertEqual(self.looks, 2)  # nothing was waited for

    def test_a_step_follows_those_that_stay_together(self):
        other = self.a.model.open_sequence()
        self.drain(self.home, {self.a.id: self.b.model.service, other.id: self.b.model.service})
        self.assertNotIsInstance(self.check([(self.a, 2), (other, 1)]), ClusterStep)

    def test_a_step_of_several_servers_is_divided_again(self):
        other = self.a.model.open_sequence()
        there = self.b.model.service
        self.drain(self.home, {self.a.id: there})
        step = self.check([(self.a, 1), (self.b, 2), (other, 3)])
        self.assertEqual(step.owners, 2)
        self.assertEqual(there.server.calls.count("begin"), 2)
        self.assertEqual(there.server.calls.count("abort"), 1)
        self.assertFalse(step.failed)

    def test_sequences_that_never_stay_fail(self):
        homes = [one.model.service for one in (self.a, self.b, self.c)]
        for client, then in zip(homes, homes[1:] + homes[:1]):
            self.drain(client, {self.a.id: then, self.b.id: then})
        with self.assertRaises(OwnersFailed) as raised:
            self.client.step([(self.a, 1), (self.b, 1)]).begin()
        self.assertEqual(set(raised.exception.failed), {self.a, self.b})


if __name__ == "__main__":
    unittest.main()
