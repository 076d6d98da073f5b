// Keeps the registered models, with their geometry, cache layout and the state of their weights.
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

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "kernels/attention_backend.h"
#include "scheduler/clock.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"
#include "scheduler/tables/model_weights.h"
#include "scheduler/tables/registered_model.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

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
  // Undoes a Register that has made the model: unregisters it, unless another Register has named it
  // since or a sequence of it is open.
  void Withdraw(TenantKey tenant, const std::string& id);
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
  // Returns the models whose weights or sinks are complete. If several models share contents, and
  // so have the same weights, only the first is in the list.
  std::vector<HeldWeights> AllWeights() const;
  int32_t size() const;

  // Sets sinks of a window, [slice.layer_count, slice.head_count]: all of them, or none on an
  // error. Refuses what CheckSinks refuses. Also refuses to change sinks while sequences are open
  // (ALREADY_EXISTS); missing ones may be set at any time.
  absl::Status SetSinks(Model& model, SinkSlice slice, std::span<const float> sinks,
                        const std::string& field);
  // Returns the layers that still miss sinks, ascending; none when sinks_complete.
  std::vector<int32_t> LayersWithoutSinks(const Model& model) const;
  // Sets the scale of every layer's rows. Refuses what CheckKvScales refuses. Also refuses to
  // change scales while sequences are open (ALREADY_EXISTS), because rows are stored with them.
  absl::Status SetScales(Model& model, std::span<const float> scales, const std::string& field);

  // Takes `amount` for the tenant. If necessary, models that are not used are unregistered to make
  // room, except `taker`.
  absl::Status TakeOrYield(Tenant& account, Resource resource, int64_t amount, const char* field,
                           const Model* taker);
  // Frees weights of a model that has no complete ones, and gives back what the tenant is charged
  // for them.
  void GiveWeightsBack(Model& model);
  // Takes the weights that workers upload for the models.
  ModelWeights& weights() { return weights_; }
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
  absl::Status FreeWeights(const Model& model);
  absl::Status Remove(Model& model);
  void SetLease(Model* model, int64_t lease_ns);
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
  ModelWeights weights_{backend_, this};
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_MODEL_TABLE_H_
