// Finds the highest rate of an open loop at which a bound holds, by runs at chosen rates.
//
//   RateSearch search(capacity);
//   while (const auto rate = search.Next()) search.Note(HoldsAt(*rate));
//   search.highest();
//
// It assumes that the bound holds below a rate and fails above it. Load is random, so the rate that
// it finds is as exact as the runs are long.
#ifndef MLA_CLIENT_MLACTL_LOAD_RATE_SEARCH_H_
#define MLA_CLIENT_MLACTL_LOAD_RATE_SEARCH_H_

#include <optional>

namespace mla::mlactl {

class RateSearch final {
 public:
  // The search ends when the rate is known to this share of itself, or after this many runs.
  static constexpr double kPrecision = 0.05;
  static constexpr int kMostRuns = 12;

  // `capacity`: what a closed loop reaches, > 0; the search begins with half of it.
  explicit RateSearch(double capacity) : next_(capacity / 2) {}

  // Returns the rate of the next run, or nullopt when the search has ended.
  std::optional<double> Next() const;
  // Tells whether the bound held at the rate that Next has returned.
  void Note(bool held);
  // Returns the highest rate at which the bound held; 0 if there was none.
  double highest() const { return held_; }

 private:
  double next_;
  double held_ = 0;
  double failed_ = 0;  // the lowest rate at which the bound failed; 0: none yet
  int runs_ = 0;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_LOAD_RATE_SEARCH_H_
