// Holds every bound of the scheduler in one place, with its reason and default. Nothing in the
// server grows past these bounds. All buffers are sized from them at start, and the server refuses
// to start when their sum exceeds memory.
#ifndef MLA_SCHEDULER_LIMITS_H_
#define MLA_SCHEDULER_LIMITS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

namespace mla::scheduler {

// The bound follows from page tables, whose entries count 256-byte granules of the pool in 32 bits.
inline constexpr int64_t kMostKvCacheBytes = int64_t{1} << 40;

// Bounds the length of another server's address, so that an answer which names it fits a reply slot
// of a ring.
inline constexpr size_t kMostPeerBytes = 128;
// When to repeat a call whose sequence may be on its way to another server.
inline constexpr int64_t kMovingRetryMs = 100;

struct Limits {
  // --- KV cache
  int64_t kv_cache_bytes = int64_t{1} << 30;  // page pool; one contiguous budget for all models
  int32_t default_page_size = 64;             // rows of a page if the model does not say; 1 .. 4096
  int32_t max_sequences = 1024;               // open sequences, all tenants
  int32_t max_sequence_rows = 163840;         // rows of one sequence
  int32_t max_pages_per_sequence = 8192;      // page-table entries of one sequence
  int32_t prefix_tokens = 8 << 20;            // rows that open sequences may declare; 4 bytes each

  int32_t pinned_percent = 50;         // of the pool: bound for the pins of all tenants
  int32_t tenant_pinned_percent = 25;  // of a tenant's share of it: bound for the tenant's pins

  // --- Slower tiers of the prefix cache (docs/cache/tiers.md)
  int64_t host_tier_bytes = 0;     // host memory in addition to the pool; 0: no slower tiers
  int64_t file_tier_bytes = 0;     // size of the file, if there is one
  int32_t tier_low_percent = 10;   // groups leave the pool once a smaller part is free ...
  int32_t tier_high_percent = 20;  // ... until this part is free
  // A group goes to the file once this many matches have used its rows.
  int32_t tier_file_hits = 1;
  int32_t tier_tenant_percent = 90;  // of a tier: bound for one tenant's copies
  int64_t tier_wait_ms = 2000;       // how long Open and Match wait for rows from slower tiers

  // --- Models
  int32_t max_models = 8;
  int32_t max_layers = 128;           // per model
  int32_t max_heads = 128;            // per model; sizes launch workspaces
  int32_t max_row_dim = 576;          // kv_lora_rank + rope_dim
  int32_t max_v_dim = 256;            // largest nope_dim and v_dim of the EXPANDED profile
  int32_t max_hidden_size = 16384;    // q_lora_rank and hidden_size of PROJECTED
  int32_t max_top_k = 2048;           // entries of one index list
  int64_t max_tail_bytes = 16 << 20;  // per sequence
  // Host memory for the tails of all sequences and the rotations of all open steps.
  int64_t tail_bytes = int64_t{256} << 20;
  int64_t weights_bytes = int64_t{512} << 20;  // as ModelSpec::layer_weight_bytes counts

  // --- Steps
  int32_t max_step_rows = 8192;      // rows of one step, all its sequences together
  int32_t max_step_sequences = 512;  // sequences of one step
  int32_t max_open_steps = 256;      // all streams together
  int32_t max_participants = 64;     // streams of one step
  int32_t max_tenants = 4096;        // tenants that use something at the same time

  // --- Queue and launches
  int32_t queue_requests = 4096;       // requests accepted and not yet answered, of all streams
  int32_t launch_rows = 4096;          // query rows of one launch
  int32_t launch_packed_rows = 65536;  // query rows x heads of one launch: sizes its workspaces
  // Records of one launch; a record is a row range of one sequence.
  int32_t launch_requests = 1024;
  int32_t prefill_rows = 2048;  // extend and prefill rows of one launch; bounds the staged memory
  // Predicted time of one launch; half of it while decodes keep coming.
  int64_t launch_ms = 10;
  // A record with at most this many rows on a cache counts as decode: 1 + drafts.
  int32_t decode_rows = 8;

  // --- Time
  int64_t sequence_lease_ms = 10000;  // counted from the last use or renewal of the sequence
  // Longest lease of a sequence or model that a client may ask for.
  int64_t max_lease_ms = 3600000;
  int64_t model_lease_ms = 0;         // if the client asks for none; 0: the model stays
  int64_t model_yield_ms = 600000;    // after this time unused it makes room for others; 0: never
  int64_t step_lease_ms = 2000;       // counted from the last message of the step
  int64_t max_step_lease_ms = 60000;  // longest step lease that a client may ask for
  // Head slices wait this long for slices of other ranks; 0: not at all.
  int64_t slice_wait_us = 200;
  int64_t kv_wait_ms = 500;  // how long a request may wait for KV rows that have not arrived
  int64_t queue_ms = 30000;  // how long any request may wait for its launch
  // A launch may wait this long on the device for a client's work; 0: not at all.
  int64_t ahead_us = 200;

  // --- Names
  int32_t max_name_bytes = 128;  // of the names of models, clients, requests and tenants

  // Returns the longest step lease that a client may ask for: at least the default, and at most
  // max_lease_ms.
  int64_t longest_step_lease_ms() const {
    return std::min(max_lease_ms, std::max(step_lease_ms, max_step_lease_ms));
  }
};

// Checks that every limit is in its range and that limits which bound each other are in order.
// INVALID_ARGUMENT names the configuration key of the first fault, its value and the range.
absl::Status CheckLimits(const Limits& limits);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LIMITS_H_
