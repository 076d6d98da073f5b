"""Exemplars of the metrics, read by the parser of Prometheus's own client."""

import json
import pathlib
import re
import tempfile
import time
import unittest
import urllib.request

import mla_client
import numpy as np
import server_binary
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_metrics

ROWS, HEADS, STEPS = 3, 2, 5
GEOMETRY = mla_client.Geometry(num_heads=HEADS, kv_lora_rank=512, rope_dim=64)
PROMETHEUS = ("application/openmetrics-text;version=1.0.0;q=0.5,"
              "application/openmetrics-text;version=0.0.1;q=0.4,"
              "text/plain;version=0.0.4;q=0.3,*/*;q=0.2")
SHOWN = {"mla_request_duration_seconds", "mla_request_queue_seconds"}
WAIT_S = 60


class ExemplarsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.spans = pathlib.Path(folder.name) / "spans.jsonl"
        self.server = server_binary.start(
            f"--tracing-file={self.spans}", "--tracing-sample-every=1",
            "--ops-listen=127.0.0.1:0", "--log-level=info")
        self.addCleanup(self.server.stop)
        self.port = re.search(r"ops_port=(\d+)", self.server.log())[1]

    def scrape(self, accept):
        """The content type and the text of the metrics."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/metrics",
                                         headers={"Accept": accept} if accept else {})
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return reply.headers["Content-Type"], reply.read().decode()

    def take_steps(self):
        with mla_client.Client.connect(self.server.target) as client:
            model = client.register_model(mla_client.ModelSpec("m", GEOMETRY, 1, 0.1))
            sequence = model.open_sequence()
            q = np.zeros((ROWS, HEADS, GEOMETRY.row_dim), np.uint16)
            for _ in range(STEPS):
                with client.step([(sequence, ROWS)]) as step:
                    step.attend(0, q, q[:, 0], mla_client.Profile.ABSORBED)

    def traces(self):
        """The ids of all traces that were written, by the name of a span, once the steps are."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = {}
            for line in self.spans.read_text(encoding="utf-8").splitlines():
                span = json.loads(line)
                found.setdefault(span["name"], set()).add(span["trace_id"])
            if len(found.get("step", ())) == STEPS or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def test_buckets_name_traces_that_were_recorded(self):
        self.take_steps()
        traces = self.traces()
        kind, text = self.scrape(PROMETHEUS)
        self.assertEqual(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8")
        seen = {}
        for family in open_metrics(text):
            for sample in family.samples:
                if sample.exemplar is None:
                    continue
                self.assertIn(family.name, SHOWN)
                name = sample.labels.get("kind", "attend")
                self.assertIn(sample.exemplar.labels["trace_id"], traces[name])
                self.assertLessEqual(sample.exemplar.value, float(sample.labels["le"]))
                self.assertLess(abs(float(sample.exemplar.timestamp) - time.time()), 3600)
                seen.setdefault((family.name, name), 0)
        self.assertEqual(set(seen), {
            ("mla_request_queue_seconds", "attend"), *(
                ("mla_request_duration_seconds", name)
                for name in ("begin_step", "attend", "end_step"))})

    def test_both_formats_say_the_same_and_plain_text_has_no_traces(self):
        self.take_steps()
        for accept in ("", "*/*", "text/plain", "text/plain,application/openmetrics-text;q=0.5"):
            kind, plain = self.scrape(accept)
            self.assertEqual(kind, "text/plain; version=0.0.4; charset=utf-8", accept)
            self.assertNotIn("trace_id", plain)

        def samples(families):
            return {(sample.name, *sorted((name, float(value) if name == "le" else value)
                                          for name, value in sample.labels.items()))
                    for family in families for sample in family.samples}

        _, text = self.scrape(PROMETHEUS)
        self.assertEqual(samples(open_metrics(text)), samples(plain_metrics(plain)))
        documented = {family.name: family.documentation for family in plain_metrics(plain)}
        for family in open_metrics(text):
            self.assertTrue(family.documentation)
            self.assertIn(family.name, documented)


if __name__ == "__main__":
    unittest.main()
