"""Workers, relays and servers over UCX that are killed, stopped or cut off while twelve workers are
at twelve points of their work: no output is wrong, other clients are served, all that the dead held
returns, and the next worker is served.

Between two network namespaces over TCP, and between processes over UCX's shared memory. Needs root
and `ip` for the former, the C library and UCX for both; without them the tests say so and are
skipped.
"""

import contextlib
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest

import mla_client
import point_workers
import server_binary
from mla_client.testing import ServerProcess
from point_workers import FAILED, IN_A_STEP, OK, POINTS
from test_two_hosts import HERE, SERVER_ADDRESS, THERE, ip, two_hosts
from test_two_hosts import why_not as why_no_hosts

RUN_SECONDS = 50
WEIGHT = 2
INPUTS = (".bazel/bin/client/c/libmla_client.so", ".bazel/bin/server/mla-server",
          "client/python", "tests/integration/ucx")
HERE_PATH = pathlib.Path(__file__).resolve().parent
PORT = 50772
WAIT_S = 90.0
LONG = bool(os.environ.get("MLA_TEST_LONG"))
REQUEST_S = 5  # a worker that is cut off gives up after that
# Assertions of UCX 1.13 that end a process over TCP when its peer goes (docs/rdma.md).
KNOWN_ASSERTIONS = ("tcp_iface.c", "tcp_ep.c", "ucp_request.c", "ucp_request.inl",
                    "wireup")


def each_transport(test):
    """Runs a test for workers whose tensors travel with frames and for those that put them; without
    MLA_TEST_LONG for one of them."""
    @functools.wraps(test)
    def run(self):
        for transport in ("ucx", "ucx_puts") if LONG else (self.short,):
            with self.subTest(transport=transport):
                test(self, transport)
    return run


