"""Servers with TLS are reached by their sockets on the worker's own host."""

import pathlib
import tempfile
import unittest

from mla_client import Client, Geometry, ModelSpec, Tls

from tests import peers

SPEC = ModelSpec("m", Geometry(2, 32, 8), 1, 0.25, 4)
TENANT = "red"


class ServersTest(unittest.TestCase):
    """Two servers with TLS, whose sockets lie in one folder."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.authority = peers.Authority()
        self.addCleanup(self.authority.close)
        self.authority.make(TENANT)
        self.addresses = []
        for number in range(2):
            server, port = self.authority.serve(f"--server-unix-tenant={TENANT}")
            self.addCleanup(server.stop)
            for ending in ("", ".shm"):
                (self.folder / f"{number}.sock{ending}").symlink_to(f"{server.socket}{ending}")
            self.addresses.append(f"localhost:{port}")

    def connect(self, **cluster):
        client = Client.connect(",".join(self.addresses), tls=Tls(**self.authority.files(TENANT)),
                                timeout_s=20.0, shared_bytes=4 << 20,
                                cluster={"subset": 0, **cluster})
        self.addCleanup(client.close)
        model = client.register_model(SPEC)
        there = [client.model_at(address, model) for address in self.addresses]
        return [one.service.transport for one in there], [one.open_sequence() for one in there]

    def test_servers_with_tls_are_reached_by_their_sockets_where_the_caller_names_them(self):
        transports, sequences = self.connect()
        self.assertEqual(transports, ["inline", "inline"])
        transports, near = self.connect(sockets=f"{self.folder}/*.sock")
        self.assertEqual(transports, ["ring", "ring"])
        # The tenant is the same, so each worker finds what the other one has.
        for far, one in zip(sequences, near):
            self.assertEqual(one.model.service.attach(one.model, far.id).id, far.id)

    def test_the_others_are_reached_over_the_network(self):
        (self.folder / "1.sock").unlink()
        transports, _ = self.connect(sockets=f"{self.folder}/*.sock")
        self.assertEqual(transports, ["ring", "inline"])


if __name__ == "__main__":
    unittest.main()
