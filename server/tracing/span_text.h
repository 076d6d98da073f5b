// Writes spans in the forms in which they leave the server: OTLP messages and lines of JSON.
//
// Pure functions; any thread.
#ifndef MLA_SERVER_TRACING_SPAN_TEXT_H_
#define MLA_SERVER_TRACING_SPAN_TEXT_H_

#include <string>
#include <vector>

#include "otlp/trace_service.pb.h"
#include "server/tracing/tracer.h"

namespace mla::server {

// The resource in the sense of OTLP: attributes that all spans of this process have.
struct TraceResource {
  std::string service;   // service.name
  std::string version;   // service.version
  std::string instance;  // service.instance.id
};

namespace otlp = ::opentelemetry::proto::collector::trace::v1;

void ToOtlp(const TraceResource& resource, const std::vector<TraceSpan>& spans,
            otlp::ExportTraceServiceRequest* request);

// Returns one object of JSON on one line, without the end of the line: trace_id, span_id,
// parent_span_id (absent for a root), name, start_unix_ns, end_unix_ns, the attributes by their
// OTLP names, and error if it failed.
std::string ToJsonLine(const TraceResource& resource, const TraceSpan& span);

}  // namespace mla::server

#endif  // MLA_SERVER_TRACING_SPAN_TEXT_H_
