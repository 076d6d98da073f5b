// The engine's state under bounds by tenant: how much one tenant may hold, what operators may
// evict, and how models are unregistered.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/engine_fixture.h"
#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using testing::FaultPoint;
using testing::FaultyBackend;
using testing::Rows;
using testing::TestRequest;

struct Quota {
  Resource resource;
  int64_t bound;
};

std::unique_ptr<EngineHarness> HarnessWith(const std::vector<Quota>& quotas,
                                           Limits limits = testing::TinyLimits()) {
  testing::HarnessOptions options{limits, testing::TinyModel(), nullptr, nullptr};
  for (const Quota& quota : quotas) options.tenants.default_bounds[quota.resource] = quota.bound;
  return std::make_unique<EngineHarness>(std::move(options));
}

absl::StatusOr<Model*> RegisterFor(EngineHarness& h, const std::string& tenant,
                                   const ModelSpec& spec, int64_t lease_ms = 0) {
  const TenantRef row = *h.core().tenants().Enter(tenant);
  return h.core().models().Register(row->key(), spec, lease_ms);
}

absl::StatusOr<SequenceInfo> OpenFor(EngineHarness& h, const std::string& tenant,
                                     const std::string& model) {
  OpenArgs args;
  args.tenant = tenant;
  args.model_id = model;
  args.lease_ms = 1000000;
  return h.core().sequences().Open(args);
}

void ExpectTenantBound(const ErrorDetail& detail, const char* reason, int64_t bound) {
  EXPECT_EQ(detail.reason, reason);
  EXPECT_EQ(detail.bound_of, BoundOwner::kTenant);
  EXPECT_EQ(detail.bound, bound);
  EXPECT_GT(detail.retry_after_ms, 0);
}

TEST(EngineTenantsTest, OneTenantCannotHoldAllSequences) {
  const auto h = HarnessWith({{Resource::kSequences, 3}});
  for (int i = 0; i < 3; ++i) h->Open();
  absl::Status refused = OpenFor(*h, h->tenant(), h->model().id).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  ExpectTenantBound(DetailOf(refused), "sequences_exhausted", 3);
  const SequenceInfo parent = h->core().sequences().Get({h->tenant(), {}, ""}).sequences[0];
  ForkArgs fork;
  fork.tenant = h->tenant();
  fork.parent = parent.id;
  fork.expected_epoch = parent.epoch;
  refused = h->core().sequences().Fork(fork).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  ExpectTenantBound(DetailOf(refused), "sequences_exhausted", 3);
  ASSERT_TRUE(RegisterFor(*h, "b", h->model()).ok());
  EXPECT_TRUE(OpenFor(*h, "b", h->model().id).ok());
  std::vector<SequenceId> missing;
  h->core().sequences().Release(h->tenant(), std::vector{parent.id}, &missing);
  EXPECT_TRUE(OpenFor(*h, h->tenant(), h->model().id).ok()) << "what is released is free";
}

TEST(EngineTenantsTest, OneTenantCannotHoldAllModelsOrWeights) {
  const int64_t weights = 2 * 2 * 8 * (6 + 5) * 2;
  const auto h = HarnessWith({{Resource::kModels, 2}, {Resource::kWeightBytes, weights}});
  ModelSpec spec = h->model();
  spec.id = "second";
  Model* const second = *RegisterFor(*h, h->tenant(), spec);
  spec.id = "third";
  absl::Status refused = RegisterFor(*h, h->tenant(), spec).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(DetailOf(refused).reason, "models_exhausted");
  const std::vector<std::byte> head(8 * (6 + 5) * 2, std::byte{3});
  ModelTable& models = h->core().models();
  ASSERT_TRUE(models.weights().Load(*second, 1, 0, 0, 1, head).ok());
  Model* const first = *models.Find(h->core().FindTenant(h->tenant()), h->model().id, "model_id");
  refused = models.weights().Load(*first, 2, 0, 0, 1, head);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  ExpectTenantBound(DetailOf(refused), "weights_exhausted", weights);
}

