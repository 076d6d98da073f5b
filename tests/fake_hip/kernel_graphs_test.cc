// Tests that repeated kernel sequences become one call of the runtime, for both vendors. If the
// runtime refuses a call, kernels are launched one by one and results stay correct.
#include "kernels/hip/runtime/kernel_graphs.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

constexpr size_t kRowElements = 576;

constexpr int64_t kLayerBytes = 64 * 1152;

// Appends a row to a layer's page with two kernels: one changes the page table, the other stores
// the row.
class LayerLaunch {
 public:
  absl::Status Submit(HipBackend& backend, int32_t slot, Bf16 value, int layer) {
    row_.assign(kRowElements, value);
    layout_ = LaunchLayout(backend, slot);
    const auto kv = layout_.Input(row_.data(), 1152);
    if (!kv.ok()) return kv.status();
    record_ = {*kv, DType::kBf16, 576, 0, layer * kLayerBytes, 1152, 64, 0, 1, 576};
    launch_.inputs = layout_.inputs();
    launch_.page_tables = {&page_, 1};
    launch_.table_changes = {&table_, 1};
    launch_.appends = {&record_, 1};
    return backend.Submit(slot, launch_);
  }

 private:
  const uint32_t page_ = 0;
  const TableRange table_{0, 1};
  std::vector<Bf16> row_;
  AppendRecord record_{};
  LaunchLayout layout_;
  Launch launch_;
};

class KernelGraphsTest : public BackendOnFakeTest, public ::testing::WithParamInterface<Vendor> {
 protected:
  bool amd() const { return GetParam() == Vendor::kAmd; }
  const char* image() const { return amd() ? kImage950 : kImage90; }
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    Make();
  }
  void Make() {
    backend_.reset();
    control_->arch = amd() ? "gfx950" : "sm_90";
    HipBackendOptions options = Options();
    options.vendor = GetParam();
    options.images = {Image(control_->arch, image())};
    options.graphs = GraphUse::kOn;
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    ASSERT_TRUE(backend_->Configure(Limits()).ok());
  }
  void TearDown() override {
    backend_.reset();
    EXPECT_EQ(control_->graphs, 0);
    BackendOnFakeTest::TearDown();
  }
  // Returns the row of a layer.
  std::vector<Bf16> Row(int layer) {
    AppendRecord stored = Append(nullptr, 1);
    stored.layer_offset = layer * kLayerBytes;
    const uint32_t page = 0;
    std::vector<Bf16> row(kRowElements);
    EXPECT_TRUE(kernels::ReadRows(*backend_, 0, {&page, 1}, stored, row.data()).ok());
    return row;
  }
  // Sequences of a launch. The first one is the kernel that copies the row, before the first event.
  static constexpr int64_t kAll = 2;
  // Stores a row in a layer. Returns the number of sequences that ran as graphs.
  int64_t Store(Bf16 value, int layer) {
    const int64_t graphs = control_->graph_launches, kernels = control_->launches;
    LayerLaunch launch;
    EXPECT_TRUE(launch.Submit(*backend_, 0, value, layer).ok());
    EXPECT_TRUE(backend_->Wait(0).ok());
    EXPECT_GE(control_->launches - kernels, 2);
    const int64_t of_graphs = control_->graph_launches - graphs;
    EXPECT_EQ(Row(layer), std::vector<Bf16>(kRowElements, value)) << layer;
    return of_graphs;
  }

  // HIP does not promise to keep the arguments of a running kernel, so on AMD devices each launch
  // sets all arguments itself.
  void ExpectNothingSetAhead() {
    for (int layer = 0; layer < 5; ++layer) Store(static_cast<Bf16>(0x3f80 + layer), layer);
    for (int layer = 5; layer < 8; ++layer) {
      const int64_t before = control_->graph_updates;
      LayerLaunch launch;
      ASSERT_TRUE(launch.Submit(*backend_, 0, 0x4000, layer).ok());
      EXPECT_EQ(control_->graph_updates - before, 1) << layer;
      ASSERT_TRUE(backend_->Wait(0).ok());
      EXPECT_EQ(Row(layer), std::vector<Bf16>(kRowElements, 0x4000)) << layer;
    }
  }

  std::unique_ptr<HipBackend> backend_;
};

TEST_P(KernelGraphsTest, TheThirdLaunchOfASequenceIsOfItsGraph) {
  EXPECT_EQ(Store(0x3f80, 0), 0);
  EXPECT_EQ(Store(0x4000, 0), 0);
  const int64_t made = control_->graphs, set = control_->graph_updates;
  EXPECT_GE(made, 1);
  EXPECT_EQ(Store(0x4040, 0), kAll);
  EXPECT_EQ(control_->graph_updates, set);
  EXPECT_EQ(Store(0x4080, 2), kAll);
  EXPECT_EQ(Store(0x40a0, 1), kAll);
  EXPECT_GT(control_->graph_updates, set);
  EXPECT_EQ(control_->graphs, made);
}

