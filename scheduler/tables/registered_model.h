// Holds one registered model: its spec, its layout in the cache, its scales and sinks, and the
// state of its weights. ModelTable owns the models.
//
// Threading: owned by the engine role, except the spec, which is immutable and shared.
#ifndef MLA_SCHEDULER_TABLES_REGISTERED_MODEL_H_
#define MLA_SCHEDULER_TABLES_REGISTERED_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "scheduler/clock.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/model.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

// Contents shared by models of one tenant that are equal except for their names: the layout of
// their rows in the cache, their scales, and their weights. Because the layouts are shared, each of
// these models finds rows that another one has cached.
struct ModelContents {
  int32_t index = -1;  // of its weight slots
  std::unique_ptr<TenantPoolAccount> pool_account;
  kvcache::GroupLayout layout;
  kvcache::LayoutId layout_id = -1;
  // For models with a window: layout of their rows; `layout` is then for entries.
  kvcache::GroupLayout window_layout;
  kvcache::LayoutId window_layout_id = -1;
  // One for each layer, if the format has such scales and they have been set; otherwise empty.
  std::vector<float> kv_scales;
  // --- Weights
  struct Head {
    // 0: the head is missing. kCommitted: it is committed. Otherwise it is loaded, and this is its
    // upload.
    UploadId upload = 0;
    uint64_t digest = 0;  // digest of its bytes, which tells a repeat from a change
  };
  static constexpr UploadId kCommitted = ~UploadId{0};
  // One Head for each layer, part and head, [layers, parts, num_heads]; the parts are W_UK and
  // W_UV, and for PROJECTED W_UQ and then W_O.
  std::vector<Head> heads;
  int32_t layer_heads = 0;  // parts x num_heads
  // Returns true if all heads of the layer are committed.
  bool HasLayer(int32_t layer) const {
    const auto first = heads.begin() + int64_t{layer} * layer_heads;
    return std::all_of(first, first + layer_heads,
                       [](const Head& head) { return head.upload == kCommitted; });
  }
  int64_t weights_bytes = 0;  // charged against Limits::weights_bytes; 0: no weights yet
  bool weights_complete = false;
};

struct Model {
  TenantKey tenant = kNoTenant;
  Tenant* account = nullptr;  // the tenant's row, which stays as long as the model
  std::shared_ptr<const ModelSpec> spec;
  std::shared_ptr<ModelContents> contents = std::make_shared<ModelContents>();
  std::shared_ptr<const std::string> name;  // the spec's id, as used in events
  const kvcache::KvPlane& rows(int32_t layer) const {
    const bool window = contents->window_layout_id >= 0;
    return (window ? contents->window_layout : contents->layout).rows(layer);
  }
  // REQUIRES that the layer has entries.
  const kvcache::KvPlane& entries(int32_t layer) const { return contents->layout.rows(layer); }
  int32_t sequences = 0;       // open sequences; Unregister requires 0
  uint64_t registrations = 0;  // calls of Register that have named it
  // Tells the model from earlier ones of its name. Random, so that a tenant does not learn how many
  // models others register.
  uint64_t instance = 0;
  // Open streams that have begun steps of the model: they belong to its workers.
  absl::flat_hash_set<StreamId> streams;
  // When a call last named it, or a sequence or stream that used it ended.
  MonotonicNanos used_at = 0;
  // The model is unregistered when it has been unused for this time and has no open sequence; 0:
  // never.
  int64_t lease_ns = 0;
  MonotonicNanos lease_deadline = 0;
  // EXPANDED takes the expanded form for requests with at least this many query rows. If the
  // backend does not offer the form, the number is larger than any launch. A backend may offer the
  // form for bf16 queries only.
  int32_t expanded_min_rows = 0;
  int32_t expanded_min_rows_f32 = 0;
  int32_t ExpandedMinRows(kernels::DType q_dtype) const {
    return q_dtype == kernels::DType::kF32 ? expanded_min_rows_f32 : expanded_min_rows;
  }
  // For kWindow: the sinks [layers, num_heads]; NaN: not set yet. Empty: no head has a sink. Each
  // model has its own, even if it shares contents: sequences with a window do not share rows with
  // other models.
  std::vector<float> sinks;
  bool sinks_complete = true;    // true if all sinks that ModelSpec::needs_sinks asks for are set
  absl::Status absorbed_f32;     // OK if ABSORBED may send fp32 queries; else the backend's error
  int32_t tile_rows = 0;         // packed rows of a full tile of the absorbed form
  int32_t min_charged_rows = 0;  // see PlanTraits
  float kv_scale(int32_t layer) const {
    const std::vector<float>& scales = contents->kv_scales;
    return scales.empty() ? 1.0f : scales[static_cast<size_t>(layer)];
  }
  // Returns true if rows may be stored: their format needs no scales, or the scales are set.
  bool scales_complete() const {
    return kernels::TraitsOf(spec->kv_format).scales != kernels::KvScales::kLayer ||
           !contents->kv_scales.empty();
  }
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_REGISTERED_MODEL_H_
