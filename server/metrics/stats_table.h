// Lists all numbers that the engine and the transport keep, one row for each. The metrics, the
// reply of Admin.GetStats and the table in docs/metrics.md are made from these rows.
//
// Plain data; any thread.
#ifndef MLA_SERVER_METRICS_STATS_TABLE_H_
#define MLA_SERVER_METRICS_STATS_TABLE_H_

#include <atomic>
#include <cstdint>
#include <span>

#include "scheduler/engine.h"

namespace mla::server {

// Counts bytes and streams of the transport; the numbers are always exact, independent of scrapes.
struct WireCounters {
  std::atomic<uint64_t> received_bytes{0};
  std::atomic<uint64_t> sent_bytes{0};
  std::atomic<uint64_t> copied_bytes{0};
  std::atomic<int32_t> streams{0};
  std::atomic<uint64_t> streams_disconnected{0};  // slow readers
  // Rings that were disconnected because their client broke a rule.
  std::atomic<uint64_t> rings_disconnected{0};
  // Regions that were disconnected because their client has punched holes into them.
  std::atomic<uint64_t> regions_disconnected{0};
  std::atomic<uint64_t> connections_refused{0};  // gRPC connections beyond a bound
  std::atomic<uint64_t> shm_refusals{0};         // connections for which no descriptor was left
  // Connections without a request that had to make room for others.
  std::atomic<uint64_t> shm_displaced{0};
  std::atomic<uint64_t> write_blocked_ns{0};
  // Bytes of tensors that were used in place, in shared memory.
  std::atomic<uint64_t> shared_received_bytes{0}, shared_sent_bytes{0};
  std::atomic<int32_t> shared_regions{0};  // with a handle
  std::atomic<int32_t> rings{0};
  // Rings over UCX, each with a relay, and their traffic as the relays report it.
  std::atomic<int32_t> ucx_rings{0};
  std::atomic<uint64_t> ucx_rings_opened{0};
  std::atomic<uint64_t> ucx_ended_by_client{0}, ucx_ended_by_relay{0};
  std::atomic<uint64_t> ucx_received_frames{0}, ucx_sent_frames{0};
  std::atomic<uint64_t> ucx_received_bytes{0}, ucx_sent_bytes{0}, ucx_put_bytes{0};
  // For rings whose next entry waits for its client's GPU: the time of waiting, and the number of
  // sleeps in it.
  std::atomic<uint64_t> device_polling_ns{0}, device_sleeps{0};
};

// Counts checkpoints on the server's disk. All are zero if no folder for them is configured.
struct CheckpointCounters {
  std::atomic<int64_t> files{0};
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> last_unix_ms{0};  // when the latest was written; 0: none yet
  std::atomic<uint64_t> saves{0}, restores{0};
  // Failures of the disk and damaged files count here; faults of callers do not.
  std::atomic<uint64_t> save_failures{0}, restore_failures{0};
};

// Counts sequences that were handed over to other servers while this one drained, and taken over
// from others.
struct HandOverCounters {
  std::atomic<uint64_t> moved{0};    // the peer has them
  std::atomic<uint64_t> refused{0};  // by the peer
  // Sequences that stayed for a reason on this side. peer_failed: the peer could not be reached,
  // was another server or gave no answer. changed: they were truncated or closed on their way.
  // stopped: the drain ended first. empty: they had no rows.
  std::atomic<uint64_t> peer_failed{0}, changed{0}, stopped{0}, empty{0};
  std::atomic<uint64_t> taken_back{0};  // attempts that the peer was told to forget
  std::atomic<uint64_t> taken_over{0};  // from others
  // Payload bytes of sequences that moved or were taken over.
  std::atomic<uint64_t> sent_bytes{0}, taken_bytes{0};
  // Models whose weights the peer has, has refused, or did not get for a reason on this side; and
  // models whose weights came from others.
  std::atomic<uint64_t> weights_moved{0}, weights_refused{0}, weights_failed{0}, weights_taken{0};
  // Bytes of these weights that crossed.
  std::atomic<uint64_t> weights_sent_bytes{0}, weights_taken_bytes{0};
};

struct StatSources {
  const scheduler::EngineStats& engine;
  const WireCounters& wire;
  const CheckpointCounters& checkpoints;
  const HandOverCounters& hand_overs;
};

struct Stat {
  const char* field;   // field of GetStatsReply; null: not there
  const char* metric;  // a counter if its name ends in _total, else a gauge; null: none
  const char* help;    // null: an earlier row of the same metric has the text
  uint64_t (*read)(const StatSources&);
  const char* label;        // null: the metric does not have a label
  const char* label_value;  // null exactly where `label` is
  double unit;  // the metric is the number times this: 1e-9 for nanoseconds in a metric of seconds
};

std::span<const Stat> AllStats();

}  // namespace mla::server

#endif  // MLA_SERVER_METRICS_STATS_TABLE_H_
