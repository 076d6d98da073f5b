// Submits launches, on NVIDIA and AMD devices, while another thread makes driver calls that wait
// for the device, between any two calls of Submit. A kernel must never wait for work that is not
// enqueued yet, because that call would then block both.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "tests/conformance/suite/scheduler_plan.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_hip/waits/driver_calls.h"

namespace mla::kernels::hip {
namespace {

constexpr int32_t kHeads = 32, kSegments = 2, kKeys = 70, kPageRows = 64, kPages = 2;
constexpr int64_t kDim = 576, kOutputDim = 512;
constexpr int64_t kLayerRowBytes = kDim * static_cast<int64_t>(sizeof(Bf16));

// Values in [-1, 1), of either sign.
std::vector<Bf16> Values(int64_t count, uint32_t seed) {
  std::vector<Bf16> values(static_cast<size_t>(count));
  for (Bf16& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<Bf16>((0x3c00u | (seed >> 16 & 0x3ffu)) | (seed >> 31 << 15));
  }
  return values;
}

// Two sequences with one row of queries each, streamed in and out.
class StreamedLaunch {
 public:
  explicit StreamedLaunch(HipBackend& backend)
      : backend_(backend),
        plan_(conformance::SchedulerPlanBuilder(backend)),
        queries_(Values(kSegments * kHeads * kDim, 3)),
        rows_(Values(kKeys * kDim, 5)),
        outputs_(static_cast<size_t>(kSegments * kHeads * kOutputDim)) {
    for (const auto& memory : Memory()) EXPECT_TRUE(backend.RegisterHost(memory).ok());
  }
  ~StreamedLaunch() {
    for (const auto& memory : Memory()) backend_.UnregisterHost(memory);
  }

  // Fills the pages of both sequences.
  void Append() {
    layout_ = LaunchLayout(backend_, 0);
    launch_ = {};
    const auto kv = layout_.Input(rows_.data(), kKeys * kLayerRowBytes);
    ASSERT_TRUE(kv.ok()) << kv.status();
    const AppendRecord record{*kv,       DType::kBf16,
                              kDim,      0,
                              0,         kLayerRowBytes,
                              kPageRows, 0,
                              kKeys,     static_cast<int32_t>(kDim)};
    launch_.inputs = layout_.inputs();
    launch_.page_tables = tables_;
    launch_.table_changes = {&table_, 1};
    launch_.appends = {&record, 1};
    ASSERT_TRUE(backend_.Submit(0, launch_).ok());
    ASSERT_TRUE(backend_.Wait(0).ok());
  }

  void Prepare() {
    std::fill(outputs_.begin(), outputs_.end(), 12345.0f);
    layout_ = LaunchLayout(backend_, 0);
    launch_ = {};
    const auto q = layout_.Input(queries_.data(), Bytes(queries_));
    const auto o = layout_.Output(outputs_.data(), Bytes(outputs_));
    ASSERT_TRUE(q.ok() && o.ok());
    std::vector<conformance::PlanShape> shapes;
    records_.clear();
    for (int64_t i = 0; i < kSegments; ++i) {
      SegmentRecord r{};
      r.q = static_cast<const Bf16*>(*q) + i * kHeads * kDim;
      r.o = static_cast<float*>(*o) + i * kHeads * kOutputDim;
      r.q_head_stride = kDim;
      r.q_row_stride = kHeads * kDim;
      r.o_head_stride = kOutputDim;
      r.o_row_stride = kHeads * kOutputDim;
      r.row_stride = kLayerRowBytes;
      r.page_size = kPageRows;
      r.q_rows = 1;
      r.kv_rows = kKeys;
      r.num_heads = kHeads;
      r.weights_slot = -1;
      r.softmax_scale = 0.1f;
      r.causal = 1;
      records_.push_back(r);
      shapes.push_back({1, kKeys, kHeads, true});
    }
    AttentionParams& params = launch_.absorbed;
    params.desc.geometry = {kHeads, 512, 64, 128, 128};
    params.desc.form = AttentionForm::kAbsorbed;
    params.desc.q_dtype = DType::kBf16;
    params.desc.o_dtype = DType::kF32;
    params.desc.page_size = kPageRows;
    params.desc.streamed = true;
    params.segments = records_;
    const auto plan = plan_(shapes, backend_.Traits(params.desc));
    ASSERT_TRUE(plan.ok()) << plan.status();
    params.plan = *plan;
    launch_.inputs = layout_.inputs();
    launch_.outputs = layout_.outputs();
    launch_.page_tables = tables_;
  }

  absl::Status Submit() { return backend_.Submit(0, launch_); }
  absl::Status Wait() { return backend_.Wait(0).status(); }
  const std::vector<float>& outputs() const { return outputs_; }

 private:
  template <class T>
  static int64_t Bytes(const std::vector<T>& values) {
    return static_cast<int64_t>(values.size() * sizeof(T));
  }
  std::array<std::span<std::byte>, 2> Memory() {
    return {std::as_writable_bytes(std::span(queries_)),
            std::as_writable_bytes(std::span(outputs_))};
  }

