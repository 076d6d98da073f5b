"""Servers of this host, found by their sockets."""

import pathlib
import tempfile
import unittest

from mla_client import errors
from mla_client.connection.same_host import MOST_SOCKETS, SameHost


class SameHostTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.servers, self.asked = {}, []  # boot ids by name
        self.here = SameHost(f"{folder.name}/*.sock", self.boot_id_of)

    def boot_id_of(self, path):
        self.asked.append(pathlib.Path(path).stem)
        boot_id = self.servers[pathlib.Path(path).stem]
        if boot_id == 0:
            raise errors.Unavailable("nothing listens there")
        return boot_id

    def serve(self, name, boot_id):
        path = self.folder / f"{name}.sock"
        path.unlink(missing_ok=True)
        path.touch()
        self.servers[name] = boot_id

    def found(self, boot_id):
        path = self.here.path_of(boot_id)
        return pathlib.Path(path).stem if path else ""

    def test_the_socket_that_answers_with_the_boot_id(self):
        self.assertEqual(self.found(1), "")
        for name, boot_id in (("a", 1), ("b", 2), ("broken", 0), ("c", 3)):
            self.serve(name, boot_id)
        self.assertEqual([self.found(boot_id) for boot_id in (3, 1, 2, 4)], ["c", "a", "b", ""])

    def test_a_known_socket_is_asked_first_and_alone(self):
        for name in "abcd":
            self.serve(name, ord(name))
        self.assertEqual(self.found(ord("d")), "d")
        self.asked.clear()
        self.assertEqual(self.found(ord("d")), "d")
        self.assertEqual(self.asked, ["d"])

    def test_a_server_that_restarts_is_found_again(self):
        self.serve("a", 1)
        self.serve("b", 2)
        self.assertEqual(self.found(2), "b")
        self.servers["b"] = 5  # behind the same file
        self.assertEqual(self.found(2), "")
        self.assertEqual(self.found(5), "b")
        self.serve("a", 7)  # with a file of its own
        self.assertEqual(self.found(7), "a")

    def test_so_many_are_looked_at_and_no_more(self):
        for number in range(MOST_SOCKETS + 1):
            self.serve(f"{number:04}", number + 1)
        self.assertNotEqual(self.found(MOST_SOCKETS), "")
        self.assertEqual(self.found(MOST_SOCKETS + 1), "")


if __name__ == "__main__":
    unittest.main()