def state_of(pid):
    """The letter of a process's state: T if it is stopped."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return stat.rpartition(")")[2].split()[0]


class Points:
    """A server, and workers that reach it in some way."""

    short = "ucx"    # the transport of the short run

    transports = ""  # of UCX
    devices = ""     # of UCX; empty: all
    prefix = []      # of commands that run on the workers' host
    listen = ""
    server_prefix = []
    # A stopped worker does not answer the server's keepalive.
    keepalive_ms = 60_000

    @classmethod
    def setUpClass(cls):
        reason = server_binary.why_no_ucx()
        if reason:
            raise unittest.SkipTest(reason)
        cls.start_server()
        cls.addClassCleanup(lambda: cls.server.stop())  # the one that runs then
        environment = {**os.environ, "UCX_TLS": cls.transports, "UCX_LOG_LEVEL": "error",
                       "PYTHONPATH": os.pathsep.join(sys.path)}
        if cls.devices:
            environment["UCX_NET_DEVICES"] = cls.devices
        cls.workers = subprocess.Popen(
            [*cls.prefix, sys.executable, str(HERE_PATH / "point_workers.py"), cls.target()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment, bufsize=1, start_new_session=True)
        cls.addClassCleanup(os.killpg, cls.workers.pid, signal.SIGKILL)

    @classmethod
    def start_server(cls):
        """A server, and the client of this test that watches it."""
        cls.server = ServerProcess(
            server_binary.path(),
            ["--kv-cache-bytes=256MiB", "--insecure=true", "--ucx-enabled=true",
             f"--ucx-transports={cls.transports}", f"--ucx-devices={cls.devices}",
             "--ucx-puts=true", "--ucx-sessions=32",
             "--shm-total-bytes=1GiB", "--shm-tenant-regions=64", "--tenants-region-bytes=1GiB",
             f"--wire-keepalive-ms={cls.keepalive_ms}", "--log-level=warning"], listen=cls.listen)
        cls.server.command = [*cls.server_prefix, *cls.server.command]
        cls.server.start()
        cls.local = mla_client.Client.connect(cls.server.target, transport="inline")

    @classmethod
    def target(cls):
        """The server's target for workers."""
        return cls.listen or cls.server.target

    def command(self, text):
        """To the workers' program."""
        self.workers.stdin.write(text + "\n")

    def next_line(self, *kinds):
        """The words of the next line of these kinds; others go to `said`."""
        while True:
            line = self.workers.stdout.readline()
            self.assertTrue(line, f"the workers' program has ended\n{''.join(self.said)}")
            words = line.split()
            if words and words[0] in kinds:
                return words
            self.said.append(line)

    def start(self, points, transport, timeout_s=60):
        """Starts workers, waits until they have stopped at their points, returns their processes.

        A worker says that it is there just before it stops. A signal to continue that came in
        between would be lost.
        """
        self.said = []
        for point in points:
            self.command(f"start {point} {transport} {timeout_s}")
        pids = {}
        while len(pids) < len(points):
            word, point, pid, *more = self.next_line("at", "error", "wrong")
            self.assertEqual(word, "at", f"{point} {pid} {more}")
            pids[point] = int(pid)
        for point, pid in pids.items():
            self.await_stop(point, pid)
        return pids

    def await_stop(self, point, pid):
        """Waits until a process is stopped, if the point is one at which workers stop."""
        deadline = time.monotonic() + WAIT_S
        while point in POINTS and state_of(pid) != "T":
            self.assertLess(time.monotonic(), deadline, f"{point}: {pid} has not stopped")
            time.sleep(0.01)

    def statuses(self, points):
        """Exit statuses of all workers."""
        self.command("wait")
        found = {}
        while len(found) < len(points):
            _, point, status = self.next_line("exit")
            found[point] = int(status)
        return found

    def signal_all(self, pids, number):
        """Sends a signal to processes."""
        for pid in pids:
            os.kill(pid, number)

    def relays(self):
        """Processes of relays."""
        found = subprocess.run(["pgrep", "-P", str(self.server.pid), "-f", "ucx-relay"],
                               capture_output=True, check=False).stdout.split()
        return [int(pid) for pid in found]

    def becomes(self, what, holds):
        """Waits until it holds."""
        end = time.monotonic() + WAIT_S
        while not holds():
            self.assertLess(time.monotonic(), end, what)
            time.sleep(0.05)

    def bystander(self):
        """Another client is served, with right outputs."""
        conversation = point_workers.Conversation(self.local, 2)
        conversation.step(3)
        conversation.step(1)
        conversation.sequence.release()

    def all_returns(self, transport):
        """Nothing is left of the workers, and the next one is served."""
        self.becomes("rings and steps end", lambda: self.local.stats().rings == 0 and
                     self.local.stats().open_steps == 0)
        self.becomes("relays end", lambda: not self.relays())
        self.bystander()
        self.command(f"start none {transport} 60")
        self.assertEqual(self.statuses(["none"]), {"none": OK}, "".join(self.said))

    def check_failed(self, statuses, certain):
        """Workers have failed with an error, at least those that had to; none had wrong outputs."""
        text = "".join(self.said)
        for point, status in statuses.items():
            if status == -signal.SIGABRT and "tcp" in self.transports:
                self.assertTrue(any(known in text for known in KNOWN_ASSERTIONS), text)
                continue
            self.assertIn(status, (FAILED,) if point in certain else (OK, FAILED),
                          f"{point}\n{text}")


class Kills(Points):
    """Either side is killed."""

    @each_transport
    def test_workers_are_killed(self, transport):
        pids = self.start(POINTS, transport)
        self.bystander()
        self.signal_all(pids.values(), signal.SIGKILL)
        self.assertEqual(set(self.statuses(POINTS).values()), {-signal.SIGKILL})
        self.all_returns(transport)

    @each_transport
    def test_server_is_killed(self, transport):
        pids = self.start(POINTS, transport)
        relays = self.relays()
        self.local.close()
        self.server.kill()
        self.becomes("relays end with their server", lambda relays=relays: not any(
            pathlib.Path(f"/proc/{pid}").exists() for pid in relays))
        self.signal_all(pids.values(), signal.SIGCONT)
        self.check_failed(self.statuses(POINTS), POINTS)
        self.server.start()
        type(self).local = mla_client.Client.connect(self.server.target, transport="inline")
        self.all_returns(transport)


