#include "client/cpp/ucx/ucx_chains.h"

#include <atomic>
#include <utility>

#include "base/status_macros.h"

namespace mla::client {
namespace {

template <typename T>
std::atomic_ref<T> Atomic(T& word) {
  return std::atomic_ref<T>(word);
}

}  // namespace

UcxChains::UcxChains(std::span<std::byte> region, uint32_t entries,
                     std::unique_ptr<DeviceRegion> device)
    : header_(reinterpret_cast<wire::RingHeader*>(region.data())),
      completions_(reinterpret_cast<wire::CompletionEntry*>(region.data() +
                                                            wire::CompletionsOffset(entries))),
      entries_(entries),
      device_(std::move(device)) {}

absl::StatusOr<std::unique_ptr<UcxChains>> UcxChains::Open(std::span<std::byte> region,
                                                           uint32_t entries,
                                                           const DeviceRegionOptions& options) {
  MLA_ASSIGN_OR_RETURN(std::unique_ptr<DeviceRegion> device, DeviceRegion::WithoutMemory(options));
  MLA_RETURN_IF_ERROR(device->MapWords(region));
  return std::unique_ptr<UcxChains>(new UcxChains(region, entries, std::move(device)));
}

uint32_t* UcxChains::DoneOf(uint64_t index) const {
  return &completions_[index & (entries_ - 1)].done;
}

absl::Status UcxChains::PassTurn(uint64_t index, uint64_t returned, void* stream) {
  const uint32_t value = wire::PublishedSequence(index);
  if (returned >= chain_end_) {
    // Old words would look like later ones one day. No stream waits for any now.
    if (index - chain_end_ >= wire::kChainWordsLast) {
      for (uint32_t slot = 0; slot < entries_; ++slot) Atomic(*DoneOf(slot)).store(value - 1);
    }
    Atomic(header_->ready).store(value - 1, std::memory_order_release);
  }
  MLA_RETURN_IF_ERROR(
      device_->PassTurn({{{{&header_->ready, value}, {}}}, {DoneOf(index), value}}, stream));
  chain_end_ = index + 1;
  return absl::OkStatus();
}

bool UcxChains::Ready(uint64_t index) const {
  const uint32_t ready = Atomic(header_->ready).load(std::memory_order_acquire);
  return static_cast<int32_t>(ready - wire::PublishedSequence(index)) >= 0;
}

void UcxChains::Complete(uint64_t tag) {
  const auto entry = waiting_.find(tag);
  if (entry == waiting_.end()) return;
  Atomic(*DoneOf(entry->second))
      .store(wire::PublishedSequence(entry->second), std::memory_order_release);
  waiting_.erase(entry);
}

void UcxChains::Release() {
  while (!waiting_.empty()) Complete(waiting_.begin()->first);
}

}  // namespace mla::client
