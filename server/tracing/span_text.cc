#include "server/tracing/span_text.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "base/printable.h"

namespace mla::server {
namespace {

// Calls text(name, value) or number(name, value) for each attribute of the span.
template <typename Text, typename Number>
void ForEachAttribute(const TraceSpan& span, const Text& text, const Number& number) {
  const auto add_text = [&](const char* name, const std::string& value) {
    // Names come from clients. Anything but printable text is replaced.
    if (!value.empty()) text(name, base::Printable(value));
  };
  const auto add_number = [&](const char* name, int64_t value) {
    if (value >= 0) number(name, value);
  };
  add_text("mla.tenant", span.tenant);
  add_text("mla.model", span.model);
  add_text("mla.step_id", span.step);
  add_number("mla.layer", span.layer);
  add_number("mla.rows", span.rows);
  add_number("mla.heads", span.heads);
  add_number("mla.sequences", span.sequences);
  add_number("mla.launch_requests", span.launch_requests);
}

template <typename Message>
void AddText(Message* message, const char* name, const std::string& value) {
  otlp::KeyValue* attribute = message->add_attributes();
  attribute->set_key(name);
  attribute->mutable_value()->set_string_value(value);
}

}  // namespace

void ToOtlp(const TraceResource& resource, const std::vector<TraceSpan>& spans,
            otlp::ExportTraceServiceRequest* request) {
  otlp::ResourceSpans* of_process = request->add_resource_spans();
  AddText(of_process->mutable_resource(), "service.name", resource.service);
  AddText(of_process->mutable_resource(), "service.version", resource.version);
  AddText(of_process->mutable_resource(), "service.instance.id", resource.instance);
  otlp::ScopeSpans* scope = of_process->add_scope_spans();
  scope->mutable_scope()->set_name("mla-server");
  for (const TraceSpan& span : spans) {
    otlp::Span* sent = scope->add_spans();
    sent->set_trace_id(TraceIdBytes(span.trace));
    sent->set_span_id(SpanIdBytes(span.id));
    if (span.parent != 0) sent->set_parent_span_id(SpanIdBytes(span.parent));
    sent->set_name(span.name);
    sent->set_kind(span.server ? otlp::Span::SPAN_KIND_SERVER : otlp::Span::SPAN_KIND_INTERNAL);
    sent->set_start_time_unix_nano(static_cast<uint64_t>(span.begin_ns));
    sent->set_end_time_unix_nano(static_cast<uint64_t>(span.end_ns));
    ForEachAttribute(
        span, [&](const char* name, const std::string& value) { AddText(sent, name, value); },
        [&](const char* name, int64_t value) {
          otlp::KeyValue* attribute = sent->add_attributes();
          attribute->set_key(name);
          attribute->mutable_value()->set_int_value(value);
        });
    if (span.error.empty()) continue;
    sent->mutable_status()->set_code(otlp::Status::STATUS_CODE_ERROR);
    sent->mutable_status()->set_message(span.error);
  }
}

std::string ToJsonLine(const TraceResource& resource, const TraceSpan& span) {
  nlohmann::ordered_json line;
  line["trace_id"] = TraceIdText(span.trace);
  line["span_id"] = absl::StrFormat("%016x", span.id);
  if (span.parent != 0) line["parent_span_id"] = absl::StrFormat("%016x", span.parent);
  line["name"] = span.name;
  line["start_unix_ns"] = span.begin_ns;
  line["end_unix_ns"] = span.end_ns;
  line["service.instance.id"] = resource.instance;
  ForEachAttribute(
      span, [&](const char* name, const std::string& value) { line[name] = value; },
      [&](const char* name, int64_t value) { line[name] = value; });
  if (!span.error.empty()) line["error"] = span.error;
  return line.dump();
}

}  // namespace mla::server
