// Tests weights on a GPU. Their memory is taken at start, one account places them, and models move
// together when the free memory is fragmented.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kLora = 512;
constexpr int32_t kRope = 64;

Geometry OfHeads(int32_t heads, int32_t dim = 8) { return {heads, kLora, kRope, dim, dim}; }
int64_t BytesOf(const Geometry& g) {
  return int64_t{g.num_heads} * kLora * (g.nope_dim + g.v_dim) * 2;
}

class WeightsTest : public BackendOnFakeTest {
 protected:
  static BackendLimits LimitsOf(int64_t weights_bytes) {
    BackendLimits limits = Limits();
    limits.weights_bytes = weights_bytes;
    limits.weights_slots = 4;
    return limits;
  }
  std::unique_ptr<HipBackend> Configured(int64_t weights_bytes,
                                         int64_t expanded_workspace_bytes = 640 << 20) {
    HipBackendOptions options = Options();
    options.expanded_workspace_bytes = expanded_workspace_bytes;
    auto backend = HipBackend::Create(options);
    EXPECT_TRUE(backend.ok()) << backend.status();
    if (!backend.ok()) return nullptr;
    EXPECT_TRUE((*backend)->Configure(LimitsOf(weights_bytes)).ok());
    return *std::move(backend);
  }
  // Every element of W_UK of head h is `value` + h; W_UV has the negative.
  static absl::Status Load(HipBackend& backend, int32_t slot, const Geometry& g, float value,
                           int32_t begin = 0, int32_t end = -1) {
    if (end < 0) end = g.num_heads;
    std::vector<Bf16> uk, uv;
    for (int32_t h = begin; h < end; ++h) {
      const float x = value + static_cast<float>(h);
      uk.insert(uk.end(), static_cast<size_t>(g.nope_dim) * kLora, ToBf16(x));
      uv.insert(uv.end(), static_cast<size_t>(g.v_dim) * kLora, ToBf16(-x));
    }
    return backend.LoadWeights(slot, g, begin, end, uk.data(), uv.data());
  }
  // Projects a vector with a one in its first element by head `head`. The result is an element of
  // its W_UK if `absorb` is true, else of its W_UV.
  static float Seen(HipBackend& b, int32_t slot, const Geometry& g, int32_t head, bool absorb) {
    std::vector<Bf16> in(kLora + kRope, 0), out(kLora + kRope, 0);
    in[0] = ToBf16(1.0f);
    LaunchLayout layout(b, 0);
    auto from = layout.Input(in.data(), static_cast<int64_t>(in.size()) * 2);
    auto to = layout.Output(out.data(), static_cast<int64_t>(out.size()) * 2);
    EXPECT_TRUE(from.ok() && to.ok());
    const ProjectionRecord record{*from, *to, 0, 0, 0, 0, 1, 1, head, slot};
    Launch launch;
    launch.inputs = layout.inputs();
    launch.outputs = layout.outputs();
    (absorb ? launch.absorb : launch.project) = {g, DType::kBf16, DType::kBf16, {&record, 1}, {}};
    EXPECT_TRUE(b.Submit(0, launch).ok());
    EXPECT_TRUE(b.Wait(0).ok());
    return ToFloat(out[0]);
  }
  static void ExpectSeen(HipBackend& b, int32_t slot, const Geometry& g, float value) {
    for (int32_t h = 0; h < g.num_heads; ++h) {
      EXPECT_EQ(Seen(b, slot, g, h, true), value + static_cast<float>(h)) << slot << ", " << h;
      EXPECT_EQ(Seen(b, slot, g, h, false), -value - static_cast<float>(h)) << slot << ", " << h;
    }
  }
};

TEST_F(WeightsTest, OutOfMemoryAtStartNamesTheKey) {
  // Numbers of allocations. The one between them holds the addresses of weights.
  for (const auto& [i, key] :
       {std::pair(0, "limits.weights_bytes: "), std::pair(2, "kv_cache.bytes: ")}) {
    auto backend = HipBackend::Create(Options());
    ASSERT_TRUE(backend.ok()) << backend.status();
    control_->FailOnce("hipMalloc", i, 2);
    const absl::Status status = (*backend)->Configure(LimitsOf(1 << 20));
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(status.message(), HasSubstr(key));
    EXPECT_THAT(status.message(), HasSubstr("out of memory (2)"));
    EXPECT_EQ(control_->live_bytes, 0);
  }
}

