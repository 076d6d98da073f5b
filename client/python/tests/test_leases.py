"""When leases are renewed, without a server and without waiting."""

import threading
import unittest

import mla_client
from mla_client.connection.leases import LeaseRenewer, LeaseSchedule


class LeaseScheduleTest(unittest.TestCase):
    def setUp(self):
        self.schedule = LeaseSchedule()

    def test_nothing_is_due_without_sequences(self):
        self.assertIsNone(self.schedule.due())
        self.assertEqual(self.schedule.period_s(), 0.0)
        self.schedule.renewed(True, 5.0)
        self.assertIsNone(self.schedule.due())

    def test_a_later_sequence_with_a_shorter_lease_is_renewed_in_time(self):
        self.schedule.add(1, 60.0, 60.0, 0.0)
        self.assertEqual(self.schedule.due(), 20.0)
        self.schedule.add(2, 3.0, 3.0, 10.0)
        self.assertEqual(self.schedule.due(), 11.0)
        self.schedule.renewed(True, 11.0)
        self.assertEqual(self.schedule.due(), 12.0)

    def test_a_longer_lease_delays_nothing(self):
        self.schedule.add(1, 3.0, 3.0, 0.0)
        self.schedule.add(2, 60.0, 60.0, 0.5)
        self.assertEqual(self.schedule.due(), 1.0)

    def test_released_sequences_do_not_count(self):
        self.schedule.add(1, 3.0, 3.0, 0.0)
        self.schedule.add(2, 3.0, 3.0, 0.0)
        self.schedule.add(3, 60.0, 60.0, 0.0)
        self.schedule.drop([1, 77])
        self.assertEqual(self.schedule.period_s(), 1.0)
        self.schedule.drop([2])
        self.assertEqual(self.schedule.period_s(), 20.0)
        self.schedule.drop([3, 3])
        self.assertIsNone(self.schedule.due())

    def test_a_repeated_open_counts_once_and_sees_what_is_left(self):
        self.schedule.add(1, 60.0, 60.0, 0.0)
        self.schedule.add(1, 60.0, 6.0, 1.0)
        self.assertEqual(self.schedule.due(), 3.0)
        self.schedule.renewed(True, 3.0)
        self.assertEqual(self.schedule.due(), 23.0)
        self.schedule.drop([1])
        self.assertIsNone(self.schedule.due())

    def test_a_failed_renewal_is_repeated_within_the_lease(self):
        self.schedule.add(1, 12.0, 12.0, 0.0)
        self.schedule.renewed(False, 4.0)
        self.assertEqual(self.schedule.due(), 5.0)
        self.schedule.add(2, 0.003, 0.003, 5.0)
        self.schedule.renewed(False, 6.0)
        self.assertEqual(self.schedule.due(), 6.02)  # a server that fails is not flooded

    def test_a_renewal_may_change_all_leases(self):
        self.schedule.add(1, 60.0, 60.0, 0.0)
        self.schedule.add(2, 30.0, 30.0, 0.0)
        self.schedule.set_all(3.0, 5.0)
        self.assertEqual((self.schedule.due(), self.schedule.period_s()), (6.0, 1.0))
        self.schedule.drop([1])
        self.assertEqual(self.schedule.period_s(), 1.0)
        self.schedule.drop([2])
        self.schedule.set_all(1.0, 6.0)
        self.assertIsNone(self.schedule.due())


class LeaseRenewerTest(unittest.TestCase):
    """The thread: waits are for events, bounded only so that a failure ends."""

    def test_a_shorter_lease_wakes_the_thread(self):
        renewed = threading.Event()
        renewer = LeaseRenewer(lambda timeout_s: renewed.set())
        renewer.add(1, 3_600_000, 3_600_000)
        renewer.add(2, 60, 60)
        self.assertTrue(renewed.wait(60.0))
        renewer.close()

    def test_an_error_is_kept_until_a_renewal_succeeds(self):
        seen, calls = [], []
        ended = threading.Event()

        def renew(timeout_s):
            seen.append(renewer.error)
            calls.append(timeout_s)
            if len(calls) == 1:
                raise mla_client.Unavailable("gone")
            if len(calls) == 3:
                ended.set()

        renewer = LeaseRenewer(renew)
        renewer.add(1, 90, 90)
        self.assertTrue(ended.wait(60.0))
        renewer.close()
        self.assertEqual([type(error) for error in seen[:3]],
                         [type(None), mla_client.Unavailable, type(None)])
        self.assertAlmostEqual(calls[0], 0.03)  # a call that hangs does not cost the lease
        self.assertIsNone(renewer.error)

    def test_no_thread_without_a_lease(self):
        renewer = LeaseRenewer(lambda timeout_s: self.fail("nothing to renew"))
        renewer.close()
        renewer.add(1, 1, 1)
        renewer.close()


if __name__ == "__main__":
    unittest.main()
