// Compiles the kernels of gfx942 for the host.
#define MLA_ON_HOST 1
#define MLA_GFX942 1
#define MLA_HOST_ARCH "gfx942"
#include "kernels/hip/host_images/device_kernels.h"
