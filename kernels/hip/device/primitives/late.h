// What kernels behind a gate (gate.h) do where it has run out of time: nothing that can be seen.
// Those that write tensors or pages return at once, and the others write what only these read.
// Kernels of the expanded form do not look: they have no register for it, and no launch of theirs
// is worth a gate.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_LATE_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_LATE_H_

#include "kernels/hip/device/target/vendor.h"

namespace mla::kernels::hip {

// Of any kernel's arguments with `late`. The gate has ended by then, though kernels between it and
// this one may not have: where it says yes, they have.
template <class Args>
MLA_DEVICE bool came_late(const Args& args) {
  if (args.late == nullptr || *as_global<const volatile uint32_t>(args.late) == 0) return false;
  wait_for_previous_kernel();
  return true;
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_LATE_H_
