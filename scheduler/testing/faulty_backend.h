// A decorator that makes a backend fail on command, so that tests can see how the engine answers
// device faults. It also counts the work of launches.
#ifndef MLA_SCHEDULER_TESTING_FAULTY_BACKEND_H_
#define MLA_SCHEDULER_TESTING_FAULTY_BACKEND_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "kernels/attention_backend.h"

namespace mla::scheduler::testing {

enum class FaultPoint {
  kNone,
  kSubmit,           // of any launch
  kSubmitPages,      // of a launch with page work
  kSubmitAppends,    // of a launch that appends or compares KV rows
  kSubmitAttention,  // of a launch that computes
  kWait,
  kReadWeights,
  kFreeWeights
};

class FaultyBackend final : public kernels::AttentionBackend {
 public:
  explicit FaultyBackend(std::unique_ptr<kernels::AttentionBackend> inner)
      : inner_(std::move(inner)) {}

  // Makes one call at this point fail: the next one if `after` is 0, else the one after `after`
  // others.
  void FailAt(FaultPoint point, int after = 0) {
    point_ = point;
    after_ = after;
  }
  bool armed() const { return point_ != FaultPoint::kNone; }  // the call has not come yet
  // `fn` is called for each head whose weights are loaded, with the engine role held.
  void OnLoadWeights(std::function<void(int32_t head)> fn) { on_load_weights_ = std::move(fn); }
  // `fn` is called for each head whose weights are read, with the engine role held.
  void OnReadWeights(std::function<void(int32_t head)> fn) { on_read_weights_ = std::move(fn); }
  // `fn` is called with the words of each launch that waits for some.
  void OnGate(std::function<void(std::span<const kernels::WordValue>)> fn) {
    on_gate_ = std::move(fn);
  }
  // Return totals of all launches: KV rows appended or compared, and records of attention with
  // their heads.
  int64_t appended_rows() const { return appended_rows_; }
  int64_t compared_rows() const { return compared_rows_; }
  int64_t reads() const { return reads_; }  // launches that read pages
  int64_t attended_records() const { return attended_records_; }
  int64_t attended_heads() const { return attended_heads_; }
  void SetAbsorbedOnly() { absorbed_only_ = true; }
  // Offers the expanded form only for bf16 queries, of at least kExpandedRows rows.
  static constexpr int32_t kExpandedRows = 4;
  void SetExpandedBf16Only() { expanded_bf16_only_ = true; }
  // Makes slices of this many packed rows fill the backend's tiles, so that none are fused.
  void SetTileRows(int32_t rows) { tile_rows_ = rows; }
  // The following three may be called from other threads. They say that the device is lost, or hold
  // launches until ReleaseLaunches.
  void SetUnhealthy() { unhealthy_ = true; }
  void HoldLaunches() { held_ = true; }
  void ReleaseLaunches() {
    held_ = false;
    held_.notify_all();
  }
  bool holds_launch() const { return holds_launch_; }  // a launch is held now
  // Makes a held launch count as a call that never returns.
  void SetStuck() { stuck_ = true; }

  // Makes the backend look like a device with its own memory that takes two launches at a time.
  void SetTwoSlots() {
    two_slots_ = inner_->Info();
    two_slots_.unified_memory = false;
    has_two_slots_ = true;
  }

  // Does this, too, and makes launches wait for words. A launch is late if its word has not been
  // reached when it ends.
  void SetWaitsForWords() {
    SetTwoSlots();
    two_slots_.waits_for_words = true;
  }

  // Makes a launch read its word and its tensors only when it ends; a late launch writes none. Host
  // memory must stay until then, as with any device.
  void SetComputesAtEnd() { computes_at_end_ = true; }
  // Makes launches late whose words have not been reached by now; the engine learns it when they
  // end.
  void EndGates() {
    for (Staging& staging : staging_) {
      staging.late = !staging.Reached();
    }
  }

