// Simulator: operators' calls: quotas, evictions, drains and their end.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/simulation/simulator/simulator.h"

namespace mla::simulation {
namespace {

using scheduler::Resource;

}  // namespace

OracleQuota Simulator::DrawQuota() {
  OracleQuota quota;
  const auto draw = [this](int low, int high) {
    return low + static_cast<int64_t>(Pick(static_cast<uint64_t>(high - low + 1)));
  };
  if (Chance(50)) quota.kv_bytes = draw(0, 40) * 512;
  if (Chance(50)) quota.sequences = draw(0, oracle_limits_.max_sequences);
  if (Chance(30)) quota.models = draw(0, 2);
  if (Chance(50)) quota.open_steps = draw(0, oracle_limits_.max_open_steps);
  if (Chance(50)) quota.queued = draw(2, queue_requests_);
  return quota;
}

scheduler::TenantQuota Simulator::QuotaOf(const OracleQuota& quota) {
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
bool Simulator::SetQuota() {
  if (!has_quotas_) return false;
  const int tenant = 1 + static_cast<int>(Pick(tenants_));
  const OracleQuota quota = Chance(30) ? OracleQuota() : DrawQuota();
  Reasons expect;
  expect.AddIf(!calls_->SetOtherQuota(TenantName(tenant)), "tenants_exhausted");
  const absl::Status status =
      engine_->tenants()->SetQuota(TenantName(tenant), QuotaOf(quota), /*reset=*/true);
  if (Foretold("SetQuota", status, expect)) oracle_->quotas[tenant] = quota;
  Trace(static_cast<uint64_t>(tenant), static_cast<uint64_t>(quota.kv_bytes));
  return true;
}

// Calls of transports and operators on the tenant table, which the engine uses, too.
bool Simulator::CallAsTenant() {
  const int64_t refusals = calls_->refusals();
  std::string violation;
  if (!calls_->Do(&violation)) return false;
  if (!violation.empty()) Fail(violation);
  counts_.refusals += calls_->refusals() - refusals;
  Trace(static_cast<uint64_t>(calls_->refusals()));
  return true;
}

bool Simulator::Evict() {
  if (Chance(50)) return EvictModel();
  OracleSequence* sequence = AnySequence(0, /*free=*/false);
  if (sequence == nullptr) return false;
  const uint64_t id = sequence->id;
  const int tenant = sequence->tenant;
  BeforeCall();
  sequence = oracle_->Find(tenant, id);
  if (sequence == nullptr) return false;  // its lease has run out
  if (OracleStep* step = oracle_->StepOf(sequence->step)) step->aborting = true;
  std::vector<scheduler::SequenceId> absent;
  const int evicted = engine_->EvictSequences({TenantName(tenant), {id}, ""}, &absent);
  CheckAnswers();
  FinishAborts();
  oracle_->ApplyRelease(id, Now());
  AfterCall();
  if (evicted != 1) Fail("EvictSequences did not find the sequence");
  Trace(id);
  return true;
}

bool Simulator::EvictModel() {
  const int tenant = 1 + static_cast<int>(Pick(tenants_));
  BeforeCall();
  const int model = AnyModel(tenant);
  if (model < 0 || Chance(70)) return false;
  std::vector<uint64_t> going;
  for (const auto& [id, sequence] : oracle_->sequences) {
    if (sequence.model != model) continue;
    going.push_back(id);
    if (OracleStep* step = oracle_->StepOf(sequence.step)) step->aborting = true;
  }
  const auto evicted = engine_->EvictModel(TenantName(tenant), oracle_->models[model].name);
  CheckAnswers();
  FinishAborts();
  for (const uint64_t id : going) oracle_->ApplyRelease(id, Now());
  oracle_->ApplyUnregister(model);
  AfterCall();
  if (!evicted.ok() || *evicted != static_cast<int>(going.size())) {
    Fail(absl::StrCat("EvictModel: ", evicted.status().ToString()));
  }
  Trace(static_cast<uint64_t>(model), going.size());
  return true;
}

bool Simulator::Drain() {
  BeforeCall();
  if (oracle_->draining) {
    engine_->CancelDrain();
  } else {
    engine_->StartDrain();
  }
  oracle_->draining = !oracle_->draining;
  AfterCall();
  Trace(oracle_->draining);
  return true;
}

// Time passed during a call, so the time at which a model was last named or released is not known.
// Leases of models therefore begin now.
void Simulator::TouchModels() {
  for (size_t i = 0; i < oracle_->models.size(); ++i) {
    const OracleModel& model = oracle_->models[i];
    if (!model.open || model.lease_ns == 0) continue;
    oracle_->PassTime(Now());
    if (!model.open) continue;
    // Commits an upload that does not exist: this names the model and changes nothing.
    const auto missing =
        engine_->CommitWeights(TenantName(model.tenant), model.name, engine_->NewUpload());
    if (!missing.ok()) Fail("a model is gone before its lease");
    oracle_->TouchModel(static_cast<int>(i), Now());
  }
}

}  // namespace mla::simulation