TEST_P(KernelGraphsTest, LaunchesThatOverlapKeepTheirArguments) {
  for (int i = 0; i < KernelGraphs::kUsesBefore; ++i) {
    LayerLaunch first, second;
    ASSERT_TRUE(first.Submit(*backend_, 0, 0x3f80, 0).ok());
    ASSERT_TRUE(second.Submit(*backend_, 1, 0x3f80, 1).ok());
    ASSERT_TRUE(backend_->Wait(0).ok());
    ASSERT_TRUE(backend_->Wait(1).ok());
  }
  const int64_t before = control_->graph_launches;
  LayerLaunch first, second;
  ASSERT_TRUE(first.Submit(*backend_, 0, 0x4000, 2).ok());
  ASSERT_TRUE(second.Submit(*backend_, 1, 0x4040, 3).ok());
  ASSERT_TRUE(backend_->Wait(0).ok());
  ASSERT_TRUE(backend_->Wait(1).ok());
  EXPECT_GE(control_->graph_launches - before, 2);
  EXPECT_EQ(Row(2), std::vector<Bf16>(kRowElements, 0x4000));
  EXPECT_EQ(Row(3), std::vector<Bf16>(kRowElements, 0x4040));
}

TEST_P(KernelGraphsTest, LayersOfAStepAreSetBeforeTheyAreLaunched) {
  if (amd()) return ExpectNothingSetAhead();
  // The second launch creates the graph. From the fifth launch on, arguments for the next layer can
  // be predicted, because layers follow at equal distances.
  for (int layer = 0; layer < 5; ++layer) Store(static_cast<Bf16>(0x3f80 + layer), layer);
  for (int layer = 5; layer < 8; ++layer) {
    control_->fail_call = "hipGraphExecKernelNodeSetParams";
    control_->fail_after = 0;
    control_->fail_times = 1;
    control_->fail_seen = layer == 6 ? 0 : 1;
    // Arguments of layer 6 were set ahead, so its own launch sets none. The injected failure hits
    // the call that sets the arguments of layer 7.
    EXPECT_EQ(Store(static_cast<Bf16>(0x3f80 + layer), layer), kAll) << layer;
  }
  // These layers were not predicted.
  control_->fail_call = "";
  EXPECT_EQ(Store(0x4000, 2), kAll);
  EXPECT_EQ(Store(0x4040, 1), kAll);
  EXPECT_EQ(Store(0x4080, 9), kAll);
  EXPECT_EQ(Row(7), std::vector<Bf16>(kRowElements, 0x3f80 + 7));
}

TEST_P(KernelGraphsTest, WhatIsRefusedWhenItIsMadeIsLaunchedOneByOne) {
  for (const char* call :
       {"hipGraphCreate", "hipGraphAddKernelNode", "hipGraphInstantiateWithFlags"}) {
    Make();
    control_->fail_call = call;
    control_->fail_after = 0;
    control_->fail_times = -1;
    for (int i = 0; i < 5; ++i) EXPECT_EQ(Store(static_cast<Bf16>(0x3f80 + i), i), 0) << call;
    control_->fail_call = "";
    EXPECT_EQ(Store(0x4000, 0), 0) << call;
    EXPECT_EQ(control_->graphs, 0) << call;
    EXPECT_TRUE(backend_->Healthy().ok());
  }
}

TEST_P(KernelGraphsTest, ALaunchThatIsRefusedIsMadeOneByOneAndTheNextIsNot) {
  for (const char* call : {"hipGraphExecKernelNodeSetParams", "hipGraphLaunch"}) {
    Make();
    Store(0x3f80, 0);
    Store(0x4000, 0);
    EXPECT_EQ(Store(0x4040, 0), kAll) << call;
    control_->fail_call = call;
    control_->fail_after = control_->fail_seen = 0;
    control_->fail_times = -1;
    // The kernel that copies the row has no arguments to set.
    const bool sets = std::string(call) == "hipGraphExecKernelNodeSetParams";
    EXPECT_EQ(Store(0x4080, 4), sets ? kAll - 1 : 0) << call;
    control_->fail_call = "";
    EXPECT_EQ(Store(0x40a0, 8), kAll) << call;
    EXPECT_TRUE(backend_->Healthy().ok());
  }
}

