// A probe counts the rows of a prefix, changes nothing and waits for nothing. Pages of 3
// rows.
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

std::vector<uint32_t> Tokens(int count, uint32_t first = 1) {
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

class EngineProbeTest : public testing::EngineCoreTest {
 protected:
  ProbeAnswer Probe(const PrefixArgs& prefix, const std::string& tenant) {
    ProbeAnswer answer;
    const TenantKey key = h_.core().FindTenant(h_.tenant());
    const ModelSpec& spec = *(*h_.core().models().Find(key, h_.model().id, "model_id"))->spec;
    const auto& directory = h_.core().cache().prefixes().directory();
    EXPECT_TRUE(planner_.CountHeld(tenant, spec, prefix, directory, &answer).ok());
    return answer;
  }
  ProbeAnswer Probe(const PrefixArgs& prefix) { return Probe(prefix, h_.tenant()); }
  // Leaves rows of a prefix in the cache.
  void Leave(const PrefixArgs& prefix, int rows) {
    OpenArgs args;
    args.tenant = h_.tenant();
    args.model_id = h_.model().id;
    args.prefix = prefix;
    PrefixPlan plan;
    const TenantKey tenant = h_.core().FindTenant(args.tenant);
    plan.spec = (*h_.core().models().Find(tenant, args.model_id, "model_id"))->spec;
    ASSERT_TRUE(planner_.Fill(args.tenant, args.prefix, 0, 0, &plan).ok());
    const SequenceInfo sequence = h_.core().sequences().Open(args, plan).value();
    Fill(sequence, rows, 50);
    std::vector<SequenceId> absent;
    h_.core().sequences().Release(h_.tenant(), std::vector{sequence.id}, &absent);
  }

  const PrefixPlanner planner_{kvcache::PrefixSecret{}, testing::TinyLimits()};
};

TEST_F(EngineProbeTest, CountsWholePagesAlone) {
  Leave({.token_ids = Tokens(7)}, 7);
  const ProbeAnswer answer = Probe({.token_ids = Tokens(11)});
  EXPECT_EQ(answer.rows_asked, 9);
  EXPECT_EQ(answer.rows_in_pool, 6);
  EXPECT_EQ(answer.rows_in_host + answer.rows_in_file, 0);
  EXPECT_EQ(Probe({.token_ids = Tokens(11), .max_rows = 5}).rows_in_pool, 3);
  EXPECT_EQ(Probe({.token_ids = Tokens(11, 2)}).rows_in_pool, 0);
  EXPECT_EQ(Probe({.token_ids = Tokens(11), .salt = "other"}).rows_in_pool, 0);
  EXPECT_EQ(Probe({.token_ids = Tokens(2)}).rows_asked, 0);
}

TEST_F(EngineProbeTest, FindsNothingOfOtherTenants) {
  Leave({.token_ids = Tokens(6)}, 6);
  EXPECT_EQ(Probe({.token_ids = Tokens(6)}).rows_in_pool, 6);
  EXPECT_EQ(Probe({.token_ids = Tokens(6)}, "another").rows_in_pool, 0);
}

TEST_F(EngineProbeTest, FindsPagesByNamesOfEitherSize) {
  for (const size_t bytes : {size_t{16}, size_t{32}}) {
    const std::vector<std::string> names = {std::string(bytes, 'a'), std::string(bytes, 'b')};
    EXPECT_EQ(Probe({.page_keys = names}).rows_in_pool, 0);
    Leave({.page_keys = names}, 6);
    const ProbeAnswer found = Probe({.page_keys = names});
    EXPECT_EQ(found.rows_asked, 6);
    EXPECT_EQ(found.rows_in_pool, 6);
  }
}

TEST_F(EngineProbeTest, LeavesNoTrace) {
  Leave({.token_ids = Tokens(6)}, 6);
  const EngineStats before = h_.core().Stats();
  for (int i = 0; i < 10; ++i) Probe({.token_ids = Tokens(9)});
  const EngineStats after = h_.core().Stats();
  EXPECT_EQ(after.prefix.ends, before.prefix.ends);
  EXPECT_EQ(after.prefix.rows_asked, before.prefix.rows_asked);
  EXPECT_EQ(after.prefix.steps, before.prefix.steps);
  EXPECT_EQ(after.sequences, before.sequences);
  EXPECT_EQ(h_.core().tenants().Usage(h_.tenant()).used[Resource::kPrefixTokens], 0);
}

TEST_F(EngineProbeTest, RowsThatAreGoneAreNotFound) {
  Leave({.token_ids = Tokens(6)}, 6);
  const TenantKey tenant = h_.core().FindTenant(h_.tenant());
  const ModelSpec spec = h_.model();
  ASSERT_TRUE(h_.core().models().Unregister(tenant, spec.id).ok());
  ASSERT_TRUE(h_.core().models().Register(tenant, spec).ok());
  EXPECT_EQ(Probe({.token_ids = Tokens(6)}).rows_in_pool, 0);
}

TEST(EngineProbeWithThreadsTest, AnswersWhileAnotherThreadHasTheRole) {
  RealClock clock;
  Engine* engine = nullptr;
  absl::StatusOr<ProbeAnswer> answer = absl::UnknownError("not asked");
  EngineOptions options;
  options.limits = testing::TinyLimits();
  // The role asks for an id when a sequence is opened.
  options.ids = [&]() -> uint64_t {
    std::thread caller([&] { answer = engine->Probe("t", testing::TinyModel().id, {}); });
    caller.join();
    return 7;
  };
  auto made =
      Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock).value();
  engine = made.get();
  ASSERT_TRUE(engine->RegisterModel("t", testing::TinyModel()).ok());
  OpenArgs args;
  args.tenant = "t";
  args.model_id = testing::TinyModel().id;
  ASSERT_TRUE(engine->OpenSequence(args).ok());
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_GT(answer->kv_bytes_free, 0);
  EXPECT_GE(answer->kv_bytes_total, answer->kv_bytes_free);
}

TEST(EngineProbeWithThreadsTest, SaysWhatTheServerIsLike) {
  RealClock clock;
  EngineOptions options;
  options.limits = testing::TinyLimits();
  auto engine =
      Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock).value();
  EXPECT_EQ(DetailOf(engine->Probe("t", "absent", {}).status()).reason, "model_not_found");
  ASSERT_TRUE(engine->RegisterModel("t", testing::TinyModel()).ok());
  OpenArgs args;
  args.tenant = "t";
  args.model_id = testing::TinyModel().id;
  ASSERT_TRUE(engine->OpenSequence(args).ok());
  EXPECT_EQ(engine->Probe("t", "", {})->sequences, 1);
  EXPECT_FALSE(engine->Probe("t", "", {})->draining);
  engine->StartDrain();
  EXPECT_TRUE(engine->Probe("t", "", {})->draining);
  engine->CancelDrain();
  EXPECT_FALSE(engine->Probe("t", "", {})->draining);
  PrefixArgs longest;
  longest.token_ids = Tokens(static_cast<int>(options.limits.max_sequence_rows) + 1);
  const ErrorDetail detail =
      DetailOf(engine->Probe("t", testing::TinyModel().id, longest).status());
  EXPECT_EQ(detail.field, "prefix.token_ids");
}

}  // namespace
}  // namespace mla::scheduler
