// Compiles the kernels of sm_90 for the host.
#define MLA_ON_HOST 1
#define MLA_SM90 1
#define MLA_HOST_ARCH "sm_90"
#include "kernels/hip/host_images/device_kernels.h"
