// Turns the lengths of a batch into an execution plan: which unit computes which piece of which
// tile, and which pieces are merged afterwards. Runs on the host from host-side lengths; nothing is
// ever copied from a device to plan.
//
// A request of q_rows x num_heads packed rows is cut into tiles of at most traits.tile_rows packed
// rows; a tile needs the KV rows that its last query row can see (causal trim). Tiles are laid end
// to end, charged ceil(kv rows / granularity) + overhead each, and the line is cut into `units`
// equal parts: a tile that crosses a cut is split, its pieces become partial tiles and one reduce
// tile. A piece never starts past what its first query row can see unless the tile's own causal
// tail does.
//
// Threading: a Planner is owned by one thread. Build allocates nothing.
#ifndef MLA_SCHEDULER_PLANNER_H_
#define MLA_SCHEDULER_PLANNER_H_

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/attention_params.h"
#include "scheduler/metadata_buffers.h"

namespace mla::scheduler {

struct PlanRequest {
  int32_t q_rows = 0;     // >= 0; 0 is a padded request and yields no work
  int32_t kv_rows = 0;    // visible to the last query row, >= 0
  int32_t num_heads = 1;  // 1 .. 65535
  bool causal = true;
  friend bool operator==(const PlanRequest&, const PlanRequest&) = default;
};

// Bounds of any batch that Build may see.
struct PlanLimits {
  int32_t requests = 0;
  int32_t q_rows = 0;       // all requests together
  int64_t packed_rows = 0;  // sum of q_rows x num_heads
  int32_t kv_rows = 0;      // of one request
  int32_t min_heads = 1;    // fewest heads of any request: bounds the tiles
};

class Planner {
 public:
  // Capacity of every array for any batch within `limits`: the planning code itself, run in
  // counting mode on the worst batch, so that sizing and use can not drift apart.
  static PlanCapacity Capacity(const PlanLimits& limits, const kernels::PlanTraits& traits);

  // Fills `buffers` and returns views into it. RESOURCE_EXHAUSTED names the array, what is needed
  // and what there is (cannot happen within the limits the buffers were sized for);
  // INVALID_ARGUMENT names the request and field.
  absl::StatusOr<kernels::PlanView> Build(std::span<const PlanRequest> requests,
                                          const kernels::PlanTraits& traits,
                                          MetadataBuffers& buffers);

  // Largest and mean KV rows x packed rows share of a unit in the last plan; 1.0 when balanced.
  double last_imbalance() const { return last_imbalance_; }

 private:
  double last_imbalance_ = 1.0;
  uint64_t generation_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNER_H_
