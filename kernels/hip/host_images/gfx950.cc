// Compiles the kernels of gfx950 for the host.
#define MLA_ON_HOST 1
#define MLA_GFX950 1
#define MLA_HOST_ARCH "gfx950"
#include "kernels/hip/host_images/device_kernels.h"
