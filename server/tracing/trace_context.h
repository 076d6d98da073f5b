// The context that joins the spans of one trace across processes: W3C Trace Context, level 1
// (https://www.w3.org/TR/trace-context/), the header `traceparent`.
//
// Plain values and pure functions; any thread.
#ifndef MLA_SERVER_TRACING_TRACE_CONTEXT_H_
#define MLA_SERVER_TRACING_TRACE_CONTEXT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mla::server {

inline constexpr char kTraceparentKey[] = "traceparent";  // of gRPC metadata
// The longest header that is read. Later versions of the header may be longer than version 00.
inline constexpr size_t kMaxTraceparentBytes = 128;

using SpanId = uint64_t;  // big endian on the wire; 0: none

struct TraceId {
  uint64_t high = 0, low = 0;  // both 0: none
  friend bool operator==(const TraceId&, const TraceId&) = default;
  bool valid() const { return (high | low) != 0; }
};

struct TraceContext {
  TraceId trace;
  SpanId span = 0;       // the parent of spans that are made in this context
  bool sampled = false;  // the caller records the trace and asks others to do so
  friend bool operator==(const TraceContext&, const TraceContext&) = default;
  bool valid() const { return trace.valid() && span != 0; }
};

// Returns the context of a header; an invalid one if the text is not a header of version 00 or
// later.
TraceContext ParseTraceparent(std::string_view header);
// Returns "00-<32 hex digits>-<16 hex digits>-01", with -00 at the end if it is not sampled.
std::string Traceparent(const TraceContext& context);
// Returns 32 hex digits.
std::string TraceIdText(const TraceId& id);

// Return the bytes of the ids as OTLP sends them.
std::string TraceIdBytes(const TraceId& id);
std::string SpanIdBytes(SpanId id);

}  // namespace mla::server

#endif  // MLA_SERVER_TRACING_TRACE_CONTEXT_H_
