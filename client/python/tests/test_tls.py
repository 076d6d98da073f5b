"""Mutual TLS from Python: who gets in, and who they are."""

import pathlib
import subprocess
import tempfile
import unittest

import numpy

import mla_client
import server_binary
from service_contract import GEOMETRY, SCALE

FOLDER = None
SERVER = None
PORT = 0


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], cwd=FOLDER.name, check=True, capture_output=True)


def make_ca(name):
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "2", "-subj", f"/CN={name}")


def make_certificate(name, ca, subject, days="2"):
    """A key and a certificate of `ca` for the subject alternative names given."""
    folder = pathlib.Path(FOLDER.name)
    (folder / f"{name}.ext").write_text(f"subjectAltName={subject}\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout",
            f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.crt", "-CAkey", f"{ca}.key",
            "-CAcreateserial", "-days", days, "-extfile", f"{name}.ext", "-out", f"{name}.crt")


def setUpModule():
    global FOLDER, SERVER, PORT
    FOLDER = tempfile.TemporaryDirectory(prefix="mla-tls-")
    folder = pathlib.Path(FOLDER.name)
    make_ca("ca")
    make_ca("stranger")
    make_certificate("server", "ca", "DNS:localhost,IP:127.0.0.1")
    make_certificate("red", "ca", "DNS:red")
    make_certificate("blue", "ca", "DNS:blue")
    make_certificate("expired", "ca", "DNS:expired", days="-1")
    make_certificate("forged", "stranger", "DNS:red")
    SERVER = server_binary.start(
        f"--tls-cert={folder / 'server.crt'}", f"--tls-key={folder / 'server.key'}",
        f"--client-ca={folder / 'ca.crt'}", "--log-level=info", listen="127.0.0.1:0")
    PORT = int(SERVER.log().split("tcp_port=")[1].split()[0])


def tearDownModule():
    SERVER.stop()
    FOLDER.cleanup()


def connect(name, ca="ca", port=0, **options):
    folder = pathlib.Path(FOLDER.name)
    tls = mla_client.Tls(ca=str(folder / f"{ca}.crt"), cert=str(folder / f"{name}.crt"),
                         key=str(folder / f"{name}.key"))
    return mla_client.Client.connect(f"127.0.0.1:{port or PORT}", tls=tls, timeout_s=3.0, **options)


class TlsTest(unittest.TestCase):
    def test_the_certificate_is_the_tenant(self):
        with connect("red") as red, connect("red") as again, connect("blue") as blue:
            model = red.register_model(mla_client.ModelSpec("secret", GEOMETRY, 1, SCALE))
            self.assertEqual([spec.model_id for spec in again.models()], ["secret"])
            self.assertEqual(blue.models(), [])
            with model.open_sequence() as sequence:
                self.assertEqual(blue._get([sequence.id]), ([], [sequence.id]))

    def test_a_tenant_in_metadata_does_not_count(self):
        with connect("red") as red, connect("blue") as blue:
            model = red.register_model(mla_client.ModelSpec("mine", GEOMETRY, 1, SCALE))
            blue._metadata = (("mla-tenant", "red"),)
            self.assertNotIn("mine", [spec.model_id for spec in blue.models()])
            model.unregister()

    def test_who_is_kept_out(self):
        for name in ("forged", "expired"):
            with self.subTest(name=name), self.assertRaises(mla_client.Unavailable):
                connect(name).close()

    def test_a_server_of_another_authority_is_not_trusted(self):
        with self.assertRaises(mla_client.Unavailable):
            connect("red", ca="stranger").close()

    def test_plain_text_is_kept_out(self):
        with self.assertRaises(mla_client.Unavailable):
            mla_client.Client.connect(f"127.0.0.1:{PORT}", timeout_s=3.0).close()

    def test_a_drain_hands_sequences_over(self):
        folder = pathlib.Path(FOLDER.name)
        flags = (f"--tls-cert={folder / 'server.crt'}", f"--tls-key={folder / 'server.key'}",
                 f"--client-ca={folder / 'ca.crt'}", "--log-level=info",
                 "--server-operators=blue,localhost")
        ports = []
        for _ in range(2):
            server = server_binary.start(*flags, listen="127.0.0.1:0")
            self.addCleanup(server.stop)
            ports.append(int(server.log().split("tcp_port=")[1].split()[0]))
        spec = mla_client.ModelSpec("m", GEOMETRY, 1, SCALE)
        rows = numpy.zeros((5, GEOMETRY.kv_lora_rank + GEOMETRY.rope_dim), numpy.uint16)
        peer = f"localhost:{ports[1]}"
        with connect("red", port=ports[0]) as red, connect("blue", port=ports[0]) as blue:
            model = red.register_model(spec)
            sequence = model.open_sequence()
            with red.step([(sequence, 5)]) as step:
                step.attend(0, None, rows, mla_client.Profile.APPEND_ONLY)
                step.end()
            reply = blue.drain(to=peer)
            self.assertEqual([one.outcome for one in reply.handed_over], [1], reply)
            self.assertEqual(reply.handed_over[0].tenant, "red")
            with self.assertRaises(mla_client.NotFound) as moved:
                red.step([(sequence, 1)]).__enter__()
            self.assertEqual((moved.exception.detail.reason, moved.exception.detail.peer),
                             ("moved", peer))
            with self.assertRaises(mla_client.NotFound) as moved:
                red.attach(model, sequence.id)
            self.assertEqual(moved.exception.detail.peer, peer)
        with connect("red", port=ports[1]) as red:
            model = red.register_model(spec)
            with red.attach(model, sequence.id) as there:
                self.assertEqual(there.length, 5)
            with self.assertRaises(mla_client.NotFound) as gone:
                red.attach(model, sequence.id)
            self.assertEqual(gone.exception.detail.reason, "sequence_not_found")


if __name__ == "__main__":
    unittest.main()