TEST(EngineTenantsTest, OneTenantCannotHoldAllOpenSteps) {
  const auto h = HarnessWith({{Resource::kOpenSteps, 2}});
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  std::vector<SequenceInfo> own;
  for (int i = 0; i < 3; ++i) own.push_back(h->Open());
  for (StepId step : {1, 2}) {
    ASSERT_TRUE(h->Begin(stream, step, {{own[step].id, 1, 0, 1}})->status.ok());
  }
  const auto third = h->Begin(stream, 3, {{own[0].id, 1, 0, 1}});
  EXPECT_TRUE(absl::IsResourceExhausted(third->status));
  ExpectTenantBound(third->detail, "steps_exhausted", 2);
  EXPECT_FALSE(h->Get(own[0].id).in_step);
  ASSERT_TRUE(RegisterFor(*h, "b", h->model()).ok());
  const SequenceInfo other = *OpenFor(*h, "b", h->model().id);
  EXPECT_TRUE(h->Begin(h->core().steps().OpenStream("b"), 1, {{other.id, 1, 0, 1}})->status.ok());
  ASSERT_TRUE(h->Abort(stream, 1)->status.ok());
  EXPECT_TRUE(h->Begin(stream, 3, {{own[0].id, 1, 0, 1}})->status.ok());
}

TEST(EngineTenantsTest, AStepLeaseIsBounded) {
  Limits limits = testing::TinyLimits();
  limits.max_step_lease_ms = 5000;
  const auto h = HarnessWith({}, limits);
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  const SequenceInfo sequence = h->Open();
  for (const auto& [lease_ms, code] : {std::pair(5001, absl::StatusCode::kInvalidArgument),
                                       std::pair(5000, absl::StatusCode::kOk)}) {
    TestRequest begin;
    begin.kind = RequestKind::kBeginStep;
    begin.stream = stream;
    begin.step_id = 1;
    begin.begin.model_id = h->model().id;
    begin.begin.lease_ms = lease_ms;
    begin.begin.sequences = {{sequence.id, 1, 0, 1}};
    h->Submit(&begin);
    EXPECT_EQ(begin.status.code(), code) << begin.status;
  }
}

// All pages, including copies on write, count until they are back in the pool.
TEST(EngineTenantsTest, OneTenantCannotHoldAllPages) {
  const auto h = HarnessWith({});
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  const SequenceInfo sequence = h->Open();
  const Model& model =
      **h->core().models().Find(h->core().FindTenant(h->tenant()), h->model().id, "");
  const int64_t group = model.contents->layout.group_bytes();
  TenantQuota quota;
  quota.bounds[Resource::kKvBytes] = 3 * group;
  ASSERT_TRUE(h->core().tenants().SetQuota(h->tenant(), quota, false).ok());
  ASSERT_TRUE(h->Begin(stream, 1, {{sequence.id, 1, 0, 9}})->status.ok()) << "three pages of 3";
  EXPECT_EQ(h->core().tenants().Usage(h->tenant()).used[Resource::kKvBytes], 3 * group);
  const SequenceInfo second = h->Open();
  auto more = h->Begin(stream, 2, {{second.id, 1, 0, 4}});
  EXPECT_TRUE(absl::IsResourceExhausted(more->status));
  ExpectTenantBound(more->detail, "pages_exhausted", 3 * group);
  EXPECT_EQ(more->detail.wanted, 2 * group);
  EXPECT_EQ(more->detail.free, 0);
  ASSERT_TRUE(h->Abort(stream, 1)->status.ok());
  EXPECT_EQ(h->core().tenants().Usage(h->tenant()).used[Resource::kKvBytes], 0);
  EXPECT_EQ(h->core().tenants().Usage(h->tenant()).used[Resource::kKvSlabBytes], 0);
  EXPECT_TRUE(h->Begin(stream, 2, {{second.id, 1, 0, 4}})->status.ok());
  EXPECT_EQ(h->core().cache().CheckInvariants(), "");
}

