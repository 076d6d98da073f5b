#include "server/tracing/trace_context.h"

#include "absl/strings/str_format.h"

namespace mla::server {
namespace {

// Places of the fields of version 00: 2 digits of version, 32 of trace, 16 of span, 2 of flags.
constexpr size_t kTrace = 3, kSpan = 36, kFlags = 53, kLength = 55;

// Reads lower-case hex digits, as the specification demands. Returns false for anything else.
bool ReadHex(std::string_view text, uint64_t* value) {
  *value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9', letter = c >= 'a' && c <= 'f';
    if (!digit && !letter) return false;
    *value = *value << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return true;
}

std::string BigEndian(uint64_t value) {
  std::string bytes(sizeof(value), '\0');
  for (size_t i = 0; i < sizeof(value); ++i) {
    bytes[i] = static_cast<char>(value >> (8 * (sizeof(value) - 1 - i)) & 0xff);
  }
  return bytes;
}

}  // namespace

TraceContext ParseTraceparent(std::string_view header) {
  uint64_t version = 0, flags = 0;
  TraceContext context;
  if (header.size() < kLength || header.size() > kMaxTraceparentBytes) return {};
  if (!ReadHex(header.substr(0, 2), &version) || version == 0xff) return {};
  // Version 00 has exactly this length; what later versions add begins with another dash.
  if (version == 0 ? header.size() != kLength : header.size() > kLength && header[kLength] != '-') {
    return {};
  }
  if (header[kTrace - 1] != '-' || header[kSpan - 1] != '-' || header[kFlags - 1] != '-') return {};
  const bool read = ReadHex(header.substr(kTrace, 16), &context.trace.high) &&
                    ReadHex(header.substr(kTrace + 16, 16), &context.trace.low) &&
                    ReadHex(header.substr(kSpan, 16), &context.span) &&
                    ReadHex(header.substr(kFlags, 2), &flags);
  if (!read || !context.valid()) return {};
  context.sampled = (flags & 1) != 0;
  return context;
}

std::string Traceparent(const TraceContext& context) {
  return absl::StrFormat("00-%s-%016x-0%d", TraceIdText(context.trace), context.span,
                         context.sampled ? 1 : 0);
}

std::string TraceIdText(const TraceId& id) {
  return absl::StrFormat("%016x%016x", id.high, id.low);
}

std::string TraceIdBytes(const TraceId& id) { return BigEndian(id.high) + BigEndian(id.low); }

std::string SpanIdBytes(SpanId id) { return BigEndian(id); }

}  // namespace mla::server
