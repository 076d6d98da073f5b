// Barriers of sm_90 between the warps of a block: mbarriers in shared memory, which asynchronous
// copies can complete; named barriers for a number of threads; and the exchange of registers
// between warpgroups. Phases of an mbarrier alternate in parity, beginning with 0.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_BARRIERS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_BARRIERS_H_

#include "kernels/hip/device/target/vendor.h"
#if MLA_ON_HOST
#include "kernels/hip/emulator/instructions/sm90_barriers.h"
#else

namespace mla::kernels::hip::tile {

// `barrier` is 8 bytes of shared memory. A phase completes after `arrivals`. One thread
// initialises; the other threads see it after a block barrier.
MLA_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
MLA_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when all asynchronous copies that this thread has started are complete.
MLA_DEVICE void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Returns true if the phase of this parity is complete.
MLA_DEVICE bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// As barrier_test, for callers that do not poll in a loop.
MLA_DEVICE bool barrier_ended(uint32_t barrier, uint32_t parity) {
  return barrier_test(barrier, parity);
}
// Returns once the phase of this parity is complete.
MLA_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Barrier kId (1 to 15) of kThreads threads. named_arrive only arrives; named_sync arrives and
// waits.
template <int kId, int kThreads>
MLA_DEVICE void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
template <int kId, int kThreads>
MLA_DEVICE void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// Returns true if x holds in any thread of the barrier; all its threads wait for the result.
template <int kId, int kThreads>
MLA_DEVICE bool named_any(bool x) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\n"
      "barrier.cta.red.or.pred q, %2, %3, p;\nselp.b32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(x)), "n"(kId), "n"(kThreads)
      : "memory");
  return any != 0;
}

// Sets the registers a thread of this warpgroup from here on; kCount is a multiple of 8. All warps
// of the group call it. A group that takes registers waits until other groups have released enough.
template <int kCount>
MLA_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
MLA_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace mla::kernels::hip::tile

#endif  // MLA_ON_HOST

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_BARRIERS_H_