TEST(EngineTenantsTest, AFullPoolIsNotTheTenantsBound) {
  const auto h = HarnessWith({});
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  Limits limits = testing::TinyLimits();
  ModelSpec wide = h->model();
  wide.id = "wide";
  wide.page_size = 4096;
  ASSERT_TRUE(RegisterFor(*h, h->tenant(), wide).ok());
  StepId step = 1;
  std::unique_ptr<TestRequest> begin;
  for (; step < 10; ++step) {
    const SequenceInfo sequence = *OpenFor(*h, h->tenant(), "wide");
    begin = std::make_unique<TestRequest>();
    begin->kind = RequestKind::kBeginStep;
    begin->stream = stream;
    begin->step_id = step;
    begin->begin.model_id = "wide";
    begin->begin.sequences = {{sequence.id, 1, 0, 1}};
    h->Submit(begin.get());
    if (!begin->status.ok()) break;
  }
  EXPECT_TRUE(absl::IsResourceExhausted(begin->status)) << begin->status;
  EXPECT_EQ(begin->detail.reason, "pages_exhausted");
  EXPECT_EQ(begin->detail.bound_of, BoundOwner::kServer);
  EXPECT_EQ(begin->detail.bound, limits.kv_cache_bytes);
}

// A slab serves one model until its last page group is free, so a tenant could keep all slabs with
// one page each. Slabs count, too.
TEST(EngineTenantsTest, FewPagesCannotKeepAllSlabs) {
  Limits limits = testing::TinyLimits();
  limits.max_sequences = 1024;
  const auto h = HarnessWith({{Resource::kKvSlabBytes, limits.kv_cache_bytes / 2}}, limits);
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  // Opens sequences of eight pages each until the tenant gets no more.
  std::vector<SequenceId> held;
  bool refused = false;
  for (StepId step = 1; !refused && held.size() < 1000; ++step) {
    const SequenceInfo sequence = h->Open();
    const auto begin = h->Begin(stream, step, {{sequence.id, 1, 0, 24}});
    refused = !begin->status.ok();
    if (refused) {
      ExpectTenantBound(begin->detail, "pages_exhausted", limits.kv_cache_bytes / 2);
      break;
    }
    held.push_back(sequence.id);
    const auto first = h->AppendOnly(stream, step, 0, 0, Rows(24, held.size()));
    const auto second = h->AppendOnly(stream, step, 1, 0, Rows(24, held.size()));
    h->Run();
    ASSERT_TRUE(h->End(stream, step)->status.ok());
  }
  ASSERT_TRUE(refused) << held.size() << " sequences";
  // One page of each stays, and with it every slab.
  for (const SequenceId id : held) {
    ASSERT_TRUE(h->core().sequences().Truncate(h->tenant(), id, 3, 1).ok());
  }
  EXPECT_GT(h->core().tenants().Usage(h->tenant()).used[Resource::kKvSlabBytes],
            limits.kv_cache_bytes / 4);
  EXPECT_LE(h->core().tenants().Usage(h->tenant()).used[Resource::kKvSlabBytes],
            limits.kv_cache_bytes / 2);
  // Another tenant's model of another page size still finds slabs.
  ModelSpec spec = h->model();
  spec.page_size = 64;
  ASSERT_TRUE(RegisterFor(*h, "b", spec).ok());
  const SequenceInfo other = *OpenFor(*h, "b", spec.id);
  auto begin = h->Begin(h->core().steps().OpenStream("b"), 1, {{other.id, 1, 0, 20}});
  EXPECT_TRUE(begin->status.ok()) << begin->status;
}

// A row that is dropped and made again has another key: pages of the former are scrubbed.
TEST(EngineTenantsTest, ATenantThatComesBackGetsScrubbedPages) {
  Limits limits = testing::TinyLimits();
  limits.max_tenants = 2;
  const auto h = HarnessWith({}, limits);
  const auto visit = [&](const std::string& tenant) {
    ASSERT_TRUE(RegisterFor(*h, tenant, h->model()).ok()) << tenant;
    const SequenceInfo sequence = *OpenFor(*h, tenant, h->model().id);
    const StreamId stream = h->core().steps().OpenStream(tenant);
    ASSERT_TRUE(h->Begin(stream, 1, {{sequence.id, 1, 0, 3}})->status.ok());
    h->core().steps().CloseStream(stream);
    EXPECT_TRUE(h->core().sequences().EvictModel(tenant, h->model().id).ok());
  };
  visit("b");
  const uint64_t before = h->core().Stats().page_groups_scrubbed;
  visit("b");  // the row is idle but still there: its own page
  EXPECT_EQ(h->core().Stats().page_groups_scrubbed, before);
  ASSERT_TRUE(h->core().tenants().Enter("c").ok());  // drops b's row
  visit("b");
  EXPECT_EQ(h->core().Stats().page_groups_scrubbed, before + 1);
}

