"""What a registry says, and the list that outlives it."""

import json
import unittest

from mla_client import errors
from mla_client.cluster import members, registry, targets
from mla_client.cluster.members import Member, MemberList

MEMBER = Member("a:1", 7, "node", "/run/a.sock", "gpu", "1.2", False, 100, 20, 200, 3, ("ab", "cd"))


class MemberTest(unittest.TestCase):
    def test_a_value_is_read_as_it_was_written(self):
        self.assertEqual(Member.from_json(MEMBER.to_json()), MEMBER)

    def test_mlactl_writes_the_same_text(self):
        # client/cpp/cluster/members_test.cc has it, too.
        member = Member("node-1:50551", 2**64 - 1, 'a "quoted" \\ name', "/run/mla.sock", "MI355X",
                        "0.2.0", True, 3, 2, 5, 7, ("00ff", "01"))
        self.assertEqual(
            member.to_json(),
            '{"address":"node-1:50551","boot_id":18446744073709551615,"bytes_cached":2,'
            '"bytes_free":3,"bytes_total":5,"device":"MI355X","draining":true,'
            '"models":["00ff","01"],"node":"a \\"quoted\\" \\\\ name","sequences":7,'
            '"socket":"/run/mla.sock","version":"0.2.0"}')

    def test_fields_of_newer_announcers_are_left_out(self):
        fields = {**json.loads(MEMBER.to_json()), "colour": "blue"}
        self.assertEqual(Member.from_json(json.dumps(fields)), MEMBER)
        self.assertEqual(Member.from_json('{"address": "b:1"}'), Member("b:1"))

    def test_what_is_no_member_is_refused_with_the_field(self):
        good = json.loads(MEMBER.to_json())
        for field, value in (("address", ""), ("address", "a\n"), ("address", "x" * 257),
                             ("boot_id", -1), ("boot_id", 2**64), ("boot_id", True),
                             ("bytes_free", "1"), ("bytes_total", 1.5), ("draining", 1),
                             ("models", "ab"), ("models", ["x"] * 257), ("models", [1]),
                             ("node", None), ("sequences", {})):
            with self.assertRaises(errors.InvalidArgument, msg=(field, value)) as caught:
                Member.from_json(json.dumps({**good, field: value}))
            self.assertEqual(caught.exception.detail.field, f"member.{field}")
        for text in ("", "[]", "{}", "nonsense", "[" * 100_000, " " * (65 << 10) + "{}"):
            with self.assertRaises(errors.InvalidArgument, msg=text[:9]):
                Member.from_json(text)


class MemberListTest(unittest.TestCase):
    def setUp(self):
        self.now = 0.0
        self.found = [MEMBER, Member("b:1", 8)]
        self.gone = []
        self.list = MemberList(self.read, keep_s=600, now=lambda: self.now,
                               on_gone=self.gone.extend)

    def read(self):
        if isinstance(self.found, Exception):
            raise self.found
        return list(self.found)

    def test_members_are_used_for_ten_minutes_without_the_registry_and_no_longer(self):
        self.assertTrue(self.list.refresh())
        self.found = errors.Unavailable("no connection")
        self.now = 600.0
        self.assertFalse(self.list.refresh())
        self.assertEqual([one.address for one in self.list.all()], ["a:1", "b:1"])
        self.assertEqual(self.gone, [])
        self.assertEqual(self.list.error.message, "no connection")
        self.now = 601.0
        with self.assertRaises(errors.Unavailable) as caught:
            self.list.all()
        self.assertEqual(caught.exception.detail.reason, "registry_away")
        self.assertIn("no connection", str(caught.exception))
        self.found = [MEMBER]
        self.assertTrue(self.list.refresh())
        self.assertEqual(self.list.all(), [MEMBER])
        self.assertEqual(self.list.age_s, 0.0)

    def test_a_registry_that_never_answered_is_said(self):
        self.found = errors.Unavailable("no connection")
        self.list.refresh()
        with self.assertRaises(errors.Unavailable):
            self.list.all()
        self.assertEqual(self.list.age_s, float("inf"))

    def test_those_that_left_or_restarted_are_told(self):
        self.list.refresh()
        self.found = [Member("a:1", 9)]
        self.list.refresh()
        self.assertEqual(sorted(self.gone), ["a:1", "b:1"])
        self.gone.clear()
        self.found = [Member("a:1")]  # it does not say: it may be the same
        self.list.refresh()
        self.assertEqual(self.gone, [])

    def test_what_a_fault_left_untold_is_told_at_the_next_reading(self):
        told = []

        def on_gone(addresses):
            told.append(list(addresses))
            if len(told) < 3:
                raise KeyError("a fault")
        self.list = MemberList(self.read, on_gone=on_gone)
        self.list.refresh()
        self.found = [MEMBER]
        for _ in range(2):
            with self.assertRaises(KeyError):
                self.list.refresh()
        self.found = []
        self.assertTrue(self.list.refresh())
        self.assertTrue(self.list.refresh())
        self.assertEqual(told, [["b:1"], ["b:1"], ["b:1", "a:1"]])

    def test_too_many_members_are_refused_and_the_list_stays(self):
        self.list.refresh()
        self.found = [Member(f"s:{number}") for number in range(members.MOST_MEMBERS + 1)]
        self.assertFalse(self.list.refresh())
        self.assertEqual(len(self.list.all()), 2)

    def test_a_thread_reads_until_it_is_closed(self):
        read = self.list = MemberList(self.read, refresh_s=0.001)
        read.start()
        while read.age_s == float("inf"):
            pass
        read.close()
        self.assertFalse(read._thread.is_alive())


