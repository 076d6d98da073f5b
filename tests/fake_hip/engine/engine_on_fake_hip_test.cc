// Tests the engine together with the GPU backend on the fake HIP runtime, as far as tests of either
// part cannot.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "scheduler/launching/launch_sizes.h"
#include "scheduler/testing/engine_harness.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using scheduler::StreamId;
using scheduler::testing::EngineHarness;
using scheduler::testing::MakeRow;
using scheduler::testing::Row;
using scheduler::testing::TestRequest;
using ::testing::HasSubstr;

constexpr int kHeads = 16;
constexpr int kRowDim = 576;
constexpr int kLongRows = 4096;
// Probabilities are rounded to bf16 before the second product.
constexpr double kTolerance = 4e-3;

// Returns the fake's control block in its present state.
fake_hip::Control& Control() {
  static fake_hip::Control* const control = FakeControl();
  return *control;
}

// If `reach_host` is false, every tensor is copied.
std::unique_ptr<EngineHarness> Harness(int32_t top_k = 0, int32_t heads = kHeads,
                                       Vendor vendor = Vendor::kAmd, bool reach_host = true) {
  Control() = fake_hip::Control();
  HipBackendOptions options;
  options.reach_host = reach_host;
  options.libraries = {kLibrary};
  options.self_test = false;
  options.vendor = vendor;
  options.images = {Image("gfx950", kImage950)};
  if (vendor == Vendor::kNvidia) {
    Control().arch = "sm_90";
    options.images = {Image("sm_90", kImage90)};
  }
  auto backend = HipBackend::Create(options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  scheduler::testing::HarnessOptions harness;
  harness.limits = scheduler::testing::TinyLimits();
  harness.limits.max_heads = heads;
  harness.limits.max_row_dim = kRowDim;
  harness.limits.max_v_dim = 128;
  harness.limits.launch_packed_rows = 8 * kHeads;
  if (heads > kHeads) {
    harness.limits.launch_rows = harness.limits.prefill_rows = harness.limits.max_step_rows = 40;
    harness.limits.launch_packed_rows = 40 * heads;
    harness.limits.max_step_sequences = 16;
  }
  harness.limits.max_participants = kHeads;
  harness.limits.kv_cache_bytes = 4 << 20;
  harness.model = scheduler::testing::TinyModel();
  harness.model.geometry = {heads, 512, 64, 8, 8};
  harness.model.softmax_scale = 0.05;
  if (top_k > 0) harness.model.attention = AttentionKind::kSparse;
  harness.model.top_k = top_k;
  harness.backend = *std::move(backend);
  return std::make_unique<EngineHarness>(std::move(harness));
}

std::vector<Row> Rows(int count, uint64_t key) {
  std::vector<Row> rows;
  for (int i = 0; i < count; ++i) rows.push_back(MakeRow(key * 1000 + i, kRowDim));
  return rows;
}

void Settle(EngineHarness& h) {
  for (int quiet = 0; quiet < 3;) {
    const bool started = h.core().launches().Start();
    const bool completed = h.core().launches().Complete(/*wait=*/true);
    quiet = started || completed ? 0 : quiet + 1;
  }
}

// Stores the work items of the last launch.
class LastLaunch final : public scheduler::EngineObserver {
 public:
  void OnLaunch(const scheduler::LaunchReport& report) override { work_items = report.work_items; }
  void OnRequest(const scheduler::RequestReport&) override {}
  int32_t work_items = 0;
};

TEST(EngineOnFakeHip, AnIndexerOfAnotherWidthIsRefusedByName) {
  const std::unique_ptr<EngineHarness> h = Harness();
  scheduler::ModelSpec spec = h->model();
  spec.id = "indexed";
  spec.attention = kernels::AttentionKind::kSparse;
  spec.top_k = 4;
  spec.indexer = {64, 64};
  const absl::Status status =
      h->core().models().Register(h->core().FindTenant(h->tenant()), spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(DetailOf(status).field, "model.index_dim");
  EXPECT_EQ(DetailOf(status).got, "64");
}

// On gfx942 two blocks share a tile of more than 64 heads, so half as many units take part.
TEST(EngineOnFakeHip, FewHeadsOfALargeModelUseAllUnits) {
  Control() = fake_hip::Control();
  Control().arch = "gfx942";
  HipBackendOptions options;
  options.libraries = {kLibrary};
  options.self_test = false;
  options.images = {Image("gfx942", kImage942)};
  auto backend = HipBackend::Create(options);
  ASSERT_TRUE(backend.ok()) << backend.status();
  LastLaunch last;
  scheduler::testing::HarnessOptions harness;
  harness.limits = scheduler::testing::TinyLimits();
  harness.limits.default_page_size = 64;
  harness.limits.max_heads = 128;
  harness.limits.max_row_dim = kRowDim;
  harness.limits.max_sequence_rows = harness.limits.max_step_rows = kLongRows;
  harness.limits.max_pages_per_sequence = kLongRows / 64;
  harness.limits.launch_rows = harness.limits.prefill_rows = kLongRows;
  harness.limits.launch_packed_rows = 1024;
  harness.limits.kv_cache_bytes = 16 << 20;
  harness.model = scheduler::testing::TinyModel();
  harness.model.geometry = {128, 512, 64, 8, 8};
  harness.model.softmax_scale = 0.05;
  harness.backend = *std::move(backend);
  harness.observer = &last;
  EngineHarness h(std::move(harness));
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  const auto seq = h.Open();
  ASSERT_TRUE(h.Begin(stream, 1, {{seq.id, 1, 0, kLongRows}})->status.ok());
  const auto kv = h.AppendOnly(stream, 1, 0, 0, std::vector<Row>(kLongRows, MakeRow(1, kRowDim)));
  Settle(h);
  ASSERT_TRUE(kv->status.ok()) << kv->status;
  const std::vector<std::pair<int, int>> units_by_heads = {{16, 8}, {64, 8}, {65, 4}, {128, 4}};
  for (const auto& [heads, units] : units_by_heads) {
    const auto slice = h.Query(stream, 1, 0, kLongRows - 1, 1, 0, heads, 5);
    Settle(h);
    ASSERT_TRUE(slice->status.ok()) << slice->status;
    EXPECT_EQ(last.work_items, units) << heads << " heads";
  }
}

// More steps than a launch has commands are begun and abandoned. Each has its own page.
TEST(EngineOnFakeHip, BegunStepsLeavePageWorkThatLaunchesCarry) {
  auto h = Harness();
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  const auto seq = h->Open();
  for (int round = 0; round < 5000; ++round) {
    const auto step = static_cast<scheduler::StepId>(round) + 10;
    ASSERT_TRUE(h->Begin(stream, step, {{seq.id, 1, 0, 1}})->status.ok());
    ASSERT_TRUE(h->Abort(stream, step)->status.ok());
  }
  ASSERT_TRUE(h->Begin(stream, 1, {{seq.id, 1, 0, 3}})->status.ok());
  const std::vector<Row> rows = Rows(3, 7);
  const auto answer = h->Attend(stream, 1, 0, 0, rows, 5);
  Settle(*h);
  ASSERT_TRUE(answer->status.ok()) << answer->status;
  EXPECT_LT(h->Error(*answer, scheduler::testing::Pointers(rows), {1, 2, 3}, 5), kTolerance);
}

// Copies of a launch to the device.
struct Copied {
  int64_t copies, bytes;
};

// All layers of a step have one plan, which is copied with the first layer.
TEST(EngineOnFakeHip, TheSecondLayerOfAStepUploadsNoPlan) {
  auto h = Harness(0, kHeads, Vendor::kAmd, /*reach_host=*/false);
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  std::vector<scheduler::StepSequenceArgs> begun;
  for (int i = 0; i < 3; ++i) begun.push_back({h->Open().id, 1, 0, 1});
  for (const scheduler::StepId step : {1, 2}) {
    ASSERT_TRUE(h->Begin(stream, step, begun)->status.ok());
    std::vector<Copied> layers;
    for (const int layer : {0, 1}) {
      const int64_t copies = Control().copies_in, bytes = Control().bytes_in;
      const auto answer = h->Attend(stream, step, layer, 0, Rows(3, 7 + layer), 5);
      Settle(*h);
      ASSERT_TRUE(answer->status.ok()) << answer->status;
      layers.push_back({Control().copies_in - copies, Control().bytes_in - bytes});
    }
    ASSERT_TRUE(h->End(stream, step)->status.ok());
    for (auto& sequence : begun) sequence.start_position += 1;
    EXPECT_EQ(layers[0].copies, 3);  // the plan, metadata, and the staged tensors
    EXPECT_EQ(layers[1].copies, 2);
    // The plan has one work item for each of at least three requests, one unit's range, and more.
    EXPECT_GT(layers[0].bytes, layers[1].bytes + 3 * int64_t{sizeof(WorkInfo)});
    // Records of three requests and of their rows, the inputs, and the alignment of each array.
    const int64_t records =
        3 * int64_t{sizeof(SegmentRecord)} + 3 * int64_t{sizeof(AppendRecord)} + 4 * 4;
    const int64_t inputs = 3 * 1152 + 3 * kHeads * 1152;
    EXPECT_LE(layers[1].bytes, records + inputs + 8 * kRegionAlignment);
  }
}

// Index lists are copied with the launch, and a row attends only to the rows in its list.
TEST(EngineOnFakeHip, RowsAttendToTheirIndexLists) {
  auto h = Harness(/*top_k=*/4);
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  const auto a = h->Open(), b = h->Open();
  ASSERT_TRUE(h->Begin(stream, 1, {{a.id, 1, 0, 1}, {b.id, 1, 0, 3}})->status.ok());
  const std::vector<Row> rows = Rows(4, 7);
  const std::vector<const Row*> of_b = {&rows[1], &rows[2]};
  auto request = h->Unsent(stream, 1, 0, 0, 4, rows, 0, kHeads, 5);
  const std::vector<int32_t> begins = {0, 0, 1, 3, 5}, lists = {0, 1, 0, 0, 1};
  request->attend.list_begin = begins.data();
  request->attend.list = lists.data();
  h->Submit(request.get());
  Settle(*h);
  ASSERT_TRUE(request->answered());
  ASSERT_TRUE(request->status.ok()) << request->status;
  EXPECT_EQ(request->output[0], 0.0f) << "an empty list";
  EXPECT_EQ(request->lse[0], -std::numeric_limits<float>::infinity());
  // The last row could attend to three rows, and its list has two. The error is computed over all
  // rows except the first.
  request->attend.row_begin = 1;
  request->attend.row_count = 3;
  request->output.erase(request->output.begin(), request->output.begin() + kHeads * 512);
  request->lse.erase(request->lse.begin(), request->lse.begin() + kHeads);
  EXPECT_LT(h->Error(*request, of_b, {1, 2, 2}, 5), kTolerance);
}

int64_t stream_launches = 0, append_launches = 0;
void CountStreams(const char* kernel) {
  stream_launches += std::string_view(kernel).starts_with("mla_stream");
  append_launches += std::string_view(kernel).starts_with("mla_append");
}

// The tensors that a kernel may access directly: output, log-sum-exps, queries and KV rows.
std::array<std::span<std::byte>, 4> TensorsOf(TestRequest& request) {
  return {std::as_writable_bytes(std::span(request.output)),
          std::as_writable_bytes(std::span(request.lse)),
          std::as_writable_bytes(std::span(request.queries)),
          std::as_writable_bytes(std::span(request.kv_rows))};
}

// If kernels reach the tensors, queries of 5 MiB arrive and outputs leave during the launch. If one
// tensor is out of reach, all are copied.
TEST(EngineOnFakeHip, LargeStepsAreStreamed) {
  constexpr int kManyHeads = 128, kSequences = 12, kRowsOfEach = 3;
  for (const size_t reached : {3, 2, 0}) {
    SCOPED_TRACE(reached);
    auto h = Harness(0, kManyHeads, Vendor::kNvidia);
    Control().on_launch = CountStreams;
    stream_launches = 0;
    const StreamId stream = h->core().steps().OpenStream(h->tenant());
    std::vector<scheduler::StepSequenceArgs> begun;
    for (int i = 0; i < kSequences; ++i) begun.push_back({h->Open().id, 1, 0, kRowsOfEach});
    ASSERT_TRUE(h->Begin(stream, 1, begun)->status.ok());
    const std::vector<Row> rows = Rows(kRowsOfEach, 7);
    std::vector<Row> sent;
    std::vector<int> seen;
    for (int i = 0; i < kSequences * kRowsOfEach; ++i) {
      sent.push_back(rows[static_cast<size_t>(i % kRowsOfEach)]);
      seen.push_back(1 + i % kRowsOfEach);
    }
    for (const int layer : {0, 1}) {
      const auto q_key = static_cast<uint64_t>(5 + layer);
      auto request =
          h->Unsent(stream, 1, layer, 0, static_cast<int>(sent.size()), sent, 0, kManyHeads, q_key);
      const auto all = TensorsOf(*request);
      const auto registered = std::span(all).first(reached);
      for (const auto& memory : registered) {
        ASSERT_TRUE(h->core().backend().RegisterHost(memory).ok());
      }
      const int64_t in = Control().copies_in, out = Control().copies_out;
      h->Submit(request.get());
      Settle(*h);
      ASSERT_TRUE(request->answered());
      ASSERT_TRUE(request->status.ok()) << request->status;
      EXPECT_EQ(request->timings.launch_requests, 1);
      EXPECT_LT(h->Error(*request, scheduler::testing::Pointers(rows), seen, q_key), kTolerance);
      const bool streamed = reached == 3;
      EXPECT_EQ(stream_launches, streamed ? 1 + layer : 0);
      // Copies of the metadata, the first layer's plan, and the queries. KV rows share the copy of
      // the queries if all tensors pass through the staging memory. If queries are streamed, a
      // kernel moves the KV rows.
      EXPECT_EQ(Control().copies_in - in, 2 + (layer == 0));
      EXPECT_EQ(Control().copies_out - out > 0, !streamed);
      for (const auto& memory : registered) h->core().backend().UnregisterHost(memory);
    }
  }
}

// Plans of large batches have more parts when streamed. Without room for these parts, the batches
// would not be streamed.
TEST(EngineOnFakeHip, ThereIsRoomForThePlansOfStreams) {
  const auto h = Harness(0, 128, Vendor::kNvidia);
  const AttentionBackend& backend = h->core().backend();
  AttentionDesc desc;
  desc.geometry = {128, 512, 64, 8, 8};
  desc.streamed = true;
  const PlanTraits traits = backend.Traits(desc);
  ASSERT_GT(traits.dealt_pieces, 0);
  const scheduler::PlanCapacity room = scheduler::PlanCapacityOf(h->core().limits(), backend);
  const int64_t pieces = int64_t{traits.units} * traits.dealt_pieces;
  EXPECT_GE(room.reduce_partials, pieces);
  EXPECT_GE(room.partial_rows, pieces * traits.tile_rows);
}

// The rows of a step lie on two pages. The test runs with and without kernels that read the rows in
// host memory.
TEST(EngineOnFakeHip, BlocksOfStreamsAppendTheRowsOfTheirItems) {
  constexpr int kManyHeads = 128, kSequences = 12, kRowsOfEach = 2, kSteps = 3;
  auto h = Harness(0, kManyHeads, Vendor::kNvidia);
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  std::vector<scheduler::StepSequenceArgs> begun;
  for (int i = 0; i < kSequences; ++i) begun.push_back({h->Open().id, 1, 0, kRowsOfEach});
  const std::vector<Row> rows = Rows(kSteps * kRowsOfEach, 7);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(step);
    const int before = step * kRowsOfEach;
    std::vector<Row> sent;
    std::vector<int> seen;
    for (int i = 0; i < kSequences * kRowsOfEach; ++i) {
      const int row = before + i % kRowsOfEach;
      sent.push_back(rows[static_cast<size_t>(row)]);
      seen.push_back(row + 1);
    }
    const auto step_id = static_cast<scheduler::StepId>(step) + 1;
    for (auto& sequence : begun) sequence.start_position = before;
    ASSERT_TRUE(h->Begin(stream, step_id, begun)->status.ok());
    for (const int layer : {0, 1}) {
      const auto q_key = static_cast<uint64_t>(5 + 2 * step + layer);
      auto request = h->Unsent(stream, step_id, layer, 0, static_cast<int>(sent.size()), sent, 0,
                               kManyHeads, q_key);
      const auto all = TensorsOf(*request);
      const auto registered = std::span(all).first(step % 2 == 0 ? 4 : 3);
      for (const auto& memory : registered) {
        ASSERT_TRUE(h->core().backend().RegisterHost(memory).ok());
      }
      Control().on_launch = CountStreams;
      stream_launches = append_launches = 0;
      h->Submit(request.get());
      Settle(*h);
      ASSERT_TRUE(request->status.ok()) << request->status;
      EXPECT_EQ(stream_launches, 1);
      EXPECT_EQ(append_launches, 0);
      EXPECT_LT(h->Error(*request, scheduler::testing::Pointers(rows), seen, q_key), kTolerance);
      for (const auto& memory : registered) h->core().backend().UnregisterHost(memory);
    }
    ASSERT_TRUE(h->End(stream, step_id)->status.ok());
  }
}

// One row of queries consists of the word that the device's memory holds before queries arrive.
TEST(EngineOnFakeHip, StreamedQueriesMayHaveAnyWords) {
  constexpr int kManyHeads = 128, kSequences = 15, kHostile = 5;
  constexpr size_t kQueryRow = kManyHeads * 576, kOutputRow = kManyHeads * 512;
  auto h = Harness(0, kManyHeads, Vendor::kNvidia);
  Control().on_launch = CountStreams;
  stream_launches = 0;
  const StreamId stream = h->core().steps().OpenStream(h->tenant());
  std::vector<scheduler::StepSequenceArgs> begun;
  for (int i = 0; i < kSequences; ++i) begun.push_back({h->Open().id, 1, 0, 1});
  ASSERT_TRUE(h->Begin(stream, 1, begun)->status.ok());
  const std::vector<Row> sent(kSequences, Rows(1, 7).front());
  auto request = h->Unsent(stream, 1, 0, 0, kSequences, sent, 0, kManyHeads, 5);
  std::memset(request->queries.data() + kHostile * kQueryRow, 0xff,
              kQueryRow * sizeof(kernels::Bf16));
  const auto tensors = TensorsOf(*request);
  const auto all = std::span(tensors).first(3);
  for (const auto& memory : all) ASSERT_TRUE(h->core().backend().RegisterHost(memory).ok());
  h->Submit(request.get());
  Settle(*h);
  ASSERT_TRUE(request->answered());
  EXPECT_TRUE(request->status.ok()) << request->status;
  EXPECT_EQ(stream_launches, 1);
  for (int row = 0; row < kSequences; ++row) {
    EXPECT_EQ(std::isnan(request->output[static_cast<size_t>(row) * kOutputRow]), row == kHostile)
        << row;
  }
  for (const auto& memory : all) h->core().backend().UnregisterHost(memory);
}

// The kernel that waits for the queries is already on the device when their copy is refused.
TEST(EngineOnFakeHip, LaunchesOfRefusedCopiesEnd) {
  constexpr int kManyHeads = 128, kSequences = 15, kCopies = 3;  // metadata, the plan, queries
  for (int refused = 0; refused < kCopies; ++refused) {
    SCOPED_TRACE(refused);
    auto h = Harness(0, kManyHeads, Vendor::kNvidia);
    const StreamId stream = h->core().steps().OpenStream(h->tenant());
    std::vector<scheduler::StepSequenceArgs> begun;
    for (int i = 0; i < kSequences; ++i) begun.push_back({h->Open().id, 1, 0, 1});
    ASSERT_TRUE(h->Begin(stream, 1, begun)->status.ok());
    const std::vector<Row> sent(kSequences, Rows(1, 7).front());
    auto request = h->Unsent(stream, 1, 0, 0, kSequences, sent, 0, kManyHeads, 5);
    const auto tensors = TensorsOf(*request);
    const auto all = std::span(tensors).first(3);
    for (const auto& memory : all) ASSERT_TRUE(h->core().backend().RegisterHost(memory).ok());
    Control().on_launch = CountStreams;
    stream_launches = 0;
    Control().FailOnce("hipMemcpyHtoDAsync", refused);
    h->Submit(request.get());
    Settle(*h);
    EXPECT_EQ(request->detail.reason, "launch_failed") << request->status;
    EXPECT_EQ(stream_launches, refused + 1 == kCopies);
    EXPECT_TRUE(h->core().backend().Healthy().ok());
    for (const auto& memory : all) h->core().backend().UnregisterHost(memory);
  }
}

class EngineOnFakeHipTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EngineOnFakeHipTest, ::testing::Values(2, 4, 8));

