#include "client/cpp/streams/tensor_placement.h"

#include "proto/wire/ring_layout.h"

namespace mla::client {
namespace {

uint64_t Together(size_t first, size_t second) {
  return second == 0 ? first : wire::AlignShared(first) + second;
}

// True if `second` lies where the contract wants it behind `first`.
bool IsBehind(std::span<const std::byte> first, std::span<const std::byte> second) {
  return first.empty() || second.empty() ||
         second.data() == first.data() + wire::AlignShared(first.size());
}

// Two tensors that may stay where they are: their common start, else null.
const std::byte* InPlace(const SharedMemory& memory, std::span<const std::byte> first,
                         std::span<const std::byte> second) {
  const std::byte* const start = first.empty() ? second.data() : first.data();
  const bool fits = IsBehind(first, second) &&
                    memory.Holds(start, Together(first.size(), second.size())) &&
                    memory.OffsetOf(start) % wire::kSharedAlignment == 0;
  return fits ? start : nullptr;
}

}  // namespace

bool PlaceTensors(SharedMemory* memory, wire::ParallelCopier* copier,
                  std::span<const std::byte> first, std::span<const std::byte> second,
                  const PendingReply& pending, TensorPlacement* placement) {
  TensorPlacement made;
  made.in_bytes = Together(first.size(), second.size());
  made.out_bytes = Together(pending.o.size(), pending.lse.size());
  const std::byte* in = made.in_bytes == 0 ? nullptr : InPlace(*memory, first, second);
  const std::byte* out = made.out_bytes == 0 ? nullptr : InPlace(*memory, pending.o, pending.lse);
  if (made.in_bytes > 0 && in == nullptr) made.in = memory->Allocate(made.in_bytes);
  if (made.out_bytes > 0 && out == nullptr) made.out = memory->Allocate(made.out_bytes);
  if (in == nullptr) in = made.in.data();
  if (out == nullptr) out = made.out.data();
  if ((made.in_bytes > 0 && in == nullptr) || (made.out_bytes > 0 && out == nullptr)) {
    FreeTensors(memory, &made);
    return false;
  }
  if (!made.in.empty()) {
    copier->Copy(first, made.in.data());
    copier->Copy(second, made.in.data() + (first.empty() ? 0 : wire::AlignShared(first.size())));
  }
  if (in != nullptr) made.in_offset = memory->OffsetOf(in);
  if (out != nullptr) made.out_offset = memory->OffsetOf(out);
  *placement = made;
  return true;
}

bool AreInPlace(const SharedMemory& memory, std::span<const std::byte> first,
                std::span<const std::byte> second, const PendingReply& pending) {
  const bool no_input = first.empty() && second.empty();
  const bool no_output = pending.o.empty() && pending.lse.empty();
  return (no_input || InPlace(memory, first, second) != nullptr) &&
         (no_output || InPlace(memory, pending.o, pending.lse) != nullptr);
}

void TakeOutputs(const TensorPlacement& placement, wire::ParallelCopier* copier,
                 const PendingReply& pending) {
  if (placement.out.empty()) return;
  copier->Copy(placement.out.first(pending.o.size()), pending.o.data());
  copier->Copy(placement.out.last(pending.lse.size()), pending.lse.data());
}

void FreeTensors(SharedMemory* memory, TensorPlacement* placement) {
  memory->Free(placement->in);
  memory->Free(placement->out);
  placement->in = placement->out = {};
}

}  // namespace mla::client
