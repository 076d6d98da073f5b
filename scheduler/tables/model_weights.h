// Loads the heads of weights that workers upload, into the backend's slots of their model.
//
// Loaded heads belong to their upload until it commits; a later upload of the same head takes it
// over. A committed head accepts a repeat of the same bytes and refuses others (ALREADY_EXISTS):
// launches may read it. Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_TABLES_MODEL_WEIGHTS_H_
#define MLA_SCHEDULER_TABLES_MODEL_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/model.h"
#include "scheduler/tables/registered_model.h"

namespace mla::scheduler {

class ModelTable;

class ModelWeights final {
 public:
  // Both outlive it. The table gives slots, and room for the bytes.
  ModelWeights(kernels::AttentionBackend* backend, ModelTable* table)
      : backend_(backend), table_(table) {}

  // Returns OK if Load takes heads and bytes of these sizes.
  absl::Status CheckChunk(const Model& model, int32_t layer, int32_t head_begin, int32_t head_count,
                          std::span<const std::byte> bytes) const;
  absl::Status Load(Model& model, UploadId upload, int32_t layer, int32_t head_begin,
                    int32_t head_count, std::span<const std::byte> bytes);
  // Checks the same for one head of W_UQ or W_O. FAILED_PRECONDITION for models without PROJECTED.
  // Their weights are ModelSpec::head_bytes long.
  absl::Status CheckProjectedHeads(const Model& model, int32_t layer, int32_t head_begin,
                                   int32_t head_count) const;
  absl::Status LoadProjected(Model& model, UploadId upload, kernels::ProjectedPart part,
                             int32_t layer, int32_t head, std::span<const std::byte> weights);
  // Returns the layers in which heads are still not committed.
  std::vector<int32_t> Commit(Model& model, UploadId upload);
  // If no weights are left then, their memory and the tenant's charge for it are given back.
  void Discard(Model& model, UploadId upload);
  // Copy committed weights of one head back, bit for bit as Load and LoadProjected got them: W_UK
  // and then W_UV, or one part of PROJECTED. INVALID_ARGUMENT unless `weights` has exactly their
  // size; FAILED_PRECONDITION unless the model's weights are complete.
  absl::Status Read(const Model& model, int32_t layer, int32_t head,
                    std::span<kernels::Bf16> weights) const;
  absl::Status ReadProjected(const Model& model, kernels::ProjectedPart part, int32_t layer,
                             int32_t head, std::span<std::byte> weights) const;
  std::vector<int32_t> MissingLayers(const Model& model) const;

 private:
  absl::Status Charge(Model& model);
  // Returns true if the head is in use already with the same contents; ALREADY_EXISTS if it is with
  // others.
  static absl::StatusOr<bool> IsRepeat(const ModelContents::Head& head, uint64_t digest,
                                       int32_t layer, int32_t number);

  kernels::AttentionBackend* const backend_;
  ModelTable* const table_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_MODEL_WEIGHTS_H_
