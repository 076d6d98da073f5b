"""Paths of unix sockets with characters that have a meaning in a URI."""

import pathlib
import tempfile
import unittest

import mla_client
import server_binary
from mla_client.connection import targets

NAMES = ("plain", "50%off", "100%25", "run#1", "what?", "a b", "a+b", "a&b=c", "a@b", "a:b", "a;b",
         "[a]", "a\\b", "~a", "ä", "a\nb", "%", "%zz", "..%2f", "'\"")


class SocketPathsTest(unittest.TestCase):
    def test_a_path_is_meant_as_it_stands(self):
        server = server_binary.start()
        self.addCleanup(server.stop)
        with tempfile.TemporaryDirectory(prefix="mla-paths-") as folder:
            for name in NAMES:
                place = pathlib.Path(folder, name)
                place.mkdir()
                for end in ("", ".shm"):
                    (place / f"{name}{end}").symlink_to(f"{server.socket}{end}")
                for target in (f"unix:{place / name}", f"unix://{place / name}"):
                    with self.subTest(target=target), \
                            mla_client.Client.connect(target, timeout_s=60.0,
                                                      shared_bytes=1 << 20) as client:
                        self.assertEqual((client.server_info().boot_id, client.transport),
                                         (client.boot_id, "ring"))

    def test_a_path_that_grpc_takes_for_two(self):
        with self.assertRaisesRegex(mla_client.InvalidArgument, "without a comma") as caught:
            mla_client.Client.connect("unix:/tmp/a,b/mla.sock", timeout_s=60.0)
        self.assertEqual(caught.exception.detail.field, "target")

    def test_other_targets_stay_as_they_are(self):
        for target in ("127.0.0.1:1", "dns:///a%20b:1", "unix-abstract:a#b"):
            self.assertEqual(targets.grpc_target(target), target)
        self.assertEqual(targets.grpc_target("unix:a b"), "unix:a%20b")


if __name__ == "__main__":
    unittest.main()
