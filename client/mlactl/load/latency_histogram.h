// Counts of durations in buckets whose width grows with the value, after the HDR histogram: every
// duration from 1 ns to 73 minutes is kept within 0.2 % of its value in 69 KiB, whatever the number
// of samples. Longer ones count as 73 minutes; the exact largest one is also kept.
//
// Threading: not thread-safe; give each thread its own and Merge.
#ifndef MLA_CLIENT_MLACTL_LOAD_LATENCY_HISTOGRAM_H_
#define MLA_CLIENT_MLACTL_LOAD_LATENCY_HISTOGRAM_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mla::mlactl {

class LatencyHistogram final {
 public:
  LatencyHistogram();

  void Record(int64_t ns);  // below 0 counts as 0
  void Merge(const LatencyHistogram& other);
  void Clear();

  uint64_t count() const { return count_; }
  int64_t max_ns() const { return max_; }  // exact; 0 when empty
  int64_t min_ns() const { return count_ == 0 ? 0 : min_; }
  double mean_ns() const;
  // Returns the largest duration that the bucket of the sample at `quantile` (0..1) may hold, never
  // above the largest sample. 0 when empty.
  int64_t ValueAt(double quantile) const;
  // Points of a latency curve: (quantile, ns) at 0, then five points for each halving of the
  // distance to 1 as far as there are samples beyond it, then 1.
  std::vector<std::pair<double, int64_t>> Curve() const;

 private:
  std::vector<uint64_t> buckets_;
  uint64_t count_ = 0;
  int64_t min_ = 0, max_ = 0;
  double sum_ = 0;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_LOAD_LATENCY_HISTOGRAM_H_