TEST_F(WeightsTest, UploadsAllocateNothing) {
  const Geometry g = OfHeads(4);
  auto backend = Configured(2 * BytesOf(g));
  ASSERT_NE(backend, nullptr);
  const int64_t live = control_->live_bytes, allocations = control_->allocations;
  control_->fail_call = "hipMalloc";
  control_->fail_after = 0;
  control_->fail_code = 2;
  ASSERT_TRUE(Load(*backend, 0, g, 1.0f).ok());
  ASSERT_TRUE(Load(*backend, 3, g, 16.0f).ok());
  ExpectSeen(*backend, 0, g, 1.0f);
  ExpectSeen(*backend, 3, g, 16.0f);
  // Another model replaces the one in this slot.
  const Geometry other = OfHeads(2, 16);
  ASSERT_TRUE(Load(*backend, 0, other, 32.0f).ok());
  ExpectSeen(*backend, 0, other, 32.0f);
  EXPECT_EQ(control_->allocations, allocations);
  EXPECT_EQ(control_->live_bytes, live);
}

// The account reserves whole models, so an upload that has begun can finish whatever is loaded in
// between.
TEST_F(WeightsTest, TheFirstHeadTakesTheRoomOfAll) {
  const Geometry g = OfHeads(4);
  auto backend = Configured(2 * BytesOf(g));
  ASSERT_NE(backend, nullptr);
  ASSERT_TRUE(Load(*backend, 0, g, 1.0f, 3, 4).ok());
  ASSERT_TRUE(Load(*backend, 1, g, 8.0f, 0, 1).ok());
  const absl::Status status = Load(*backend, 2, OfHeads(1), 24.0f);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(),
            "limits.weights_bytes: got 16384 bytes of weights in addition to 131072 in use, limit "
            "131072");
  ASSERT_TRUE(Load(*backend, 0, g, 1.0f, 0, 3).ok());
  ASSERT_TRUE(Load(*backend, 1, g, 8.0f, 1, 4).ok());
  ExpectSeen(*backend, 0, g, 1.0f);
  ExpectSeen(*backend, 1, g, 8.0f);
  ASSERT_TRUE(backend->FreeWeights(0).ok());
  ASSERT_TRUE(Load(*backend, 2, OfHeads(1), 24.0f).ok());
  ExpectSeen(*backend, 2, OfHeads(1), 24.0f);
}

TEST_F(WeightsTest, FreeRoomInPiecesIsJoined) {
  const Geometry small = OfHeads(1), middle = OfHeads(3), large = OfHeads(4);
  auto backend = Configured(BytesOf(OfHeads(8)));
  ASSERT_NE(backend, nullptr);
  ASSERT_TRUE(Load(*backend, 0, small, 1.0f).ok());
  ASSERT_TRUE(Load(*backend, 1, middle, 2.0f).ok());
  ASSERT_TRUE(Load(*backend, 2, small, 8.0f).ok());
  ASSERT_TRUE(Load(*backend, 3, middle, 16.0f).ok());
  ASSERT_TRUE(backend->FreeWeights(0).ok());
  ASSERT_TRUE(backend->FreeWeights(3).ok());
  // There is free room of one head before the three heads of slot 1, which therefore move in
  // pieces, and free room of three heads after them.
  ASSERT_TRUE(Load(*backend, 0, large, 32.0f).ok());
  ExpectSeen(*backend, 0, large, 32.0f);
  ExpectSeen(*backend, 1, middle, 2.0f);
  ExpectSeen(*backend, 2, small, 8.0f);
}

// Free room of `gap` heads lies before a model of `heads` heads, and of two heads after it. A model
// of two heads more than the gap is loaded, so the first model moves.
TEST_F(WeightsTest, AMoveTakesFewCopies) {
  constexpr int64_t kWorkspace = LeastRoundWorkspace(kDims128);
  const int64_t head = BytesOf(OfHeads(1));
  ASSERT_GT(kWorkspace, 2 * head);
  ASSERT_LT(kWorkspace, 2 * 4 * head);
  const struct {
    int32_t gap, heads;
    int64_t copies;
  } moves[] = {
      {4, 3, 1},                                                 // in one copy
      {4, 4, 1},                                                 // as long as the distance it moves
      {4, 10, 3},                                                // in pieces
      {1, 15, 2 * ((15 * head + kWorkspace - 1) / kWorkspace)},  // through the workspace
  };
  for (const auto& [gap, heads, copies] : moves) {
    SCOPED_TRACE(testing::Message() << gap << ", " << heads);
    const Geometry small = OfHeads(gap), model = OfHeads(heads), more = OfHeads(gap + 2);
    auto backend = Configured(BytesOf(model) + BytesOf(more), kWorkspace);
    ASSERT_NE(backend, nullptr);
    ASSERT_TRUE(Load(*backend, 0, small, 1.0f).ok());
    ASSERT_TRUE(Load(*backend, 1, model, 16.0f).ok());
    ASSERT_TRUE(backend->FreeWeights(0).ok());
    control_->copies_on_device = 0;
    ASSERT_TRUE(Load(*backend, 2, more, 64.0f).ok());
    EXPECT_EQ(control_->copies_on_device, copies);
    ExpectSeen(*backend, 1, model, 16.0f);
    ExpectSeen(*backend, 2, more, 64.0f);
  }
}

