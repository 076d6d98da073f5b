#include "client/cpp/streams/tensor_placement.h"

#include "proto/wire/attend_layout.h"
#include "proto/wire/ring_layout.h"

namespace mla::client {
namespace {

using wire::AttendLayout;

AttendLayout LayoutOf(const InputTensors& inputs, const PendingReply& pending) {
  return AttendLayout({.kv = inputs.kv.size(),
                       .q = inputs.q.size(),
                       .lists = inputs.lists.size(),
                       .o = pending.o.size(),
                       .lse = pending.lse.size(),
                       .lists_out = pending.chosen.size()});
}

const std::byte* StartOf(std::span<const std::byte> first, std::span<const std::byte> second) {
  return first.empty() ? second.data() : first.data();
}

// Returns `start` if tensors from there on, of `bytes` in all, can be used in place, else null.
template <typename Memory>
const std::byte* InPlace(const Memory& memory, const std::byte* start, uint64_t bytes) {
  const bool fits = start != nullptr && memory.Holds(start, bytes) &&
                    memory.OffsetOf(start) % wire::kSharedAlignment == 0;
  return fits ? start : nullptr;
}

// Returns true if the tensor is empty or lies at its place.
bool LiesAt(const std::byte* place, std::span<const std::byte> tensor) {
  return tensor.empty() || tensor.data() == place;
}

// Returns the start of the inputs if they can be used where they are, else null.
template <typename Memory>
const std::byte* InputsInPlace(const Memory& memory, const InputTensors& inputs,
                               const AttendLayout& layout) {
  const std::byte* const start = StartOf(inputs.kv, inputs.q);
  const bool placed = start != nullptr && LiesAt(start + layout.q, inputs.q) &&
                      LiesAt(start + layout.lists, inputs.lists);
  return placed ? InPlace(memory, start, layout.inputs.bytes()) : nullptr;
}

// Like InputsInPlace, for o and lse.
template <typename Memory>
const std::byte* OutputsInPlace(const Memory& memory, const PendingReply& pending,
                                const AttendLayout& layout) {
  const std::byte* const start = StartOf(pending.o, pending.lse);
  const bool placed = start != nullptr && LiesAt(start + layout.lse, pending.lse);
  const uint64_t bytes = pending.lse.empty() ? pending.o.size() : layout.lse + pending.lse.size();
  return placed ? InPlace(memory, start, bytes) : nullptr;
}

// Returns true if all tensors lie in device memory and can be used there. It is not enough that
// some do, because the host cannot copy them.
bool OnDevice(const RingMemory& memory, const InputTensors& inputs, const PendingReply& pending,
              const AttendLayout& layout) {
  if (memory.device() == nullptr || !inputs.lists.empty()) return false;
  const DeviceRegion& device = *memory.device();
  const bool no_output = pending.o.empty() && pending.lse.empty();
  return inputs.size() > 0 && InputsInPlace(device, inputs, layout) != nullptr &&
         (no_output || OutputsInPlace(device, pending, layout) != nullptr);
}

uint64_t DeviceOffset(const RingMemory& memory, std::span<const std::byte> first,
                      std::span<const std::byte> second) {
  const std::byte* const start = StartOf(first, second);
  return start == nullptr ? 0 : memory.device()->OffsetOf(start);
}

}  // namespace

bool PlaceTensors(RingMemory* memory, wire::ThreadTeam* copier, const InputTensors& inputs,
                  const PendingReply& pending, TensorPlacement* placement) {
  TensorPlacement result;
  const AttendLayout layout = LayoutOf(inputs, pending);
  result.in_bytes = layout.inputs.bytes();
  result.out_bytes = layout.outputs.bytes();
  if (OnDevice(*memory, inputs, pending, layout)) {
    result.in_offset = DeviceOffset(*memory, inputs.kv, inputs.q);
    result.out_offset = DeviceOffset(*memory, pending.o, pending.lse);
    result.on_device = true;
    *placement = result;
    return true;
  }
  const std::byte* in = result.in_bytes == 0 ? nullptr : InputsInPlace(*memory, inputs, layout);
  // A caller's memory for returned lists does not follow the other outputs, so these are copied.
  const bool out_stays = result.out_bytes > 0 && pending.chosen.empty();
  const std::byte* out = out_stays ? OutputsInPlace(*memory, pending, layout) : nullptr;
  if (result.in_bytes > 0 && in == nullptr) result.in = memory->Allocate(result.in_bytes);
  if (result.out_bytes > 0 && out == nullptr) result.out = memory->Allocate(result.out_bytes);
  if (in == nullptr) in = result.in.data();
  if (out == nullptr) out = result.out.data();
  if ((result.in_bytes > 0 && in == nullptr) || (result.out_bytes > 0 && out == nullptr)) {
    FreeTensors(memory, &result);
    return false;
  }
  if (!result.in.empty()) {
    copier->Copy(inputs.kv, result.in.data());
    copier->Copy(inputs.q, result.in.data() + layout.q);
    if (!inputs.lists.empty()) copier->Copy(inputs.lists, result.in.data() + layout.lists);
  }
  if (in != nullptr) result.in_offset = memory->OffsetOf(in);
  if (out != nullptr) result.out_offset = memory->OffsetOf(out);
  *placement = result;
  return true;
}

bool AreInPlace(const RingMemory& memory, const InputTensors& inputs, const PendingReply& pending) {
  const AttendLayout layout = LayoutOf(inputs, pending);
  if (OnDevice(memory, inputs, pending, layout)) return true;
  const bool no_input = inputs.size() == 0;
  const bool no_output = pending.o.empty() && pending.lse.empty();
  return (no_input || InputsInPlace(memory, inputs, layout) != nullptr) && pending.chosen.empty() &&
         (no_output || OutputsInPlace(memory, pending, layout) != nullptr);
}

absl::Status CheckDevicePlaces(const RingMemory& memory, const InputTensors& inputs,
                               const PendingReply& pending) {
  if (memory.device() == nullptr || OnDevice(memory, inputs, pending, LayoutOf(inputs, pending))) {
    return absl::OkStatus();
  }
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
  if (!pending.lse.empty()) {
    const wire::AttendLayout layout({.o = pending.o.size(), .lse = pending.lse.size()});
    copier->Copy(placement.out.subspan(layout.lse, pending.lse.size()), pending.lse.data());
  }
  if (pending.chosen.empty()) return;
  copier->Copy(placement.out.last(pending.chosen.size()), pending.chosen.data());
}

void FreeTensors(RingMemory* memory, TensorPlacement* placement) {
  memory->Free(placement->in);
  memory->Free(placement->out);
  placement->in = placement->out = {};
}

}  // namespace mla::client
