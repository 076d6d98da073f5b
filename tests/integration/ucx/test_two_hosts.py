"""Rings over UCX between two network namespaces, which are as two hosts: whole steps, clients that
are killed at twelve points, and a network that breaks while clients work.

Needs root, `ip` and UCX; without them the tests say so and are skipped.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import time
import unittest

import mla_client
import server_binary
from mla_client.testing import ServerProcess

RUN_SECONDS = 35
INPUTS = (".bazel/bin/client/c/libmla_client.so", ".bazel/bin/client/mlactl/mlactl",
          ".bazel/bin/server/mla-server",
          "client/python", "tests/integration/ucx")
ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE, THERE = f"mla-a-{os.getpid()}", f"mla-b-{os.getpid()}"
SERVER_ADDRESS, CLIENT_ADDRESS = "10.213.7.1", "10.213.7.2"
PORT = 50771
LONG = bool(os.environ.get("MLA_TEST_LONG"))
KILLS, CLIENTS = (12, 4) if LONG else (6, 2)
WAIT_S = 90.0


def mlactl():
    """MLACTL_UNDER_TEST, else what `./dev test` built."""
    return os.environ.get("MLACTL_UNDER_TEST", str(ROOT / ".bazel/bin/client/mlactl/mlactl"))


def why_not():
    """The reason why the tests cannot run here, or an empty string."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and ip"
    try:
        ctypes.CDLL("libucp.so.0")
    except OSError as error:
        return f"no UCX: {error}"
    made = subprocess.run(["ip", "netns", "add", HERE], capture_output=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces: {made.stderr.decode()}"
    subprocess.run(["ip", "netns", "del", HERE], check=True)
    return ""


def ip(*arguments):
    """Runs one command of ip."""
    subprocess.run(["ip", *arguments], check=True)


def wait_for_cable(name):
    """Until the kernel says that the cable is there, some time after both ends are up: UCX takes no
    device before."""
    end = time.monotonic() + WAIT_S
    while "state UP" not in subprocess.run(["ip", "-n", name, "-o", "link", "show", "cable"],
                                           capture_output=True, check=True, text=True).stdout:
        if time.monotonic() > end:
            raise TimeoutError(f"no cable in {name}")
        time.sleep(0.02)


@contextlib.contextmanager
def two_hosts():
    """Namespaces HERE and THERE with a cable between them."""
    try:
        for name in (HERE, THERE):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", HERE, "type", "veth", "peer", "name", "cable", "netns",
           THERE)
        for name, address in ((HERE, SERVER_ADDRESS), (THERE, CLIENT_ADDRESS)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        for name in (HERE, THERE):
            wait_for_cable(name)
        yield
    finally:
        for name in (HERE, THERE):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class TwoHostsTest(unittest.TestCase):
    """One server, and clients at the other end of the cable."""

    @classmethod
    def setUpClass(cls):
        reason = why_not()
        if reason:
            raise unittest.SkipTest(reason)
        cls.hosts = two_hosts()
        cls.hosts.__enter__()
        cls.addClassCleanup(cls.hosts.__exit__, None, None, None)
        server = ServerProcess(
            server_binary.path(),
            ["--kv-cache-bytes=256MiB", "--limits-max-models=64", "--insecure=true",
             "--ucx-enabled=true", "--ucx-devices=cable", "--ucx-transports=tcp",
             "--ucx-puts=true",
             "--shm-total-bytes=1GiB", "--wire-keepalive-ms=1000", "--log-level=warning"],
            listen=f"{SERVER_ADDRESS}:{PORT}")
        server.command = ["ip", "netns", "exec", HERE, *server.command]
        cls.server = server.start()
        cls.addClassCleanup(cls.server.stop)
        cls.local = mla_client.Client.connect(cls.server.target, transport="inline")
        cls.addClassCleanup(cls.local.close)

    def start(self, *arguments):
        """mlactl with these arguments on the other host."""
        environment = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "cable"}
        return subprocess.Popen(
            ["ip", "netns", "exec", THERE, mlactl(), "--target", f"{SERVER_ADDRESS}:{PORT}",
             *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def bench(self):
        """A client that works for longer than any test."""
        return self.start("bench", "--transport", "ucx", "--preset", "small", "--batch", "16",
                          "--context", "64", "--duration", "600", "--warmup", "0")

    def check_attend(self, transport="ucx"):
        """Outputs at the other end are right."""
        done = self.start("attend", "--transport", transport)
        text, _ = done.communicate(timeout=WAIT_S)
        self.assertEqual(done.returncode, 0, text.decode())

    def wait_for_network(self):
        """Until the server answers at the other end: the kernel remembers for some seconds that it
        could not be reached."""
        end = time.monotonic() + WAIT_S
        while self.start("health").wait(WAIT_S) != 0:
            self.assertLess(time.monotonic(), end, "the network is back")
            time.sleep(0.2)

    def becomes(self, what, holds):
        """Waits until the server's figures are as wanted."""
        end = time.monotonic() + WAIT_S
        while not holds(self.local.stats()):
            self.assertLess(time.monotonic(), end, what)
            time.sleep(0.05)

    def relays(self):
        """Number of relays that run."""
        return int(subprocess.run(["pgrep", "-c", "-P", str(self.server_pid()), "-f", "ucx-relay"],
                                  capture_output=True, check=False).stdout or 0)

    def server_pid(self):
        """`ip netns exec` becomes the server."""
        return self.server.pid

    def test_steps(self):
        for transport in ("ucx", "ucx-puts"):
            self.check_attend(transport)
            self.becomes("the ring ends with its client", lambda stats: stats.rings == 0)

    def test_clients_are_killed(self):
        for point in range(KILLS):
            client = self.bench()
            time.sleep(0.15 * point * 12 / KILLS)
            client.send_signal(signal.SIGKILL)
            client.communicate()
        self.becomes("rings and steps end",
                     lambda stats: stats.rings == 0 and stats.open_steps == 0)
        end = time.monotonic() + WAIT_S
        while self.relays() > 0:
            self.assertLess(time.monotonic(), end, "relays end")
            time.sleep(0.05)
        self.check_attend()

    def test_network_breaks(self):
        clients = []
        for _ in range(CLIENTS):
            clients.append(self.bench())
            self.addCleanup(clients[-1].kill)
            time.sleep(0.3)
        self.becomes("the clients work", lambda stats: stats.rings == len(clients))
        ip("-n", HERE, "link", "set", "cable", "down")
        try:
            # The server answers others, and what the clients had returns.
            self.becomes("rings and steps end without a word from the clients",
                         lambda stats: stats.rings == 0 and stats.open_steps == 0)
            for client in clients:
                text, _ = client.communicate(timeout=WAIT_S)
                self.assertNotEqual(client.returncode, 0, text.decode())
                self.assertGreater(client.returncode, 0, "it was not ended by a signal")
        finally:
            ip("-n", HERE, "link", "set", "cable", "up")
        for name in (HERE, THERE):
            wait_for_cable(name)
        self.wait_for_network()
        self.check_attend()


if __name__ == "__main__":
    unittest.main()