class Pauses:
    """In place of the event that ends the thread: it waits for nothing, and ends after `count`."""

    def __init__(self, count):
        self.count = count
        self.asked = []

    def wait(self, timeout):
        self.asked.append(timeout)
        return len(self.asked) > self.count

    def set(self):
        pass


class ThreadTest(unittest.TestCase):
    def run_with(self, answers, refresh_s=1.0):
        """Reads in the list's thread, and returns the list and the pauses before each reading."""
        left = list(answers)

        def read():
            one = left.pop(0)
            if isinstance(one, Exception):
                raise one
            return one
        made = MemberList(read, refresh_s=refresh_s)
        made._stop = pauses = Pauses(len(left))
        made.start()
        made._thread.join()
        return made, pauses.asked

    def test_it_goes_on_after_an_exception_of_any_kind(self):
        with self.assertLogs("mla_client", "ERROR") as logged:
            made, pauses = self.run_with([KeyError("port"), [MEMBER]])
        self.assertEqual(made.all(), [MEMBER])
        self.assertIsNone(made.error)
        self.assertEqual(pauses, [1.0, 2.0, 1.0])
        self.assertEqual(len(logged.records), 1)
        self.assertIn("a fault while the members of the cluster were read; again in 2 s",
                      logged.output[0])
        self.assertIn("KeyError", logged.output[0])

    def test_its_pauses_are_bounded(self):
        with self.assertLogs("mla_client", "ERROR"):
            made, pauses = self.run_with([ValueError("x")] * 7)
        self.assertEqual(pauses, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0])
        with self.assertRaises(errors.Unavailable) as caught:
            made.all()
        self.assertIn("ValueError: x", str(caught.exception))
        with self.assertLogs("mla_client", "ERROR"):
            _, pauses = self.run_with([ValueError("x")] * 2, refresh_s=100.0)
        self.assertEqual(pauses, [100.0] * 3)


class RegistryTest(unittest.TestCase):
    def test_every_address_of_a_name_is_a_member(self):
        def look_up(host, port, type):
            self.assertEqual((host, port), ("mla", 50551))
            return [(2, 1, 6, "", ("10.0.0.2", port)), (2, 1, 6, "", ("10.0.0.1", port)),
                    (2, 1, 6, "", ("10.0.0.2", port)), (10, 1, 6, "", ("fd00::1", port, 0, 0))]
        found = registry.DnsRegistry(targets.dns_target("dns:///mla"), look_up).read()
        self.assertEqual([one.address for one in found],
                         ["10.0.0.1:50551", "10.0.0.2:50551", "[fd00::1]:50551"])

    def test_a_name_service_that_fails_is_a_registry_that_is_away(self):
        def look_up(*_, **__):
            raise OSError("no such name")
        with self.assertRaises(errors.Unavailable) as caught:
            registry.DnsRegistry(targets.dns_target("dns:///mla"), look_up).read()
        self.assertEqual(caught.exception.detail.reason, "registry_away")

    def test_a_list_stays(self):
        found = registry.registry_of("a:1,b:2")
        self.assertEqual([one.address for one in found.read()], ["a:1", "b:2"])
        self.assertEqual(found.moved(7), "")


if __name__ == "__main__":
    unittest.main()
