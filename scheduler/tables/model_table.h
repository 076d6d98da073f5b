// The registered models, with their geometry, cache layout and the state of their weights.
//
// Ownership: the table owns the models. A ModelSpec is shared and immutable, so that transports may
// keep it. The backend holds the bytes of weights in slots that the table assigns: slot = index of
// the contents x max_layers + layer.
//
// Models of one tenant whose specs have the same weights_digest, and are equal in all but their
// names, share their contents: rows and weights are there once, and go with the last of the models.
// Tenants never share contents, even if their models are equal. Threading: owned by the engine
// role.
#ifndef MLA_SCHEDULER_TABLES_MODEL_TABLE_H_
#define MLA_SCHEDULER_TABLES_MODEL_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "kernels/attention_backend.h"
#include "scheduler/clock.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/limits.h"
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
  // [layers, parts, num_heads]: W_UK and W_UV, and for PROJECTED W_UQ and then W_O.
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
  int32_t sequences = 0;  // open sequences; Unregister requires 0
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
  // For kWindow: [layers, num_heads]; NaN: not set yet. Empty: no head has a sink. Each model has
  // its own, even if it shares contents: sequences with a window do not share rows with other
  // models.
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

class ModelTable {
 public:
  ModelTable(const Limits& limits, kernels::AttentionBackend* backend, kvcache::KvCache* cache,
             TenantTable* tenants, const Clock* clock);

  // Sets the lease of models whose client asks for none, for models that are registered from now
  // on.
  void set_default_lease_ms(int64_t lease_ms) { default_lease_ms_ = lease_ms; }

  // REQUIRES: the tenant has a row. `lease_ms` as in Engine::RegisterModel; a repeat with a lease
  // replaces the present one. If there are too many models, those unused for Limits::model_yield_ms
  // are unregistered; models of the same tenant after a fraction of that time.
  absl::StatusOr<Model*> Register(TenantKey tenant, const ModelSpec& spec, int64_t lease_ms = 0);
  // If it fails, the model stays registered, perhaps without some of its weights; a repeated call
  // goes on.
  absl::Status Unregister(TenantKey tenant, const std::string& id);
  // `on_gone`, which may be empty, is called with each model before it is removed.
  void set_on_gone(std::function<void(const Model&)> on_gone) { on_gone_ = std::move(on_gone); }
  // Starts the model's lease again, because a call has named it or a sequence of it has closed.
  void Touch(Model* model) {
    model->used_at = clock_->Now();
    if (model->lease_ns > 0) model->lease_deadline = model->used_at + model->lease_ns;
  }
  // Call NoteStream when a step of the model has begun on the stream, and StreamClosed when a
  // stream has closed.
  void NoteStream(Model* model, StreamId stream) { model->streams.insert(stream); }
  void StreamClosed(StreamId stream);
  uint64_t yielded() const { return yielded_; }  // models unregistered to make room, since start
  // Unregisters the models whose lease has run out, and returns their number.
  int32_t ExpireLeases();
  void PostponeLeases(int64_t nanos);
  // Returns when ExpireLeases should next be called; max() if no lease runs.
  MonotonicNanos NextExpiry() const;
  // Returns the tenant's model; NOT_FOUND, with a reason, if there is none.
  absl::StatusOr<Model*> Find(TenantKey tenant, const std::string& id, const char* field) const;
  // As Find, for a call that uses the model: starts its lease again.
  absl::StatusOr<Model*> Use(TenantKey tenant, const std::string& id, const char* field) {
    absl::StatusOr<Model*> model = Find(tenant, id, field);
    if (model.ok()) Touch(*model);
    return model;
  }
  ModelInfo Info(const Model& model) const;
  std::vector<Model*> OfTenant(TenantKey tenant) const;
  int32_t size() const;

