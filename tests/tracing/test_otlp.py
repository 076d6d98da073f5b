"""Spans of a server, read by OpenTelemetry's own messages, with a span of its SDK as the parent."""

import concurrent.futures
import threading
import unittest

import grpc
import mla_client
import numpy as np
import server_binary
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider

ENVIRONMENT = "vllm"  # whose packages include OpenTelemetry
WAIT_S = 60
ROWS, HEADS = 3, 2
GEOMETRY = mla_client.Geometry(num_heads=HEADS, kv_lora_rank=512, rope_dim=64)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans, by name."""

    def __init__(self):
        self.changed = threading.Condition()
        self.spans = {}
        self.resource = {}

    def Export(self, request, context):
        with self.changed:
            for of_process in request.resource_spans:
                for one in of_process.resource.attributes:
                    self.resource[one.key] = one.value.string_value
                for scope in of_process.scope_spans:
                    for span in scope.spans:
                        self.spans[span.name] = span
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, name):
        """The span of this name."""
        with self.changed:
            self.changed.wait_for(lambda: name in self.spans, WAIT_S)
            return self.spans[name]


class OtlpTest(unittest.TestCase):
    def setUp(self):
        self.collector = Collector()
        self.receiver = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self.collector, self.receiver)
        port = self.receiver.add_insecure_port("127.0.0.1:0")
        self.receiver.start()
        self.addCleanup(self.receiver.stop, None)
        self.server = server_binary.start(f"--tracing-otlp-target=127.0.0.1:{port}")
        self.addCleanup(self.server.stop)

    def test_a_step_is_a_child_of_the_current_span(self):
        tracer = TracerProvider().get_tracer("test")
        with mla_client.Client.connect(self.server.target) as client:
            model = client.register_model(mla_client.ModelSpec("m", GEOMETRY, 1, 0.1))
            sequence = model.open_sequence()
            q = np.zeros((ROWS, HEADS, GEOMETRY.row_dim), np.uint16)
            with tracer.start_as_current_span("parent") as parent:
                with client.step([(sequence, ROWS)]) as step:
                    step.attend(0, q, q[:, 0], mla_client.Profile.ABSORBED)
        self.assertIs(trace.get_current_span(), trace.INVALID_SPAN)
        context = parent.get_span_context()
        step = self.collector.wait_for("step")
        attend = self.collector.wait_for("attend")
        self.assertEqual(step.trace_id, context.trace_id.to_bytes(16, "big"))
        self.assertEqual(step.parent_span_id, context.span_id.to_bytes(8, "big"))
        self.assertEqual(attend.parent_span_id, step.span_id)
        attributes = {one.key: one.value for one in attend.attributes}
        self.assertEqual(attributes["mla.rows"].int_value, ROWS)
        self.assertEqual(attributes["mla.tenant"].string_value, "default")
        self.assertLessEqual(step.start_time_unix_nano, attend.start_time_unix_nano)
        self.assertLessEqual(attend.end_time_unix_nano, step.end_time_unix_nano)
        # Wall clocks of one machine: the server's step lies within the caller's span.
        self.assertLess(abs(step.start_time_unix_nano - parent.start_time), WAIT_S * 10**9)
        self.assertEqual(self.collector.resource["service.name"], "mla-server")

    def test_a_failed_call_names_its_trace(self):
        tracer = TracerProvider().get_tracer("test")
        with mla_client.Client.connect(self.server.target) as client:
            model = client.register_model(mla_client.ModelSpec("m", GEOMETRY, 1, 0.1))
            model.unregister()
            with tracer.start_as_current_span("parent") as parent:
                with self.assertRaises(mla_client.errors.NotFound) as caught:
                    model.open_sequence()
        self.assertEqual(caught.exception.detail.trace_id,
                         f"{parent.get_span_context().trace_id:032x}")
        failed = self.collector.wait_for("Sequences.Open")
        self.assertEqual(failed.status.code, 2)  # error


if __name__ == "__main__":
    unittest.main()
