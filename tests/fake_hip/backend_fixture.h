// What tests of the GPU backend on the fake runtime have in common.
#ifndef MLA_TESTS_FAKE_HIP_BACKEND_FIXTURE_H_
#define MLA_TESTS_FAKE_HIP_BACKEND_FIXTURE_H_

#include <dlfcn.h>

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/fake_control.h"

namespace mla::gpu {

inline constexpr char kLibrary[] = "tests/fake_hip/libfake_hip.so";
inline constexpr char kImage950[] = "fake image for gfx950";
inline constexpr char kImage942[] = "fake image for gfx942";
inline constexpr char kImage90[] = "fake image for sm_90";

inline KernelImage Image(const char* arch, const char* text) {
  return {arch, {reinterpret_cast<const std::byte*>(text), std::strlen(text) + 1}};
}

// The fake's control block, fresh; null, with a failure, when the library cannot be opened.
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
    // Has tests of its own, and takes its time where nothing is optimised.
    options.self_test = false;
    return options;
  }
  static kernels::BackendLimits Limits() {
    kernels::BackendLimits l;
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
    return l;
  }
  // Appends `rows` rows at `kv`, an address of the launch that is being recorded, to the first
  // page.
  static kernels::AppendRecord Append(const void* kv, int32_t rows) {
    return {kv, kernels::DType::kBf16, 576, 0, 0, 1152, 64, 0, rows, 576};
  }
  // A launch that appends one row.
  static absl::Status AppendOnce(HipBackend& backend) {
    const std::vector<kernels::Bf16> row(576, 0x3f80);
    return AppendOnce(backend, row.data());
  }
  static absl::Status AppendOnce(HipBackend& backend, const kernels::Bf16* row) {
    if (absl::Status s = backend.BeginLaunch(0); !s.ok()) return s;
    auto kv = backend.StageInput(0, row, 1152);
    if (!kv.ok()) return kv.status();
    backend.PageTables()[0] = 0;
    const kernels::TableRange table{0, 1};
    const kernels::AppendRecord record = Append(*kv, 1);
    absl::Status s = backend.PublishPageTable(0, {&table, 1});
    if (s.ok()) s = backend.AppendKv(0, {&record, 1});
    if (s.ok()) s = backend.Submit(0);
    return s.ok() ? backend.Wait(0).status() : s;
  }

  fake_hip::Control* control_ = nullptr;
};

}  // namespace mla::gpu

#endif  // MLA_TESTS_FAKE_HIP_BACKEND_FIXTURE_H_