TEST(EngineTenantsTest, AModelGoesWhenItsLeaseRunsOut) {
  const auto h = HarnessWith({});
  ModelSpec spec = h->model();
  spec.id = "leased";
  ASSERT_TRUE(RegisterFor(*h, h->tenant(), spec, 1000).ok());
  const auto models = [&] {
    return h->core().models().OfTenant(h->core().FindTenant(h->tenant())).size();
  };
  h->Advance(900);
  // Any call that names it renews it; so does its last sequence when it closes.
  ASSERT_TRUE(RegisterFor(*h, h->tenant(), spec).ok());
  h->Advance(900);
  const SequenceInfo sequence = *OpenFor(*h, h->tenant(), spec.id);
  h->Advance(5000);
  EXPECT_EQ(models(), 2u) << "an open sequence keeps its model";
  std::vector<SequenceId> missing;
  h->core().sequences().Release(h->tenant(), std::vector{sequence.id}, &missing);
  h->Advance(999);
  EXPECT_EQ(models(), 2u);
  EXPECT_LE(h->core().steps().NextTick(), h->clock().Now() + 1'000'000);
  h->Advance(1);
  EXPECT_EQ(models(), 1u) << "the model without a lease stays";
  EXPECT_EQ(h->core().Stats().models_expired, 1u);
  h->Advance(1000000);
  EXPECT_EQ(models(), 1u);
}

TEST(EngineTenantsTest, AnOperatorMayGiveAllModelsALease) {
  Limits limits = testing::TinyLimits();
  limits.model_lease_ms = 1000;
  const auto h = HarnessWith({}, limits);
  EXPECT_EQ(h->core().models().size(), 1);
  h->Advance(1000);
  EXPECT_EQ(h->core().models().size(), 0);
}

ModelSpec Named(const EngineHarness& h, const std::string& id) {
  ModelSpec model = h.model();
  model.id = id;
  return model;
}

