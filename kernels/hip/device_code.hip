// All device kernels of one architecture, from one source: the architecture folder supplies the
// tile primitives and sizes.
#include "kernels/hip/common/target.h"
#if MLA_GFX950
#include "kernels/hip/gfx950/config.h"
#include "kernels/hip/gfx950/tile.h"
#elif MLA_GFX942
#include "kernels/hip/gfx942/config.h"
#include "kernels/hip/gfx942/tile.h"
#else
#include "kernels/hip/sm90/config.h"
#include "kernels/hip/sm90/tile.h"
#endif

#include "kernels/hip/arch_traits.h"
#include "kernels/hip/common/attend.h"
#include "kernels/hip/common/project.h"
#include "kernels/hip/common/small_kernels.h"
#if MLA_AMD
#include "kernels/hip/amd/attend_expanded.h"
#include "kernels/hip/amd/expand.h"
#else
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

#if MLA_AMD
MLA_ATTEND_KERNEL(64)
#if MLA_GFX950
MLA_ATTEND_KERNEL(128)
#endif
#else
MLA_ATTEND_KERNEL(16)
// Where matrix work counts; the loop of common/attend.h would do at about half the speed.
extern "C" __global__ void MLA_LAUNCH_BOUNDS(AttendWgmma<AttendConfig<64>>::kThreads)
    mla_attend_64(const MLA_KERNEL_ARGUMENT AttendArgs args) {
  AttendWgmma<AttendConfig<64>>::run(args);
}
#endif

#if MLA_AMD
extern "C" __global__ void MLA_LAUNCH_BOUNDS(256) mla_expand(const ExpandArgs args) {
  Expand<ExpandedConfig>::run(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(256)
    mla_attend_expanded(const ExpandedArgs args) {
  AttendExpanded<ExpandedConfig>::run(args);
}
#else
extern "C" __global__ void MLA_LAUNCH_BOUNDS(ExpandWgmma::kThreads)
    mla_expand(const MLA_KERNEL_ARGUMENT ExpandArgs args) {
  ExpandWgmma::run(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS(ExpandedWgmma::kThreads)
    mla_attend_expanded(const MLA_KERNEL_ARGUMENT ExpandedArgs args) {
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

#if MLA_GFX942
#define MLA_PROJECT_BOUNDS MLA_LAUNCH_BOUNDS(256)  // its LDS has room for one block
#else
#define MLA_PROJECT_BOUNDS MLA_LAUNCH_BOUNDS_OF_TWO(256)
#endif
extern "C" __global__ void MLA_PROJECT_BOUNDS
mla_project(const MLA_KERNEL_ARGUMENT ProjectArgs args) {
  Project<ProjectConfig>::run(args);
}

// The host launches with the sizes of arch_traits.h.
#if MLA_SM90
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
