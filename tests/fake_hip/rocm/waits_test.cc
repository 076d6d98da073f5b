// Tests that a launch's outputs are in host memory when Wait returns, for each way that outputs
// take. The fake's streams run only when a caller waits for them. The tests also show that each
// wait between streams is needed, and that a runtime is refused if its events are complete before
// copies to the host have arrived.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

constexpr size_t kRowElements = 576;
constexpr int32_t kRows = 3;
constexpr int32_t kUnwritten = 7;

// Compares rows with those of the pool and has one output for each. It must live until its Wait
// returns.
class CompareLaunch {
 public:
  absl::Status Submit(HipBackend& backend, int32_t slot, std::span<const Bf16> rows,
                      int32_t* differs) {
    layout_ = LaunchLayout(backend, slot);
    const auto kv = layout_.Input(rows.data(), static_cast<int64_t>(rows.size_bytes()));
    const auto out = layout_.Output(differs, kRows * int64_t{sizeof(int32_t)});
    if (!kv.ok() || !out.ok()) return kv.ok() ? out.status() : kv.status();
    record_ = {*kv, DType::kBf16, kRowElements, 0, 0, 1152, 64, 0, kRows, kRowElements};
    record_.differs = static_cast<int32_t*>(*out);
    launch_.inputs = layout_.inputs();
    launch_.outputs = layout_.outputs();
    launch_.page_tables = {&page_, 1};
    launch_.table_changes = {&table_, 1};
    launch_.appends = {&record_, 1};
    return backend.Submit(slot, launch_);
  }

 private:
  const uint32_t page_ = 0;
  const TableRange table_{0, 1};
  AppendRecord record_{};
  LaunchLayout layout_;
  Launch launch_;
};

struct Way {
  const char* name;
  bool reached;  // kernels reach the host's memory
  bool pinned;   // the tensors' memory is pinned
  bool alone;    // no other launch runs
};

class WaitsTest : public BackendOnFakeTest, public ::testing::WithParamInterface<Way> {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    control_->device_pointer_offset = GetParam().reached ? 0 : int64_t{1} << 40;
    auto made = HipBackend::Create(Options());
    ASSERT_TRUE(made.ok()) << made.status();
    backend_ = *std::move(made);
    ASSERT_TRUE(backend_->Configure(Limits()).ok());
    ASSERT_EQ(backend_->Info().waits_for_words, GetParam().reached);
    if (GetParam().pinned) {
      ASSERT_TRUE(backend_->RegisterHost(Memory()).ok());
    }
    // The launches expect rows 0 and 1 in the pool.
    rows_.assign(kRows * kRowElements, Bf16{0x3f80});
    for (int32_t row = 0; row < 2; ++row) {
      Launch launch;
      LaunchLayout layout(*backend_, 0);
      const auto kv = layout.Input(rows_.data(), 1152);
      ASSERT_TRUE(kv.ok());
      const AppendRecord record{*kv,  DType::kBf16, kRowElements, 0, 0,
                                1152, 64,           row,          1, kRowElements};
      launch.inputs = layout.inputs();
      const uint32_t page = 0;
      const TableRange table{0, 1};
      launch.page_tables = {&page, 1};
      launch.table_changes = {&table, 1};
      launch.appends = {&record, 1};
      ASSERT_TRUE(backend_->Submit(0, launch).ok());
      ASSERT_TRUE(backend_->Wait(0).ok());
    }
  }
  void TearDown() override {
    if (GetParam().pinned) backend_->UnregisterHost(Memory());
    backend_.reset();
    BackendOnFakeTest::TearDown();
  }
  std::span<std::byte> Memory() { return std::as_writable_bytes(std::span(memory_)); }
  std::span<Bf16> Rows() {
    return {reinterpret_cast<Bf16*>(memory_.data()), size_t{kRows} * kRowElements};
  }
  int32_t* Differs() { return reinterpret_cast<int32_t*>(memory_.data() + 2048); }

  // Runs a launch that compares the three rows, waits for it, and returns its outputs.
  std::vector<int32_t> Compare() {
    CompareLaunch other, compare;
    std::vector<int32_t> others(kRows, kUnwritten);
    std::copy(rows_.begin(), rows_.end(), Rows().begin());
    std::fill_n(Differs(), kRows, kUnwritten);
    if (!GetParam().alone) {
      EXPECT_TRUE(other.Submit(*backend_, 1, rows_, others.data()).ok());
    }
    EXPECT_TRUE(compare.Submit(*backend_, 0, Rows(), Differs()).ok());
    EXPECT_EQ(std::vector<int32_t>(Differs(), Differs() + kRows),
              std::vector<int32_t>(kRows, kUnwritten));  // Wait was not called yet
    EXPECT_TRUE(backend_->Wait(0).ok());
    std::vector<int32_t> got(Differs(), Differs() + kRows);
    EXPECT_EQ(GetParam().alone || backend_->Wait(1).ok(), true);
    return got;
  }

  static inline const std::vector<int32_t> kWanted = {0, 0, 1};
  std::unique_ptr<HipBackend> backend_;
  std::vector<Bf16> rows_;
  std::vector<int64_t> memory_ = std::vector<int64_t>(4096);
};

