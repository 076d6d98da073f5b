// Device code compiled for the build machine: a shared library with the kernels of one architecture
// and the runner of their lanes. It exports mla_host_image().
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_IMAGE_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_IMAGE_H_

#include <cstddef>
#include <cstdint>

namespace mla::kernels::hip::host {

struct Grid {
  uint32_t x, y;
  uint32_t threads;       // threads a block
  uint32_t shared_bytes;  // dynamic
};

// A kernel that the device may still run when a launch begins. The launch calls `run(of)`, once at
// most, when its lanes wait for that kernel. `run` may run a grid of the same image.
struct Previous {
  void (*run)(void* of);
  void* of;
};

struct Kernel {
  const char* name;
  size_t argument_bytes;
  void (*lane)(const void* arguments);  // the code of each lane
};

// An access to shared memory that all lanes of a wave make together.
struct SharedAccess {
  static constexpr int kLanes = 64;
  const char* instruction;
  uint32_t at[kLanes];  // bytes from the start of shared memory
};

struct Image {
  const char* arch;  // as the runtime reports it: "gfx950", "gfx942", "sm_90"
  int wave;          // lanes
  const Kernel* kernels;
  size_t kernel_count;
  // Runs a grid, block after block, on the caller's thread; one launch at a time. Returns null, or
  // a message about an error that a device might have answered with wrong numbers. The text lives
  // until the next launch. `previous` is null if the kernel before has ended.
  const char* (*run)(const Kernel& kernel, const Grid& grid, const void* arguments,
                     const Previous* previous);
  // From now on calls `sink` for the accesses of waves of 64 lanes; null ends it. The watched
  // kernels' lanes of a wave must access shared memory together.
  void (*watch)(void (*sink)(const SharedAccess& access));
};

}  // namespace mla::kernels::hip::host

extern "C" const mla::kernels::hip::host::Image* mla_host_image();

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_IMAGE_H_