  HipBackend& backend_;
  conformance::PlanBuilder plan_;
  std::vector<Bf16> queries_, rows_;
  std::vector<float> outputs_;
  const std::vector<uint32_t> tables_ = {0, kPageRows* kLayerRowBytes / kPageGranuleBytes};
  const TableRange table_{0, kPages};
  std::vector<SegmentRecord> records_;
  LaunchLayout layout_;
  Launch launch_;
};

// A launch that appends one row after a word is set. The word is never set.
class GatedLaunch {
 public:
  explicit GatedLaunch(HipBackend& backend) : backend_(backend), row_(Values(kDim, 7)) {
    EXPECT_TRUE(backend.RegisterHost(std::as_writable_bytes(std::span(word_))).ok());
  }
  ~GatedLaunch() { backend_.UnregisterHost(std::as_writable_bytes(std::span(word_))); }

  void Prepare() {
    layout_ = LaunchLayout(backend_, 1);
    const auto kv = layout_.Input(row_.data(), kLayerRowBytes);
    ASSERT_TRUE(kv.ok());
    record_ = {
        *kv, DType::kBf16, kDim, 0, 0, kLayerRowBytes, kPageRows, 0, 1, static_cast<int32_t>(kDim)};
    launch_.inputs = layout_.inputs();
    launch_.page_tables = tables_;
    launch_.appends = {&record_, 1};
    launch_.gate = {{word_.data(), 1, nullptr}, /*limit_ns=*/2'000'000};
  }
  absl::Status Submit() { return backend_.Submit(1, launch_); }
  absl::Status Wait() { return backend_.Wait(1).status(); }

 private:
  HipBackend& backend_;
  std::vector<Bf16> row_;
  std::vector<uint32_t> word_ = std::vector<uint32_t>(16);
  const std::vector<uint32_t> tables_ = {0};
  AppendRecord record_{};
  LaunchLayout layout_;
  Launch launch_;
};

class DriverWaitsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    control_ = FakeControl();
    ASSERT_NE(control_, nullptr);
    control_->arch = "sm_90";
    MakeBackend();
  }
  void TearDown() override {
    backend_.reset();
    EXPECT_EQ(control_->live_bytes, 0);
  }

  void MakeBackend(int64_t stuck_ms = 0) {
    HipBackendOptions options;
    options.vendor = Vendor::kNvidia;
    options.libraries = {fake_hip::kWaitingLibrary};
    options.images = {Image("sm_90", kImage90)};
    options.stuck_ms = stuck_ms;
    MakeBackend(std::move(options));
  }
  void MakeBackend(HipBackendOptions options) {
    backend_.reset();
    options.self_test = false;
    options.watchdog_ms = 60'000;
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    BackendLimits limits;
    limits.kv_pool_bytes = 1 << 20;
    limits.page_table_entries = 16;
    limits.launch_slots = 2;
    limits.launch_requests = 4;
    limits.launch_rows = 16;
    limits.partial_rows = 4096;
    limits.max_o_dim = 512;
    limits.staging_in_bytes = limits.staging_out_bytes = limits.slot_workspace_bytes = 1 << 20;
    limits.work_items = limits.reduce_tiles = limits.reduce_partials = 256;
    limits.round_items = limits.round_expansions = 64;
    ASSERT_TRUE(backend_->Configure(limits).ok());
  }

  // Submits the launch once for each call and each place before one of Submit's driver calls.
  // Returns how many of the calls had to wait for the device. Calls `check` after each launch.
  template <class AnyLaunch>
  int Intrude(AnyLaunch& launch, std::span<const fake_hip::DriverCalls::Waiting> calls,
              const std::function<void()>& check) {
    int waited = 0;
    for (const auto& call : calls) {
      SCOPED_TRACE(call.name);
      bool made = true;
      for (int place = 0; made; ++place) {
        SCOPED_TRACE(place);
        launch.Prepare();
        fake_hip::Intrusion intrusion(*driver_, call, place);
        const absl::Status submitted = launch.Submit();
        made = intrusion.made();
        waited += intrusion.waited();
        EXPECT_TRUE(submitted.ok()) << submitted;
        const absl::Status ended = launch.Wait();
        EXPECT_TRUE(ended.ok()) << ended;
        check();
        if (::testing::Test::HasFailure()) return waited;
      }
    }
    return waited;
  }

  fake_hip::Control* control_ = nullptr;
  std::optional<fake_hip::DriverCalls> driver_{std::in_place, kImage90};
  std::unique_ptr<HipBackend> backend_;
};

