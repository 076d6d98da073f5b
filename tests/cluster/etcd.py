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

    def __init__(self, prefix="fleet", tls=False):
        """With `tls` it wants certificates of its clients, as those of `files`."""
        self._folder = tempfile.mkdtemp(prefix="mla-etcd-")
        self._port, self._peer_port = free_port(), free_port()
        self._process = None
        self._tls = tls
        if tls:
            self._make_certificates()
        self.target = f"etcd{'s' * tls}://127.0.0.1:{self._port}/{prefix}"

    def _make_certificates(self):
        """An authority, another one, and a key with a certificate of each."""
        script = """
            new='openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
            for ca in ca other; do
              $new -x509 -keyout $ca.key -out $ca.pem -subj /CN=$ca -days 2
              $new -keyout by-$ca.key -out by-$ca.csr -subj /CN=member
              printf 'subjectAltName=IP:127.0.0.1' > san
              openssl x509 -req -in by-$ca.csr -CA $ca.pem -CAkey $ca.key -CAcreateserial \\
                -out by-$ca.pem -days 2 -extfile san
            done"""
        subprocess.run(["sh", "-ec", script], cwd=self._folder, check=True, capture_output=True)

    def files(self, ca="ca", by="ca"):
        """Options of a registry's client: whom it trusts, and who has signed its certificate."""
        if not self._tls:
            return {}
        return {"ca": f"{self._folder}/{ca}.pem", "cert": f"{self._folder}/by-{by}.pem",
                "key": f"{self._folder}/by-{by}.key"}

    def start(self):
        """Starts it, with what it had before if it ran, and waits until it answers."""
        url = f"http{'s' * self._tls}://127.0.0.1:{self._port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        files = self.files()
        flags = [f"--trusted-ca-file={files['ca']}", f"--cert-file={files['cert']}",
                 f"--key-file={files['key']}", "--client-cert-auth"] if files else []
        with open(pathlib.Path(self._folder, "etcd.log"), "ab") as log:
            self._process = subprocess.Popen(
                [program(), f"--data-dir={self._folder}/data", f"--listen-client-urls={url}",
                 f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}",
                 f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
                 *flags],
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
        return registry.EtcdRegistry(targets.etcd_target(self.target), timeout_s=timeout_s,
                                     **self.files())

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
