"""One etcd, for tests."""

import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

from mla_client import errors
from mla_client.cluster import registry, targets

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_S = 60.0


def program():
    """etcd, which ./dev setup and ./dev test unpack."""
    unpacked = ROOT / "build/tools/usr/bin/etcd"
    found = str(unpacked) if unpacked.exists() else shutil.which("etcd")
    if found is None:
        raise FileNotFoundError("no etcd: run ./dev setup")
    return found


def free_port():
    """A port that nothing listened to a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Etcd:
    """A registry of one node in a folder of its own; a `with` block ends it."""

    def __init__(self, prefix="fleet"):
        self._folder = tempfile.mkdtemp(prefix="mla-etcd-")
        self._port, self._peer_port = free_port(), free_port()
        self._process = None
        self.target = f"etcd://127.0.0.1:{self._port}/{prefix}"

    def start(self):
        """Starts it, with what it had before if it ran, and waits until it answers."""
        url, peer = (f"http://127.0.0.1:{port}" for port in (self._port, self._peer_port))
        with open(pathlib.Path(self._folder, "etcd.log"), "ab") as log:
            self._process = subprocess.Popen(
                [program(), f"--data-dir={self._folder}/data", f"--listen-client-urls={url}",
                 f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}",
                 f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        found, deadline = self.registry(), time.monotonic() + START_S
        while True:
            try:
                found.read()
                return self
            except errors.Unavailable:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def registry(self, timeout_s=5.0):
        """A client of it."""
        return registry.EtcdRegistry(targets.etcd_target(self.target), timeout_s=timeout_s)

    def kill(self):
        """Ends it at once; it may be started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc_info):
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