TEST_P(EngineOnFakeHipTest, FusedSlicesAnswerEachRankWithItsHeads) {
  const int ranks = GetParam();
  const int heads = kHeads / ranks;
  auto h = Harness(0, kHeads, Vendor::kAmd, /*reach_host=*/false);
  std::vector<StreamId> streams;
  for (int i = 0; i < ranks; ++i) streams.push_back(h->core().steps().OpenStream(h->tenant()));
  const auto seq = h->Open();
  for (const StreamId stream : streams) {
    ASSERT_TRUE(h->Begin(stream, 1, {{seq.id, 1, 0, 3}}, ranks)->status.ok());
  }
  const std::vector<Row> rows = Rows(3, 7);
  std::vector<const Row*> seen;
  for (const Row& row : rows) seen.push_back(&row);
  std::vector<std::unique_ptr<TestRequest>> slices;
  for (int i = 0; i < ranks; ++i) {
    auto slice =
        h->Unsent(streams[i], 1, 0, 0, 3, i == 0 ? rows : std::vector<Row>(), i * heads, heads, 5);
    // Every second rank's tensors lie in memory that the device's copies reach.
    if (i % 2 == 1) {
      for (const std::span<std::byte> memory : {std::as_writable_bytes(std::span(slice->queries)),
                                                std::as_writable_bytes(std::span(slice->output)),
                                                std::as_writable_bytes(std::span(slice->lse))}) {
        ASSERT_TRUE(h->core().backend().RegisterHost(memory).ok());
      }
    }
    slices.push_back(std::move(slice));
  }
  for (const auto& slice : slices) h->Submit(slice.get());
  const int64_t copies_in = Control().copies_in;
  const int64_t copies_out = Control().copies_out;
  Settle(*h);
  for (const auto& slice : slices) {
    ASSERT_TRUE(slice->answered());
    ASSERT_TRUE(slice->status.ok()) << slice->status;
    EXPECT_EQ(slice->timings.launch_requests, ranks);
    EXPECT_LT(h->Error(*slice, seen, {1, 2, 3}, 5), kTolerance);
  }
  // Copies of the plan, of the metadata, of all staged tensors, and one of each pinned tensor.
  EXPECT_EQ(Control().copies_in - copies_in, 3 + ranks / 2);
  EXPECT_EQ(Control().copies_out - copies_out, 1 + 2 * (ranks / 2));
  EXPECT_EQ(h->core().Stats().slices_fused, uint64_t(ranks));
}

