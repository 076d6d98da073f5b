"""A fleet of real processes on this machine: etcd, servers, and an announcer next to each."""

import os
import pathlib
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "client/python/tests"),
                str(ROOT / "tests"), str(ROOT / "tests/cluster")]

# pylint: disable=wrong-import-position
import etcd  # noqa: E402
from mla_client import Client, Tls  # noqa: E402
from mla_client.testing import ServerProcess  # noqa: E402

SERVER = ROOT / ".bazel/bin/server/mla-server"
START_S = 120.0


class Member:
    """A server, and the process that announces it."""

    def __init__(self, program, number, registry, flags, host):
        self.address = f"{host}:{etcd.free_port()}"
        port = self.address.rsplit(":", 1)[1]
        self._make = lambda one: ServerProcess(
            one, ["--log-level=warning", *flags(number)], listen=f"127.0.0.1:{port}")
        self.server = self._make(program)
        self._registry = registry
        self._announcer = None

    def start(self):
        """Both; another server takes the same address."""
        self.server.start()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "client/python")}
        self._announcer = subprocess.Popen(  # pylint: disable=consider-using-with
            [sys.executable, "-m", "mla_client.cluster", "announce", "--registry", self._registry,
             "--target", self.server.target, "--address", self.address], env=environment)

    def replace(self, program):
        """Ends the server, as an operator does, and starts another with its address."""
        self.end_announcing()  # which takes it out of the registry
        self.server.stop()
        self.server = self._make(program)
        self.start()

    def kill(self):
        """The server alone, as a crash does."""
        self.server.kill()

    def freeze(self, stops=True):
        """Neither process does anything, as seen from others: a host without a network."""
        what = signal.SIGSTOP if stops else signal.SIGCONT
        for pid in (self.server.pid, self._announcer.pid):
            os.kill(pid, what)

    def end_announcing(self, how=signal.SIGTERM):
        """The announcer alone."""
        if self._announcer is not None:
            self._announcer.send_signal(how)
            self._announcer.wait()
            self._announcer = None

    def close(self):
        """Whatever state it is in."""
        if self._announcer is not None:
            self._announcer.kill()
            self._announcer.wait()
        try:
            self.server.kill()
        except AssertionError:
            pass  # it was killed
        self.server.stop()


class Fleet:
    """Use it in a `with` block. `flags`: of a server, by its number."""

    def __init__(self, program, servers, flags, host="127.0.0.1"):
        self.etcd = etcd.Etcd()
        self._made = lambda: [Member(program, number, self.etcd.target, flags, host)
                              for number in range(servers)]
        self.members = []

    def __enter__(self):
        self.etcd.start()
        try:
            self.members = self._made()
            for one in self.members:
                one.start()
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info):
        for one in self.members:
            one.close()
        self.etcd.__exit__()

    def wait(self, count=None):
        """Until so many servers are announced and take sequences; None: all."""
        registry, deadline = self.etcd.registry(), time.monotonic() + START_S
        wanted = len(self.members) if count is None else count
        while sum(not one.draining for one in registry.read()) < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of {wanted} servers are announced: "
                                   f"{[one.address for one in registry.read()]}")
            time.sleep(0.02)
        registry.close()

    def connect(self, name, files=None, **options):
        """A worker's client. `files`: of its certificate."""
        return Client.connect(self.etcd.target, client_id=name,
                              tls=None if files is None else Tls(**files),
                              **{"timeout_s": 30.0, "cluster": {"subset": 0}, **options})

    def at(self, address):
        """The member of an address."""
        return next(one for one in self.members if one.address == address)


def quantile(values, part):
    """Of a list that is not empty."""
    ordered = sorted(values)
    return ordered[round(part * (len(ordered) - 1))]
