// Lets kernels end without a visible effect after a gate (gate.h) has run out of time. Kernels that
// write tensors or pages return at once, and the other kernels write only what these would read.
// Kernels of the expanded form do not check: they have no register for it, and their launches are
// too long to gain from a gate.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_LATE_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_LATE_H_

#include "kernels/hip/device/target/vendor.h"

namespace mla::kernels::hip {

// Returns true if the launch is late. Takes the arguments of any kernel with `late`. The gate has
// ended by then, but kernels between it and this one may still run; if the launch is late, this
// waits for them.
template <class Args>
MLA_DEVICE bool came_late(const Args& args) {
  if (args.late == nullptr || *as_global<const volatile uint32_t>(args.late) == 0) return false;
  wait_for_previous_kernel();
  return true;
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_LATE_H_
