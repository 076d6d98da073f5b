// Sizes that a runner configures its backend for.
#ifndef MLA_TESTS_CONFORMANCE_SUITE_RUNNER_OPTIONS_H_
#define MLA_TESTS_CONFORMANCE_SUITE_RUNNER_OPTIONS_H_

#include <cstdint>

#include "kernels/attention_backend.h"

namespace mla::conformance {

// For all plans of a launch together.
inline constexpr int64_t kRoundItems = 401024, kRoundExpansions = 4160;

struct RunnerOptions {
  int64_t kv_pool_bytes = int64_t{512} << 20;
  int64_t page_table_entries = int64_t{4} << 20;
  int64_t staging_bytes = int64_t{192} << 20;         // inputs and outputs of a launch together
  int64_t slot_workspace_bytes = int64_t{192} << 20;  // absorbed queries and latent outputs
  int64_t partial_rows = 200000;
  int64_t weights_bytes = int64_t{768} << 20;
  int32_t weights_slots = 64;
  // > 0: backends that read queries in pieces get pieces of about this size, each at an address of
  // its own.
  int64_t query_piece_bytes = 0;
};

kernels::BackendLimits LimitsOf(const RunnerOptions& options);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SUITE_RUNNER_OPTIONS_H_
