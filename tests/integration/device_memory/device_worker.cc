// A worker process with tensors in device memory. It runs up to POINT and waits there to be stopped
// or killed: device_worker TARGET LIBRARY POINT.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "tests/fake_hip/runtime/fake_control.h"

namespace mla::integration {
namespace {

[[noreturn]] void StayAt(const std::string& point) {
  std::printf("at %s\n", point.c_str());
  std::fflush(stdout);
  while (true) pause();
}

[[noreturn]] void Fail(const char* what, const absl::Status& status) {
  std::printf("failed: %s: %s\n", what, status.ToString().c_str());
  std::fflush(stdout);
  _exit(1);
}

client::AttendCall CallOf(uint32_t layer, std::span<std::byte> in, std::span<std::byte> out) {
  client::AttendCall call;
  call.layer = layer;
  call.row_count = 1;
  call.num_heads = 2;
  call.profile = v1::PROFILE_ABSORBED;
  call.o_dtype = v1::DTYPE_F32;
  call.kv = in.data();
  call.q = in.data() + 1152;
  call.o = out.data();
  return call;
}

int Run(const std::string& target, const std::string& library, const std::string& point) {
  const auto reached = [&point](const char* name) {
    if (point == name) StayAt(point);
  };
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kRing;
  options.shared_bytes = 1 << 20;
  options.device_bytes = 4 << 20;
  options.device_library = library;
  auto client = client::Client::Connect(target, options);
  if (!client.ok()) Fail("connect", client.status());
  reached("connected");
  auto session = (*client)->OpenSession();
  if (!session.ok()) Fail("session", session.status());
  if (!(*session)->DeviceStatus().ok()) Fail("device", (*session)->DeviceStatus());
  reached("mapped");
  auto sequence = (*client)->OpenSequence("m");
  if (!sequence.ok()) Fail("open", sequence.status());
  reached("opened");
  auto step = (*session)->Begin("m", {{&*sequence, 1}});
  if (!step.ok()) Fail("begin", step.status());
  reached("begun");
  const std::span<std::byte> in = (*session)->AllocateOnDevice(3 * 1152);
  const std::span<std::byte> out = (*session)->AllocateOnDevice(2 * 512 * 4);
  std::memset(in.data(), 0, in.size());
  reached("written");
  auto* const control = reinterpret_cast<fake_hip::Control* (*)()>(
      dlsym(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL), "fake_hip_control"))();
  control->hang = point == "gpu_hangs";  // its stream never runs its work
  {
    client::PendingAttend pending = (*step)->AttendAsync(CallOf(0, in, out));
    reached("gpu_hangs");
    reached("published");
    if (auto times = pending.Wait(); !times.ok()) Fail("attend", times.status());
  }
  reached("answered");
  {
    client::PendingAttend pending = (*step)->AttendAsync(CallOf(1, in, out));
    reached("second_layer");
    if (auto times = pending.Wait(); !times.ok()) Fail("attend", times.status());
  }
  reached("before_end");
  if (auto lengths = (*step)->End(); !lengths.ok()) Fail("end", lengths.status());
  reached("after_end");
  if (absl::Status s = (*session)->Close(); !s.ok()) Fail("close", s);
  reached("closed");
  return 0;
}

}  // namespace
}  // namespace mla::integration

int main(int argc, char** argv) {
  return argc == 4 ? mla::integration::Run(argv[1], argv[2], argv[3]) : 2;
}
