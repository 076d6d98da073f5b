// The answer of a probe of the engine.
#ifndef MLA_SCHEDULER_PROBE_H_
#define MLA_SCHEDULER_PROBE_H_

#include <cstdint>

namespace mla::scheduler {

// Rows that a sequence with a prefix would find, and how busy the engine is.
struct ProbeAnswer {
  int64_t rows_asked = 0;  // of whole pages
  int64_t rows_in_pool = 0, rows_in_host = 0, rows_in_file = 0;
  int64_t kv_bytes_free = 0;    // with the bytes that only the prefix cache holds
  int64_t kv_bytes_cached = 0;  // part of kv_bytes_free
  int64_t kv_bytes_total = 0;
  int32_t sequences = 0;        // open ones of all tenants
  int32_t queued_requests = 0;  // accepted and not answered, of all tenants
  int64_t wait_ns = 0;          // that requests lately waited for a launch; 0: none is queued
  bool draining = false;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PROBE_H_
