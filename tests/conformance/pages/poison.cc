#include "tests/conformance/pages/poison.h"

#include <algorithm>
#include <vector>

#include "kernels/types/launch.h"

namespace mla::conformance {
namespace {

constexpr size_t kTransfers = 16;  // a launch; every backend's limits allow as many

}  // namespace

std::byte PoisonByte(kernels::KvFormat format, kernels::Fp8Kind kind, bool alternate) {
  if (kernels::TraitsOf(format).latent != kernels::DType::kFp8E4m3) return std::byte{0xff};
  if (kind == kernels::Fp8Kind::kE4m3Fnuz) return std::byte{0x80};
  return alternate ? std::byte{0xff} : std::byte{0x7f};
}

absl::Status PoisonPages(kernels::AttentionBackend& backend, int32_t slot, int64_t first,
                         int64_t bytes, std::byte poison, std::span<std::byte> block) {
  std::fill(block.begin(), block.end(), poison);
  std::vector<kernels::PageTransfer> writes;
  for (int64_t done = 0; done < bytes;) {
    writes.clear();
    while (writes.size() < kTransfers && done < bytes) {
      const int64_t part = std::min(bytes - done, kPoisonBlockBytes);
      writes.push_back({first + done, part, block.data()});
      done += part;
    }
    kernels::Launch launch;
    launch.page_writes = writes;
    absl::Status status = backend.Submit(slot, launch);
    if (status.ok()) status = backend.Wait(slot).status();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace mla::conformance
