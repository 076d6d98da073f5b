// A backend that checks every page into which a launch stores rows, after the launch, and launches
// that name the same bytes twice. It also overwrites what launches leave in their workspaces.
#ifndef MLA_TESTS_INTEGRATION_TAINT_WATCHING_BACKEND_H_
#define MLA_TESTS_INTEGRATION_TAINT_WATCHING_BACKEND_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention_backend.h"

namespace mla::integration {

// Functions are called on the thread that has the engine's role.
struct WatchOptions {
  std::function<void(std::span<const uint16_t>)> look;  // gets the words of a page at one layer
  std::function<void(const std::string&)> clash;        // gets a description of bytes that a launch
                                                        // names twice
  bool zeroes = true;                                   // false: launches zero nothing
  std::chrono::microseconds takes_most{
      0};  // the longest extra time of a launch, so that calls gather
};

class WatchingBackend final : public kernels::AttentionBackend {
 public:
  WatchingBackend(std::unique_ptr<kernels::AttentionBackend> inner, WatchOptions options)
      : inner_(std::move(inner)), options_(std::move(options)) {}

  const kernels::BackendInfo& Info() const override { return inner_->Info(); }
  absl::Status CanRun(const kernels::AttentionDesc& d) const override { return inner_->CanRun(d); }
  kernels::PlanTraits Traits(const kernels::AttentionDesc& d) const override {
    return inner_->Traits(d);
  }
  int32_t ExpandedFormMinRows(const kernels::Geometry& g) const override {
    return inner_->ExpandedFormMinRows(g);
  }
  int64_t WorkspaceSize(const kernels::BackendLimits& l) const override {
    return inner_->WorkspaceSize(l);
  }
  absl::Status Configure(const kernels::BackendLimits& l) override {
    slots_.resize(static_cast<size_t>(l.launch_slots));
    return inner_->Configure(l);
  }
  absl::Status Healthy() const override { return inner_->Healthy(); }
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> AllocateHost(size_t bytes) override {
    return inner_->AllocateHost(bytes);
  }
  absl::Status LoadWeights(int32_t slot, const kernels::Geometry& g, int32_t begin, int32_t end,
                           const kernels::Bf16* uk, const kernels::Bf16* uv) override {
    return inner_->LoadWeights(slot, g, begin, end, uk, uv);
  }
  absl::Status LoadProjected(int32_t slot, const kernels::Geometry& g,
                             const kernels::ProjectedShape& shape, kernels::ProjectedPart part,
                             int32_t head, const void* weights) override {
    return inner_->LoadProjected(slot, g, shape, part, head, weights);
  }
  absl::Status ReadWeights(int32_t slot, const kernels::Geometry& g, int32_t head,
                           kernels::Bf16* uk, kernels::Bf16* uv) override {
    return inner_->ReadWeights(slot, g, head, uk, uv);
  }
  absl::Status ReadProjected(int32_t slot, const kernels::Geometry& g,
                             const kernels::ProjectedShape& shape, kernels::ProjectedPart part,
                             int32_t head, void* weights) override {
    return inner_->ReadProjected(slot, g, shape, part, head, weights);
  }
  absl::Status FreeWeights(int32_t slot) override { return inner_->FreeWeights(slot); }
  kernels::SlotMemory Memory(int32_t slot) override { return inner_->Memory(slot); }
  absl::Status Submit(int32_t slot, const kernels::Launch& launch) override;
  bool Done(int32_t slot) override { return inner_->Done(slot); }
  absl::StatusOr<int64_t> Wait(int32_t slot) override;

 private:
  struct Slot {
    kernels::Launch launch;  // with the added reads
    std::vector<kernels::PageTransfer> reads;
    std::vector<kernels::PageRange> pages;
    std::vector<uint16_t> words;
    size_t own_reads = 0;  // the launch's own reads, which come first
  };
  void AddReads(const kernels::AppendRecord& record, Slot* slot) const;

  const std::unique_ptr<kernels::AttentionBackend> inner_;
  const WatchOptions options_;
  uint32_t launches_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_TAINT_WATCHING_BACKEND_H_
