#include "kernels/hip/emulator/block/counted_barrier.h"

#include <cstring>
#include <map>
#include <vector>

#include "kernels/hip/emulator/block/block.h"
#include "kernels/hip/emulator/block/tensor_map.h"

namespace mla::kernels::hip::host {
namespace {

// A lane's arrival that is due once its copies before group `group` have landed.
struct Deferred {
  Lane* lane;
  uint64_t group;
};
struct Counted {
  int arrivals = 0, missing = 0;
  int64_t missing_bytes = 0;
  uint32_t parity = 0;  // parity of the current phase
  std::vector<Deferred> deferred;
  CopyQueue bulk;
};

struct Barriers {
  uint64_t block = 0;  // number of the block they belong to
  std::map<uint32_t, Counted> at;
};

std::map<uint32_t, Counted>& All() {
  static auto& of_blocks = *new std::map<const Block*, Barriers>;  // of the two that may run
  Barriers& barriers = of_blocks[the_block];
  if (barriers.block != the_block->number) {
    barriers.block = the_block->number;
    barriers.at.clear();
  }
  return barriers.at;
}

Counted& Find(uint32_t at) {
  const auto found = All().find(at);
  if (found == All().end()) Fault("a barrier that was not initialised");
  return found->second;
}

void EndPhaseIfComplete(Counted& barrier) {
  if (barrier.missing > 0 || barrier.missing_bytes != 0) return;
  barrier.missing = barrier.arrivals;
  barrier.parity ^= 1;
}

// Lands copies if they alone keep the phase from ending.
void LandLast(Counted& barrier) {
  SharedMemory& shared = the_block->shared;
  if (barrier.missing != static_cast<int>(barrier.deferred.size())) return;
  if (barrier.missing == 0 && barrier.missing_bytes == 0) return;
  const int64_t before = barrier.bulk.bytes();
  if (before != barrier.missing_bytes) return;
  for (const Deferred& arrival : barrier.deferred) {
    shared.LandBefore(arrival.lane->copies, arrival.group, arrival.lane->wave->index);
  }
  shared.LandAllBut(barrier.bulk, 0, the_lane->wave->index);
  barrier.missing = 0;
  barrier.missing_bytes = 0;
  barrier.deferred.clear();
  EndPhaseIfComplete(barrier);
}

}  // namespace

void InitCounted(uint32_t at, int arrivals) {
  the_block->shared.WatchCopiesOnly();
  All()[at] = Counted{arrivals, arrivals, 0, 0, {}, {}};
}

void ArriveCounted(uint32_t at, uint32_t bytes) {
  Counted& barrier = Find(at);
  barrier.missing_bytes += bytes;
  if (--barrier.missing < static_cast<int>(barrier.deferred.size())) {
    Fault("more arrivals at a barrier than it counts");
  }
  EndPhaseIfComplete(barrier);
}

void ArriveAfterCopies(uint32_t at) {
  Counted& barrier = Find(at);
  CopyQueue& copies = the_lane->copies;
  copies.CloseGroup();
  barrier.deferred.push_back({the_lane, copies.open_group()});
  if (static_cast<int>(barrier.deferred.size()) > barrier.missing) {
    Fault("more arrivals at a barrier than it counts");
  }
}

void StartBulkCopy(char* to, const void* from, uint32_t bytes, uint32_t barrier) {
  the_block->shared.StartCopy(Find(barrier).bulk, to, from, static_cast<int>(bytes),
                              the_lane->wave->index);
}

void StartBoxCopy(char* target, const void* map, const int (&place)[3], uint32_t barrier) {
  TensorMap of;
  std::memcpy(&of, map, sizeof(of));
  if (of.mark != TensorMap::kMark) Fault("a copy by a tensor map that the driver has not encoded");
  SharedMemory& shared = the_block->shared;
  const auto offset = static_cast<uint64_t>(target - shared.base());
  if (offset % TensorMap::kAlignment != 0) Fault("a box at %lu of shared memory", offset);
  const uint32_t row_bytes = of.box[0] * 2;
  const bool page = place[2] >= 0 && static_cast<uint32_t>(place[2]) < of.dims[2];
  if (place[0] < 0 || place[0] + of.box[0] > of.dims[0]) {
    Fault("a box that begins with column %d", place[0]);
  }
  for (uint32_t i = 0; i < of.box[1]; ++i) {
    const int64_t row = place[1] + int64_t{i};
    const bool there = page && row >= 0 && row < static_cast<int64_t>(of.dims[1]);
    const char* const from = of.first + static_cast<int64_t>(of.strides[1]) * place[2] +
                             row * static_cast<int64_t>(of.strides[0]) + place[0] * 2;
    // The swizzle acts on bits of the address: bits 7 and on change the chunk of 16 bytes.
    const uint64_t at = offset + uint64_t{i} * row_bytes;
    const uint64_t turn = of.swizzle == 0 ? 0 : at / 128 % (of.swizzle / 16);
    shared.StartCopy(Find(barrier).bulk, shared.base() + at, there ? from : nullptr,
                     static_cast<int>(row_bytes), the_lane->wave->index, static_cast<int>(turn));
  }
}

bool CountedPhaseEnded(uint32_t at, uint32_t parity) {
  Counted& barrier = Find(at);
  if (barrier.parity == parity) LandLast(barrier);
  return barrier.parity != parity;
}

}  // namespace mla::kernels::hip::host
