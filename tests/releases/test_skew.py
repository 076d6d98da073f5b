"""The last release and this tree work together: clients with servers, and servers with each other.

Builds the release from its commit, which takes long the first time: part of the longer runs.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import release

sys.path.append(str(release.ROOT / "tests"))
sys.path.append(str(release.ROOT / "client/python/tests"))

# pylint: disable=wrong-import-position
import peers  # noqa: E402
from mla_client.testing import ServerProcess  # noqa: E402
from sides import LONG, sides  # noqa: E402

SMALL = ["--kv-cache-bytes=64MiB", "--limits-weights-bytes=64MiB"]
PROGRAM = pathlib.Path(__file__).with_name("skew_client.py")


def start_worker(side, target, files=()):
    """A started skew_client.py over that side's client."""
    return subprocess.Popen(
        ["/usr/bin/python3", str(PROGRAM), "fill", target, *files], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(side.python)})


class SkewTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if LONG:
            cls.old, cls.new = sides()

    def setUp(self):
        if not LONG:
            self.skipTest("part of the longer runs: ./dev test --all")

    def finish(self, worker):
        """Lets the worker take its last step; fails unless that is as before."""
        out, err = worker.communicate("go on\n", timeout=60)
        self.assertEqual((worker.returncode, out.splitlines()[-1:]), (0, ["same"]), err)

    def test_clients_of_one_and_servers_of_the_other(self):
        for client, server in ((self.old, self.new), (self.new, self.old)):
            with self.subTest(f"client {client.name}, server {server.name}"), \
                    ServerProcess(str(server.server), SMALL, listen="") as running:
                for transport in ("inline", "shm", "ring-futex"):
                    code, said = client.command(running.target, "attend",
                                                f"--transport={transport}")
                    self.assertEqual(code, 0, said)
                for words in (("info",), ("status",), ("health",), ("models",), ("quotas",)):
                    self.assertEqual(client.command(running.target, *words)[0], 0, words)
                worker = start_worker(client, running.target)
                line = worker.stdout.readline()
                self.assertIn("filled", line, worker.stderr.read() if not line else "")
                self.finish(worker)

    def test_the_configuration_of_the_release_is_accepted(self):
        example = release.FOLDER / self.old.name / "source/deploy/config/example.yaml"
        for line in (None, "log: {level: debug}\nlimits: {max_models: 9}\n"):
            with self.subTest(line=line), tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(example.read_text(encoding="utf-8") if line is None else line)
                file.flush()
                for side in (self.old, self.new):
                    done = subprocess.run(
                        [str(side.server), "--check-config", f"--config={file.name}", *SMALL],
                        check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_page_files_of_one_are_read_by_the_other(self):
        for source, target in ((self.old, self.new), (self.new, self.old)):
            with self.subTest(f"{source.name} to {target.name}"), \
                    ServerProcess(str(source.server), SMALL) as one, \
                    ServerProcess(str(target.server), SMALL) as two:
                worker = start_worker(source, one.target)
                identity = worker.stdout.readline().split()[1]
                pages = pathlib.Path(one.socket).parent / "rows.mlapages"
                code, said = source.command(one.target, "export", identity, str(pages))
                self.assertEqual(code, 0, said)
                other = start_worker(target, two.target)  # registers the model there
                self.assertIn("filled", other.stdout.readline())
                code, said = target.command(two.target, "import", "skew", str(pages))
                self.assertEqual(code, 0, said)
                self.finish(worker)
                self.finish(other)

    def test_sequences_move_between_servers_of_both(self):
        authority = peers.Authority()
        self.addCleanup(authority.close)
        for name in ("red", "blue"):
            authority.make(name)
        files = authority.files("server")
        flags = [*SMALL, f"--tls-cert={files['cert']}", f"--tls-key={files['key']}",
                 f"--client-ca={files['ca']}", "--server-operators=blue,localhost",
                 "--log-level=info"]
        for source, target in ((self.old, self.new), (self.new, self.old)):
            with self.subTest(f"{source.name} to {target.name}"), \
                    ServerProcess(str(source.server), flags, listen="127.0.0.1:0") as one, \
                    ServerProcess(str(target.server), flags, listen="127.0.0.1:0") as two:
                ports = [item.log().split("tcp_port=")[1].split()[0] for item in (one, two)]
                red, blue = authority.files("red"), authority.files("blue")
                worker = start_worker(source, f"127.0.0.1:{ports[0]}",
                                      (red["ca"], red["cert"], red["key"]))
                line = worker.stdout.readline()
                self.assertIn("filled", line, worker.stderr.read() if not line else "")
                code, said = self.new.command(
                    f"127.0.0.1:{ports[0]}", "drain", f"--to=localhost:{ports[1]}",
                    f"--tls-ca={blue['ca']}", f"--tls-cert={blue['cert']}",
                    f"--tls-key={blue['key']}", "--timeout-ms=60000")
                self.assertEqual(code, 0, said)
                self.finish(worker)  # wherever its sequence is now
                self.assertIn("hand_over", one.log() + two.log())


if __name__ == "__main__":
    unittest.main()