class Pauses(Points):
    """Either side is stopped, and goes on."""

    @each_transport
    def test_workers_are_stopped_for_a_while(self, transport):
        pids = self.start(POINTS, transport)
        self.bystander()
        self.signal_all(pids.values(), signal.SIGCONT)
        self.assertEqual(self.statuses(POINTS), dict.fromkeys(POINTS, OK), "".join(self.said))
        self.all_returns(transport)

    @each_transport
    def test_server_and_relays_are_stopped_for_a_while(self, transport):
        pids = self.start(POINTS, transport)
        theirs = [self.server.pid, *self.relays()]
        self.signal_all(theirs, signal.SIGSTOP)
        self.signal_all(pids.values(), signal.SIGCONT)
        time.sleep(0.2)  # workers come to wait; whether they do is not looked at
        self.signal_all(theirs, signal.SIGCONT)
        self.assertEqual(self.statuses(POINTS), dict.fromkeys(POINTS, OK), "".join(self.said))
        self.all_returns(transport)


class Relays(Points):
    """The relays alone are killed."""

    @each_transport
    def test_relays_are_killed(self, transport):
        pids = self.start(POINTS, transport)
        self.signal_all(self.relays(), signal.SIGKILL)
        self.bystander()
        self.signal_all(pids.values(), signal.SIGCONT)
        self.check_failed(self.statuses(POINTS), IN_A_STEP)
        self.all_returns(transport)


class SharedMemoryTest(Kills, Pauses, *([Relays] if LONG else []), unittest.TestCase):
    """Between processes of one host."""

    short = "ucx_puts"
    transports = "posix,cma"


class TwoHosts(Points):
    """Two network namespaces."""

    transports = "tcp"
    devices = "cable"  # the loopback of one host does not lead to the other
    prefix = ["ip", "netns", "exec", THERE]
    server_prefix = ["ip", "netns", "exec", HERE]
    listen = f"{SERVER_ADDRESS}:{PORT}"

    @classmethod
    def setUpClass(cls):
        reason = server_binary.why_no_ucx() or why_no_hosts()
        if reason:
            raise unittest.SkipTest(reason)
        with contextlib.ExitStack() as stack:
            stack.enter_context(two_hosts())
            cls.addClassCleanup(stack.pop_all().close)
        super().setUpClass()


class TwoHostsTest(TwoHosts, Kills, *([Pauses, Relays] if LONG else []), unittest.TestCase):
    """Between two hosts."""


class CutOffTest(TwoHosts, unittest.TestCase):
    """Between two hosts whose cable is pulled."""

    keepalive_ms = 5000

    @each_transport
    def test_network_breaks(self, transport):
        pids = self.start(POINTS, transport, REQUEST_S)
        ip("-n", HERE, "link", "set", "cable", "down")
        try:
            self.bystander()
            self.becomes("rings and steps end without a word from the workers",
                         lambda: self.local.stats().rings == 0 and
                         self.local.stats().open_steps == 0)
            self.signal_all(pids.values(), signal.SIGCONT)
            self.check_failed(self.statuses(POINTS), POINTS)
        finally:
            ip("-n", HERE, "link", "set", "cable", "up")
        self.becomes("the network is back", self.reachable)
        self.all_returns(transport)

    def reachable(self):
        """True once the server answers at the other end: the kernel remembers for some seconds that
        it could not be reached."""
        dial = f"</dev/tcp/{SERVER_ADDRESS}/{PORT}"
        return subprocess.run(["ip", "netns", "exec", THERE, "timeout", "1", "bash", "-c", dial],
                              capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    unittest.main()