// The error at registration names the supported dims and the missing feature of this device.
TEST(EngineOnFakeHip, ModelsOfOtherLatentDimsAreRefusedAtRegistration) {
  const auto harness = Harness();
  scheduler::EngineCore& core = harness->core();
  const struct {
    Geometry geometry;
    const char* missing;
  } wrong[] = {{{kHeads, 256, 64, 0, 0}, "missing: this kv_lora_rank"},
               {{kHeads, 512, 32, 0, 0}, "missing: this rope_dim"},
               {{kHeads, 512, 64, 100, 128}, "missing: this nope_dim"},
               {{kHeads, 512, 64, 128, 100}, "missing: this v_dim"}};
  for (const auto& [geometry, missing] : wrong) {
    ASSERT_TRUE(core.models().Unregister(core.FindTenant("tenant-a"), "tiny").ok() ||
                core.models().size() == 0);
    scheduler::ModelSpec spec = harness->model();
    spec.geometry = geometry;
    const auto model = core.models().Register(core.FindTenant("tenant-a"), spec);
    EXPECT_EQ(model.status().code(), absl::StatusCode::kUnimplemented) << model.status();
    for (const char* part : {"wanted: absorbed heads=16 lora=", "supported: ", missing,
                             "device: Fake Instinct (gfx950)"}) {
      EXPECT_THAT(model.status().message(), HasSubstr(part));
    }
    const ErrorDetail detail = DetailOf(model.status());
    EXPECT_EQ(detail.field, "model.geometry");
    EXPECT_EQ(detail.reason, "unsupported_shape");
    EXPECT_THAT(detail.limit, HasSubstr("kv_lora_rank 512, rope_dim 64"));
    EXPECT_THAT(core.backend().Info().supported, HasSubstr("kv_lora_rank 512, rope_dim 64"));
  }
}

}  // namespace
}  // namespace mla::kernels::hip
