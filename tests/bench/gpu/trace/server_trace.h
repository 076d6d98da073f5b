// The host's work for the launches of a server, by the counters that it exposes.
#ifndef MLA_TESTS_BENCH_GPU_TRACE_SERVER_TRACE_H_
#define MLA_TESTS_BENCH_GPU_TRACE_SERVER_TRACE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mla::bench {

struct ServerTrace {
  double copied_bytes = 0;  // tensor bytes copied by the host
  double sleeps = 0;        // of its threads, waiting for the GPU
  // Time in which a thread polled for the end of GPU work.
  double client_polling_us = 0;  // for the client's work before a request
  double launch_polling_us = 0;

  // The difference to `before`, for one of `layers` layers.
  ServerTrace Since(const ServerTrace& before, double layers) const;
};

// Counters since the server's start. `text` is the reply to GET /metrics.
ServerTrace ParseTrace(absl::string_view text);
// The same from the server's own address for operations, "HOST:PORT". UNAVAILABLE if it does not
// reply.
absl::StatusOr<ServerTrace> ReadTrace(const std::string& address);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_GPU_TRACE_SERVER_TRACE_H_
