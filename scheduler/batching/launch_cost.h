// How long a launch will take, learned from those that have completed.
//
// Work is counted in KV bytes: the bytes of KV rows that the tiles of a launch stream past their
// query rows, so that a tile of 128 packed rows over 4096 KV rows counts the same whether it
// belongs to one prompt or to 128 decodes. Rates (nanoseconds a byte) are kept for each batch key
// and form, since dtypes, dims and forms differ in speed, and one for page work. A rate follows a
// launch that took longer than predicted at once and one that was faster slowly: a launch that is
// too long makes others wait, one that is too short costs little.
//
// Threading: owned by the engine role. Nothing is allocated.
#ifndef MLA_SCHEDULER_BATCHING_LAUNCH_COST_H_
#define MLA_SCHEDULER_BATCHING_LAUNCH_COST_H_

#include <array>
#include <cstdint>

#include "scheduler/batching/batch_key.h"
#include "scheduler/request.h"
#include "scheduler/tables/model_table.h"

namespace mla::scheduler {

// Work of a launch by what it costs differently.
struct LaunchUnits {
  int64_t absorbed = 0;  // KV bytes
  int64_t expanded = 0;  // KV bytes, up-projection included
  int64_t pages = 0;     // bytes zeroed, copied and appended
  int64_t sum() const { return absorbed + expanded + pages; }
  LaunchUnits& operator+=(const LaunchUnits& more) {
    absorbed += more.absorbed;
    expanded += more.expanded;
    pages += more.pages;
    return *this;
  }
  friend LaunchUnits operator+(LaunchUnits a, const LaunchUnits& b) { return a += b; }
};

class LaunchCost {
 public:
  // Units of `rows` query rows x `heads` of one sequence, of which the first row sees `cached` + 1
  // KV rows. Of ABSORBED and of EXPANDED in the absorbed form, its projections included. `top_k`:
  // of sparse attention, which reads so many of them for every query row by itself.
  static constexpr int32_t kAllRows = 0;
  static int64_t AbsorbedUnits(const Model& model, Profile profile, int64_t rows, int64_t heads,
                               int64_t cached, int32_t top_k = kAllRows);
  // Of EXPANDED in the expanded form: K and V of all rows are projected up first.
  static int64_t ExpandedUnits(const Model& model, int64_t rows, int64_t heads, int64_t cached);

  // Predicted nanoseconds on the device. Launches of nothing take kLaunchNanos.
  int64_t Nanos(const BatchKey& key, const LaunchUnits& units) const;
  // Bytes of page work that fit this time.
  int64_t PageBytes(int64_t nanos) const {
    return static_cast<int64_t>(static_cast<double>(nanos) / pages_);
  }
  // The launch took this long.
  void Observe(const BatchKey& key, const LaunchUnits& units, int64_t nanos);

 private:
  static constexpr int kKeys = 16;  // whose rates are kept; the one unused for longest makes room
  struct Rates {
    bool used = false;
    BatchKey key;
    uint64_t last_used = 0;
    double absorbed = 0, expanded = 0;  // nanoseconds a byte
  };
  const Rates& Of(const BatchKey& key) const;

  // A CPU core takes about this long for a byte of KV rows under 128 heads, a GPU a ten thousandth.
  static constexpr double kInitialRate = 1.5;
  Rates initial_ = {.key = {}, .absorbed = kInitialRate, .expanded = kInitialRate};
  std::array<Rates, kKeys> rates_;
  double pages_ = 0.5;
  uint64_t observed_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_LAUNCH_COST_H_
