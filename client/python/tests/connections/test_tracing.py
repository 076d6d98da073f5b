"""The trace context that the client sends."""

import sys
import types
import unittest
from unittest import mock

from mla_client.base import tracing

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def opentelemetry(valid):
    """A module like opentelemetry.trace with a current span."""
    context = types.SimpleNamespace(is_valid=valid, trace_id=int(HEADER[3:35], 16),
                                    span_id=int(HEADER[36:52], 16), trace_flags=1)
    span = types.SimpleNamespace(get_span_context=lambda: context)
    return types.SimpleNamespace(get_current_span=lambda: span)


class TracingTest(unittest.TestCase):
    def test_without_a_tracer_nothing_is_sent(self):
        with mock.patch.dict(sys.modules):
            sys.modules.pop("opentelemetry.trace", None)
            self.assertEqual(tracing.traceparent(), "")
            self.assertEqual(tracing.metadata(), ())

    def test_the_current_span_of_opentelemetry_is_sent(self):
        with mock.patch.dict(sys.modules, {"opentelemetry.trace": opentelemetry(True)}):
            self.assertEqual(tracing.traceparent(), HEADER)
            self.assertEqual(tracing.metadata(), (("traceparent", HEADER),))
        with mock.patch.dict(sys.modules, {"opentelemetry.trace": opentelemetry(False)}):
            self.assertEqual(tracing.traceparent(), "")

    def test_another_source_takes_its_place(self):
        self.addCleanup(tracing.set_source, None)
        tracing.set_source(lambda: HEADER)
        self.assertEqual(tracing.traceparent(), HEADER)


if __name__ == "__main__":
    unittest.main()
