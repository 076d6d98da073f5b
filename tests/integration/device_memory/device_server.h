// A server in this process on the fake GPU, which offers device memory, and clients that map it.
#ifndef MLA_TESTS_INTEGRATION_DEVICE_MEMORY_DEVICE_SERVER_H_
#define MLA_TESTS_INTEGRATION_DEVICE_MEMORY_DEVICE_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {

inline constexpr int64_t kMiB = 1 << 20;

// Dims that the GPU kernels support.
inline Dims DeviceDims() {
  Dims dims;
  dims.heads = 2;
  dims.lora = 512;
  dims.rope = 64;
  dims.nope = dims.v = 128;
  dims.layers = 2;
  dims.page = 16;
  return dims;
}

inline void AllowDeviceDims(server::Config& config) {
  config.limits.max_row_dim = 576;
  config.limits.max_v_dim = 128;
  config.limits.default_page_size = 16;
  config.limits.kv_cache_bytes = 16 * kMiB;
  config.limits.ahead_us = 200;
  config.shm.device_bytes = 16 * kMiB;
  config.shm.device_wait_ms = 300;
}

class DeviceServer final {
 public:
  // `machine` may turn the fake into a GPU other than an sm_90.
  explicit DeviceServer(const std::function<void(server::Config&)>& change = {},
                        const std::function<void(fake_hip::Control&)>& machine = {})
      : control_(Machine(machine)),
        server_(
            [&change](server::Config& config) {
              AllowDeviceDims(config);
              if (change) change(config);
            },
            [this] { return Backend(); }) {
    base_bytes_ = control_->live_bytes;
  }

  TestServer& server() { return server_; }
  const TestServer& server() const { return server_; }
  fake_hip::Control& control() { return *control_; }
  // Device memory in use, in addition to what the server took at start.
  int64_t device_bytes() const { return control_->live_bytes - base_bytes_; }

  static client::ClientOptions Options(int64_t device_bytes = 4 * kMiB) {
    client::ClientOptions options;
    options.transport = client::ClientOptions::Transport::kRing;
    options.shared_bytes = kMiB;
    options.device_bytes = static_cast<uint64_t>(device_bytes);
    options.device_library = kernels::hip::kLibrary;
    return options;
  }

 private:
  static fake_hip::Control* Machine(const std::function<void(fake_hip::Control&)>& machine) {
    fake_hip::Control* const control = kernels::hip::FakeControl();
    control->arch = "sm_90";
    if (machine) machine(*control);
    return control;
  }
  std::unique_ptr<kernels::AttentionBackend> Backend() {
    kernels::hip::HipBackendOptions options;
    const bool nvidia = std::string_view(control_->arch) == "sm_90";
    options.vendor = nvidia ? kernels::hip::Vendor::kNvidia : kernels::hip::Vendor::kAmd;
    options.libraries = {kernels::hip::kLibrary};
    options.images = {kernels::hip::Image("sm_90", kernels::hip::kImage90),
                      kernels::hip::Image("gfx950", kernels::hip::kImage950)};
    options.self_test = false;
    options.watchdog_ms = 20000;
    auto made = kernels::hip::HipBackend::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }

  fake_hip::Control* const control_;
  int64_t base_bytes_ = 0;
  TestServer server_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_DEVICE_MEMORY_DEVICE_SERVER_H_
