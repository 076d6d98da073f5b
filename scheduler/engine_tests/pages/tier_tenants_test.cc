// Tenants that want rows of slower tiers at the same time, with the engine's own thread.
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/kvcache/pool/group_pieces.h"
#include "scheduler/kvcache/tiers/tier_file.h"

namespace mla::scheduler {
namespace {

using kvcache::MatchEnd;

constexpr char kGreedy[] = "greedy", kModest[] = "modest";
constexpr int kManyPages = 80, kFewPages = 3;
constexpr int32_t kPageRows = 64;
constexpr int64_t kGroupBytes = int64_t{1152} * kPageRows * 7;

ModelSpec Model() {
  ModelSpec model;
  model.id = "model";
  model.geometry = {2, 512, 64, 16, 16};
  model.layers = 7;
  model.page_size = kPageRows;
  model.softmax_scale = 0.1;
  return model;
}

class TierTenantsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    EngineOptions options;
    Limits& limits = options.limits;
    limits.kv_cache_bytes = 100 * kGroupBytes;
    limits.host_tier_bytes = 100 * (kGroupBytes + kvcache::kTierBlock);
    limits.tier_low_percent = limits.tier_high_percent = 0;  // hints alone move rows
    limits.tier_tenant_percent = 100;
    limits.max_sequences = limits.max_step_sequences = 8;
    limits.max_heads = 2;
    limits.weights_bytes = 1 << 20;
    limits.launch_rows = 64;
    limits.prefill_rows = 32;
    limits.launch_packed_rows = 256;
    options.tier_threads = 1;
    auto engine = Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    for (const char* const tenant : {kGreedy, kModest}) {
      ASSERT_TRUE(engine_->RegisterModel(tenant, Model()).ok());
    }
  }
  static PrefixArgs Prefix(int pages) {
    PrefixArgs prefix;
    prefix.token_ids.resize(static_cast<size_t>(pages * kPageRows));
    std::iota(prefix.token_ids.begin(), prefix.token_ids.end(), 1);
    return prefix;
  }
  // Leaves this many pages of the tenant in the cache.
  void Leave(const std::string& tenant, int pages) {
    OpenArgs open;
    open.tenant = tenant;
    open.model_id = "model";
    const SequenceInfo source = engine_->OpenSequence(open).value();
    const MovingPages empty = engine_->BeginExport({tenant, source.id, 1, 0, {}}).value();
    ImportArgs args;
    args.tenant = tenant;
    args.model_id = "model";
    args.tags = empty.tags;
    args.tags.rows = int64_t{pages} * kPageRows;
    const MovingPages target = engine_->BeginImport(args).value();
    std::vector<std::byte> payload(
        static_cast<size_t>(kvcache::PayloadBytes(kvcache::GroupPieces(target.layout, kPageRows))));
    for (int64_t page = 0; page < pages; ++page) {
      std::memset(payload.data(), static_cast<int>(page), payload.size());
      PageMove move;
      move.tenant = tenant;
      move.id = target.id;
      move.in = true;
      move.page = page;
      move.rows = kPageRows;
      move.bytes = payload;
      ASSERT_TRUE(engine_->MovePart(&move).ok());
    }
    const SequenceInfo ended = engine_->EndImport(tenant, target.id, Engine::kAllFinite).value();
    MatchArgs match;
    match.tenant = tenant;
    match.id = ended.id;
    match.expected_epoch = ended.epoch;
    match.prefix = Prefix(pages);
    ASSERT_TRUE(engine_->MatchSequence(match).ok());
    std::vector<SequenceId> absent;
    engine_->ReleaseSequences(tenant, std::vector{ended.id, source.id, empty.id}, &absent);
  }
  HintAnswer Hint(HintKind kind, const std::string& tenant, int pages) {
    HintArgs args;
    args.tenant = tenant;
    args.kind = kind;
    args.model_id = "model";
    args.prefix = Prefix(pages);
    return engine_->Hint(args).value();
  }
  SequenceInfo Open(const std::string& tenant, int pages, int64_t most_wait_ms) {
    OpenArgs args;
    args.tenant = tenant;
    args.model_id = "model";
    args.prefix = Prefix(pages);
    args.most_wait_ms = most_wait_ms;
    return engine_->OpenSequence(args).value();
  }
  void Release(const std::string& tenant, const SequenceInfo& sequence) {
    std::vector<SequenceId> absent;
    engine_->ReleaseSequences(tenant, std::vector{sequence.id}, &absent);
  }
  void AwaitMoves() {
    while (engine_->Stats().tiers.moving > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  void DemoteAll() {
    Hint(HintKind::kDemote, kGreedy, kManyPages);
    Hint(HintKind::kDemote, kModest, kFewPages);
    AwaitMoves();
  }

  static constexpr int64_t kWaits = 1'000'000;
  RealClock clock_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(TierTenantsTest, OneThatWantsMuchHoldsNoOtherUp) {
  Leave(kGreedy, kManyPages);
  Leave(kModest, kFewPages);
  bool overtook = false;
  // This thread may sleep for longer than all of it takes.
  for (int round = 0; round < 10 && !overtook; ++round) {
    DemoteAll();
    const uint64_t before = engine_->Stats().tiers.host.groups_out;
    EXPECT_EQ(Hint(HintKind::kPrefetch, kGreedy, kManyPages).outcome, HintOutcome::kDeferred);
    const SequenceInfo opened = Open(kModest, kFewPages, kWaits);
    overtook = engine_->Stats().tiers.host.groups_out - before < kManyPages + kFewPages;
    EXPECT_EQ(opened.length, kFewPages * kPageRows);
    EXPECT_EQ(opened.matched.end, MatchEnd::kAll);
    Release(kModest, opened);
    AwaitMoves();
    EXPECT_EQ(Hint(HintKind::kPrefetch, kGreedy, kManyPages).outcome, HintOutcome::kAccepted);
  }
  EXPECT_TRUE(overtook);
}

TEST_F(TierTenantsTest, ACallWaitsNoLongerThanItsClientLets) {
  Leave(kModest, kFewPages);
  Hint(HintKind::kDemote, kModest, kFewPages);
  AwaitMoves();
  const SequenceInfo early = Open(kModest, kFewPages, 0);
  EXPECT_TRUE(early.matched.end == MatchEnd::kDeferred || early.matched.end == MatchEnd::kAll);
  const SequenceInfo late = Open(kModest, kFewPages, kWaits);
  EXPECT_EQ(late.length, kFewPages * kPageRows);
}

TEST_F(TierTenantsTest, ACallThatIsRefusedMovesNothing) {
  Leave(kModest, kFewPages);
  Hint(HintKind::kDemote, kModest, kFewPages);
  AwaitMoves();
  OpenArgs args;
  args.tenant = kModest;
  args.model_id = "model";
  args.prefix = Prefix(kFewPages);
  args.lease_ms = int64_t{1} << 40;
  EXPECT_EQ(engine_->OpenSequence(args).status().code(), absl::StatusCode::kInvalidArgument);
  args.lease_ms = 0;
  engine_->StartDrain();
  EXPECT_EQ(engine_->OpenSequence(args).status().code(), absl::StatusCode::kUnavailable);
  AwaitMoves();
  EXPECT_EQ(engine_->Stats().tiers.host.groups_out, 0u);
}

}  // namespace
}  // namespace mla::scheduler