TEST_P(WaitsTest, OutputsAreThereWhenALaunchHasEnded) {
  for (int turn = 0; turn < 4; ++turn) EXPECT_EQ(Compare(), kWanted) << turn;
}

// The copies of two launches that run together have their own streams. Without one of the waits
// between streams, a launch would read its inputs or return its outputs before they are written.
TEST_P(WaitsTest, EachWaitBetweenStreamsIsNeeded) {
  EXPECT_EQ(Compare(), kWanted);
  control_->stream_waits = 0;
  rows_[5] = 0x4000;  // makes the tensors differ from those of the previous launch
  EXPECT_EQ(Compare(), (std::vector<int32_t>{1, 0, 1}));
  const int waits = control_->stream_waits;
  int needed = 0;
  for (int wait = 0; wait < waits; ++wait) {
    rows_[5] = rows_[5] == 0x4000 ? Bf16{0x3f80} : Bf16{0x4000};
    const std::vector<int32_t> wanted = {rows_[5] == 0x4000 ? 1 : 0, 0, 1};
    control_->stream_waits = 0;
    control_->ignored_wait = wait;
    needed += Compare() != wanted;
    control_->ignored_wait = -1;
    EXPECT_EQ(Compare(), wanted) << wait;
  }
  EXPECT_EQ(needed > 0, waits > 0);
}

// No wait of the backend can help where the runtime's events are wrong, so the self-test has to
// find it.
TEST_P(WaitsTest, ARuntimeWhoseEventsAreTooEarlyIsNotUsed) {
  EXPECT_EQ(Compare(), kWanted);
  control_->late_copies_out = true;
  rows_[5] = 0x4000;  // makes the outputs differ from those of the previous launch
  const std::vector<int32_t> right = {1, 0, 1};
  // A single launch's kernels that reach the host's memory write outputs there, without a copy.
  EXPECT_EQ(Compare() == right, GetParam().reached && GetParam().alone);
  HipBackendOptions options = Options();
  options.self_test = true;
  options.self_test_options.parts = {"pages"};
  const absl::Status refused = HipBackend::Create(options).status();
  EXPECT_THAT(std::string(refused.message()), HasSubstr("failed self-test"));
  control_->late_copies_out = false;
  EXPECT_EQ(Compare(), right);
  EXPECT_TRUE(HipBackend::Create(options).ok());
}

INSTANTIATE_TEST_SUITE_P(Ways, WaitsTest,
                         ::testing::Values(Way{"CopiedStagedAlone", false, false, true},
                                           Way{"CopiedStagedBeside", false, false, false},
                                           Way{"CopiedPinnedAlone", false, true, true},
                                           Way{"CopiedPinnedBeside", false, true, false},
                                           Way{"ReachedStagedAlone", true, false, true},
                                           Way{"ReachedStagedBeside", true, false, false},
                                           Way{"ReachedPinnedAlone", true, true, true},
                                           Way{"ReachedPinnedBeside", true, true, false}),
                         [](const auto& way) { return std::string(way.param.name); });

}  // namespace
}  // namespace mla::kernels::hip