  const kernels::BackendInfo& Info() const override {
    return has_two_slots_ ? two_slots_ : inner_->Info();
  }
  absl::Status CanRun(const kernels::AttentionDesc& d) const override {
    if (absorbed_only_ && d.form == kernels::AttentionForm::kExpanded) {
      return absl::UnimplementedError("supported: absorbed form");
    }
    if (expanded_bf16_only_ && d.form == kernels::AttentionForm::kExpanded &&
        d.q_dtype != kernels::DType::kBf16) {
      return absl::UnimplementedError("supported: bf16 queries");
    }
    return inner_->CanRun(d);
  }
  kernels::PlanTraits Traits(const kernels::AttentionDesc& d) const override {
    kernels::PlanTraits traits = inner_->Traits(d);
    if (tile_rows_ > 0) traits.tile_rows = tile_rows_;
    return traits;
  }
  int32_t ExpandedFormMinRows(const kernels::Geometry& g) const override {
    return expanded_bf16_only_ ? kExpandedRows : inner_->ExpandedFormMinRows(g);
  }
  int64_t WorkspaceSize(const kernels::BackendLimits& l) const override {
    return inner_->WorkspaceSize(l);
  }
  absl::Status Configure(const kernels::BackendLimits& l) override {
    limits_ = l;
    return inner_->Configure(l);
  }
  absl::Status Healthy() const override {
    return unhealthy_ ? absl::InternalError("the device is lost") : inner_->Healthy();
  }
  std::string StuckCall() const override {
    return stuck_ && holds_launch_ ? "a held launch has not returned" : inner_->StuckCall();
  }
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> AllocateHost(size_t bytes) override {
    return inner_->AllocateHost(bytes);
  }
  absl::Status LoadWeights(int32_t slot, const kernels::Geometry& g, int32_t begin, int32_t end,
                           const kernels::Bf16* uk, const kernels::Bf16* uv) override {
    if (on_load_weights_) on_load_weights_(begin);
    return inner_->LoadWeights(slot, g, begin, end, uk, uv);
  }
  absl::Status LoadProjected(int32_t slot, const kernels::Geometry& g,
                             const kernels::ProjectedShape& shape, kernels::ProjectedPart part,
                             int32_t head, const void* weights) override {
    return inner_->LoadProjected(slot, g, shape, part, head, weights);
  }
  absl::Status ReadWeights(int32_t slot, const kernels::Geometry& g, int32_t head,
                           kernels::Bf16* uk, kernels::Bf16* uv) override {
    MLA_RETURN_IF_ERROR(At(FaultPoint::kReadWeights));
    if (on_read_weights_) on_read_weights_(head);
    return inner_->ReadWeights(slot, g, head, uk, uv);
  }
  absl::Status ReadProjected(int32_t slot, const kernels::Geometry& g,
                             const kernels::ProjectedShape& shape, kernels::ProjectedPart part,
                             int32_t head, void* weights) override {
    MLA_RETURN_IF_ERROR(At(FaultPoint::kReadWeights));
    return inner_->ReadProjected(slot, g, shape, part, head, weights);
  }
  absl::Status FreeWeights(int32_t slot) override {
    MLA_RETURN_IF_ERROR(At(FaultPoint::kFreeWeights));
    return inner_->FreeWeights(slot);
  }
  kernels::SlotMemory Memory(int32_t slot) override {
    kernels::SlotMemory memory = inner_->Memory(slot);
    if (!has_two_slots_) return memory;
    if (staging_.size() <= static_cast<size_t>(slot))
      staging_.resize(static_cast<size_t>(slot) + 1);
    Staging& staging = staging_[static_cast<size_t>(slot)];
    staging.in.resize(static_cast<size_t>(limits_.staging_in_bytes));
    staging.out.resize(static_cast<size_t>(limits_.staging_out_bytes));
    return {staging.in, staging.out, memory.workspace};
  }
  absl::Status Submit(int32_t slot, const kernels::Launch& launch) override {
    absl::Status s = At(FaultPoint::kSubmit);
    if (s.ok() && !launch.pages.empty()) s = At(FaultPoint::kSubmitPages);
    reads_ += !launch.page_reads.empty();
    if (s.ok() && !launch.appends.empty()) s = At(FaultPoint::kSubmitAppends);
    const auto forms = {&launch.absorbed, &launch.expanded};
    for (const kernels::AttentionParams* form : forms) {
      if (s.ok() && !form->segments.empty()) s = At(FaultPoint::kSubmitAttention);
    }
    if (!s.ok()) return s;
    for (const kernels::AppendRecord& record : launch.appends) {
      (record.differs == nullptr ? appended_rows_ : compared_rows_) += record.rows;
    }
    for (const kernels::AttentionParams* form : forms) {
      for (const kernels::SegmentRecord& record : form->segments) {
        ++attended_records_;
        attended_heads_ += record.num_heads;
      }
    }
    if (!has_two_slots_) return inner_->Submit(slot, launch);
    Staging& staging = staging_[static_cast<size_t>(slot)];
    staging.gate_ns = launch.gate.limit_ns;
    staging.words.clear();
    if (launch.gate.ready.word != nullptr) staging.words.push_back(launch.gate.ready);
    staging.words.insert(staging.words.end(), launch.gate.others.begin(), launch.gate.others.end());
    if (on_gate_ && !staging.words.empty()) on_gate_(staging.words);
    staging.late = false;
    staging.signals = launch.signals;
    staging.launch = &launch;
    if (computes_at_end_) return absl::OkStatus();
    return inner_->Submit(slot, launch);
  }
  bool InPlace(const void*, int64_t) const override { return two_slots_.waits_for_words; }
  bool WasLate(int32_t slot) const override {
    return has_two_slots_ && staging_[static_cast<size_t>(slot)].late;
  }
  int64_t GateNanos(int32_t slot) const override {
    return WasLate(slot) ? staging_[static_cast<size_t>(slot)].gate_ns : 0;
  }
  bool Done(int32_t slot) override {
    if (has_two_slots_ && held_) return false;
    if (!computes_at_end_) return inner_->Done(slot);
    const Staging& staging = staging_[static_cast<size_t>(slot)];
    return staging.late || staging.Reached();
  }
  absl::StatusOr<int64_t> Wait(int32_t slot) override {
    holds_launch_ = held_.load();
    held_.wait(true);
    holds_launch_ = false;
    if (two_slots_.waits_for_words) {
      Staging& staging = staging_[static_cast<size_t>(slot)];
      staging.late = staging.late || !staging.Reached();
    }
    absl::StatusOr<int64_t> waited = computes_at_end_ ? Compute(slot) : inner_->Wait(slot);
    MLA_RETURN_IF_ERROR(At(FaultPoint::kWait));
    if (!two_slots_.waits_for_words) return waited;
    const Staging& staging = staging_[static_cast<size_t>(slot)];
    for (const kernels::WordValue& signal : staging.signals) {
      if (!staging.late) signal.Store();
    }
    return waited;
  }

