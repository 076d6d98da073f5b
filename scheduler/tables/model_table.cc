#include "scheduler/tables/model_table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "scheduler/tables/model_checks.h"

namespace mla::scheduler {
namespace {

// Returns the sinks of all layers and heads; a model without sinks keeps an empty vector.
std::vector<float> AllSinks(const Model& model) {
  if (!model.sinks.empty()) return model.sinks;
  return std::vector<float>(size_t(model.spec->layers) * model.spec->geometry.num_heads, kNoSink);
}

using kernels::AttentionDesc;
using kernels::AttentionForm;

// A tenant's own unused models make room for its next one after Limits::model_yield_ms divided by
// this. An engine that restarts under new names leaves such models.
constexpr int64_t kOwnYieldPart = 10;

}  // namespace

ModelTable::ModelTable(const Limits& limits, kernels::AttentionBackend* backend,
                       kvcache::KvCache* cache, TenantTable* tenants, const Clock* clock)
    : limits_(limits),
      backend_(backend),
      cache_(cache),
      tenants_(tenants),
      clock_(clock),
      models_(limits.max_models) {}

// Notes how the backend computes rows of the model in either form.
void ModelTable::NoteForms(const ModelSpec& spec, Model* model) const {
  // If the backend does not offer the expanded form, all rows of EXPANDED take the absorbed form
  // between their projections.
  for (const auto& [q_dtype, min_rows] :
       {std::pair(kernels::DType::kBf16, &model->expanded_min_rows),
        std::pair(kernels::DType::kF32, &model->expanded_min_rows_f32)}) {
    AttentionDesc desc = DescOf(spec, AttentionForm::kExpanded);
    desc.q_dtype = q_dtype;
    const bool offered = spec.has_expanded() && backend_->CanRun(desc).ok();
    *min_rows = offered ? backend_->ExpandedFormMinRows(spec.geometry) : limits_.launch_rows + 1;
  }
  AttentionDesc absorbed_f32 = DescOf(spec, AttentionForm::kAbsorbed);
  absorbed_f32.q_dtype = kernels::DType::kF32;
  model->absorbed_f32 = backend_->CanRun(absorbed_f32);
  const kernels::PlanTraits traits = backend_->Traits(DescOf(spec, AttentionForm::kAbsorbed));
  model->tile_rows = traits.tile_rows;
  model->min_charged_rows = traits.min_charged_rows;
}

// Adds the cache layouts of its rows and of its entries.
absl::Status ModelTable::AddLayouts(const ModelSpec& spec, ModelContents* contents) {
  const kernels::Geometry& g = spec.geometry;
  const auto uniform = [&](int32_t page_size) {
    const kernels::KvRowLayout row =
        kernels::MakeKvRowLayout(spec.kv_format, g.kv_lora_rank, g.rope_dim);
    return kvcache::MakeLayout({row.row_bytes, page_size, spec.layers, spec.kv_format,
                                spec.indexer.dim,
                                kernels::KvPageBytes(row, row.row_bytes, page_size)});
  };
  if (spec.windowed()) {
    contents->layout = kvcache::MakeEntryLayout(
        kernels::MakeKvRowLayout(spec.entry_format, g.kv_lora_rank, g.rope_dim), spec.entry_format,
        spec.page_size, spec.ratios);
  } else {
    contents->layout = uniform(spec.page_size);
  }
  absl::StatusOr<kvcache::LayoutId> layout =
      cache_->AddLayout(contents->layout, contents->pool_account.get());
  if (!layout.ok()) return layout.status();
  contents->layout_id = *layout;
  if (!spec.windowed()) return absl::OkStatus();
  contents->window_layout = uniform(spec.window_page_size());
  contents->window_layout.window = spec.window;
  layout = cache_->AddLayout(contents->window_layout, contents->pool_account.get());
  if (layout.ok()) {
    contents->window_layout_id = *layout;
    return absl::OkStatus();
  }
  const absl::Status removed = cache_->RemoveLayout(contents->layout_id);
  return removed.ok() ? layout.status() : removed;
}

std::shared_ptr<ModelContents> ModelTable::ContentsOfEqual(TenantKey tenant,
                                                           const ModelSpec& spec) const {
  if (spec.weights_digest.empty()) return nullptr;
  for (const std::unique_ptr<Model>& model : models_) {
    if (model == nullptr || model->tenant != tenant) continue;
    ModelSpec named = *model->spec;
    named.id = spec.id;
    if (named == spec) return model->contents;
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<ModelContents>> ModelTable::MakeContents(const ModelSpec& spec,
                                                                        Tenant* account) {
  auto contents = std::make_shared<ModelContents>();
  contents->pool_account = std::make_unique<TenantPoolAccount>(tenants_, account);
  if (absl::Status added = AddLayouts(spec, contents.get()); !added.ok()) {
    return MakeError(added.code(), added.message(),
                     {.field = "model.layers",
                      .got = absl::StrCat(spec.layers),
                      .limit = "layers whose page group fits into kv_cache.bytes",
                      .reason = "page_group_too_large"});
  }
  const int32_t parts = 1 + (spec.projected.present() ? kernels::kProjectedParts : 0);
  contents->layer_heads = parts * spec.geometry.num_heads;
  contents->heads.assign(size_t(spec.layers) * contents->layer_heads, ModelContents::Head());
  std::vector<bool> slots(models_.size());
  for (const std::unique_ptr<Model>& model : models_) {
    if (model != nullptr) slots[static_cast<size_t>(model->contents->index)] = true;
  }
  contents->index =
      static_cast<int32_t>(std::find(slots.begin(), slots.end(), false) - slots.begin());
  return contents;
}

absl::StatusOr<Model*> ModelTable::Register(TenantKey tenant, const ModelSpec& wanted,
                                            int64_t lease_ms) {
  ModelSpec spec = wanted;
  if (spec.page_size == 0) spec.page_size = limits_.default_page_size;
  MLA_RETURN_IF_ERROR(SettlePrecision(backend_->Info(), &spec));
  MLA_RETURN_IF_ERROR(CheckModelSpec(spec, limits_));
  // Results do not depend on how the weights are held, only the bytes do.
  if (!backend_->Info().projects_codes) spec.projected.weights = kernels::DType::kBf16;
  MLA_RETURN_IF_ERROR(SettleFp8Compute(*backend_, &spec));
  MLA_ASSIGN_OR_RETURN(const int64_t lease_ns, LeaseNanos(lease_ms));
  for (const std::unique_ptr<Model>& one : models_) {
    Model* const model = one.get();
    if (model == nullptr || model->tenant != tenant || model->spec->id != spec.id) continue;
    // The type stays as it is: a model may have come from a server that holds another one.
    spec.projected.weights = model->spec->projected.weights;
    if (*model->spec == spec) {
      if (lease_ms > 0) SetLease(model, lease_ns);
      ++model->registrations;
      Touch(model);
      return model;
    }
    return RefuseField("model", "other contents than registered",
                       absl::StrCat("equal to the registered model ", spec.id), "model_exists",
                       absl::StatusCode::kAlreadyExists);
  }
  MLA_RETURN_IF_ERROR(CheckSupported(spec, *backend_));
  const TenantRef account = tenants_->Get(tenant);
  MLA_RETURN_IF_ERROR(TakeOrYield(*account, Resource::kModels, 1, "model", nullptr));

  auto model = std::make_unique<Model>();
  model->tenant = tenant;
  model->registrations = 1;
  model->instance = RandomNumber();
  model->account = account.get();
  model->contents = ContentsOfEqual(tenant, spec);
  if (model->contents == nullptr) {
    absl::StatusOr<std::shared_ptr<ModelContents>> contents = MakeContents(spec, account.get());
    if (!contents.ok()) {
      tenants_->Return(*account, Resource::kModels, 1);
      return contents.status();
    }
    model->contents = *std::move(contents);
  }
  SetLease(model.get(), lease_ns);
  NoteForms(spec, model.get());
  model->name = std::make_shared<const std::string>(spec.id);
  if (spec.needs_sinks) {
    model->sinks_complete = false;
    model->sinks.assign(size_t(spec.layers) * spec.geometry.num_heads, std::nanf(""));
  }
  model->spec = std::make_shared<const ModelSpec>(std::move(spec));
  std::unique_ptr<Model>& place = *std::find(models_.begin(), models_.end(), nullptr);
  place = std::move(model);
  NameLayout(*place->contents);
  Touch(place.get());
  return place.get();
}

absl::Status ModelTable::Unregister(TenantKey tenant, const std::string& id) {
  MLA_ASSIGN_OR_RETURN(Model* const found, Find(tenant, id, "model_id"));
  Model& model = *found;
  if (model.sequences > 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("model ", id, " has ", model.sequences, " open sequences"),
                     {.field = "model_id",
                      .got = id,
                      .limit = "a model without open sequences",
                      .reason = "model_in_use"});
  }
  return Remove(model);
}

void ModelTable::Withdraw(TenantKey tenant, const std::string& id) {
  const absl::StatusOr<Model*> model = Find(tenant, id, "model_id");
  if (!model.ok() || (*model)->registrations > 1) return;
  Unregister(tenant, id).IgnoreError();  // it stays while sequences are open
}

absl::Status ModelTable::FreeWeights(const Model& model) {
  ModelContents& contents = *model.contents;
  const int32_t heads = contents.layer_heads;
  for (int32_t layer = 0; contents.weights_bytes > 0 && layer < model.spec->layers; ++layer) {
    const absl::Status freed = backend_->FreeWeights(weights_slot(model, layer));
    if (!freed.ok() && !absl::IsNotFound(freed)) return freed;
    const auto first = contents.heads.begin() + int64_t{layer} * heads;
    std::fill(first, first + heads, ModelContents::Head());
    contents.weights_complete = false;
  }
  return absl::OkStatus();
}

// The layout goes last: a model that stays because its weights cannot be freed must keep it.
// Otherwise its sequences would write into groups of whatever layout gets the id next.
absl::Status ModelTable::RemoveContents(const Model& model) {
  MLA_RETURN_IF_ERROR(FreeWeights(model));
  const ModelContents& contents = *model.contents;
  MLA_RETURN_IF_ERROR(cache_->RemoveLayout(contents.layout_id));
  return contents.window_layout_id < 0 ? absl::OkStatus()
                                       : cache_->RemoveLayout(contents.window_layout_id);
}

absl::Status ModelTable::Remove(Model& model) {
  const bool last = model.contents.use_count() == 1;
  const int64_t weights_bytes = last ? model.contents->weights_bytes : 0;
  MLA_RETURN_IF_ERROR(last ? RemoveContents(model) : absl::OkStatus());
  if (on_gone_) on_gone_(model);
  Tenant& account = *model.account;
  SetLease(&model, 0);
  const auto at = std::find_if(models_.begin(), models_.end(),
                               [&](const auto& other) { return other.get() == &model; });
  const std::unique_ptr<Model> gone = std::exchange(*at, nullptr);
  if (!last) NameLayout(*gone->contents);
  tenants_->Return(account, Resource::kWeightBytes, weights_bytes);
  tenants_->Return(account, Resource::kModels, 1);
  return absl::OkStatus();
}

// Events of rows without a sequence name one of the models with these contents.
void ModelTable::NameLayout(const ModelContents& contents) {
  const auto model = std::find_if(models_.begin(), models_.end(), [&](const auto& other) {
    return other != nullptr && other->contents.get() == &contents;
  });
  if (cache_->events() == nullptr) return;
  cache_->events()->SetLayout(contents.layout_id, (*model)->tenant, (*model)->account->name(),
                              (*model)->spec->id);
}

int32_t ModelTable::SequencesOf(const ModelContents& contents) const {
  int32_t sequences = 0;
  for (const std::unique_ptr<Model>& model : models_) {
    if (model != nullptr && model->contents.get() == &contents) sequences += model->sequences;
  }
  return sequences;
}

absl::StatusOr<Model*> ModelTable::Find(TenantKey tenant, const std::string& id,
                                        const char* field) const {
  for (const std::unique_ptr<Model>& model : models_) {
    if (model != nullptr && tenant != kNoTenant && model->tenant == tenant &&
        model->spec->id == id) {
      return model.get();
    }
  }
  return MakeError(absl::StatusCode::kNotFound, absl::StrCat("model ", id, " is not registered"),
                   {.field = field,
                    .got = id,
                    .limit = "a registered model of this tenant",
                    .reason = "model_not_found"});
}

ModelInfo ModelTable::Info(const Model& model) const {
  ModelInfo info;
  info.spec = *model.spec;
  info.page_group_bytes = model.contents->layout.group_bytes();
  info.page_groups_max = std::min(limits_.kv_cache_bytes / model.contents->layout.group_bytes(),
                                  kvcache::SlabPool::kMostGroups);
  const int64_t pages = std::min<int64_t>(info.page_groups_max, limits_.max_pages_per_sequence);
  info.max_sequence_rows =
      std::min<int64_t>(limits_.max_sequence_rows, pages * model.contents->layout.page_size);
  info.instance = model.instance;
  info.weights_complete = model.contents->weights_complete;
  info.scales_complete = model.scales_complete();
  info.sinks_complete = model.sinks_complete;
  info.sequences = model.sequences;
  info.lease_ms = model.lease_ns / kNanosPerMilli;
  info.lease_left_ms = info.lease_ms;
  if (model.lease_ns > 0 && model.sequences == 0) {
    info.lease_left_ms =
        std::max<int64_t>(0, model.lease_deadline - clock_->Now()) / kNanosPerMilli;
  }
  return info;
}

std::vector<Model*> ModelTable::OfTenant(TenantKey tenant) const {
  std::vector<Model*> result;
  for (const std::unique_ptr<Model>& model : models_) {
    if (model != nullptr && model->tenant == tenant) result.push_back(model.get());
  }
  return result;
}

int32_t ModelTable::size() const {
  int32_t count = 0;
  for (const std::unique_ptr<Model>& model : models_) count += model != nullptr;
  return count;
}

absl::Status ModelTable::SetSinks(Model& model, SinkSlice slice, std::span<const float> sinks,
                                  const std::string& field) {
  MLA_RETURN_IF_ERROR(CheckSinks(*model.spec, sinks, field, &slice));
  const int64_t heads = model.spec->geometry.num_heads;
  std::vector<float> next = AllSinks(model);
  bool changes = false, adds = false;
  auto from = sinks.begin();
  for (int64_t layer = slice.layer_begin; layer < slice.layer_begin + slice.layer_count; ++layer) {
    for (int64_t head = slice.head_begin; head < slice.head_begin + slice.head_count;
         ++head, ++from) {
      float& sink = next[static_cast<size_t>(layer * heads + head)];
      (std::isnan(sink) ? adds : changes) |= sink != *from;
      sink = *from;
    }
  }
  if (!changes && !adds) return absl::OkStatus();  // a launch may read the present ones
  if (changes && model.sequences > 0) {
    return RefuseField(field, "other sinks",
                       absl::StrCat("those in force, while the ", model.sequences,
                                    " sequences of the model are open"),
                       "sinks_differ", absl::StatusCode::kAlreadyExists);
  }
  model.sinks_complete =
      std::none_of(next.begin(), next.end(), [](float sink) { return std::isnan(sink); });
  // A model without sinks always has an empty vector, however it came to have none.
  const bool none =
      std::all_of(next.begin(), next.end(), [](float sink) { return sink == kNoSink; });
  model.sinks = none ? std::vector<float>() : std::move(next);
  return absl::OkStatus();
}

std::vector<int32_t> ModelTable::LayersWithoutSinks(const Model& model) const {
  std::vector<int32_t> missing;
  const int64_t heads = model.spec->geometry.num_heads;
  for (int32_t layer = 0; layer < model.spec->layers && !model.sinks_complete; ++layer) {
    const auto first = model.sinks.begin() + layer * heads;
    if (std::any_of(first, first + heads, [](float sink) { return std::isnan(sink); })) {
      missing.push_back(layer);
    }
  }
  return missing;
}

absl::Status ModelTable::SetScales(Model& model, std::span<const float> scales,
                                   const std::string& field) {
  MLA_RETURN_IF_ERROR(CheckKvScales(*model.spec, scales, field));
  if (std::equal(scales.begin(), scales.end(), model.contents->kv_scales.begin(),
                 model.contents->kv_scales.end())) {
    return absl::OkStatus();
  }
  const int32_t sequences = SequencesOf(*model.contents);
  if (!model.contents->kv_scales.empty() && sequences > 0) {
    return RefuseField(
        field, "other scales than those in use",
        absl::StrCat("equal to them while the ", sequences, " sequences of the model are open"),
        "scales_differ", absl::StatusCode::kAlreadyExists);
  }
  model.contents->kv_scales.assign(scales.begin(), scales.end());
  cache_->DropCached(model.contents->layout_id);  // rows stored under other scales
  return absl::OkStatus();
}

void ModelTable::GiveWeightsBack(Model& model) {
  ModelContents& contents = *model.contents;
  // Weights that cannot be freed stay charged; they go with the model.
  if (contents.weights_bytes == 0 || !FreeWeights(model).ok()) return;
  tenants_->Return(*model.account, Resource::kWeightBytes, contents.weights_bytes);
  contents.weights_bytes = 0;
}

std::vector<HeldWeights> ModelTable::AllWeights() const {
  std::vector<HeldWeights> all;
  std::vector<const ModelContents*> seen;
  for (const std::unique_ptr<Model>& model : models_) {
    if (model == nullptr) continue;
    if (model->sinks_complete && (model->spec->needs_sinks || !model->sinks.empty())) {
      all.push_back(
          {model->account->name(), model->spec, model->contents->kv_scales, AllSinks(*model)});
    }
    if (!model->contents->weights_complete) continue;
    if (std::find(seen.begin(), seen.end(), model->contents.get()) != seen.end()) continue;
    seen.push_back(model->contents.get());
    all.push_back({model->account->name(), model->spec, model->contents->kv_scales, {}});
  }
  return all;
}

// ------------------------------------------------------------------------------------------ Leases

absl::StatusOr<int64_t> ModelTable::LeaseNanos(int64_t lease_ms) const {
  MLA_RETURN_IF_ERROR(CheckRange("lease_ms", lease_ms, 0, limits_.max_lease_ms));
  return (lease_ms == 0 ? default_lease_ms_ : lease_ms) * kNanosPerMilli;
}

void ModelTable::SetLease(Model* model, int64_t lease_ns) {
  leased_ += static_cast<int32_t>(lease_ns > 0) - static_cast<int32_t>(model->lease_ns > 0);
  model->lease_ns = lease_ns;
}

int32_t ModelTable::ExpireLeases() {
  int32_t expired = 0;
  const MonotonicNanos now = clock_->Now();
  for (const std::unique_ptr<Model>& model : models_) {
    if (model == nullptr || model->lease_ns == 0 || model->sequences > 0) continue;
    if (now < model->lease_deadline) continue;
    if (Remove(*model).ok()) {
      ++expired;
    } else {
      Touch(model.get());  // tried again after another lease
    }
  }
  return expired;
}

void ModelTable::PostponeLeases(int64_t nanos) {
  for (const std::unique_ptr<Model>& model : models_) {
    if (model == nullptr) continue;
    model->used_at += nanos;
    if (model->lease_ns > 0) model->lease_deadline += nanos;
  }
}

MonotonicNanos ModelTable::NextExpiry() const {
  MonotonicNanos next = std::numeric_limits<MonotonicNanos>::max();
  if (leased_ == 0) return next;
  for (const std::unique_ptr<Model>& model : models_) {
    if (model == nullptr || model->lease_ns == 0 || model->sequences > 0) continue;
    next = std::min(next, model->lease_deadline);
  }
  return next;
}

absl::Status ModelTable::TakeOrYield(Tenant& account, Resource resource, int64_t amount,
                                     const char* field, const Model* taker) {
  absl::Status status = tenants_->Take(account, resource, amount, field);
  while (!status.ok() &&
         Yield(account.key(), DetailOf(status).bound_of == BoundOwner::kServer, taker)) {
    status = tenants_->Take(account, resource, amount, field);
  }
  return status;
}

bool ModelTable::Yield(TenantKey tenant, bool any, const Model* taker) {
  if (limits_.model_yield_ms == 0) return false;
  const int64_t enough = limits_.model_yield_ms * kNanosPerMilli;
  const MonotonicNanos now = clock_->Now();
  Model* longest = nullptr;
  for (const std::unique_ptr<Model>& one : models_) {
    Model* const model = one.get();
    if (model == nullptr || model == taker || model->sequences > 0 || !model->streams.empty()) {
      continue;
    }
    const bool own = model->tenant == tenant;
    if (now - model->used_at < (own ? enough / kOwnYieldPart : enough) || (!own && !any)) continue;
    const bool owns = longest != nullptr && longest->tenant == tenant;
    if (longest == nullptr || (own && !owns) ||
        (own == owns && model->used_at < longest->used_at)) {
      longest = model;
    }
  }
  if (longest == nullptr) return false;
  if (!Remove(*longest).ok()) {
    Touch(longest);  // tried again later
    return Yield(tenant, any, taker);
  }
  ++yielded_;
  return true;
}

void ModelTable::StreamClosed(StreamId stream) {
  for (const std::unique_ptr<Model>& model : models_) {
    // Ending a stream is not a call: the model's lease goes on.
    if (model != nullptr && model->streams.erase(stream) > 0) model->used_at = clock_->Now();
  }
}

}  // namespace mla::scheduler
