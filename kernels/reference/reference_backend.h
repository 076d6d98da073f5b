// Implements the oracle as an AttentionBackend: plain arithmetic (reference_attention.h) on the
// thread that submits, which ignores the plan. A launch is computed before Start returns. Results
// are bit-identical for a request alone and in any batch. It is never optimised: use it to check
// other backends and to debug, not to serve.
#ifndef MLA_KERNELS_REFERENCE_REFERENCE_BACKEND_H_
#define MLA_KERNELS_REFERENCE_REFERENCE_BACKEND_H_

#include <memory>

#include "absl/status/status.h"
#include "kernels/backend_registry.h"
#include "kernels/host_memory/host_backend.h"
#include "kernels/reference/reference_attention.h"

namespace mla::kernels {

class ReferenceBackend final : public HostBackend {
 public:
  ReferenceBackend();

  const BackendInfo& Info() const override { return info_; }
  PlanTraits Traits(const AttentionDesc& desc) const override;
  int32_t ExpandedFormMinRows(const Geometry& geometry) const override;

 private:
  int64_t OwnWorkspaceSize(const BackendLimits&) const override { return 0; }
  absl::Status ConfigureOwn(const BackendLimits&) override { return absl::OkStatus(); }
  int64_t PackedWeightBytes(const Geometry& geometry, int32_t heads) const override;
  void PackWeights(const Geometry& geometry, int32_t heads, const Bf16* w_uk, const Bf16* w_uv,
                   std::byte* packed) const override;
  void UnpackWeights(const Geometry& geometry, const std::byte* packed, Bf16* w_uk,
                     Bf16* w_uv) const override;
  int64_t PackedProjectedBytes(const Geometry& geometry,
                               const ProjectedShape& shape) const override;
  void PackProjected(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                     int32_t head, const void* weights, std::byte* packed) const override;
  void UnpackProjected(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                       int32_t head, const std::byte* packed, void* weights) const override;
  void Start(int32_t slot, const Launch& launch) override;
  bool Finished(int32_t) override { return true; }
  absl::StatusOr<int64_t> Finish(int32_t slot) override;

  ReferenceWeights WeightsOf(int32_t slot) const;
  void Project(const Projection& projection, bool absorb) const;
  void ProjectRows(const RowProjection& projection, ProjectedPart part) const;
  void Attend(const AttentionParams& params, const PoolView& pool);

  BackendInfo info_;
  ReferenceScratch scratch_;
  std::vector<int64_t> nanoseconds_ = std::vector<int64_t>(64, 0);
};

// Adds the row "reference" with the lowest rank.
absl::Status RegisterReference(BackendRegistry& registry);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_REFERENCE_REFERENCE_BACKEND_H_
