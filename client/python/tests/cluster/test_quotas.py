"""Bounds of tenants over a fleet."""

import random
import unittest

from mla_client import errors
from mla_client.cluster.operations import quotas
from mla_client.operations import ResourceUsage, TenantQuota


class SharesTest(unittest.TestCase):
    def test_what_is_used_and_an_equal_part_of_the_rest(self):
        self.assertEqual(quotas.shares(100, {"a": 10, "b": 30}), {"a": 40, "b": 60})
        self.assertEqual(quotas.shares(101, {"a": 0, "b": 0}), {"a": 51, "b": 50})
        self.assertEqual(quotas.shares(100, {}), {})

    def test_the_sum_is_the_fleets_bound(self):
        rng = random.Random(7)
        for _ in range(500):
            used = {f"s:{number}": rng.randrange(100) for number in range(rng.randint(1, 9))}
            kept = {f"k:{number}": rng.randrange(50) for number in range(rng.randrange(3))}
            total = sum(used.values()) + sum(kept.values()) + rng.randrange(200)
            found = quotas.shares(total, used, kept)
            self.assertEqual(sum(found.values()), total - sum(kept.values()))
            self.assertTrue(all(found[one] >= used[one] for one in used))

    def test_nothing_is_taken_away_and_nothing_given_where_more_is_in_use(self):
        self.assertEqual(quotas.shares(50, {"a": 40, "b": 30}), {"a": 40, "b": 30})
        self.assertEqual(quotas.shares(50, {"a": 40}, {"b": 20}), {"a": 40})

    def test_bounds_that_fall_are_set_first(self):
        order = quotas.changes({"a": 10, "b": 90, "c": 5}, {"a": 50, "b": 20, "c": 5, "d": 7})
        self.assertEqual([one[0] for one in order], ["d", "b", "a"])


class Server:
    """A server of an operator."""

    def __init__(self):
        self.used = 0
        self.error = None
        self.start()

    def start(self):
        self.bound, self.source = 1 << 40, "default"

    def quotas(self):
        if self.error:
            raise self.error
        if self.source == "default" and not self.used:
            return [], {}
        usage = ResourceUsage(self.used, self.bound, self.source, 0)
        return [TenantQuota("t", 1, {"kv_bytes": usage})], {}

    def set_quota(self, tenant, bounds):
        if self.error:
            raise self.error
        assert tenant == "t"
        self.bound, self.source = bounds["kv_bytes"], "runtime"


