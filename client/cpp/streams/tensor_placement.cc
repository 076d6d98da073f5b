#include "client/cpp/streams/tensor_placement.h"

#include "proto/wire/ring_layout.h"

namespace mla::client {
namespace {

uint64_t Together(size_t first, size_t second) {
  return second == 0 ? first : wire::AlignShared(first) + second;
}

// Returns true if `second` follows `first` at the distance that the contract asks for.
bool IsBehind(std::span<const std::byte> first, std::span<const std::byte> second) {
  return first.empty() || second.empty() ||
         second.data() == first.data() + wire::AlignShared(first.size());
}

// Returns the start of two tensors that can be used in place together, else null.
template <typename Memory>
const std::byte* InPlace(const Memory& memory, std::span<const std::byte> first,
                         std::span<const std::byte> second) {
  const std::byte* const start = first.empty() ? second.data() : first.data();
  const bool fits = IsBehind(first, second) &&
                    memory.Holds(start, Together(first.size(), second.size())) &&
                    memory.OffsetOf(start) % wire::kSharedAlignment == 0;
  return fits ? start : nullptr;
}

const std::byte* InputsInPlace(const RingMemory& memory, const InputTensors& inputs) {
  const std::byte* const start = InPlace(memory, inputs.kv, inputs.q);
  if (inputs.lists.empty() || start == nullptr) return start;
  const uint64_t size =
      wire::AlignShared(Together(inputs.kv.size(), inputs.q.size())) + inputs.lists.size();
  return IsBehind(inputs.q, inputs.lists) && memory.Holds(start, size) ? start : nullptr;
}

// Returns true if all tensors lie in device memory and can be used there. It is not enough that
// some do, because the host cannot copy them.
bool OnDevice(const RingMemory& memory, const InputTensors& inputs, const PendingReply& pending) {
  if (memory.device() == nullptr || !inputs.lists.empty()) return false;
  const DeviceRegion& device = *memory.device();
  const bool no_output = pending.o.empty() && pending.lse.empty();
  return inputs.size() > 0 && InPlace(device, inputs.kv, inputs.q) != nullptr &&
         (no_output || InPlace(device, pending.o, pending.lse) != nullptr);
}

uint64_t DeviceOffset(const RingMemory& memory, std::span<const std::byte> first,
                      std::span<const std::byte> second) {
  const std::byte* const start = first.empty() ? second.data() : first.data();
  return start == nullptr ? 0 : memory.device()->OffsetOf(start);
}

}  // namespace

bool PlaceTensors(RingMemory* memory, wire::ThreadTeam* copier, const InputTensors& inputs,
                  const PendingReply& pending, TensorPlacement* placement) {
  TensorPlacement made;
  const uint64_t lists_at = wire::AlignShared(Together(inputs.kv.size(), inputs.q.size()));
  made.in_bytes = inputs.lists.empty() ? Together(inputs.kv.size(), inputs.q.size())
                                       : lists_at + inputs.lists.size();
  const uint64_t results = Together(pending.o.size(), pending.lse.size());
  made.out_bytes = Together(results, pending.chosen.size());
  if (OnDevice(*memory, inputs, pending)) {
    made.in_offset = DeviceOffset(*memory, inputs.kv, inputs.q);
    made.out_offset = DeviceOffset(*memory, pending.o, pending.lse);
    made.on_device = true;
    *placement = made;
    return true;
  }
  const std::byte* in = made.in_bytes == 0 ? nullptr : InputsInPlace(*memory, inputs);
  // A caller's memory for returned lists does not follow the other outputs, so these are copied.
  const bool out_stays = made.out_bytes > 0 && pending.chosen.empty();
  const std::byte* out = out_stays ? InPlace(*memory, pending.o, pending.lse) : nullptr;
  if (made.in_bytes > 0 && in == nullptr) made.in = memory->Allocate(made.in_bytes);
  if (made.out_bytes > 0 && out == nullptr) made.out = memory->Allocate(made.out_bytes);
  if (in == nullptr) in = made.in.data();
  if (out == nullptr) out = made.out.data();
  if ((made.in_bytes > 0 && in == nullptr) || (made.out_bytes > 0 && out == nullptr)) {
    FreeTensors(memory, &made);
    return false;
  }
  if (!made.in.empty()) {
    copier->Copy(inputs.kv, made.in.data());
    const uint64_t q_at = inputs.kv.empty() ? 0 : wire::AlignShared(inputs.kv.size());
    copier->Copy(inputs.q, made.in.data() + q_at);
    if (!inputs.lists.empty()) copier->Copy(inputs.lists, made.in.data() + lists_at);
  }
  if (in != nullptr) made.in_offset = memory->OffsetOf(in);
  if (out != nullptr) made.out_offset = memory->OffsetOf(out);
  *placement = made;
  return true;
}

bool AreInPlace(const RingMemory& memory, const InputTensors& inputs, const PendingReply& pending) {
  if (OnDevice(memory, inputs, pending)) return true;
  const bool no_input = inputs.size() == 0;
  const bool no_output = pending.o.empty() && pending.lse.empty();
  return (no_input || InputsInPlace(memory, inputs) != nullptr) && pending.chosen.empty() &&
         (no_output || InPlace(memory, pending.o, pending.lse) != nullptr);
}

absl::Status CheckDevicePlaces(const RingMemory& memory, const InputTensors& inputs,
                               const PendingReply& pending) {
  if (memory.device() == nullptr || OnDevice(memory, inputs, pending)) return absl::OkStatus();
  const std::span<const std::byte> tensors[] = {inputs.kv, inputs.q, inputs.lists, pending.o,
                                                pending.lse};
  for (const std::span<const std::byte> tensor : tensors) {
    if (tensor.empty() || !memory.device()->Holds(tensor.data(), 1)) continue;
    return absl::InvalidArgumentError(
        "tensors: some lie in device memory; there all must, kv and q in one block, o and lse in "
        "another, each tensor at a multiple of 64 bytes, and without index lists");
  }
  return absl::OkStatus();
}

void TakeOutputs(const TensorPlacement& placement, wire::ThreadTeam* copier,
                 const PendingReply& pending) {
  if (placement.out.empty()) return;
  copier->Copy(placement.out.first(pending.o.size()), pending.o.data());
  const uint64_t lse_end = Together(pending.o.size(), pending.lse.size());
  copier->Copy(placement.out.subspan(lse_end - pending.lse.size(), pending.lse.size()),
               pending.lse.data());
  if (pending.chosen.empty()) return;
  copier->Copy(placement.out.last(pending.chosen.size()), pending.chosen.data());
}

void FreeTensors(RingMemory* memory, TensorPlacement* placement) {
  memory->Free(placement->in);
  memory->Free(placement->out);
  placement->in = placement->out = {};
}

}  // namespace mla::client