 private:
  // Computes the submitted launch, without the parts that are skipped if its tensors are late.
  absl::StatusOr<int64_t> Compute(int32_t slot) {
    const Staging& staging = staging_[static_cast<size_t>(slot)];
    kernels::Launch launch = *staging.launch;
    if (staging.late) {
      launch.inputs = {};
      launch.outputs = {};
      launch.appends = {};
      launch.absorb = launch.project = {};
      launch.absorbed = launch.expanded = {};
    }
    absl::Status s = inner_->Submit(slot, launch);
    return s.ok() ? inner_->Wait(slot) : s;
  }

  absl::Status At(FaultPoint point) {
    if (point != point_ || after_-- > 0) return absl::OkStatus();
    point_ = FaultPoint::kNone;
    return absl::InternalError("a fault was injected");
  }

  const std::unique_ptr<kernels::AttentionBackend> inner_;
  FaultPoint point_ = FaultPoint::kNone;
  int after_ = 0;
  kernels::BackendInfo two_slots_;
  bool has_two_slots_ = false;
  kernels::BackendLimits limits_;
  struct Staging {
    std::vector<std::byte> in, out;
    int64_t gate_ns = 0;
    std::vector<kernels::WordValue> words;  // of the gate
    std::span<const kernels::WordValue> signals;
    const kernels::Launch* launch = nullptr;
    bool late = false;
    bool Reached() const {
      return std::all_of(words.begin(), words.end(),
                         [](const kernels::WordValue& word) { return word.Reached(); });
    }
  };
  std::vector<Staging> staging_;  // by slot
  std::function<void(int32_t)> on_load_weights_, on_read_weights_;
  std::function<void(std::span<const kernels::WordValue>)> on_gate_;
  bool computes_at_end_ = false;
  int32_t tile_rows_ = 0;
  bool absorbed_only_ = false;
  bool expanded_bf16_only_ = false;
  int64_t appended_rows_ = 0;
  int64_t compared_rows_ = 0, reads_ = 0;
  int64_t attended_records_ = 0;
  int64_t attended_heads_ = 0;
  std::atomic<bool> unhealthy_{false}, held_{false}, holds_launch_{false}, stuck_{false};
};

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_TESTING_FAULTY_BACKEND_H_
