// ModelTable: leases of models, and how unused models make room.
#include <algorithm>
#include <limits>
#include <memory>

#include "base/error.h"
#include "base/status_macros.h"
#include "scheduler/tables/model_table.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kNanosPerMilli = 1'000'000;
// A tenant's own unused models make room for its next one after Limits::model_yield_ms divided by
// this. An engine that restarts under new names leaves such models.
constexpr int64_t kOwnYieldPart = 10;

}  // namespace

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
