"""Leadership by a Lease of Kubernetes, with an API server in this process."""

import http.server
import json
import os
import pathlib
import tempfile
import threading
import unittest
from unittest import mock

from mla_client import errors
from mla_client.cluster.operations import quotas
from mla_client.cluster.operations.lease import LEASE_S, ApiServer, KubernetesLease

FOLDER = "/apis/coordination.k8s.io/v1/namespaces/ai/leases"
TOKEN = "a-token"


class Api(http.server.BaseHTTPRequestHandler):
    """Leases with versions; a write of another version than the present one is refused."""

    leases: dict
    version = 0
    status = 0  # of every reply, unless it is 0

    def log_message(self, *_args):  # pylint: disable=arguments-differ
        pass

    def answer(self, status, found=None):
        text = json.dumps(found or {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def admit(self):
        if self.headers["Authorization"] != "Bearer " + TOKEN:
            self.answer(401)
        elif type(self).status:
            self.answer(type(self).status)
        else:
            return True
        return False

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def keep(self, path, lease, status):
        type(self).version += 1
        lease["metadata"]["resourceVersion"] = str(type(self).version)
        self.leases[path] = lease
        self.answer(status, lease)

    def do_GET(self):
        if self.admit():
            found = self.leases.get(self.path)
            self.answer(200 if found else 404, found)

    def do_POST(self):
        lease = self.body()
        path = f"{self.path}/{lease['metadata']['name']}"
        if self.admit():
            if path in self.leases:
                self.answer(409)
            else:
                self.keep(path, lease, 201)

    def do_PUT(self):
        lease = self.body()
        if self.admit():
            there = self.leases[self.path]["metadata"]["resourceVersion"]
            if lease["metadata"]["resourceVersion"] != there:
                self.answer(409)
            else:
                self.keep(self.path, lease, 200)


class LeaseTest(unittest.TestCase):
    def setUp(self):
        self.handler = type("Handler", (Api,), {"leases": {}})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "token").write_text(TOKEN + "\n")
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.now = 0.0

    def process(self, name):
        return KubernetesLease(ApiServer(self.url, self.folder), "ai/quotas", name,
                               now=lambda: self.now)

    @property
    def spec(self):
        return self.handler.leases[FOLDER + "/quotas"]["spec"]

    def test_one_process_leads_until_it_leaves(self):
        one, two = self.process("one"), self.process("two")
        self.assertTrue(one.held())
        self.assertEqual(self.spec["holderIdentity"], "one")
        for _ in range(3):
            self.assertFalse(two.held())
            self.now += LEASE_S
            self.assertTrue(one.held())  # which renews it
        self.assertEqual(self.spec["leaseTransitions"], 0)
        two.leave()  # it is not its own
        self.assertEqual(self.spec["holderIdentity"], "one")
        one.leave()
        self.assertTrue(two.held())
        self.assertFalse(one.held())
        self.assertEqual((self.spec["holderIdentity"], self.spec["leaseTransitions"]), ("two", 1))

    def test_a_process_that_stops_renewing_is_replaced_after_the_lease_and_not_before(self):
        one, two = self.process("one"), self.process("two")
        self.assertTrue(one.held())
        self.assertFalse(two.held())  # sees the lease now
        self.now += LEASE_S - 1
        self.assertFalse(two.held())
        self.now += 2
        self.assertTrue(two.held())
        self.assertFalse(one.held())

    def test_of_two_that_write_at_the_same_time_one_leads(self):
        self.assertTrue(self.process("gone").held())
        one, two = self.process("one"), self.process("two")
        self.assertEqual((one.held(), two.held()), (False, False))
        self.now += LEASE_S + 1
        call, results = ApiServer.call, []

        def late(api, method, path, body=None):
            if method == "PUT" and body["spec"]["holderIdentity"] == "one":
                results.append(two.held())  # between the other one's reading and its write
            return call(api, method, path, body)
        with mock.patch.object(ApiServer, "call", late):
            results.append(one.held())
        self.assertEqual(results, [True, False])
        self.assertEqual(self.spec["holderIdentity"], "two")

    def test_who_cannot_reach_it_or_may_not_use_it_does_not_lead(self):
        one = self.process("one")
        self.assertTrue(one.held())
        for status in (403, 500):
            self.handler.status = status
            self.assertFalse(one.held())
            self.assertEqual(one.refused, status)
            one.leave()
        self.handler.status = 0
        self.assertTrue(one.held())
        (self.folder / "token").write_text("another")
        self.assertFalse(one.held())
        self.url = "http://127.0.0.1:1"
        self.assertFalse(self.process("one").held())
        self.process("one").leave()

    def test_it_leads_the_reconciler(self):
        turns, stop = [], threading.Event()

        class Counted:
            failed = {}

            def turn(self, leader=None):
                turns.append(1)
                stop.set()
                return 0
        quotas.run(Counted(), self.process("one"), stop)
        self.assertEqual(len(turns), 1)
        self.assertEqual(self.spec["holderIdentity"], "")

    def test_wrong_names_and_places_are_refused(self):
        api = ApiServer(self.url, self.folder)
        for name in ("quotas", "/quotas", "ai/", "ai/../x", "AI/quotas", "a" * 300 + "/b"):
            with self.assertRaises(errors.InvalidArgument) as caught:
                KubernetesLease(api, name, "one")
            self.assertEqual(caught.exception.detail.field, "lease")
        with mock.patch.dict(os.environ):
            os.environ.pop("KUBERNETES_SERVICE_HOST", None)
            with self.assertRaises(errors.FailedPrecondition):
                ApiServer()
            for host, url in (("10.0.0.1", "https://10.0.0.1:443"),
                              ("fd00::1", "https://[fd00::1]:443")):
                os.environ["KUBERNETES_SERVICE_HOST"] = host
                self.assertEqual(ApiServer()._url, url)


if __name__ == "__main__":
    unittest.main()
