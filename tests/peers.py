"""Two servers with mutual TLS, each an operator of the other, and their certificates."""

import pathlib
import subprocess
import tempfile
import unittest

import mla_client
import server_binary

OPERATORS = "--server-operators=blue,localhost"


class Authority:
    """A folder of keys and certificates, which `close` removes."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="mla-tls-")
        self.folder = pathlib.Path(self._folder.name)
        self.make_ca("ca")
        self.make("server", "DNS:localhost,IP:127.0.0.1")

    def close(self):
        """Removes the files."""
        self._folder.cleanup()

    def make_ca(self, name):
        """Makes a certificate authority."""
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                      "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "2",
                      "-subj", f"/CN={name}")

    def make(self, name, subject="", ca="ca", days="2"):
        """Makes a key and a certificate signed by `ca` for these subject alternative names. If `ca`
        is "", the certificate signs itself."""
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={subject or 'DNS:' + name}\n")
        self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                      "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.crt", "-CAkey",
                      f"{ca}.key", "-CAcreateserial", "-days", days, "-extfile", f"{name}.ext",
                      "-out", f"{name}.crt")

    def files(self, name, ca="ca"):
        """The fields of mla_client.Tls."""
        return {"ca": str(self.folder / f"{ca}.crt"), "cert": str(self.folder / f"{name}.crt"),
                "key": str(self.folder / f"{name}.key")}

    def serve(self, *flags, port=0):
        """Starts a server on that port (0: any). Returns it and its port."""
        files = self.files("server")
        server = server_binary.start(
            f"--tls-cert={files['cert']}", f"--tls-key={files['key']}",
            f"--client-ca={files['ca']}", "--log-level=info", *flags, listen=f"127.0.0.1:{port}")
        return server, int(server.log().split("tcp_port=")[1].split()[0])

    def connect(self, name, port, ca="ca", **options):
        """A client of the tenant `name`."""
        return mla_client.Client.connect(
            f"127.0.0.1:{port}", tls=mla_client.Tls(**self.files(name, ca)),
            **{"timeout_s": 3.0, **options})

    def _openssl(self, *arguments):
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


class Peers:
    """Two servers, the first of which may `drain` to the second; blue is an operator."""

    def __init__(self, authority):
        self.authority = authority
        self.servers, self.ports = [], []
        for _ in range(2):
            server, port = authority.serve(OPERATORS)
            self.servers.append(server)
            self.ports.append(port)
        self.peer = f"localhost:{self.ports[1]}"

    def close(self):
        """Stops the servers that run."""
        for server in self.servers:
            server.stop()

    def replace(self, place):
        """Ends one of the servers and starts another process on its port."""
        self.servers[place].stop()
        self.servers[place], _ = self.authority.serve(OPERATORS, port=self.ports[place])

    def connect(self, name, place=0, **options):
        """A client of one of the servers."""
        return self.authority.connect(name, self.ports[place], **options)

    def drain(self, **options):
        """Moves all sequences of the first server to the second."""
        with self.connect("blue") as blue:
            return blue.drain(to=self.peer, **options)

    def sequences(self, place):
        """The number of sequences on a server."""
        with self.connect("blue", place) as blue:
            return blue.stats().sequences


class PeersCase(unittest.TestCase):
    """Tests with two such servers each, and certificates of red and blue for all of them."""

    @classmethod
    def setUpClass(cls):
        cls.authority = Authority()
        for name in ("red", "blue"):
            cls.authority.make(name)

    @classmethod
    def tearDownClass(cls):
        cls.authority.close()

    def setUp(self):
        self.peers = Peers(self.authority)
        self.addCleanup(self.peers.close)
