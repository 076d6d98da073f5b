// Images of device code for the fake runtime.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_IMAGE_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_IMAGE_H_

#include <string>

#include "kernels/hip/emulator/block/image.h"

namespace mla::fake_hip {

// `bytes` is either the text "fake image for ARCH", which stands for
// //kernels/hip/host_images:ARCH.so in the caller's data files, or such a library. Returns null if
// it is neither, or if its architecture is not `arch`. Images are kept until the process ends, and
// equal images are loaded once.
const kernels::hip::host::Image* LoadImage(const void* bytes, const std::string& arch);

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_IMAGE_H_
