// Declares the keys of the section tracing.
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "server/config/config.h"
#include "server/config/config_key.h"

namespace mla::server {

void AddTracingKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Text("tracing.otlp_target",
               "Collector of traces that speaks OTLP over gRPC: HOST:PORT or unix:PATH; empty: "
               "none.",
               "Spans go there in plain text, so beyond loopback it needs server.insecure.",
               MLA_SLOT(tracing.otlp_target)),
          Text("tracing.file", "File that spans are appended to as lines of JSON; empty: none.",
               "It names tenants and models, and only the server's own user may read it.",
               MLA_SLOT(tracing.file)),
          Bytes("tracing.file_bytes", 1 << 20, kTiB, "Size up to which tracing.file grows.",
                "Later spans are dropped until the file is made smaller.",
                MLA_SLOT(tracing.file_bytes)),
          Int("tracing.sample_every", 0, 1e9,
              "One of this many steps and calls is recorded if its caller sends no traceparent; 0: "
              "none is.",
              "A caller who sends one decides by its flag.", MLA_SLOT(tracing.sample_every)),
          Int("tracing.traces_per_s", 1, 1e6, "Steps and calls that are recorded a second.",
              "Any more are served unrecorded.", MLA_SLOT(tracing.traces_per_s)),
          Int("tracing.tenant_traces_per_s", 1, 1e6, "The same, for each tenant.",
              "At tracing.traces_per_s one tenant can leave no traces for others.",
              MLA_SLOT(tracing.tenant_traces_per_s)),
          Int("tracing.queue_spans", 1024, 1 << 20,
              "Spans that wait for the collector or the file.",
              "Spans that find the queue full are dropped; each takes about 300 bytes.",
              MLA_SLOT(tracing.queue_spans)),
      });
}

void CheckTracing(const Config& config, std::vector<std::string>* faults) {
  const std::string& target = config.tracing.otlp_target;
  if (target.empty() || absl::StartsWith(target, "unix:") || config.listen.insecure) return;
  if (IsLoopback(target)) return;
  faults->push_back("tracing.otlp_target: got " + target +
                    ", must be on loopback or a unix socket unless server.insecure is on");
}

}  // namespace mla::server
