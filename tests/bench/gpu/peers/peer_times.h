// Times of other libraries for the shapes of a benchmark, measured in the same run on the same
// machine, and the ratios of the benchmark's own times to the best of them.
#ifndef MLA_TESTS_BENCH_GPU_PEERS_PEER_TIMES_H_
#define MLA_TESTS_BENCH_GPU_PEERS_PEER_TIMES_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace mla::bench {

struct PeerTime {
  std::string peer;
  double us = 0;

  // Fields for a row of JSON about a shape that takes `own_us` here: "peer", "peer_us", and
  // "of_peer", which is peer_us / own_us.
  std::string JsonFields(double own_us) const;
};

// One thread.
class PeerTimes {
 public:
  static constexpr int64_t kMostBytes = int64_t{1} << 20;  // of a file

  // Reads {"peer": text, "shape": text, "us": number} from each line that is not blank; other
  // fields are ignored. INVALID_ARGUMENT names the line and the field, RESOURCE_EXHAUSTED a file
  // above kMostBytes.
  static absl::StatusOr<PeerTimes> Parse(std::string_view text);
  static absl::StatusOr<PeerTimes> Read(const std::string& path);

  // The fastest peer for a shape; null if none was timed. Valid as long as this object.
  const PeerTime* Best(std::string_view shape) const;
  bool empty() const { return best_.empty(); }

 private:
  std::map<std::string, PeerTime, std::less<>> best_;  // by shape
};

// Collects how fast the benchmark is next to the best peers.
class PeerRatios {
 public:
  // `ratio` is the peer's time divided by ours: above 1 if we are faster.
  void Add(std::string_view shape, double ratio);
  // "31 shapes with a peer: ratio 0.84 (SHAPE) to 2.00, geometric mean 1.02, 22 below 1.00", or
  // "no shape with a peer".
  std::string Summary() const;

 private:
  std::vector<double> ratios_;
  std::string slowest_;  // the shape of the least ratio
};

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_GPU_PEERS_PEER_TIMES_H_
