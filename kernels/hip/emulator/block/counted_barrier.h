// Emulates barriers in shared memory that count arrivals and the bytes of bulk copies (mbarrier of
// sm_90). Copies complete a phase as late as possible: when a lane asks for the phase and nothing
// else is missing.
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_COUNTED_BARRIER_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_COUNTED_BARRIER_H_

#include <cstdint>

namespace mla::kernels::hip::host {

void InitCounted(uint32_t at, int arrivals);
// Arrives; the phase also waits for `bytes` more of bulk copies.
void ArriveCounted(uint32_t at, uint32_t bytes);
// Arrives once all copies that this lane has started have landed.
void ArriveAfterCopies(uint32_t at);
void StartBulkCopy(char* to, const void* from, uint32_t bytes, uint32_t barrier);
// Starts the copies of a box of a tensor map (tensor_map.h) that the barrier counts.
void StartBoxCopy(char* target, const void* map, const int (&place)[3], uint32_t barrier);
// Returns true if the phase of this parity is complete.
bool CountedPhaseEnded(uint32_t at, uint32_t parity);

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_COUNTED_BARRIER_H_
