// All device kernels of one architecture, from one source: the architecture folder supplies the
// tile primitives and sizes.
#if defined(__gfx950__)
#include "kernels/hip/gfx950/config.h"
#include "kernels/hip/gfx950/tile.h"
#elif defined(__gfx942__)
#include "kernels/hip/gfx942/config.h"
#include "kernels/hip/gfx942/tile.h"
#elif defined(__CUDA_ARCH__) || defined(__CUDACC__)
#include "kernels/hip/sm90/config.h"
#include "kernels/hip/sm90/tile.h"
#else
#error "build for gfx950, gfx942 or sm_90a"
#endif

#include "kernels/hip/arch_traits.h"
#include "kernels/hip/common/attend.h"
#include "kernels/hip/common/attend_expanded.h"
#include "kernels/hip/common/expand.h"
#include "kernels/hip/common/project.h"
#include "kernels/hip/common/small_kernels.h"
#if !defined(__HIP__)
#include "kernels/hip/sm90/attend_wgmma.h"
#include "kernels/hip/sm90/expand_wgmma.h"
#include "kernels/hip/sm90/expanded_wgmma.h"
#endif

namespace mla::gpu {

#define MLA_ATTEND_KERNEL(rows)                                                      \
  extern "C" __global__ void MLA_LAUNCH_BOUNDS(Attend<AttendConfig<rows>>::kThreads) \
      mla_attend_##rows(const MLA_KERNEL_ARGUMENT AttendArgs args) {                 \
    Attend<AttendConfig<rows>>::run(args);                                           \
  }

#if defined(__HIP__)
#define MLA_KERNEL_ARGUMENT
#else
#define MLA_KERNEL_ARGUMENT __grid_constant__
MLA_ATTEND_KERNEL(16)
#endif
#if defined(__HIP__)
MLA_ATTEND_KERNEL(64)
#if defined(__gfx950__)
MLA_ATTEND_KERNEL(128)
#endif
#else
// Where matrix work counts; the loop of common/attend.h would do at about half the speed.
extern "C" __global__ void MLA_LAUNCH_BOUNDS(AttendWgmma<AttendConfig<64>>::kThreads)
    mla_attend_64(const __grid_constant__ AttendArgs args) {
  AttendWgmma<AttendConfig<64>>::run(args);
}
#endif

#if defined(__HIP__)
extern "C" __global__ void MLA_LAUNCH_BOUNDS(256) mla_expand(const ExpandArgs args) {
  Expand<ExpandedConfig>::run(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(256)
    mla_attend_expanded(const ExpandedArgs args) {
  AttendExpanded<ExpandedConfig>::run(args);
}
#else
extern "C" __global__ void MLA_LAUNCH_BOUNDS(ExpandWgmma::kThreads)
    mla_expand(const __grid_constant__ ExpandArgs args) {
  ExpandWgmma::run(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS(ExpandedWgmma::kThreads)
    mla_attend_expanded(const __grid_constant__ ExpandedArgs args) {
  ExpandedWgmma::run(args);
}
#endif

extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_FOUR(256)
    mla_move(const MLA_KERNEL_ARGUMENT MoveArgs args) {
  move_ranges(args);
}

extern "C" __global__ void MLA_LAUNCH_BOUNDS(256)
    mla_append_kv(const MLA_KERNEL_ARGUMENT AppendArgs args) {
  append_kv(args);
}

extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_FOUR(256)
    mla_combine(const MLA_KERNEL_ARGUMENT CombineArgs args) {
  Combine::run(args);
}

#if defined(__gfx942__)
#define MLA_PROJECT_BOUNDS MLA_LAUNCH_BOUNDS(256)  // its LDS has room for one block
#else
#define MLA_PROJECT_BOUNDS MLA_LAUNCH_BOUNDS_OF_TWO(256)
#endif
extern "C" __global__ void MLA_PROJECT_BOUNDS
mla_project(const MLA_KERNEL_ARGUMENT ProjectArgs args) {
  Project<ProjectConfig>::run(args);
}

// The host launches with the sizes of arch_traits.h.
#if !defined(__HIP__)
static_assert(Attend<AttendConfig<16>>::kSharedBytes == kSm90Traits.attend[0].shared_bytes);
static_assert(AttendWgmma<AttendConfig<64>>::kSharedBytes == kSm90Traits.attend[1].shared_bytes);
static_assert(AttendWgmma<AttendConfig<64>>::kThreads == kSm90Traits.attend[1].threads);
static_assert(ExpandWgmma::kThreads == kSm90Traits.expanded_threads);
static_assert(ExpandedWgmma::kThreads == kSm90Traits.expanded_threads);
static_assert(ExpandWgmma::kSharedBytes == kSm90Traits.expand_shared_bytes);
static_assert(ExpandedWgmma::kSharedBytes == kSm90Traits.expanded_shared_bytes);
static_assert(Combine::kSharedBytes == kSm90Traits.combine_shared_bytes);
static_assert(Project<ProjectConfig>::kSharedBytes == kSm90Traits.project_shared_bytes);
#endif

}  // namespace mla::gpu
