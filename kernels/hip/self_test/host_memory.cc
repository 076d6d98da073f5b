#include "kernels/hip/self_test/host_memory.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/runtime/device_memory.h"

namespace mla::kernels::hip {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kBytes = 4 * kPage;  // more than one block of the kernel copies

// Registers whole heap pages, which stay pinned for the lifetime of the object.
class RegisteredPages {
 public:
  explicit RegisteredPages(GpuRuntime* runtime) : runtime_(runtime) {}
  ~RegisteredPages() {
    if (registered_) (void)runtime_->UnregisterHost(pages_.get());
  }
  absl::Status Register() {
    if (pages_ == nullptr) return absl::ResourceExhaustedError("no memory");
    absl::Status s = runtime_->RegisterHost(pages_.get(), kBytes);
    registered_ = s.ok();
    return s;
  }
  std::byte* data() const { return pages_.get(); }

 private:
  struct Free {
    void operator()(std::byte* pages) const { std::free(pages); }
  };
  GpuRuntime* const runtime_;
  std::unique_ptr<std::byte, Free> pages_{
      static_cast<std::byte*>(std::aligned_alloc(kPage, kBytes))};
  bool registered_ = false;
};

std::byte Pattern(size_t at, int round) {
  return static_cast<std::byte>(at * 7 + at / 251 + static_cast<size_t>(round) * 101);
}

absl::Status Copy(const DeviceState& device, Stream stream, const void* from, void* to) {
  CopyTensorsArgs args = {};
  args.count = 1;
  args.copies[0].to = static_cast<uint8_t*>(to);
  args.copies[0].from = static_cast<const uint8_t*>(from);
  args.copies[0].bytes = kBytes;
  const LaunchShape shape{.grid_x = static_cast<uint32_t>(args.copies[0].blocks()),
                          .threads = kBlockThreads};
  return device.runtime->Launch(device.kernels.copy_tensors, shape, &args, stream);
}

// Checks that the host's writes arrive on the device, and the device's writes at the host.
absl::Status RoundTrip(const DeviceState& device, Stream stream, std::byte* host, const char* kind,
                       int round) {
  GpuRuntime& runtime = *device.runtime;
  MLA_ASSIGN_OR_RETURN(bool same, runtime.SameAddress(host));
  if (!same) {
    return absl::UnavailableError(
        absl::StrCat("the device has ", kind, " memory at other addresses than the host"));
  }
  MLA_ASSIGN_OR_RETURN(auto there, DeviceBuffer::Create(&runtime, "host memory's probe", kBytes));
  for (size_t i = 0; i < kBytes; ++i) host[i] = Pattern(i, round);
  absl::Status s = Copy(device, stream, host, there.As<uint8_t>());
  if (s.ok()) s = runtime.Synchronize(stream);
  std::memset(host, 0, kBytes);
  if (s.ok()) s = Copy(device, stream, there.As<uint8_t>(), host);
  if (s.ok()) s = runtime.Synchronize(stream);
  for (size_t i = 0; i < kBytes && s.ok(); ++i) {
    if (host[i] == Pattern(i, round)) continue;
    s = absl::InternalError(absl::StrCat("byte ", i, " of ", kind, " memory came back as ",
                                         static_cast<int>(host[i]), ", want ",
                                         static_cast<int>(Pattern(i, round))));
  }
  return s;
}

}  // namespace

absl::Status ProbeHostMemory(const DeviceState& device, Stream stream) {
  constexpr int kRounds = 2;  // the second round sees what a cache has kept from the first
  RegisteredPages pages(device.runtime);
  absl::Status s = pages.Register();
  auto pinned = PinnedBuffer::Create(device.runtime, "host memory's probe", kBytes);
  if (s.ok()) s = pinned.status();
  for (int round = 0; round < kRounds && s.ok(); ++round) {
    s = RoundTrip(device, stream, pages.data(), "registered", round);
    if (s.ok()) {
      s = RoundTrip(device, stream, reinterpret_cast<std::byte*>(pinned->data()), "pinned", round);
    }
  }
  return s;
}

}  // namespace mla::kernels::hip