// If a move fails, other models' weights may have moved in part and must not be read. The device
// counts as lost.
TEST_F(WeightsTest, AMoveThatDoesNotEndLosesTheDevice) {
  const Geometry small = OfHeads(1), middle = OfHeads(3), large = OfHeads(4);
  const struct {
    const char* call;
    int after;
  } failures[] = {{"hipMemcpyDtoDAsync", 0},  // of the first model that moves
                  {"hipMemcpyDtoDAsync", 1},  // the same model, from the workspace
                  {"hipMemcpyDtoDAsync", 2},  // of the second model
                  {"hipMemcpyHtoDAsync", 0},  // the new addresses
                  {"hipStreamSynchronize", 0}};
  for (const auto& [call, after] : failures) {
    SCOPED_TRACE(testing::Message() << call << " " << after);
    auto backend = Configured(BytesOf(OfHeads(8)));
    ASSERT_NE(backend, nullptr);
    ASSERT_TRUE(Load(*backend, 0, small, 1.0f).ok());
    ASSERT_TRUE(Load(*backend, 1, middle, 2.0f).ok());
    ASSERT_TRUE(Load(*backend, 2, small, 8.0f).ok());
    ASSERT_TRUE(backend->FreeWeights(0).ok());
    control_->FailOnce(call, after);
    const absl::Status status = Load(*backend, 3, large, 32.0f);
    EXPECT_EQ(control_->fail_seen, after + 1) << "the call was not reached, or others followed";
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(status.message(), HasSubstr("weights that were being moved: "));
    EXPECT_THAT(status.message(), HasSubstr("invalid argument (1)"));
    EXPECT_EQ(backend->Healthy().message(), absl::StrCat("device lost: ", status.message()));
    const Launch nothing;
    EXPECT_EQ(backend->Submit(1, nothing), backend->Healthy());
    EXPECT_EQ(Load(*backend, 0, small, 1.0f), backend->Healthy());
    EXPECT_TRUE(backend->FreeWeights(1).ok());
  }
}

// Nothing had to move, so other models' weights are intact and the upload may be repeated.
TEST_F(WeightsTest, AFailedUploadThatMovesNothingFailsAlone) {
  const Geometry g = OfHeads(2);
  for (const int copy : {0, 1, 2}) {  // addresses for the kernels, W_UK, W_UV
    SCOPED_TRACE(copy);
    auto backend = Configured(2 * BytesOf(g));
    ASSERT_NE(backend, nullptr);
    ASSERT_TRUE(Load(*backend, 1, g, 1.0f).ok());
    control_->FailOnce("hipMemcpyHtoDAsync", copy);
    EXPECT_THAT(Load(*backend, 0, g, 8.0f).message(), HasSubstr("invalid argument (1)"));
    EXPECT_TRUE(backend->Healthy().ok());
    ExpectSeen(*backend, 1, g, 1.0f);
    ASSERT_TRUE(Load(*backend, 0, g, 8.0f).ok());
    ExpectSeen(*backend, 0, g, 8.0f);
    ExpectSeen(*backend, 1, g, 1.0f);
  }
}

TEST_F(WeightsTest, BadUploadsAreRefused) {
  auto backend = Configured(1 << 20);
  ASSERT_NE(backend, nullptr);
  const Geometry g = OfHeads(2);
  EXPECT_EQ(Load(*backend, 4, g, 1.0f).message(), "weights slot: got 4, limit 4");
  EXPECT_EQ(Load(*backend, -1, g, 1.0f).message(), "weights slot: got -1, limit 4");
  EXPECT_EQ(Load(*backend, 0, g, 1.0f, 1, 1).message(), "weights heads: got [1, 1)");
  EXPECT_EQ(Load(*backend, 0, OfHeads(2, 0), 1.0f).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(backend->FreeWeights(4).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(backend->FreeWeights(0).ok());
  // Heads whose weights were not loaded cannot be used.
  ASSERT_TRUE(Load(*backend, 0, g, 1.0f, 0, 1).ok());
  const ProjectionRecord record{nullptr, nullptr, 0, 0, 0, 0, 1, 2, 0, 0};
  Launch launch;
  launch.absorb = {g, DType::kBf16, DType::kBf16, {&record, 1}, {}};
  EXPECT_EQ(backend->Submit(0, launch).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace mla::kernels::hip
