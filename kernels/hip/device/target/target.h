// The architecture that this translation unit is compiled for: exactly one of MLA_GFX950,
// MLA_GFX942 and MLA_SM90 is 1. MLA_ON_HOST is 1 if that architecture's code is compiled for the
// build machine (kernels/hip/host_images); the including file then has chosen the architecture.
#ifndef MLA_KERNELS_HIP_DEVICE_TARGET_TARGET_H_
#define MLA_KERNELS_HIP_DEVICE_TARGET_TARGET_H_

#if defined(MLA_ON_HOST)
#elif defined(__gfx950__)
#define MLA_GFX950 1
#elif defined(__gfx942__)
#define MLA_GFX942 1
#elif defined(__CUDA_ARCH__) || defined(__CUDACC__)
#define MLA_SM90 1
#else
#error "build for gfx950, gfx942 or sm_90a"
#endif

#ifndef MLA_ON_HOST
#define MLA_ON_HOST 0
#endif
#ifndef MLA_GFX950
#define MLA_GFX950 0
#endif
#ifndef MLA_GFX942
#define MLA_GFX942 0
#endif
#ifndef MLA_SM90
#define MLA_SM90 0
#endif
#if MLA_GFX950 + MLA_GFX942 + MLA_SM90 != 1
#error "exactly one architecture"
#endif
#define MLA_AMD (MLA_GFX950 || MLA_GFX942)

#endif  // MLA_KERNELS_HIP_DEVICE_TARGET_TARGET_H_
