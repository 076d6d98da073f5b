// Turns a caller's declaration of a sequence's rows into keys.
#ifndef MLA_SCHEDULER_TABLES_PREFIX_PLAN_H_
#define MLA_SCHEDULER_TABLES_PREFIX_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/prefix/page_directory.h"
#include "scheduler/kvcache/prefix/prefix_hasher.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"
#include "scheduler/probe.h"

namespace mla::scheduler {

// A declaration prepared outside the engine's role; valid only for the state of the sequence from
// which it was made.
struct PrefixPlan {
  std::shared_ptr<const ModelSpec> spec;
  std::shared_ptr<const kvcache::PrefixChain> before;  // the sequence's present chain; null: none
  int32_t declared = 0;                                // rows of it
  int64_t committed = 0;                               // rows of the sequence
  std::shared_ptr<const kvcache::PrefixChain> chain;   // as it is to be
  std::string digest;  // of all arguments, to tell a repeat from a clash
  int64_t max_rows = 0;
};

// Makes plans. Thread-safe.
class PrefixPlanner final {
 public:
  PrefixPlanner(const kvcache::PrefixSecret& secret, const Limits& limits)
      : hasher_(secret), limits_(limits) {}

  // `plan` brings spec, before and declared; Fill sets the rest and calls args.hashed. `args`
  // declares the rows from `first_row` on. All earlier rows must have been declared, and declared
  // rows that stay must agree. INVALID_ARGUMENT or FAILED_PRECONDITION name a field below "prefix".
  absl::Status Fill(const std::string& tenant, const PrefixArgs& args, int64_t first_row,
                    int64_t committed, PrefixPlan* plan) const;
  // Counts the rows of leading whole pages that the directory has, at most args.max_rows, and those
  // that there are. Pages are hashed as far as they are found; then args.hashed is called. The
  // codes of Fill.
  absl::Status CountHeld(const std::string& tenant, const ModelSpec& spec, const PrefixArgs& args,
                         const kvcache::PageDirectory& directory, ProbeAnswer* answer) const;

 private:
  // Returns how many rows `args` names. Refuses more than a sequence may have after `first_row`.
  absl::StatusOr<int64_t> RowsOf(const PrefixArgs& args, int64_t first_row,
                                 int32_t page_size) const;
  kvcache::PrefixKey RootOf(const std::string& tenant, const ModelSpec& spec,
                            const std::string& salt) const;

  const kvcache::PrefixHasher hasher_;
  const Limits limits_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_PREFIX_PLAN_H_
