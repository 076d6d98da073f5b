// A separate engine for tests of tensor-parallel ranks: a tiny model of eight heads, one stream a
// rank, and a backend that counts computed rows.
#ifndef MLA_SCHEDULER_TESTING_RANK_HARNESS_H_
#define MLA_SCHEDULER_TESTING_RANK_HARNESS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler::testing {

inline constexpr int kRankHeads = 8;
inline constexpr int64_t kSliceWaitMicros = 200;

inline Limits LimitsOfRanks() {
  Limits limits = TinyLimits();
  limits.max_heads = kRankHeads;
  limits.max_layers = 8;
  limits.max_participants = kRankHeads;
  limits.launch_packed_rows = 96;
  limits.slice_wait_us = kSliceWaitMicros;
  return limits;
}

class RankHarness {
 public:
  static constexpr uint64_t kQueries = 70000;  // for requests of Send

  // `prepare` gets the backend before the engine does. REQUIRES: `ranks` divides kRankHeads, and
  // layers <= 8.
  explicit RankHarness(int ranks, const Limits& limits = LimitsOfRanks(), int layers = 2,
                       const std::function<void(FaultyBackend&)>& prepare = {})
      : ranks_(ranks) {
    auto backend = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
    backend_ = backend.get();
    if (prepare) prepare(*backend);
    ModelSpec model = TinyModel();
    model.geometry.num_heads = kRankHeads;
    model.layers = layers;
    harness_ = std::make_unique<EngineHarness>(
        HarnessOptions{limits, std::move(model), std::move(backend), nullptr});
    for (int i = 0; i < ranks; ++i)
      streams_.push_back(core().steps().OpenStream(harness_->tenant()));
  }

  EngineHarness& harness() { return *harness_; }
  EngineCore& core() { return harness_->core(); }
  FaultyBackend& backend() { return *backend_; }
  int ranks() const { return ranks_; }
  StreamId stream(int rank) const { return streams_[rank]; }

  // Begins a step on the first `joining` ranks, or on all if it is -1. Returns false if one of them
  // is refused.
  bool Begin(StepId step, const std::vector<StepSequenceArgs>& sequences, int joining = -1) {
    for (int rank = 0; rank < (joining < 0 ? ranks_ : joining); ++rank) {
      if (!Join(rank, step, sequences)) return false;
    }
    return true;
  }
  bool Join(int rank, StepId step, const std::vector<StepSequenceArgs>& sequences) {
    return harness_->Begin(streams_[rank], step, sequences, ranks_)->status.ok();
  }
  // Commits `rows` rows to the first two layers of the sequence in a step without ranks. Returns
  // false if something is refused.
  bool Fill(const SequenceInfo& sequence, int rows) {
    const StreamId stream = streams_[0];
    bool ok = harness_->Begin(stream, 900, {{sequence.id, 1, 0, rows}})->status.ok();
    const auto below = harness_->AppendOnly(stream, 900, 0, 0, Rows(rows, 1));
    const auto above = harness_->AppendOnly(stream, 900, 1, 0, Rows(rows, 1));
    harness_->Run();
    ok &= below->status.ok() && above->status.ok();
    return ok && harness_->End(stream, 900)->status.ok();
  }
  // Submits one rank's slice of the step's rows from row 0 on; rank 0 brings `kv`.
  std::unique_ptr<TestRequest> Send(int rank, StepId step, int layer, const std::vector<Row>& kv) {
    const int heads = kRankHeads / ranks_;
    return harness_->Slice(streams_[rank], step, layer, 0, static_cast<int>(kv.size()),
                           rank == 0 ? kv : std::vector<Row>(), rank * heads, heads, kQueries);
  }

 private:
  const int ranks_;
  FaultyBackend* backend_ = nullptr;
  std::unique_ptr<EngineHarness> harness_;
  std::vector<StreamId> streams_;
};

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_TESTING_RANK_HARNESS_H_
