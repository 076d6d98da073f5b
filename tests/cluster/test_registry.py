"""The registry in a real etcd: members under leases, tombstones, one leader."""

import threading
import unittest

from mla_client import errors
from mla_client.cluster import registry, targets
from mla_client.cluster.operations import announce, quotas
from mla_client.cluster.members import Member
from mla_client.cluster.placement import Probe

import etcd


class Server:
    """A server as an announcer sees it."""

    def __init__(self):
        self.error = None
        self.probe = Probe(boot_id=7, bytes_free=50, bytes_cached=20, bytes_total=100, sequences=3)

    def server_info(self):
        class Info:
            class backend:
                device, name = "a gpu", "hip"
            server_version = "1.0"
        return Info

    def models(self):
        return []

    def _probe(self, model_id, prefix, timeout_s):
        if self.error:
            raise self.error
        return lambda: self.probe

    def close(self):
        pass


class RegistryTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.etcd = etcd.Etcd().start()
        cls.addClassCleanup(cls.etcd.__exit__)

    def setUp(self):
        self.registry = self.etcd.registry()
        self.addCleanup(self.registry.close)

    def announcer(self, server, address):
        made = announce.Announcer(self.registry, lambda: server, address,
                                  target="unix:/run/mla.sock", node="node-1")
        self.addCleanup(made.withdraw)
        return made

    def members(self):
        return {one.address: one for one in self.registry.read()}

    def test_a_server_is_a_member_while_it_answers(self):
        server = Server()
        announcer = self.announcer(server, "a:1")
        self.assertTrue(announcer.turn())
        self.assertEqual(self.members()["a:1"], Member(
            "a:1", 7, "node-1", "/run/mla.sock", "a gpu", "1.0", False, 50, 20, 100, 3))
        server.probe = Probe(boot_id=7, draining=True)
        self.assertTrue(announcer.turn())
        self.assertTrue(self.members()["a:1"].draining)
        server.error = errors.Unavailable("no connection")
        self.assertFalse(announcer.turn())
        self.assertNotIn("a:1", self.members())
        server.error = None
        self.assertTrue(announcer.turn())
        self.assertIn("a:1", self.members())

    def test_an_entry_goes_with_its_lease(self):
        announcer = self.announcer(Server(), "b:1")
        self.assertTrue(announcer.turn())
        self.registry.revoke(announcer._lease)  # as its end does
        self.assertNotIn("b:1", self.members())
        self.assertTrue(announcer.turn())  # it finds out, and takes another
        self.assertIn("b:1", self.members())

    def test_an_announcer_that_is_stopped_withdraws(self):
        announcer, stop = self.announcer(Server(), "c:1"), threading.Event()
        thread = threading.Thread(target=announcer.run, args=(stop,))
        thread.start()
        while "c:1" not in self.members():
            pass
        stop.set()
        thread.join()
        self.assertNotIn("c:1", self.members())

    def test_values_that_are_no_members_are_left_out(self):
        self.registry.put("servers/bad", "nonsense")
        self.addCleanup(self.registry.delete, "servers/bad")
        self.registry.put("servers/good", Member("d:1").to_json())
        self.addCleanup(self.registry.delete, "servers/good")
        self.assertIn("d:1", self.members())
        self.assertEqual(self.registry.bad_values, 1)

    def test_a_tombstone_says_where_a_sequence_is(self):
        self.registry.put(f"moved/{77:016x}", "e:1", self.registry.grant(60))
        self.assertEqual(self.registry.moved(77), "e:1")
        self.assertEqual(self.registry.moved(7), "")

    def test_prefixes_are_kept_apart(self):
        other = registry.EtcdRegistry(targets.etcd_target(self.etcd.target + "2"))
        self.addCleanup(other.close)
        other.put("servers/x", Member("x:1").to_json())
        self.assertNotIn("x:1", self.members())

    def test_one_process_leads(self):
        one, two = (quotas.Leadership(self.etcd.registry(), name) for name in "ab")
        self.assertTrue(one.held())
        self.assertFalse(two.held())
        self.assertTrue(one.held())
        one.leave()
        self.assertTrue(two.held())
        two.leave()

    def test_the_next_endpoint_answers_where_one_does_not(self):
        good = targets.etcd_target(self.etcd.target)
        dead = targets.Endpoint("127.0.0.1", etcd.free_port())
        both = registry.EtcdRegistry(good._replace(endpoints=(dead, *good.endpoints)))
        self.addCleanup(both.close)
        both.read()
        neither = registry.EtcdRegistry(good._replace(endpoints=(dead,)))
        with self.assertRaises(errors.Unavailable) as caught:
            neither.read()
        self.assertEqual(caught.exception.detail.reason, "registry_away")


class TlsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.etcd = etcd.Etcd(tls=True).start()
        cls.addClassCleanup(cls.etcd.__exit__)

    def registry(self, **files):
        made = registry.registry_of(self.etcd.target, **files)
        self.addCleanup(made.close)
        return made

    def test_members_and_tombstones_travel_over_tls(self):
        found = self.registry(**self.etcd.files())
        lease = found.grant(60)
        found.put("servers/a", Member("a:1", 7).to_json(), lease)
        found.put(f"moved/{9:016x}", "b:1", lease)
        self.assertEqual([one.address for one in found.read()], ["a:1"])
        self.assertEqual((found.moved(9), found.moved(8)), ("b:1", ""))
        self.assertTrue(found.refresh(lease))
        found.revoke(lease)
        self.assertEqual(found.read(), [])

    def test_who_is_not_trusted_learns_nothing(self):
        for files in ({"ca": self.etcd.files()["ca"]}, self.etcd.files(by="other"),
                      self.etcd.files(ca="other"), {}):
            with self.subTest(files=files), self.assertRaises(errors.Unavailable) as caught:
                self.registry(**files).read()
            self.assertEqual(caught.exception.detail.reason, "registry_away")


if __name__ == "__main__":
    unittest.main()
