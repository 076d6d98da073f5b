// Helpers shared by the tests of the GPU backend on the fake runtime.
#ifndef MLA_TESTS_FAKE_HIP_BACKEND_FIXTURE_H_
#define MLA_TESTS_FAKE_HIP_BACKEND_FIXTURE_H_

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "kernels/read_rows.h"
#include "tests/fake_hip/runtime/fake_control.h"

namespace mla::kernels::hip {

inline constexpr char kLibrary[] = "tests/fake_hip/libfake_hip.so";
inline constexpr char kImage950[] = "fake image for gfx950";
inline constexpr char kImage942[] = "fake image for gfx942";
inline constexpr char kImage90[] = "fake image for sm_90";

inline KernelImage Image(const char* arch, const char* text) {
  return {arch, {reinterpret_cast<const std::byte*>(text), std::strlen(text) + 1}};
}

// Returns the fake's control block, reset. Returns null, with a test failure, if the library cannot
// be opened.
inline fake_hip::Control* FakeControl() {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  EXPECT_NE(library, nullptr) << dlerror();
  if (library == nullptr) return nullptr;
  auto get = reinterpret_cast<fake_hip::Control* (*)()>(dlsym(library, "fake_hip_control"));
  EXPECT_NE(get, nullptr);
  if (get == nullptr) return nullptr;
  *get() = fake_hip::Control();
  return get();
}

// A launch that appends one row to the page at granule `page`. It must live until its Wait returns.
class AppendLaunch {
 public:
  absl::Status Submit(HipBackend& backend, int32_t slot, const Bf16* row, uint32_t page = 0) {
    page_ = page;
    layout_ = LaunchLayout(backend, slot);
    auto kv = layout_.Input(row, 1152);
    if (!kv.ok()) return kv.status();
    record_ = {*kv, DType::kBf16, 576, 0, 0, 1152, 64, 0, 1, 576};
    launch_.inputs = layout_.inputs();
    launch_.page_tables = {&page_, 1};
    launch_.table_changes = {&table_, 1};
    launch_.appends = {&record_, 1};
    return backend.Submit(slot, launch_);
  }
  // Changes the host's table after Submit.
  void set_page(uint32_t page) { page_ = page; }

 private:
  uint32_t page_ = 0;
  const TableRange table_{0, 1};
  AppendRecord record_{};
  LaunchLayout layout_;
  Launch launch_;
};

class BackendOnFakeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    control_ = FakeControl();
    ASSERT_NE(control_, nullptr);
  }
  void TearDown() override { EXPECT_EQ(control_->live_bytes, 0); }

  static HipBackendOptions Options() {
    HipBackendOptions options;
    options.libraries = {kLibrary};
    options.images = {Image("gfx950", kImage950), Image("gfx942", kImage942)};
    options.watchdog_ms = 200;
    // The self-test has its own tests, and it is slow in builds without optimisation.
    options.self_test = false;
    return options;
  }
  // Makes the device one of sm_90, and returns options for it.
  HipBackendOptions Sm90Options() {
    control_->arch = "sm_90";
    HipBackendOptions options = Options();
    options.vendor = Vendor::kNvidia;
    options.images = {Image("sm_90", kImage90)};
    return options;
  }
  static BackendLimits Limits() {
    BackendLimits l;
    l.kv_pool_bytes = 1 << 20;
    l.page_table_entries = 16;
    l.weights_bytes = 1 << 20;
    l.weights_slots = 2;
    l.launch_slots = 2;
    l.launch_requests = 4;
    l.launch_rows = 16;
    l.partial_rows = 64;
    l.max_o_dim = 512;
    l.staging_in_bytes = l.staging_out_bytes = l.slot_workspace_bytes = 1 << 16;
    l.work_items = l.reduce_tiles = l.reduce_partials = 16;
    l.round_items = l.round_expansions = 64;
    return l;
  }
  // Appends `rows` rows from `kv`, an address that the launch can read, to the first page.
  static AppendRecord Append(const void* kv, int32_t rows) {
    return {kv, DType::kBf16, 576, 0, 0, 1152, 64, 0, rows, 576};
  }
  // Runs a launch that appends one row.
  static absl::Status AppendOnce(HipBackend& backend) {
    const std::vector<Bf16> row(576, 0x3f80);
    return AppendOnce(backend, row.data());
  }
  static absl::Status AppendOnce(HipBackend& backend, const Bf16* row) {
    AppendLaunch launch;
    absl::Status s = launch.Submit(backend, 0, row);
    return s.ok() ? backend.Wait(0).status() : s;
  }
  // Returns the first rows of a page.
  static std::vector<Bf16> ReadRows(HipBackend& backend, int32_t rows, uint32_t page = 0) {
    std::vector<Bf16> read(static_cast<size_t>(rows) * 576, 7);
    EXPECT_TRUE(kernels::ReadRows(backend, 0, {&page, 1}, Append(nullptr, rows), read.data()).ok());
    return read;
  }

  fake_hip::Control* control_ = nullptr;
};

// A backend with graphs on the architecture that the parameter names, and memory that it has
// registered.
class PinnedMemoryTest : public BackendOnFakeTest,
                         public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    control_->arch = GetParam();
    ASSERT_NO_FATAL_FAILURE(Make());
    memory_ = {static_cast<std::byte*>(std::aligned_alloc(4096, kMemoryBytes)), kMemoryBytes};
    std::memset(memory_.data(), 0, memory_.size());
    ASSERT_TRUE(backend_->RegisterHost(memory_).ok());
  }
  void TearDown() override {
    if (backend_ != nullptr) backend_->UnregisterHost(memory_);
    backend_.reset();  // before the test counts its memory
    std::free(memory_.data());
    BackendOnFakeTest::TearDown();
  }
  void Make() {
    HipBackendOptions options = Options();
    options.images.push_back(Image("sm_90", kImage90));
    if (std::string_view(control_->arch) == "sm_90") options.vendor = Vendor::kNvidia;
    options.graphs = GraphUse::kOn;
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    ASSERT_TRUE(backend_->Configure(Limits()).ok());
  }

  static constexpr size_t kMemoryBytes = 1 << 20;
  std::unique_ptr<HipBackend> backend_;
  std::span<std::byte> memory_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_TESTS_FAKE_HIP_BACKEND_FIXTURE_H_
