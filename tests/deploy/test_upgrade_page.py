"""The page on upgrades, docs/install/upgrade.md: what it says to type is typed here.

Both servers are on this host, so their certificates also have the name localhost, and ports are
those that were free.
"""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import mla_client
import numpy as np
import server_binary

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("BINARIES_UNDER_TEST", ROOT / ".bazel/bin"))
GEOMETRY = mla_client.Geometry(2, 64, 16, 16, 16)
LIMIT_S = 120


class UpgradePageTest(unittest.TestCase):
    def setUp(self):
        text = (ROOT / "docs/install/upgrade.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
        self.certificates, self.drain, _, self.health = blocks[:4]
        (self.configuration,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def shell(self, script, **environment):
        done = subprocess.run(["bash", "-euc", script], cwd=self.folder, text=True, check=False,
                              capture_output=True, timeout=LIMIT_S,
                              env={**os.environ, **environment})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def serve(self, name):
        """Starts a server with the page's configuration; returns its port."""
        text = self.configuration.replace("/etc/mla-server", str(self.folder))
        path = self.folder / f"{name}.yaml"
        path.write_text(text.replace("server-a.", f"{name}."), encoding="utf-8")
        self.assertIn('"[::]:50551"', text)
        server = server_binary.start(f"--config={path}", "--log-level=info", listen="[::]:0")
        self.addCleanup(server.stop)
        return int(server.log().split("tcp_port=")[1].split()[0])

    def test_the_page_drains_one_server_to_the_other(self):
        self.shell(self.certificates.replace('DNS:$name"', 'DNS:$name,DNS:localhost"'))
        ports = {name: self.serve(name) for name in ("server-a", "server-b")}
        tls = mla_client.Tls(*(str(self.folder / name) for name in
                               ("ca.crt", "worker.crt", "worker.key")))
        with mla_client.Client.connect(f"localhost:{ports['server-a']}", tls=tls,
                                       follow_moves=True) as client:
            model = client.register_model(mla_client.ModelSpec("m", GEOMETRY, 1, 0.1))
            sequence = model.open_sequence()
            q = np.zeros((3, 2, GEOMETRY.row_dim), np.uint16)

            def step():
                with client.step([(sequence, 3)]) as one:
                    one.attend(0, q, q[:, 0], mla_client.Profile.ABSORBED)

            step()
            script = self.drain.replace("--linger-ms=30000", "--linger-ms=1")
            for name, port in ports.items():
                script = script.replace(f"{name}:50551", f"localhost:{port}")
            said = self.shell(script, PATH=f"{BINARIES / 'client/mlactl'}:{os.environ['PATH']}")
            self.assertIn("moved", said)
            step()
            self.assertIsNot(sequence.model.service, client)
            self.assertEqual(sequence.refresh().length, 6)
        exports = self.drain.splitlines()[0]
        health = self.health.replace("server-a:50551", f"localhost:{ports['server-b']}")
        said = self.shell(f"{exports}\n{health}",
                          PATH=f"{BINARIES / 'client/mlactl'}:{os.environ['PATH']}")
        self.assertIn("SERVING", said)


if __name__ == "__main__":
    unittest.main()
