"""Takes screenshots of a live server's status page in headless Chromium and checks them.
STATUS_PAGE_SCREENSHOTS=FOLDER keeps the pictures.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest
import urllib.request

import mla_client
import numpy as np
import server_binary
from service_contract import GEOMETRY, LAYERS, SCALE, Worker
from tests.png import read_png

BROWSER = "chromium-headless-shell"
HOSTILE = "<script>document.title='owned'</script><img/src=x/onerror=alert(1)>\"&'"
LONG = "long-" + "x" * 120
LIGHT, DARK = 1, 0  # values of Blink's preferredColorScheme
BAR_LIGHT, BAR_DARK = (0x2F, 0x6F, 0xDE), (0x5B, 0x93, 0xF5)


class StatusPageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(os.environ.get("STATUS_PAGE_SCREENSHOTS") or tempfile.mkdtemp())
        cls.folder.mkdir(parents=True, exist_ok=True)
        cls.server = server_binary.start("--ops-listen=127.0.0.1:0", "--log-level=info",
                                         "--kv-cache-bytes=1MiB", "--backend=reference")
        port = re.search(r"ops_port=(\d+)", cls.server.log()).group(1)
        cls.address = f"http://127.0.0.1:{port}"
        cls.clients = [cls.work(tenant) for tenant in ("default", "acme-research", HOSTILE, LONG)]
        urllib.request.urlopen(cls.address + "/readyz").read()  # gives rates a first sample
        time.sleep(0.1)

    @classmethod
    def tearDownClass(cls):
        for stack in cls.clients:
            stack.close()
        cls.server.stop()
        if "STATUS_PAGE_SCREENSHOTS" not in os.environ:
            shutil.rmtree(cls.folder)

    @classmethod
    def work(cls, tenant):
        """A client that keeps a sequence of some rows."""
        client = mla_client.Client.connect(cls.server.target, tenant=tenant, timeout_s=10.0,
                                           transport="inline")
        model = client.register_model(mla_client.ModelSpec(
            "m" if tenant == "default" else tenant, GEOMETRY, LAYERS, SCALE, 4))
        sequence = model.open_sequence()
        worker = Worker()
        for rows in [600] + 4 * [1]:
            with client.step([(sequence, rows)]) as step:
                for layer in range(LAYERS):
                    step.attend(layer, worker.queries(rows, mla_client.Profile.ABSORBED),
                                worker.kv(rows), mla_client.Profile.ABSORBED)
        cls.kept = getattr(cls, "kept", []) + [sequence]
        return client

    def shoot(self, name, scheme, width=1200, height=1500):
        """A screenshot of the page."""
        path = self.folder / f"{name}.png"
        done = subprocess.run(
            [BROWSER, "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--window-size={width},{height}", f"--screenshot={path}",
             f"--blink-settings=preferredColorScheme={scheme}", self.address + "/statusz"],
            capture_output=True, text=True, timeout=120, check=False)
        self.assertTrue(path.exists(), done.stderr[-2000:])
        return read_png(path)

    def bar_share(self, picture, color):
        """Filled share of the pool's bar, the widest run of the bar's color."""
        hits = np.all(np.abs(picture.astype(int) - color) <= 2, axis=2)
        filled = hits.sum(axis=1).max()
        y = int(hits.sum(axis=1).argmax())
        x = int(np.flatnonzero(hits[y])[0])
        # The track continues to the right in its own color, up to the card's padding.
        track = picture[y, x + filled + 4].astype(int)
        same = np.all(np.abs(picture[y].astype(int) - track) <= 2, axis=1)
        return filled / (filled + same[x + filled:].sum())

    def used_share(self):
        with urllib.request.urlopen(self.address + "/statusz?json") as reply:
            pool = json.load(reply)["limits"]["KV_page_pool"]
        return pool["used"] / pool["bound"]

    def test_light(self):
        picture = self.shoot("light", LIGHT)
        self.assertGreater(np.median(picture), 230)
        share = self.used_share()
        self.assertGreater(share, 0.2)
        self.assertLess(share, 0.75)  # else the bar has another color
        self.assertAlmostEqual(self.bar_share(picture, BAR_LIGHT), share, delta=0.02)

    def test_tenants_have_their_shares(self):
        with urllib.request.urlopen(self.address + "/statusz?json") as reply:
            tenants = {row["name"]: row for row in json.load(reply)["tenants"]}
        self.assertNotIn("warm-up", {name.strip() for name in tenants})  # the server's own
        for name in ("default", HOSTILE, LONG):
            self.assertEqual(tenants[name]["sequences"]["used"], 1)
            self.assertGreater(tenants[name]["KV_cache"]["used"], 0)
            self.assertGreater(tenants[name]["KV_cache"]["bound"], 0)

    def test_dark(self):
        picture = self.shoot("dark", DARK)
        self.assertLess(np.median(picture), 40)
        self.assertAlmostEqual(self.bar_share(picture, BAR_DARK), self.used_share(), delta=0.02)
        # Text is legible against it.
        self.assertGreater((picture.min(axis=2) > 200).mean(), 0.003)

    def test_narrow_windows_are_not_overflowed(self):
        """Long names wrap or scroll in their card: at the page's edge there is only background."""
        for width in (500, 1200):
            picture = self.shoot(f"width-{width}", LIGHT, width=width)
            edge = picture[:, -8:].reshape(-1, 3)
            self.assertTrue(np.all(edge == edge[0]), width)

    def test_names_are_text(self):
        dom = subprocess.run([BROWSER, "--no-sandbox", "--disable-gpu", "--dump-dom",
                              self.address + "/statusz"], capture_output=True, text=True,
                             timeout=120, check=True).stdout
        self.assertIn("<title>serving", dom)
        self.assertNotIn("<script", dom)
        self.assertNotIn("<img", dom)
        self.assertIn("&lt;script&gt;document.title=", dom)

    def test_nothing_may_be_loaded_or_run(self):
        with urllib.request.urlopen(self.address + "/statusz") as reply:
            policy = reply.headers["Content-Security-Policy"]
        self.assertEqual(policy, "default-src 'none'; style-src 'unsafe-inline'")


if __name__ == "__main__":
    unittest.main()
