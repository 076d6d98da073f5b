// What the host did for the launches of a server, by the counters that it exposes.
#ifndef MLA_TESTS_BENCH_GPU_TRACE_SERVER_TRACE_H_
#define MLA_TESTS_BENCH_GPU_TRACE_SERVER_TRACE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mla::bench {

struct ServerTrace {
  double copied_bytes = 0;  // of tensors, by the host
  double sleeps = 0;        // of its threads, for the GPU
  // Time in which a thread looked whether the GPU was done.
  double client_polling_us = 0;  // with the client's work before a request
  double launch_polling_us = 0;

  // Since `before`, for one of `layers` layers.
  ServerTrace Since(const ServerTrace& before, double layers) const;
};

// Since the server's start. `text` is what GET /metrics answers.
ServerTrace ParseTrace(absl::string_view text);
// The same from the server's own address for operations, "HOST:PORT". UNAVAILABLE: no answer.
absl::StatusOr<ServerTrace> ReadTrace(const std::string& address);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_GPU_TRACE_SERVER_TRACE_H_
