#include "tests/simulation/simulator/operators.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/simulation/simulator/checks.h"
#include "tests/simulation/simulator/transport.h"

namespace mla::simulation {
namespace {

using scheduler::Resource;

}  // namespace

OracleQuota Operators::DrawQuota() {
  OracleQuota quota;
  const auto draw = [this](int low, int high) {
    return low + static_cast<int64_t>(w_.Pick(static_cast<uint64_t>(high - low + 1)));
  };
  if (w_.Chance(50)) quota.kv_bytes = draw(0, 40) * 512;
  if (w_.Chance(50)) quota.sequences = draw(0, w_.oracle_limits.max_sequences);
  if (w_.Chance(30)) quota.models = draw(0, 2);
  if (w_.Chance(50)) quota.open_steps = draw(0, w_.oracle_limits.max_open_steps);
  if (w_.Chance(50)) quota.queued = draw(2, w_.queue_requests);
  return quota;
}

scheduler::TenantQuota Operators::QuotaOf(const OracleQuota& quota) {
  scheduler::TenantQuota bounds;
  const auto set = [&](Resource resource, int64_t bound) {
    bounds.bounds[resource] = bound == OracleQuota::kNone ? scheduler::kUnbounded : bound;
  };
  set(Resource::kKvBytes, quota.kv_bytes);
  set(Resource::kSequences, quota.sequences);
  set(Resource::kModels, quota.models);
  set(Resource::kOpenSteps, quota.open_steps);
  set(Resource::kQueuedRequests, quota.queued);
  return bounds;
}

// Sets bounds of a tenant at run time, also below its current use.
bool Operators::SetQuota() {
  if (!w_.has_quotas) return false;
  const int tenant = 1 + static_cast<int>(w_.Pick(w_.tenants));
  const OracleQuota quota = w_.Chance(30) ? OracleQuota() : DrawQuota();
  Reasons expect;
  expect.AddIf(!w_.calls->SetOtherQuota(w_.TenantName(tenant)), "tenants_exhausted");
  const absl::Status status =
      w_.engine->tenants()->SetQuota(w_.TenantName(tenant), QuotaOf(quota), /*reset=*/true);
  if (w_.Foretold("SetQuota", status, expect)) w_.oracle->quotas[tenant] = quota;
  w_.Trace(static_cast<uint64_t>(tenant), static_cast<uint64_t>(quota.kv_bytes));
  return true;
}

// Calls of transports and operators on the tenant table, which the engine uses, too.
bool Operators::CallAsTenant() {
  const int64_t refusals = w_.calls->refusals();
  std::string violation;
  if (!w_.calls->Do(&violation)) return false;
  if (!violation.empty()) w_.Fail(violation);
  w_.counts.refusals += w_.calls->refusals() - refusals;
  w_.Trace(static_cast<uint64_t>(w_.calls->refusals()));
  return true;
}

bool Operators::Evict() {
  if (w_.Chance(50)) return EvictModel();
  OracleSequence* sequence = w_.AnySequence(0, /*free=*/false);
  if (sequence == nullptr) return false;
  const uint64_t id = sequence->id;
  const int tenant = sequence->tenant;
  w_.transport->BeforeCall();
  sequence = w_.oracle->Find(tenant, id);
  if (sequence == nullptr) return false;  // its lease has run out
  if (OracleStep* step = w_.oracle->StepOf(sequence->step)) step->aborting = true;
  std::vector<scheduler::SequenceId> absent;
  const int evicted = w_.engine->EvictSequences({w_.TenantName(tenant), {id}, ""}, &absent);
  w_.checks->CheckAnswers();
  w_.checks->FinishAborts();
  w_.oracle->ApplyRelease(id, w_.Now());
  w_.transport->AfterCall();
  if (evicted != 1) w_.Fail("EvictSequences did not find the sequence");
  w_.Trace(id);
  return true;
}

bool Operators::EvictModel() {
  const int tenant = 1 + static_cast<int>(w_.Pick(w_.tenants));
  w_.transport->BeforeCall();
  const int model = w_.AnyModel(tenant);
  if (model < 0 || w_.Chance(70)) return false;
  std::vector<uint64_t> going;
  for (const auto& [id, sequence] : w_.oracle->sequences) {
    if (sequence.model != model) continue;
    going.push_back(id);
    if (OracleStep* step = w_.oracle->StepOf(sequence.step)) step->aborting = true;
  }
  const auto evicted = w_.engine->EvictModel(w_.TenantName(tenant), w_.oracle->models[model].name);
  w_.checks->CheckAnswers();
  w_.checks->FinishAborts();
  for (const uint64_t id : going) w_.oracle->ApplyRelease(id, w_.Now());
  w_.oracle->ApplyUnregister(model);
  w_.transport->AfterCall();
  if (!evicted.ok() || *evicted != static_cast<int>(going.size())) {
    w_.Fail(absl::StrCat("EvictModel: ", evicted.status().ToString()));
  }
  w_.Trace(static_cast<uint64_t>(model), going.size());
  return true;
}

bool Operators::Drain() {
  w_.transport->BeforeCall();
  if (w_.oracle->draining) {
    w_.engine->CancelDrain();
  } else {
    w_.engine->StartDrain();
  }
  w_.oracle->draining = !w_.oracle->draining;
  w_.transport->AfterCall();
  w_.Trace(w_.oracle->draining);
  return true;
}

// Time passed during a call, so the time at which a model was last named or released is not known.
// Leases of models therefore begin now.
void Operators::TouchModels() {
  for (size_t i = 0; i < w_.oracle->models.size(); ++i) {
    const OracleModel& model = w_.oracle->models[i];
    if (!model.open || model.lease_ns == 0) continue;
    w_.oracle->PassTime(w_.Now());
    if (!model.open) continue;
    // Commits an upload that does not exist: this names the model and changes nothing.
    const auto missing =
        w_.engine->CommitWeights(w_.TenantName(model.tenant), model.name, w_.engine->NewUpload());
    if (!missing.ok()) w_.Fail("a model is gone before its lease");
    w_.oracle->TouchModel(static_cast<int>(i), w_.Now());
  }
}

}  // namespace mla::simulation