// Tenants without a quota of their own register models and go.
TEST(EngineTenantsTest, ModelsOfTenantsThatHaveGoneDoNotKeepOthersOut) {
  Limits limits = testing::TinyLimits();
  limits.model_yield_ms = 600'000;
  const auto h = HarnessWith({}, limits);
  const auto add = [&](const std::string& tenant) {
    const TenantRef row = *h->core().tenants().Enter(tenant);
    return h->core().models().Register(row->key(), Named(*h, "theirs"));
  };
  int invented = 0;
  while (add(absl::StrCat("invented", invented)).ok()) ++invented;
  EXPECT_EQ(invented, limits.max_models - 1);
  h->Advance(599'999);
  const absl::Status refused = add("new").status();
  EXPECT_EQ(DetailOf(refused).reason, "models_exhausted") << refused;
  EXPECT_EQ(DetailOf(refused).bound_of, BoundOwner::kServer);
  const SequenceInfo used = *OpenFor(*h, h->tenant(), h->model().id);
  h->Advance(1);
  EXPECT_TRUE(add("new").ok());
  EXPECT_EQ(h->core().models().size(), limits.max_models);
  EXPECT_EQ(h->core().Stats().models_expired, 1u);
  // Models in use stay, for any time.
  h->Advance(600'000);
  for (int i = 1; i < limits.max_models; ++i) EXPECT_TRUE(add(absl::StrCat("more", i)).ok());
  EXPECT_FALSE(add("one more").ok());
  EXPECT_EQ(h->Get(used.id).id, used.id);
}

TEST(EngineTenantsTest, AModelIsUsedWhileAStreamOfItsStepsIsOpen) {
  Limits limits = testing::TinyLimits();
  limits.max_models = 2;
  limits.model_yield_ms = 60'000;
  const auto h = HarnessWith({}, limits);
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  const SequenceInfo sequence = h->Open();
  ASSERT_TRUE(h->Begin(stream, 1, {{sequence.id, 1, 0, 1}})->status.ok());
  std::vector<SequenceId> missing;
  h->core().sequences().Release(h->tenant(), std::vector{sequence.id}, &missing);
  const TenantKey other = (*h->core().tenants().Enter("other"))->key();
  const auto add = [&](const char* id) {
    return h->core().models().Register(other, Named(*h, id)).status();
  };
  ASSERT_TRUE(add("first").ok());
  h->Advance(60'000);
  ASSERT_TRUE(add("second").ok()) << "in the place of the first";
  EXPECT_EQ(h->core().models().OfTenant((*h->core().tenants().Enter(h->tenant()))->key()).size(),
            1u);
  h->core().steps().CloseStream(stream);
  h->Advance(5'999);
  EXPECT_FALSE(add("third").ok());
  h->Advance(1);
  EXPECT_TRUE(add("third").ok()) << "a tenant's own go after a tenth of the time";
  h->Advance(54'000);
  EXPECT_TRUE(add("fourth").ok());
  EXPECT_EQ(h->core().models().OfTenant((*h->core().tenants().Enter(h->tenant()))->key()).size(),
            1u)
      << "own models go first";
}

// Weights that a model has left are room, too.
TEST(EngineTenantsTest, AnEngineThatStartsAgainUnderNewNamesFindsRoom) {
  const auto h = HarnessWith({{Resource::kModels, 2}});
  const TenantKey tenant = (*h->core().tenants().Enter(h->tenant()))->key();
  for (int start = 0; start < 20; ++start) {
    const auto model = h->core().models().Register(tenant, Named(*h, absl::StrCat("run", start)));
    ASSERT_TRUE(model.ok()) << start << ": " << model.status();
    h->Advance(60'000);
  }
  EXPECT_EQ(h->core().models().size(), 2);
}

TEST(EngineTenantsTest, TheOldestWaitingRequestIsToldByStage) {
  const auto h = HarnessWith({});
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  const SequenceInfo sequence = h->Open();
  ASSERT_TRUE(h->Begin(stream, 1, {{sequence.id, 1, 0, 2}})->status.ok());
  const auto early = h->Query(stream, 1, 0, 0, 2, 0, 2, 5);  // its KV rows have not come
  h->Advance(100);
  const auto prompt = h->AppendOnly(stream, 1, 1, 0, Rows(2, 1));
  h->Advance(20);
  const EngineStats stats = h->core().Stats();
  EXPECT_EQ(stats.oldest_waiting_ns[3], 120'000'000);
  EXPECT_EQ(stats.oldest_waiting_ns[2], 20'000'000);
  EXPECT_EQ(stats.oldest_waiting_ns[0], 0);
  h->core().steps().CloseStream(stream);
}

TEST(EngineTenantsTest, OperatorsEvictSequencesAndModelsOfAnyTenant) {
  const auto h = HarnessWith({});
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  const SequenceInfo first = h->Open(), second = h->Open();
  ASSERT_TRUE(h->Begin(stream, 1, {{first.id, 1, 0, 2}})->status.ok());
  auto waiting = h->Query(stream, 1, 0, 0, 2, 0, 2, 5);
  std::vector<SequenceId> missing;
  EXPECT_EQ(h->core().sequences().Evict({h->tenant(), {first.id, first.id, 77}, ""}, &missing), 1);
  EXPECT_EQ(missing, std::vector<SequenceId>{77});
  ASSERT_TRUE(waiting->answered());
  EXPECT_TRUE(absl::IsAborted(waiting->status)) << waiting->status;
  // A selection for a tenant without a row must not reach rows of other tenants.
  EXPECT_EQ(h->core().sequences().Evict({"unknown", {}, ""}, &missing), 0);
  EXPECT_EQ(h->Get(second.id).id, second.id);
  ASSERT_TRUE(h->Begin(stream, 2, {{second.id, 1, 0, 2}})->status.ok());
  EXPECT_EQ(*h->core().sequences().EvictModel(h->tenant(), h->model().id), 1);
  EXPECT_EQ(h->core().models().size(), 0);
  EXPECT_EQ(h->core().Stats().open_steps, 0);
  EXPECT_EQ(h->core().Stats().page_groups_used, 0);
  EXPECT_TRUE(absl::IsNotFound(h->core().sequences().EvictModel(h->tenant(), "tiny").status()));
}

// If the layout were removed before the weights are freed, the model would keep the id of a layout
// that the next model gets. It would then write with that model's group size.
TEST(EngineTenantsTest, AnUnregisterThatFailsLeavesAModelThatWorks) {
  auto backend = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
  FaultyBackend* const faults = backend.get();
  EngineHarness h({testing::TinyLimits(), testing::TinyModel(), std::move(backend), nullptr});
  ModelTable& models = h.core().models();
  const TenantKey tenant = h.core().FindTenant(h.tenant());
  Model* const model = *models.Find(tenant, h.model().id, "model_id");
  const std::vector<std::byte> head(8 * (6 + 5) * 2, std::byte{3});
  ASSERT_TRUE(models.weights().Load(*model, 1, 0, 0, 1, head).ok());
  faults->FailAt(FaultPoint::kFreeWeights);
  ASSERT_FALSE(models.Unregister(tenant, h.model().id).ok());
  // Another model of another group size comes; the first one is still whole.
  ModelSpec wide = h.model();
  wide.id = "wide";
  wide.page_size = 64;
  ASSERT_TRUE(models.Register(tenant, wide).ok());
  Model* const still = *models.Find(tenant, h.model().id, "model_id");
  Model* const other = *models.Find(tenant, "wide", "model_id");
  EXPECT_NE(still->contents->layout_id, other->contents->layout_id);
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  const SequenceInfo sequence = h.Open();
  ASSERT_TRUE(h.Begin(stream, 1, {{sequence.id, 1, 0, 4}})->status.ok());
  EXPECT_EQ(h.Get(sequence.id).page_groups, 2);
  EXPECT_EQ(h.core().Stats().kv_bytes_used, 2 * still->contents->layout.group_bytes());
  ASSERT_TRUE(h.Abort(stream, 1)->status.ok());
  std::vector<SequenceId> missing;
  h.core().sequences().Release(h.tenant(), std::vector{sequence.id}, &missing);
  EXPECT_TRUE(models.Unregister(tenant, h.model().id).ok()) << "and can go after all";
}

// A late message is told why its step is gone, even if other tenants have aborted steps since.
TEST(EngineTenantsTest, AbortedStepsOfOneTenantAreNotForgottenForAnothers) {
  const auto h = HarnessWith({});
  ASSERT_TRUE(RegisterFor(*h, "b", h->model()).ok());
  const SequenceInfo of_b = *OpenFor(*h, "b", h->model().id);
  const StreamId b = h->core().steps().OpenStream("b"),
                 a = h->core().steps().OpenStream(h->tenant());
  ASSERT_TRUE(h->Begin(b, 1, {{of_b.id, 1, 0, 1}})->status.ok());
  ASSERT_TRUE(h->Abort(b, 1)->status.ok());
  const SequenceInfo of_a = h->Open();
  for (StepId step = 1; step <= 600; ++step) {
    ASSERT_TRUE(h->Begin(a, step, {{of_a.id, 1, 0, 1}})->status.ok());
    ASSERT_TRUE(h->Abort(a, step)->status.ok());
  }
  EXPECT_EQ(h->End(b, 1)->detail.reason, "step_aborted");
  EXPECT_EQ(h->End(a, 600)->detail.reason, "step_aborted");
  EXPECT_EQ(h->End(a, 1)->detail.reason, "step_not_found");
}

}  // namespace
}  // namespace mla::scheduler
