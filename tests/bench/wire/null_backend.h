// A backend that computes nothing, so that a benchmark measures the cost of the service itself.
#ifndef MLA_TESTS_BENCH_WIRE_NULL_BACKEND_H_
#define MLA_TESTS_BENCH_WIRE_NULL_BACKEND_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attention_backend.h"

namespace mla::bench {

// Accepts every launch and completes it at once; outputs keep their previous values. Memory for
// launch workspaces is real; the KV pool is not.
class NullBackend : public kernels::AttentionBackend {
 public:
  NullBackend() {
    info_.name = "null";
    info_.description = "computes nothing";
    info_.units = 1;
  }
  const kernels::BackendInfo& Info() const override { return info_; }
  absl::Status CanRun(const kernels::AttentionDesc&) const override { return absl::OkStatus(); }
  kernels::PlanTraits Traits(const kernels::AttentionDesc&) const override { return {}; }
  int32_t ExpandedFormMinRows(const kernels::Geometry&) const override { return INT32_MAX; }
  int64_t WorkspaceSize(const kernels::BackendLimits&) const override { return 0; }
  absl::Status Configure(const kernels::BackendLimits& limits) override {
    workspace_.resize(static_cast<size_t>(limits.slot_workspace_bytes));
    return absl::OkStatus();
  }
  absl::Status Healthy() const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> AllocateHost(size_t bytes) override {
    return std::make_unique<Buffer>(bytes);
  }
  absl::Status LoadWeights(int32_t, const kernels::Geometry&, int32_t, int32_t,
                           const kernels::Bf16*, const kernels::Bf16*) override {
    return absl::OkStatus();
  }
  absl::Status FreeWeights(int32_t) override { return absl::OkStatus(); }
  kernels::SlotMemory Memory(int32_t) override { return {{}, {}, workspace_}; }
  absl::Status Submit(int32_t, const kernels::Launch&) override { return absl::OkStatus(); }
  bool Done(int32_t) override { return true; }
  absl::StatusOr<int64_t> Wait(int32_t) override { return 0; }

 private:
  class Buffer final : public kernels::HostBuffer {
   public:
    explicit Buffer(size_t bytes) : memory_(new std::byte[bytes]()), bytes_(bytes) {}
    std::span<std::byte> bytes() override { return {memory_.get(), bytes_}; }

   private:
    const std::unique_ptr<std::byte[]> memory_;
    const size_t bytes_;
  };

  kernels::BackendInfo info_;
  std::vector<std::byte> workspace_;
};

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_NULL_BACKEND_H_