  // Sets sinks of a window, [at.layer_count, at.head_count]: all of them, or none on an error.
  // Refuses what CheckSinks refuses. Also refuses to change sinks while sequences are open
  // (ALREADY_EXISTS); missing ones may be set at any time.
  absl::Status SetSinks(Model& model, SinkSlice at, std::span<const float> sinks,
                        const std::string& field);
  // Returns the layers that still miss sinks, ascending; none when sinks_complete.
  std::vector<int32_t> LayersWithoutSinks(const Model& model) const;
  // Sets the scale of every layer's rows. Refuses what CheckKvScales refuses. Also refuses to
  // change scales while sequences are open (ALREADY_EXISTS), because rows are stored with them.
  absl::Status SetScales(Model& model, std::span<const float> scales, const std::string& field);

  // Loaded heads belong to their upload until it commits; a later upload of the same head takes it
  // over. A committed head accepts a repeat of the same bytes and refuses others (ALREADY_EXISTS):
  // launches may read it. CheckChunk returns OK if LoadWeights takes heads and bytes of these
  // sizes.
  absl::Status CheckChunk(const Model& model, int32_t layer, int32_t head_begin, int32_t head_count,
                          std::span<const std::byte> bytes) const;
  absl::Status LoadWeights(Model& model, UploadId upload, int32_t layer, int32_t head_begin,
                           int32_t head_count, std::span<const std::byte> bytes);
  // As above, for one head of W_UQ or W_O. FAILED_PRECONDITION for models without PROJECTED.
  absl::Status CheckProjectedHeads(const Model& model, int32_t layer, int32_t head_begin,
                                   int32_t head_count) const;
  absl::Status LoadProjected(Model& model, UploadId upload, kernels::ProjectedPart part,
                             int32_t layer, int32_t head, std::span<const kernels::Bf16> weights);
  // Returns the layers in which heads are still not committed.
  std::vector<int32_t> CommitWeights(Model& model, UploadId upload);
  void DiscardWeights(Model& model, UploadId upload);
  std::vector<int32_t> MissingLayers(const Model& model) const;

  int32_t weights_slot(const Model& model, int32_t layer) const {
    return model.contents->index * limits_.max_layers + layer;
  }

 private:
  absl::Status AddLayouts(const ModelSpec& spec, ModelContents* contents);
  // Returns the contents of a model of the tenant that is equal except for its name, or null.
  std::shared_ptr<ModelContents> ContentsOfEqual(TenantKey tenant, const ModelSpec& spec) const;
  absl::StatusOr<std::shared_ptr<ModelContents>> MakeContents(const ModelSpec& spec,
                                                              Tenant* account);
  absl::Status RemoveContents(const Model& model);
  void NameLayout(const ModelContents& contents);
  // Returns the number of open sequences of all models that share the contents.
  int32_t SequencesOf(const ModelContents& contents) const;
  void NoteForms(const ModelSpec& spec, Model* model) const;
  absl::Status ChargeWeights(Model& model);
  // Returns true if the head is in use already with the same contents; ALREADY_EXISTS if it is with
  // others.
  static absl::StatusOr<bool> IsRepeat(const ModelContents::Head& head, uint64_t digest,
                                       int32_t layer, int32_t number);
  absl::Status Remove(Model& model);
  void SetLease(Model* model, int64_t lease_ns);
  // Takes `amount` for the tenant. If necessary, models that are not used are unregistered to make
  // room, except `taker`.
  absl::Status TakeOrYield(Tenant& account, Resource resource, int64_t amount, const char* field,
                           const Model* taker);
  // Unregisters the model that has not been used for the longest, if that is long enough: one of
  // the tenant's own, else with `any` one of another's. Returns false if no such model exists.
  bool Yield(TenantKey tenant, bool any, const Model* taker);
  absl::StatusOr<int64_t> LeaseNanos(int64_t lease_ms) const;

  const Limits limits_;
  int64_t default_lease_ms_ = limits_.model_lease_ms;
  kernels::AttentionBackend* const backend_;
  kvcache::KvCache* const cache_;
  TenantTable* const tenants_;
  const Clock* const clock_;
  std::function<void(const Model&)> on_gone_;
  uint64_t yielded_ = 0;
  std::vector<std::unique_ptr<Model>> models_;  // by index; null when free
  int32_t leased_ = 0;                          // models whose lease_ns is not 0
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_MODEL_TABLE_H_
