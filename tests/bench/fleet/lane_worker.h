// A worker of two_servers.cc: sequences on some servers, and steps over them.
#ifndef MLA_TESTS_BENCH_FLEET_LANE_WORKER_H_
#define MLA_TESTS_BENCH_FLEET_LANE_WORKER_H_

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/cluster_client.h"
#include "client/cpp/cluster/cluster_step.h"
#include "tests/bench/gpu/step_worker.h"

namespace mla::bench {

using client::ClusterSequence;
using client::ClusterSession;

inline constexpr size_t kServers = 2;
inline constexpr uint32_t kFillRows = 1024;  // rows of a step that fills a context

struct Flags {
  std::string targets, profile = "both", json;
  std::vector<int32_t> batch{16, 64};
  int32_t context = 16384, layers = 61, heads = 128, seconds = 3, copy_threads = 4, spin_us = 20;
  double goal = 1.9;
};

// Values of magnitude 0.06 to 0.12, of both signs, as bf16.
std::vector<uint16_t> Values(size_t count, uint64_t seed);

// Steps over some sequences, and the memory of their tensors.
struct Lane {
  ClusterSession* session = nullptr;
  std::vector<ClusterSequence*> sequences;
  std::span<std::byte> in, out;
};

// Has sequences on some servers, and a session for each lane. `flags` must outlive it.
class LaneWorker final {
 public:
  explicit LaneWorker(const Flags& flags) : flags_(flags) {}

  absl::Status Connect(const std::vector<std::string>& targets, uint64_t region_bytes);
  absl::Status RegisterModel(bool weights);
  // Memory of a session of its own at a server.
  absl::StatusOr<Lane> MakeLane(size_t server, uint64_t in, uint64_t out);
  // Opens sequences at the first server and gives them all their rows. `seed` is of the values.
  absl::Status Fill(const Lane& lane, uint32_t count, uint64_t seed);
  // Uses sequences of another worker, which releases them.
  absl::Status Attach(size_t server, const std::vector<uint64_t>& ids);
  void Detach();
  std::vector<ClusterSequence>& sequences(size_t server) { return sequences_[server]; }

 private:
  absl::Status UploadWeights(client::Client* server) const;
  absl::Status FillStep(const Lane& lane, ClusterSequence* sequence, uint32_t rows);

  const Flags& flags_;
  std::vector<std::string> targets_;
  std::unique_ptr<client::ClusterClient> client_;
  std::vector<std::unique_ptr<ClusterSession>> sessions_;
  std::vector<ClusterSequence> sequences_[kServers];
};

struct Rate {
  double rows_s = 0, layer_us = 0;
};

// Runs steps of all lanes, each step and layer at the same time in every lane, for flags.seconds.
// Begins together with the other threads of `together`, unless that is null.
absl::StatusOr<Rate> RunFor(const Flags& flags, bool absorbed, const std::vector<Lane>& lanes,
                            std::barrier<>* together);

// Runs steps of all lanes in the calling thread for flags.seconds. No lane waits for another one: a
// layer is sent as soon as the one before it has come back in its own lane. The sum of the lanes'
// rates, and the time of a layer in the slowest.
absl::StatusOr<Rate> RunApart(const Flags& flags, bool absorbed, const std::vector<Lane>& lanes);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_FLEET_LANE_WORKER_H_