// A streamed kernel is on the device before the copies of its queries are enqueued. A call in
// between waits until the kernel's bounded wait ends and not for the copies. Outputs stay correct.
TEST_F(DriverWaitsTest, NoCallOfAnotherThreadHoldsAStreamUp) {
  StreamedLaunch launch(*backend_);
  ASSERT_NO_FATAL_FAILURE(launch.Append());
  std::vector<float> want;
  for (int i = 0; i < 3; ++i) {  // the third launch is a graph
    ASSERT_NO_FATAL_FAILURE(launch.Prepare());
    ASSERT_TRUE(launch.Submit().ok());
    ASSERT_TRUE(launch.Wait().ok());
    if (i == 0) want = launch.outputs();
    EXPECT_EQ(launch.outputs(), want);
  }
  const int64_t before = backend_->Work().late_copies;
  const int waited = Intrude(launch, driver_->All(), [&] { ASSERT_EQ(launch.outputs(), want); });
  EXPECT_GT(waited, 0);
  EXPECT_GT(backend_->Work().late_copies, before) << "no kernel has read its queries itself";
}

// The same test with kernels that are launched one by one.
TEST_F(DriverWaitsTest, NorOneOfTheFirstStreams) {
  const std::vector<fake_hip::DriverCalls::Waiting> all = driver_->All();
  std::vector<float> want;
  bool made = true;
  for (int place = 0; made; ++place) {
    SCOPED_TRACE(place);
    ASSERT_NO_FATAL_FAILURE(MakeBackend());
    StreamedLaunch launch(*backend_);
    ASSERT_NO_FATAL_FAILURE(launch.Append());
    ASSERT_NO_FATAL_FAILURE(launch.Prepare());
    {
      fake_hip::Intrusion intrusion(*driver_, all[0], place);
      ASSERT_TRUE(launch.Submit().ok());
      made = intrusion.made();
      ASSERT_TRUE(launch.Wait().ok());
    }
    if (place == 0) want = launch.outputs();
    EXPECT_EQ(launch.outputs(), want);
  }
}

TEST_F(DriverWaitsTest, NoCallOfAnotherThreadHoldsAGateUp) {
  GatedLaunch launch(*backend_);
  const int waited = Intrude(launch, driver_->All(), [&] { ASSERT_TRUE(backend_->WasLate(1)); });
  EXPECT_GT(waited, 0);
}

// AMD devices have gates and no streamed kernels.
class HipWaitsTest : public DriverWaitsTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    control_ = FakeControl();
    ASSERT_NE(control_, nullptr);
    control_->arch = GetParam();
    HipBackendOptions options;
    options.libraries = {fake_hip::kWaitingLibrary};
    options.images = {Image("gfx950", kImage950), Image("gfx942", kImage942)};
    MakeBackend(std::move(options));
    ASSERT_TRUE(backend_->Info().waits_for_words);
  }
};

TEST_P(HipWaitsTest, NoCallOfAnotherThreadHoldsAGateUp) {
  const char* const image = std::string(GetParam()) == "gfx950" ? kImage950 : kImage942;
  driver_.emplace(image, /*hip=*/true);
  GatedLaunch launch(*backend_);
  const int waited = Intrude(launch, driver_->All(), [&] { ASSERT_TRUE(backend_->WasLate(1)); });
  EXPECT_GT(waited, 0);
}

INSTANTIATE_TEST_SUITE_P(Architectures, HipWaitsTest, ::testing::Values("gfx950", "gfx942"),
                         [](const auto& arch) { return std::string(arch.param); });

// A launch that loads code would wait for all earlier launches.
TEST_F(DriverWaitsTest, AllCodeIsLoadedBeforeTheFirstLaunch) {
  StreamedLaunch streamed(*backend_);
  ASSERT_NO_FATAL_FAILURE(streamed.Append());
  ASSERT_NO_FATAL_FAILURE(streamed.Prepare());
  ASSERT_TRUE(streamed.Submit().ok());
  ASSERT_TRUE(streamed.Wait().ok());
  EXPECT_GT(driver_->control().kernels, 0);
  EXPECT_EQ(driver_->control().lazy_loads, 0);
}

// A driver call that does not return is reported while it lasts, with the backend's current
// operation.
TEST_F(DriverWaitsTest, ACallThatDoesNotReturnIsNamed) {
  ASSERT_NO_FATAL_FAILURE(MakeBackend(/*stuck_ms=*/1));
  StreamedLaunch launch(*backend_);
  ASSERT_NO_FATAL_FAILURE(launch.Append());
  ASSERT_NO_FATAL_FAILURE(launch.Prepare());
  static std::atomic<bool> stands, may_go_on;
  stands = may_go_on = false;
  driver_->control().before_call = [](const char* call) {
    if (std::strcmp(call, "cuMemcpyHtoDAsync") != 0 || stands.exchange(true)) return;
    while (!may_go_on) std::this_thread::yield();
  };
  std::thread submits([&] { EXPECT_TRUE(launch.Submit().ok()); });
  while (!stands) std::this_thread::yield();
  std::string stuck;
  while (stuck.empty()) stuck = backend_->StuckCall();
  EXPECT_TRUE(stuck.starts_with("the submission of a launch has not returned for ")) << stuck;
  EXPECT_TRUE(stuck.ends_with(" its last GPU call is copy to device")) << stuck;
  may_go_on = true;
  submits.join();
  driver_->control().before_call = nullptr;
  EXPECT_EQ(backend_->StuckCall(), "");
  EXPECT_TRUE(launch.Wait().ok());
}

}  // namespace
}  // namespace mla::kernels::hip
