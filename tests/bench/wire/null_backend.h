// A backend that does nothing, so that a benchmark sees what the service itself costs.
#ifndef MLA_TESTS_BENCH_WIRE_NULL_BACKEND_H_
#define MLA_TESTS_BENCH_WIRE_NULL_BACKEND_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention_backend.h"

namespace mla::bench {

// Accepts every launch and completes it at once; outputs keep whatever they held. Memory for page
// tables and launch workspaces is real, because the engine writes there; the KV pool is not.
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
    tables_.resize(static_cast<size_t>(limits.page_table_entries));
    workspace_.resize(static_cast<size_t>(limits.slot_workspace_bytes + 64));
    return absl::OkStatus();
  }
  absl::Status Healthy() const override { return absl::OkStatus(); }
  std::span<uint32_t> PageTables() override { return tables_; }
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> AllocateHost(size_t bytes) override {
    return std::make_unique<Buffer>(bytes);
  }
  absl::Status LoadWeights(int32_t, const kernels::Geometry&, int32_t, int32_t,
                           const kernels::Bf16*, const kernels::Bf16*) override {
    return absl::OkStatus();
  }
  absl::Status FreeWeights(int32_t) override { return absl::OkStatus(); }
  absl::Status ReadKv(const kernels::AppendRecord&, kernels::Bf16*) override {
    return absl::OkStatus();
  }
  absl::Status BeginLaunch(int32_t) override {
    used_ = 0;
    return absl::OkStatus();
  }
  absl::StatusOr<const void*> StageInput(int32_t, const void* host, int64_t) override {
    return host;
  }
  absl::StatusOr<void*> StageOutput(int32_t, void* host, int64_t) override { return host; }
  absl::StatusOr<const void*> StageInputParts(int32_t slot, int32_t rows,
                                              std::span<const kernels::InputPart> parts) override {
    int64_t bytes = 0;
    for (const kernels::InputPart& part : parts) bytes += rows * part.row_bytes;
    return SlotWorkspace(slot, bytes);
  }
  absl::StatusOr<void*> StageOutputParts(int32_t slot, int32_t rows,
                                         std::span<const kernels::OutputPart> parts) override {
    int64_t bytes = 0;
    for (const kernels::OutputPart& part : parts) bytes += rows * part.row_bytes;
    return SlotWorkspace(slot, bytes);
  }
  absl::StatusOr<void*> SlotWorkspace(int32_t, int64_t bytes) override {
    void* const at = workspace_.data() + used_;
    used_ += (bytes + 63) / 64 * 64;
    if (used_ > static_cast<int64_t>(workspace_.size())) {
      return absl::ResourceExhaustedError("slot workspace");
    }
    return at;
  }
  absl::Status WritePages(int32_t, std::span<const kernels::PageRange>) override {
    return absl::OkStatus();
  }
  absl::Status PublishPageTable(int32_t, std::span<const kernels::TableRange>) override {
    return absl::OkStatus();
  }
  absl::Status AppendKv(int32_t, std::span<const kernels::AppendRecord>) override {
    return absl::OkStatus();
  }
  absl::Status Absorb(int32_t, const kernels::Geometry&, kernels::DType, kernels::DType,
                      std::span<const kernels::ProjectionRecord>) override {
    return absl::OkStatus();
  }
  absl::Status Run(int32_t, const kernels::AttentionParams&) override { return absl::OkStatus(); }
  absl::Status Combine(int32_t, const kernels::AttentionParams&) override {
    return absl::OkStatus();
  }
  absl::Status Project(int32_t, const kernels::Geometry&, kernels::DType, kernels::DType,
                       std::span<const kernels::ProjectionRecord>) override {
    return absl::OkStatus();
  }
  absl::Status Submit(int32_t) override { return absl::OkStatus(); }
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
  std::vector<uint32_t> tables_;
  std::vector<std::byte> workspace_;
  int64_t used_ = 0;
};

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_NULL_BACKEND_H_
