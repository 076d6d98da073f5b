// Images of device code, as the fake runtime loads them.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_IMAGE_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_IMAGE_H_

#include <string>

#include "kernels/hip/emulator/block/image.h"

namespace mla::fake_hip {

// `bytes` is the text "fake image for ARCH", which stands for //kernels/hip/host_images:ARCH.so
// among the caller's data files, or such a library itself. Null: it is neither, or of another
// architecture than `arch`. Images are kept until the process ends; the same one is loaded once.
const kernels::hip::host::Image* LoadImage(const void* bytes, const std::string& arch);

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_IMAGE_H_
