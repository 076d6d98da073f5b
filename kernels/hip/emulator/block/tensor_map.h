// The tensor map of the fake driver (tests/fake_hip): what cuTensorMapEncodeTiled was given, for
// tensors of three dimensions of 16-bit elements. NVIDIA does not say how its own driver encodes
// one.
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_TENSOR_MAP_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_TENSOR_MAP_H_

#include <cstdint>

namespace mla::kernels::hip::host {

struct TensorMap {
  static constexpr uint64_t kMark = 0x70616d5f65646f6d;
  static constexpr uint32_t kAlignment = 128;  // of a box in shared memory
  uint64_t mark;
  const char* first;
  uint64_t dims[3];     // elements; the first one is contiguous
  uint64_t strides[2];  // bytes, of the other two
  uint32_t box[3];      // elements
  uint32_t swizzle;     // bytes of a row of the box, all of which the swizzle spans; 0: none
  uint64_t rest[7] = {};
};
static_assert(sizeof(TensorMap) == 128);

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_TENSOR_MAP_H_
