// Predicts how long a launch will take, learned from completed launches.
//
// Work is counted in KV bytes: the bytes of KV rows that the tiles of a launch read for their query
// rows. A tile of 128 packed rows over 4096 KV rows counts the same whether it belongs to one
// prompt or to 128 decodes. Rates (nanoseconds a byte) are kept for each batch key and form, since
// dtypes, dims and forms differ in speed, and one for page work. A rate follows a launch that took
// longer than predicted at once and one that was faster slowly: a launch that is too long makes
// others wait, one that is too short costs little.
//
// Threading: owned by the engine role. Allocates nothing.
#ifndef MLA_SCHEDULER_BATCHING_LAUNCH_COST_H_
#define MLA_SCHEDULER_BATCHING_LAUNCH_COST_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "kernels/attention_backend.h"
#include "scheduler/batching/batch_key.h"
#include "scheduler/request.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

// Work of a launch, divided into kinds with different costs.
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

// Returns the workspace of a row of PROJECTED: its queries and outputs, and at most as much for
// both in latent space. Batches of that profile have no other tensors there. Returns 0 for other
// profiles.
int64_t ProjectedRowBytes(const StreamRequest& request);

// Returns the number of KV rows that `rows` query rows see on average, if the first of them sees
// `cached` + 1.
inline int64_t MeanKvRows(int64_t rows, int64_t cached) { return cached + (rows + 1) / 2; }

// Cost of a request's rows in the absorbed form: for ABSORBED, and for EXPANDED including its
// projections. `most_places`: bound of the KV rows that attention reads separately for every query
// row, if it is sparse or has a window.
class AbsorbedCost {
 public:
  static constexpr int64_t kAllRows = std::numeric_limits<int64_t>::max();
  AbsorbedCost(const Model& model, Profile profile, int64_t heads, int64_t most_places = kAllRows);

  // Returns the number of units of `rows` query rows of one sequence, of which the first sees
  // `cached` + 1 KV rows.
  int64_t Units(int64_t rows, int64_t cached) const {
    if (heads_ == 0) return 0;
    if (most_places_ != kAllRows && rows > 1) return rows * Units(1, cached + (rows + 1) / 2 - 1);
    const int64_t kv_rows = std::min(MeanKvRows(rows, cached), most_places_) + projected_rows_;
    return std::max<int64_t>(1, Streamed(rows * heads_, kv_rows * row_bytes_));
  }

 private:
  // Returns the number of KV bytes that the tiles of `packed` rows read, if one tile reads `bytes`.
  // A backend with min_charged_rows_ charges a part of a tile as a part; others charge every tile
  // as a whole.
  int64_t Streamed(int64_t packed, int64_t bytes) const {
    if (min_charged_rows_ > 0) return std::max(packed, min_charged_rows_) * bytes / tile_rows_;
    return packed <= tile_rows_ ? bytes : (packed + tile_rows_ - 1) / tile_rows_ * bytes;
  }

  int64_t heads_, most_places_;
  int64_t tile_rows_, row_bytes_;  // of one KV row
  int64_t min_charged_rows_;       // least packed rows that are charged; 0: tiles are charged whole
  int64_t projected_rows_ = 0;     // KV rows that cost as much as the projections of one row
};

class LaunchCost {
 public:
  // Until launches have been measured, a byte of KV rows takes `nanos_per_kv_byte`
  // (BackendInfo::nanos_per_kv_byte), and a byte of page work a third of that.
  explicit LaunchCost(double nanos_per_kv_byte = kernels::kCoreNanosPerKvByte)
      : initial_{.key = {}, .absorbed = nanos_per_kv_byte, .expanded = nanos_per_kv_byte},
        pages_(nanos_per_kv_byte / 3) {}

  // Returns the number of units of EXPANDED in the expanded form: K and V of all rows are projected
  // up first.
  static int64_t ExpandedUnits(const Model& model, int64_t rows, int64_t heads, int64_t cached);

  struct Rates {
    bool used = false;
    BatchKey key;
    uint64_t last_used = 0;
    double absorbed = 0, expanded = 0;  // nanoseconds a byte
  };
  // Returns the rates of the key; valid until the next Observe.
  const Rates& Of(const BatchKey& key) const;
  // Returns the predicted nanoseconds on the device. A launch without work takes kLaunchNanos.
  int64_t Nanos(const Rates& rates, const LaunchUnits& units) const;
  int64_t Nanos(const BatchKey& key, const LaunchUnits& units) const {
    return Nanos(Of(key), units);
  }
  // Returns the number of KV bytes that are computed in this time.
  int64_t Units(const BatchKey& key, int64_t nanos) const {
    return static_cast<int64_t>(static_cast<double>(nanos) / Of(key).absorbed);
  }
  // Returns the number of bytes of page work that are done in this time.
  int64_t PageBytes(int64_t nanos) const {
    return static_cast<int64_t>(static_cast<double>(nanos) / pages_);
  }
  // Notes that a launch with this work took `nanos`, and adjusts the rates of the key.
  void Observe(const BatchKey& key, const LaunchUnits& units, int64_t nanos);

 private:
  // Keys whose rates are kept; the one unused for longest makes room.
  static constexpr int kKeys = 16;
  Rates initial_;
  std::array<Rates, kKeys> rates_;
  double pages_;  // nanoseconds a byte
  uint64_t observed_ = 0;
};

// Cost of a request's rows with `heads` heads. REQUIRES that the request outlives it.
class RequestCost {
 public:
  RequestCost(const StreamRequest& request, int32_t heads);
  // Returns the cost of `rows` rows that belong to `entry`, starting at row `row` of the step;
  // `expands` says that they take the expanded form.
  LaunchUnits Of(const StepEntry& entry, int32_t row, int32_t rows, bool expands) const {
    const int64_t cached = entry.start + row - entry.offset;
    LaunchUnits units;
    units.pages = rows * appended_row_bytes_;
    if (expands) {
      units.expanded = LaunchCost::ExpandedUnits(model_, rows, heads_, cached);
    } else if (computes_) {
      units.absorbed = absorbed_.Units(rows, cached);
    }
    return units;
  }

 private:
  const Model& model_;
  const int32_t heads_;
  const int64_t appended_row_bytes_;
  const bool computes_;
  const AbsorbedCost absorbed_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_LAUNCH_COST_H_