// HIP frees the memory of arguments only with the whole graph, and fails when none is left.
TEST_P(KernelGraphsTest, ArgumentSpaceIsBounded) {
  constexpr int64_t kSetBytes = 6 << 10;
  // The current graph and the previous one, for each of two sequences.
  constexpr int64_t kMost =
      4 * (KernelGraphs::kMostSets + 2 * int64_t{KernelGraphs::kMostKernels}) * kSetBytes;
  control_->graph_argument_limit = kMost;
  constexpr int kLaunches = 4 * KernelGraphs::kMostSets;
  for (int i = 0; i < kLaunches; ++i) {
    LayerLaunch launch;
    // The layers have no regular order, so each launch sets an argument.
    ASSERT_TRUE(launch.Submit(*backend_, 0, static_cast<Bf16>(0x3f80 + i % 64), i * i % 11).ok());
    ASSERT_TRUE(backend_->Wait(0).ok()) << i;
  }
  EXPECT_GT(control_->graph_updates, kLaunches / 2);
  EXPECT_TRUE(backend_->Healthy().ok());
  EXPECT_EQ(Store(0x4000, 3), kAll);
  if (amd()) {
    EXPECT_GT(control_->most_graph_argument_bytes, 0);
    EXPECT_LE(control_->most_graph_argument_bytes, kMost);
    EXPECT_GE(control_->graphs_made, 3);
  } else {
    EXPECT_EQ(control_->most_graph_argument_bytes, 0);
    EXPECT_EQ(control_->graphs_made, 2);
  }
  EXPECT_LE(control_->graphs, 4);
  backend_.reset();
  EXPECT_EQ(control_->graph_argument_bytes, 0);
}

TEST_P(KernelGraphsTest, AGraphThatCannotBeReplacedIsLaunchedOneByOne) {
  Store(0x3f80, 0);
  Store(0x4000, 0);
  ASSERT_EQ(Store(0x4040, 0), kAll);
  control_->fail_call = "hipGraphInstantiateWithFlags";
  control_->fail_after = 0;
  control_->fail_times = -1;
  for (int i = 0; i < 2 * KernelGraphs::kMostSets; ++i) {
    LayerLaunch launch;
    ASSERT_TRUE(launch.Submit(*backend_, 0, 0x3f80, i * i % 11).ok());
    ASSERT_TRUE(backend_->Wait(0).ok());
  }
  control_->fail_call = "";
  // The kernel that copies the row never has arguments set, so its graph stays. On NVIDIA devices
  // all graphs stay.
  EXPECT_EQ(Store(0x4080, 5), amd() ? 1 : kAll);
  EXPECT_TRUE(backend_->Healthy().ok());
}

// Tests the class KernelGraphs alone.
TEST_P(KernelGraphsTest, SequencesAreBounded) {
  backend_.reset();
  const std::string library = kLibrary;
  auto runtime = GpuRuntime::Open(GetParam(), 0, {&library, 1});
  ASSERT_TRUE(runtime.ok()) << runtime.status();
  const auto module = (*runtime)->Load(Image("", image()).bytes);
  ASSERT_TRUE(module.ok()) << module.status();
  PendingKernel kinds[2];
  const char* const names[] = {kMoveKernel, kAppendKernel};
  for (int i = 0; i < 2; ++i) {
    const auto function = (*runtime)->Find(*module, names[i]);
    ASSERT_TRUE(function.ok()) << function.status();
    kinds[i].function = *function;
    kinds[i].shape.threads = 256;
    kinds[i].args.fill(std::byte{0});
  }
  auto graphs = KernelGraphs::Open(runtime->get());
  ASSERT_TRUE(graphs.ok()) << graphs.status();
  const auto learn = [&](uint32_t bits, size_t count) {
    std::vector<PendingKernel> kernels;
    for (size_t i = 0; i < count; ++i) kernels.push_back(kinds[bits >> i & 1]);
    for (int i = 0; i < KernelGraphs::kUsesBefore; ++i) (*graphs)->Learn(kernels);
  };
  learn(0, 0);
  learn(0, KernelGraphs::kMostKernels + 1);
  EXPECT_EQ(control_->graphs, 0);
  for (uint32_t bits = 0; bits < 2 * KernelGraphs::kMostGraphs; ++bits) {
    learn(bits, KernelGraphs::kMostKernels);
  }
  EXPECT_EQ(control_->graphs, static_cast<int64_t>(KernelGraphs::kMostGraphs));
  graphs->reset();
  EXPECT_EQ(control_->graphs, 0);
  (*runtime)->Unload(*module);
}

INSTANTIATE_TEST_SUITE_P(Vendors, KernelGraphsTest,
                         ::testing::Values(Vendor::kAmd, Vendor::kNvidia), [](const auto& vendor) {
                           return vendor.param == Vendor::kAmd ? "Amd" : "Nvidia";
                         });

}  // namespace
}  // namespace mla::kernels::hip
