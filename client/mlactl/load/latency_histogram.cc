#include "client/mlactl/load/latency_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace mla::mlactl {
namespace {

constexpr int kExactBits = 9;  // values below 2^9 have a bucket each
constexpr int kMaxBits = 42;
constexpr int64_t kMaxValue = (int64_t{1} << kMaxBits) - 1;
constexpr size_t kExact = size_t{1} << kExactBits;
constexpr size_t kHalf = kExact / 2;
constexpr size_t kBuckets = kExact + (kMaxBits - kExactBits) * kHalf;

// From 2^9 on, each power of two has 2^8 buckets.
size_t BucketOf(int64_t ns) {
  const auto value = static_cast<uint64_t>(std::clamp<int64_t>(ns, 0, kMaxValue));
  if (value < kExact) return value;
  const int shift = std::bit_width(value) - kExactBits;
  return kExact + static_cast<size_t>(shift - 1) * kHalf + ((value >> shift) - kHalf);
}

int64_t LargestIn(size_t bucket) {
  if (bucket < kExact) return static_cast<int64_t>(bucket);
  const size_t shift = (bucket - kExact) / kHalf + 1;
  const size_t place = (bucket - kExact) % kHalf + kHalf;
  return static_cast<int64_t>(((place + 1) << shift) - 1);
}

}  // namespace

LatencyHistogram::LatencyHistogram() : buckets_(kBuckets) {}

void LatencyHistogram::Record(int64_t ns) {
  ns = std::max<int64_t>(ns, 0);
  ++buckets_[BucketOf(ns)];
  min_ = count_ == 0 ? ns : std::min(min_, ns);
  max_ = std::max(max_, ns);
  sum_ += static_cast<double>(ns);
  ++count_;
}

void LatencyHistogram::Merge(const LatencyHistogram& other) {
  if (other.count_ == 0) return;
  for (size_t i = 0; i < kBuckets; ++i) buckets_[i] += other.buckets_[i];
  min_ = count_ == 0 ? other.min_ : std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
  count_ += other.count_;
}

void LatencyHistogram::Clear() {
  std::fill(buckets_.begin(), buckets_.end(), 0);
  count_ = 0;
  min_ = max_ = 0;
  sum_ = 0;
}

double LatencyHistogram::mean_ns() const {
  return count_ == 0 ? 0 : sum_ / static_cast<double>(count_);
}

int64_t LatencyHistogram::ValueAt(double quantile) const {
  if (count_ == 0) return 0;
  const double rank = std::ceil(std::clamp(quantile, 0.0, 1.0) * static_cast<double>(count_));
  const auto target = std::clamp<uint64_t>(static_cast<uint64_t>(rank), 1, count_);
  uint64_t seen = 0;
  for (size_t i = 0; i < kBuckets; ++i) {
    seen += buckets_[i];
    if (seen >= target) return std::min(LargestIn(i), max_);
  }
  return max_;
}

std::vector<std::pair<double, int64_t>> LatencyHistogram::Curve() const {
  std::vector<std::pair<double, int64_t>> points;
  if (count_ == 0) return points;
  constexpr int kPerHalving = 5;
  for (int i = 0;; ++i) {
    const double beyond = std::exp2(-static_cast<double>(i) / kPerHalving);
    if (beyond * static_cast<double>(count_) < 1.0) break;
    points.emplace_back(1.0 - beyond, i == 0 ? min_ns() : ValueAt(1.0 - beyond));
  }
  points.emplace_back(1.0, max_);
  return points;
}

}  // namespace mla::mlactl
