"""Two servers are upgraded one after the other while workers take steps: nothing is lost or wrong.

Each server drains to the other one and ends, and the newer version takes its port. In the
longer runs (MLA_TEST_LONG) the older version is the last release, built from its commit, and one of
the workers has its Python client. In the quick run both versions are this tree.
"""

import json
import os
import pathlib
import subprocess
import sys
import unittest

import release

sys.path.append(str(release.ROOT / "tests"))
sys.path.append(str(release.ROOT / "client/python/tests"))

# pylint: disable=wrong-import-position
import peers  # noqa: E402
from mla_client.testing import ServerProcess  # noqa: E402
from sides import LONG, sides  # noqa: E402

RUN_SECONDS = 21
PROGRAM = pathlib.Path(__file__).with_name("upgrade_worker.py")
SMALL = ["--kv-cache-bytes=64MiB", "--limits-weights-bytes=64MiB", "--log-level=info"]
LIMIT_S = 120


class UpgradeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.old, cls.new = sides()
        cls.authority = peers.Authority()
        cls.addClassCleanup(cls.authority.close)
        for name in ("red", "green", "blue"):
            cls.authority.make(name)

    def serve(self, side, port=0):
        """Starts a server of that version; returns it and its port."""
        files = self.authority.files("server")
        server = ServerProcess(
            str(side.server), [*SMALL, f"--tls-cert={files['cert']}", f"--tls-key={files['key']}",
                               f"--client-ca={files['ca']}", "--server-operators=blue,localhost"],
            listen=f"127.0.0.1:{port}").start()
        self.addCleanup(server.stop)
        return server, int(server.log().split("tcp_port=")[1].split()[0])

    def work(self, side, tenant, port, seed):
        """Starts a worker; returns it after its first steps."""
        files = self.authority.files(tenant)
        worker = subprocess.Popen(
            ["/usr/bin/python3", str(PROGRAM), f"localhost:{port}", files["ca"], files["cert"],
             files["key"], str(seed)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(side.python)})
        self.addCleanup(worker.communicate)
        self.addCleanup(worker.kill)
        line = worker.stdout.readline()
        self.assertEqual(line, "begun\n", worker.stderr.read() if not line else "")
        return worker

    def upgrade(self, server, port, peer_port, workers):
        """As an operator upgrades a server: all its rows move to the peer; it ends once its workers
        have been told; the newer version takes its place. Returns that one."""
        files = self.authority.files("blue")
        code, said = self.new.command(
            f"localhost:{port}", "drain", f"--to=localhost:{peer_port}",
            f"--tls-ca={files['ca']}", f"--tls-cert={files['cert']}", f"--tls-key={files['key']}",
            "--timeout-ms=60000")
        self.assertEqual(code, 0, said)
        self.assertEqual("this server sends no weights" in said, self.old.name == "0.1.0", said)
        for worker in workers:
            line = worker.stdout.readline()
            self.assertEqual(line, "moved\n", worker.stderr.read() if not line else "")
        self.assertEqual(server.stop(), 0)
        return self.serve(self.new, port)[0]

    def finish(self, worker):
        """Lets a worker end; returns its figures. It fails for a lost sequence or a wrong row."""
        out, err = worker.communicate("end\n", timeout=LIMIT_S)
        self.assertEqual(worker.returncode, 0, err)
        return json.loads(out.splitlines()[-1])

    def test_no_sequence_is_lost_and_no_row_is_wrong_while_both_servers_are_upgraded(self):
        first, first_port = self.serve(self.old)
        second, second_port = self.serve(self.old)
        workers = [self.work(self.old, "red", first_port, 1),
                   self.work(self.new, "green", first_port, 2),
                   self.work(self.new, "green", second_port, 3)]
        self.upgrade(first, first_port, second_port, workers[:2])
        self.upgrade(second, second_port, first_port, workers)
        figures = [self.finish(worker) for worker in workers]
        print(f"\nupgraded {self.old.name} to {self.new.name}:", *map(json.dumps, figures))
        for one in figures:
            self.assertGreater(one["moves"], 0)
            self.assertGreater(one["sequences"], 0)


if __name__ == "__main__":
    unittest.main()
