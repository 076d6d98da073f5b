// Declares the values that the parts of the step machine share: the objects that they borrow, and
// the open streams.
#ifndef MLA_SCHEDULER_STEPS_STEP_PARTS_H_
#define MLA_SCHEDULER_STEPS_STEP_PARTS_H_

#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "kernels/attention_backend.h"
#include "scheduler/clock.h"
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/launching/launcher.h"
#include "scheduler/limits.h"
#include "scheduler/moves/cache_hints.h"
#include "scheduler/moves/page_mover.h"
#include "scheduler/moves/tier_moves.h"
#include "scheduler/steps/answers.h"
#include "scheduler/steps/drain_state.h"
#include "scheduler/steps/engine_load.h"
#include "scheduler/stream_steps.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/sequence_table.h"
#include "scheduler/tables/step_opener.h"
#include "scheduler/tables/step_table.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

// All outlive the step machine; `tiers` null: no slower tiers.
struct StepParts {
  const Limits& limits;
  const Clock* clock;
  kernels::AttentionBackend* backend;
  kvcache::KvCache* cache;
  TenantTable* tenants;
  ModelTable* models;
  SequenceTable* sequences;
  StepTable* steps;
  StepOpener* opener;
  Launcher* launcher;
  PageMover* mover;
  TierMoves* tiers;
  CacheHints* hints;
  DrainState* draining;
  AnswerCollector* answers;
  EngineLoad* load;
  EngineStats* stats;
};

struct Stream {
  std::string tenant;
  TenantRef row;  // empty if the table had no room for a row
  std::shared_ptr<StreamSteps> steps;
  TenantKey key() const { return row ? row->key() : kNoTenant; }
};
using Streams = absl::flat_hash_map<StreamId, Stream>;

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_STEP_PARTS_H_
