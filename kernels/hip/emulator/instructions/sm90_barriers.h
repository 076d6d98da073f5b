// The barriers of kernels/hip/device/sm90/barriers.h and the bulk copies of warpgroup.h on the
// host.
#ifndef MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_BARRIERS_H_
#define MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_BARRIERS_H_

#include "kernels/hip/emulator/block/counted_barrier.h"
#include "kernels/hip/emulator/instructions/sm90_instructions.h"

namespace mla::kernels::hip::tile {

inline void barrier_init(uint32_t at, int arrivals) { host::InitCounted(at, arrivals); }
inline void barrier_init_visible() {}
inline void barrier_arrive(uint32_t at) { host::ArriveCounted(at, 0); }
inline void barrier_arrive_expecting(uint32_t at, uint32_t bytes) {
  host::ArriveCounted(at, bytes);
}
inline void barrier_arrive_after_copies(uint32_t at) { host::ArriveAfterCopies(at); }
inline void barrier_wait(uint32_t at, uint32_t parity) {
  host::Poll(host::CountedPhaseEnded, at, parity);
}
// A kernel's loop over this test would keep other lanes from running, so it returns only once the
// phase is complete.
inline bool barrier_test(uint32_t at, uint32_t parity) {
  barrier_wait(at, parity);
  return true;
}
inline bool barrier_ended(uint32_t at, uint32_t parity) {
  return host::CountedPhaseEnded(at, parity);
}
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  host::StartBulkCopy(shared_bytes() + to, from, bytes, barrier);
}
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                      CachePolicy) {
  bulk_copy(to, from, bytes, barrier);
}

inline void box_copy(uint32_t to, const TensorMap& map, int column, int row, uint32_t granule,
                     uint32_t barrier, CachePolicy) {
  host::StartBoxCopy(shared_bytes() + to, &map, {column, row, static_cast<int>(granule)}, barrier);
}
inline void prefetch_map(const TensorMap&) {}

// A store reads its source as late as is allowed: when it is waited for.
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  host::the_lane->stores.push_back({shared_bytes() + from, to, bytes});
}
inline void wait_for_stores_to_read() {
  for (const host::BulkStore& store : host::the_lane->stores) {
    host::the_block->shared.Read(store.from, store.bytes, host::the_lane->wave->index);
    std::memcpy(store.to, store.from, store.bytes);
  }
  host::the_lane->stores.clear();
}

template <int kId, int kThreads>
void named_arrive() {
  host::Barrier(host::the_block->named.at(kId), kThreads, false, false);
}
template <int kId, int kThreads>
void named_sync() {
  host::Barrier(host::the_block->named.at(kId), kThreads, true, false);
}
template <int kId, int kThreads>
bool named_any(bool x) {
  return host::Barrier(host::the_block->named.at(kId), kThreads, true, x);
}
inline void named_wait(int id, int threads) {
  host::Barrier(host::the_block->named.at(id), threads, true, false);
}
inline void named_arrive(int id, int threads) {
  host::Barrier(host::the_block->named.at(id), threads, false, false);
}

template <int kCount>
void take_registers() {
  host::SetRegisters(kCount);
}
template <int kCount>
void give_registers() {
  host::SetRegisters(kCount);
}

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_BARRIERS_H_
