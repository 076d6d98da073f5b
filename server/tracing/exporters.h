// Exports spans: to a collector that speaks OTLP over gRPC, or to a file of JSON lines.
#ifndef MLA_SERVER_TRACING_EXPORTERS_H_
#define MLA_SERVER_TRACING_EXPORTERS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/tracing/span_text.h"
#include "server/tracing/tracer.h"

namespace mla::server {

// Sends to a collector at HOST:PORT or unix:PATH, in plain text. A call may take
// kOtlpTimeoutMs; a collector that is away costs its spans and nothing else.
inline constexpr int kOtlpTimeoutMs = 2000;
std::unique_ptr<SpanExporter> MakeOtlpExporter(const std::string& target, TraceResource resource);

// Appends to a file, up to `max_bytes` of it. An error if the file cannot be opened.
absl::StatusOr<std::unique_ptr<SpanExporter>> MakeJsonExporter(const std::string& path,
                                                               int64_t max_bytes,
                                                               TraceResource resource);

}  // namespace mla::server

#endif  // MLA_SERVER_TRACING_EXPORTERS_H_
