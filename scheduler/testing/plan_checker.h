// Checks a plan against its batch, with interval arithmetic and without the planner's code.
#ifndef MLA_SCHEDULER_TESTING_PLAN_CHECKER_H_
#define MLA_SCHEDULER_TESTING_PLAN_CHECKER_H_

#include <span>
#include <string>
#include <vector>

#include "kernels/attention_backend.h"
#include "kernels/types/attention_params.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler::testing {

class PlanChecker {
 public:
  // Returns an empty string if all of this holds, else a description of the first fault:
  //   - every (query row, visible kv row, head) is in exactly one work item, no item reaches past
  //     the rows that its last query row sees, and no piece is completely masked for a row;
  //   - a tile that sees no rows has one empty item; q_rows = 0 has none;
  //   - tiles respect tile_rows and both their bounds, cuts the granularity or fixed split;
  //   - the reduce arrays name exactly the partial tiles of each split tile, in kv order, and
  //     partial rows do not overlap;
  //   - everything is inside the capacity, and `imbalance` agrees with the items.
  std::string Fault(std::span<const PlanSegment> segments, const kernels::PlanTraits& traits,
                    const kernels::PlanView& view, const PlanCapacity& capacity, double imbalance);

 private:
  std::string Shape(const kernels::PlanView& view, const PlanCapacity& capacity) const;
  std::string Item(const kernels::WorkInfo& item) const;
  std::string Tiles(size_t segment, std::span<const kernels::WorkInfo> items);
  std::string Tile(std::span<const kernels::WorkInfo> pieces);
  std::string Reduce(const kernels::PlanView& view);
  std::string Dealt(const kernels::PlanView& view) const;
  std::string Balance(const kernels::PlanView& view, double imbalance) const;

  std::span<const PlanSegment> segments_;
  kernels::PlanTraits traits_;
  int64_t partial_rows_ = 0;
  // Scratch memory, kept between calls.
  std::vector<kernels::WorkInfo> sorted_;
  // Pieces of split tiles, by tile, in the order of KV rows.
  std::vector<kernels::WorkInfo> partials_;
  std::vector<size_t> split_begin_;  // index in partials_ of each split tile's first piece
};

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_TESTING_PLAN_CHECKER_H_