class ReconcilerTest(unittest.TestCase):
    def setUp(self):
        self.servers = {f"s:{number}": Server() for number in range(4)}
        self.reconciler = quotas.Reconciler(
            quotas.FleetQuotas({"t": {"kv_bytes": 1000}}), lambda: self.servers)

    def bounds(self):
        return [one.bound for one in self.servers.values()]

    def test_bounds_follow_use_and_never_exceed_the_fleets(self):
        rng = random.Random(3)
        self.reconciler.turn()
        self.assertEqual(self.bounds(), [250] * 4)
        for _ in range(300):
            for server in self.servers.values():
                server.used = min(server.bound, max(0, server.used + rng.randrange(-80, 120)))
            self.reconciler.turn()
            self.assertLessEqual(sum(self.bounds()), 1000)
            self.assertLessEqual(sum(one.used for one in self.servers.values()), 1000)

    def test_a_busy_server_gets_what_others_do_not_use(self):
        self.reconciler.turn()
        for _ in range(6):
            self.servers["s:0"].used = self.servers["s:0"].bound
            self.reconciler.turn()
        self.assertGreater(self.servers["s:0"].used, 800)

    def test_a_tenant_that_opens_during_a_turn_exceeds_its_bound_by_at_most_a_twentieth(self):
        # A server's use can grow between the reading of it and the new bound, while another server
        # gets what seemed to be free. Each request to a server takes a millisecond or less, and
        # the fleet opens four units in that time: twice the bound of 2,000 in a second.
        rng, most = random.Random(11), 0

        def work():
            nonlocal most
            servers = list(self.servers.values())
            for _ in range(4):
                one = servers[0] if rng.random() < 0.5 else rng.choice(servers)
                one.used += one.used < one.bound
            most = max(most, sum(one.used for one in servers))

        class Busy(Server):
            def quotas(self):
                work()
                return super().quotas()

            def set_quota(self, tenant, bounds):
                work()
                super().set_quota(tenant, bounds)

        self.servers.clear()
        self.servers.update({f"s:{number}": Busy() for number in range(16)})
        reconciler = quotas.Reconciler(
            quotas.FleetQuotas({"t": {"kv_bytes": 2000}}), lambda: self.servers)
        reconciler.turn()
        for _ in range(500):
            for _ in range(100):
                work()
            for one in self.servers.values():
                one.used -= rng.randrange(one.used // 8 + 1)
            reconciler.turn()
        self.assertGreater(most, 1900)  # the bound was reached
        self.assertLessEqual(most, 2000 * 1.05)

    def test_a_server_that_does_not_answer_keeps_its_share(self):
        self.reconciler.turn()
        self.servers["s:1"].error = errors.Unavailable("no connection")
        for server in ("s:0", "s:2", "s:3"):
            self.servers[server].used = self.servers[server].bound
        self.reconciler.turn()
        self.assertEqual(self.servers["s:1"].bound, 250)
        self.assertLessEqual(sum(self.bounds()), 1000)
        self.assertIn("s:1", self.reconciler.failed)

    def test_a_server_that_was_started_again_gets_its_bound_again(self):
        self.reconciler.turn()
        for used in (0, 7):
            self.servers["s:2"].start()
            self.servers["s:2"].used = used
            self.reconciler.turn()
            self.assertEqual(self.servers["s:2"].source, "runtime")
            self.assertEqual(sum(self.bounds()), 1000)

    def test_another_leader_has_set_other_bounds(self):
        self.reconciler.turn()
        self.servers["s:0"].bound, self.servers["s:1"].bound = 450, 50
        self.reconciler.turn()
        self.assertEqual(self.bounds(), [250] * 4)

    def test_the_share_of_a_server_that_has_left_goes_to_others_after_a_while(self):
        now = 0.0
        reconciler = quotas.Reconciler(quotas.FleetQuotas({"t": {"kv_bytes": 1000}}),
                                       lambda: self.servers, now=lambda: now)
        reconciler.turn()
        for number in range(3):  # pods that come again have another address
            gone = self.servers.pop(f"s:{number}")
            self.servers[f"s:{number + 4}"] = Server()
            reconciler.turn()
            self.assertEqual(sum(self.bounds()), 1000 - gone.bound)
            now += quotas.LEFT_S
            reconciler.turn()
            self.assertEqual(self.bounds(), [250] * 4)

    def test_a_member_that_never_answers_keeps_its_share(self):
        now = 0.0
        servers = dict(self.servers)
        reconciler = quotas.Reconciler(quotas.FleetQuotas({"t": {"kv_bytes": 1000}}),
                                       lambda: servers, now=lambda: now)
        reconciler.turn()
        servers["s:1"] = None
        for _ in range(3):
            now += quotas.LEFT_S
            reconciler.turn()
            self.assertEqual(self.bounds(), [250] * 4)

    def slow_turn(self, seconds_a_call, registry=None):
        """A turn of a leader whose calls to servers last so long. Returns the number of bounds that
        it set, and the times of these calls since the registry had given or renewed the lease."""
        now, registry, late = [100.0], registry or FakeRegistry(), []
        leader = quotas.Leadership(registry, "a")
        held, renewed = leader.held, [now[0]]

        def hold():
            begun = now[0]
            if now[0] - renewed[0] >= quotas.LEADER_LEASE_S:
                registry.leader = None  # the lease has ended
            if held():
                renewed[0] = begun
                return True
            return False
        leader.held = hold

        def slow(call, sets):
            def made(*arguments):
                if sets:
                    late.append(now[0] + seconds_a_call - renewed[0])
                now[0] += seconds_a_call
                return call(*arguments)
            return made
        for server in self.servers.values():
            server.quotas = slow(server.quotas, False)
            server.set_quota = slow(server.set_quota, True)
        reconciler = quotas.Reconciler(quotas.FleetQuotas({"t": {"kv_bytes": 1000}}),
                                       lambda: self.servers, now=lambda: now[0])
        return reconciler.turn(leader), late

    def test_a_long_turn_keeps_the_leadership(self):
        changed, late = self.slow_turn(5.0)
        self.assertEqual(changed, 4)
        self.assertLess(max(late), quotas.LEADER_LEASE_S)

    def test_a_turn_ends_once_another_process_may_lead(self):
        self.assertEqual(self.slow_turn(quotas.LEADER_LEASE_S + 1.0), (0, []))

        class Away(FakeRegistry):
            def refresh(self, lease):
                raise errors.Unavailable("away")
        self.assertEqual(self.slow_turn(5.0, Away()), (0, []))

    def test_who_does_not_lead_sets_nothing(self):
        registry = FakeRegistry()
        self.assertTrue(quotas.Leadership(registry, "b").held())
        self.assertEqual(self.slow_turn(0.0, registry), (0, []))

    def test_a_bound_that_could_not_be_lowered_is_not_given_to_others(self):
        self.reconciler.turn()
        self.servers["s:0"].used = 250
        real = self.servers["s:1"].set_quota

        def refuse(tenant, bounds):
            raise errors.Unavailable("no connection")
        self.servers["s:1"].set_quota = refuse
        self.servers["s:2"].set_quota = refuse
        self.servers["s:3"].set_quota = refuse
        self.reconciler.turn()
        self.assertLessEqual(sum(self.bounds()), 1000)
        self.servers["s:1"].set_quota = real

    def test_bad_files_are_refused(self):
        for text in ("", "[]", '{"t": 1}', '{"t": {"kv_bytes": -1}}', '{"t": {"kv_bytes": true}}'):
            with self.assertRaises(errors.InvalidArgument, msg=text):
                quotas.FleetQuotas.from_json(text)
        self.assertEqual(quotas.FleetQuotas.from_json('{"t": {"kv_bytes": 5}}').bounds,
                         {"t": {"kv_bytes": 5}})


class FakeRegistry:
    """One key under a lease, as etcd has it."""

    def __init__(self):
        self.leader = None
        self.away = False

    def check(self):
        if self.away:
            raise errors.Unavailable("away")

    def grant(self, ttl_s):
        self.check()
        return object()

    def refresh(self, lease):
        self.check()
        return self.leader is not None and self.leader[1] is lease

    def create(self, name, text, lease):
        self.check()
        if self.leader is None:
            self.leader = (text, lease)
            return True
        return False

    def revoke(self, lease):
        self.check()
        if self.leader is not None and self.leader[1] is lease:
            self.leader = None


class LeadershipTest(unittest.TestCase):
    def test_one_process_at_a_time_leads(self):
        registry = FakeRegistry()
        one, two = (quotas.Leadership(registry, name) for name in "ab")
        self.assertTrue(one.held())
        self.assertFalse(two.held())
        self.assertTrue(one.held())
        one.leave()
        self.assertTrue(two.held())
        self.assertFalse(one.held())

    def test_who_cannot_reach_the_registry_does_not_lead(self):
        registry = FakeRegistry()
        one = quotas.Leadership(registry, "a")
        self.assertTrue(one.held())
        registry.away = True
        self.assertFalse(one.held())
        registry.away, registry.leader = False, None  # its lease has ended
        self.assertTrue(one.held())


if __name__ == "__main__":
    unittest.main()
