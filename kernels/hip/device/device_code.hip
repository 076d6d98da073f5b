// All device kernels of one architecture, compiled from this source; the architecture folder
// supplies the tile primitives and sizes.
#include "kernels/hip/device/target/target.h"
#if MLA_GFX950
#include "kernels/hip/device/gfx950/config.h"
#include "kernels/hip/device/gfx950/tile.h"
#elif MLA_GFX942
#include "kernels/hip/device/gfx942/config.h"
#include "kernels/hip/device/gfx942/tile.h"
#else
#include "kernels/hip/device/sm90/config.h"
#include "kernels/hip/device/sm90/tile.h"
#endif

#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/device/kernels/attend.h"
#include "kernels/hip/device/kernels/code_row_product.h"
#include "kernels/hip/device/kernels/combine.h"
#include "kernels/hip/device/kernels/copies.h"
#include "kernels/hip/device/kernels/gate.h"
#include "kernels/hip/device/kernels/project.h"
#include "kernels/hip/device/kernels/row_finish.h"
#include "kernels/hip/device/kernels/row_product.h"
#include "kernels/hip/device/kv/append_kv.h"
#include "kernels/hip/device/kv/digest.h"
#include "kernels/hip/device/primitives/late.h"
#if MLA_AMD
#include "kernels/hip/device/amd/index/index_logits.h"
#include "kernels/hip/device/amd/index/index_select.h"
#include "kernels/hip/device/amd/prefill/attend_expanded.h"
#include "kernels/hip/device/amd/prefill/expand.h"
#if MLA_GFX950
#include "kernels/hip/device/amd/prefill/expanded_codes.h"
#endif
#else
#include "kernels/hip/device/sm90/decode/boxes/box_producer.h"
#include "kernels/hip/device/sm90/decode/boxes/code_box_copier.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/attend_fp8.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/attend_wgmma.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/attend_e4m3.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/attend_rows.h"
#include "kernels/hip/device/sm90/decode/rows64_widened/attend_wide.h"
#include "kernels/hip/device/sm90/decode/rows64_widened/widen_rows.h"
#include "kernels/hip/device/sm90/decode/split/attend_split.h"
#include "kernels/hip/device/sm90/decode/streamed/attend_stream.h"
#include "kernels/hip/device/sm90/index/index_logits.h"
#include "kernels/hip/device/sm90/index/index_select.h"
#include "kernels/hip/device/sm90/prefill/expand_wgmma.h"
#include "kernels/hip/device/sm90/prefill/expanded_e4m3.h"
#include "kernels/hip/device/sm90/prefill/expanded_wgmma.h"
#include "kernels/hip/device/sm90/row_products.h"
#endif

#if MLA_GFX950
#define MLA_ATTEND_VARIANTS MLA_ATTEND_GFX950
#define MLA_EXPAND_VARIANTS MLA_EXPAND_GFX950
#define MLA_EXPANDED_VARIANTS MLA_EXPANDED_GFX950
#elif MLA_GFX942
#define MLA_ATTEND_VARIANTS MLA_ATTEND_GFX942
#define MLA_EXPAND_VARIANTS MLA_EXPAND_GFX942
#define MLA_EXPANDED_VARIANTS MLA_EXPANDED_GFX942
#else
#define MLA_ATTEND_VARIANTS MLA_ATTEND_SM90
#define MLA_EXPAND_VARIANTS MLA_EXPAND_SM90
#define MLA_EXPANDED_VARIANTS MLA_EXPANDED_SM90
#endif

namespace mla::kernels::hip {

#if MLA_AMD
template <int kRows, KvFormat kFormat, DType kProducts, AttentionKind kKind>
using AttendKernel = Attend<AttendConfig<kRows, kFormat, kProducts, kKind>, kKind>;
#if MLA_GFX950
template <ExpandedDims kDims, KvFormat kFormat, DType kProducts>
using ExpandKernel = Expand<
    ExpandedConfig, kDims, kFormat,
    std::conditional_t<kProducts == DType::kBf16, void, CodeResults<kFormat, tile::Wave<32>>>>;
template <ExpandedDims kDims, DType kProducts>
using ExpandedKernel =
    std::conditional_t<kProducts == DType::kBf16, AttendExpanded<ExpandedConfig, kDims>,
                       ExpandedCodes<ExpandedConfig>>;
#else
template <ExpandedDims kDims, KvFormat kFormat, DType kProducts>
using ExpandKernel = Expand<ExpandedConfig, kDims, kFormat>;
template <ExpandedDims kDims, DType kProducts>
using ExpandedKernel = AttendExpanded<ExpandedConfig, kDims>;
#endif
#else
// From 17 rows on, products dominate, and the loop of device/kernels/attend.h would reach about
// half the speed.
template <int kRows, KvFormat kFormat, DType kProducts, AttentionKind kKind>
struct AttendKernelOf {
  using C = AttendConfig<kRows, kFormat, kProducts, kKind>;
  using OfBf16 = std::conditional_t<kRows == 16, Attend<AttendConfig<16>, kKind>, AttendWgmma<C>>;
  using OfFp8 = std::conditional_t<kRows == 16, AttendFp8<C>, AttendWide<C>>;
  using Type = std::conditional_t<kFormat == KvFormat::kBf16, OfBf16, OfFp8>;
};
template <int kRows, KvFormat kFormat, AttentionKind kKind>
struct AttendKernelOf<kRows, kFormat, DType::kFp8E4m3, kKind> {
  using C = AttendConfig<kRows, kFormat, DType::kFp8E4m3, kKind>;
  using Type = std::conditional_t<kFormat == KvFormat::kFp8Row, AttendE4m3Rows<C>, AttendE4m3<C>>;
};
template <int kRows, KvFormat kFormat, DType kProducts, AttentionKind kKind>
using AttendKernel = typename AttendKernelOf<kRows, kFormat, kProducts, kKind>::Type;
template <ExpandedDims kDims, KvFormat kFormat, DType kProducts>
using ExpandKernel = ExpandWgmma<kDims, kFormat, kProducts>;
template <ExpandedDims kDims, DType kProducts>
struct ExpandedKernelOf {
  using Type = ExpandedWgmma<kDims>;
};
template <>
struct ExpandedKernelOf<kDims128, DType::kFp8E4m3> {
  using Type = ExpandedE4m3;
};
template <ExpandedDims kDims, DType kProducts>
using ExpandedKernel = typename ExpandedKernelOf<kDims, kProducts>::Type;
#endif

#define MLA_ATTEND_KERNEL(kernel, rows, tile, format, products, attention, threads, shared, order) \
  using Of_##kernel =                                                                              \
      AttendKernel<rows, KvFormat::format, DType::products, AttentionKind::attention>;             \
  static_assert(Of_##kernel::kThreads == threads);                                                 \
  static_assert(AttendConfig<rows, KvFormat::format, DType::products>::kTileKv == tile);           \
  static_assert(MLA_AMD || Of_##kernel::kSharedBytes == shared);                                   \
  extern "C" __global__ void MLA_LAUNCH_BOUNDS(threads)                                            \
      kernel(const MLA_KERNEL_ARGUMENT AttendArgs args) {                                          \
    if (came_late(args)) return;                                                                   \
    wait_for_previous_kernel();                                                                    \
    Of_##kernel::run(args);                                                                        \
  }
MLA_ATTEND_VARIANTS(MLA_ATTEND_KERNEL)

#if MLA_SM90
template <int kRows, KvFormat kFormat, DType kProducts>
struct SplitKernelOf {
  static_assert(kRows == 16 && kProducts == DType::kBf16);
  using Type = AttendFp8<AttendConfig<16, kFormat>, SplitArgs>;
};
template <>
struct SplitKernelOf<16, KvFormat::kBf16, DType::kBf16> {
  using Type = AttendSplit<AttendConfig<16>>;
};
template <>
struct SplitKernelOf<64, KvFormat::kBf16, DType::kBf16> {
  using Type = AttendWgmma<AttendConfig<64>, SplitArgs>;
};
template <>
struct SplitKernelOf<64, KvFormat::kFp8Row, DType::kFp8E4m3> {
  using Type = AttendE4m3Rows<AttendConfig<64, KvFormat::kFp8Row, DType::kFp8E4m3>, SplitArgs>;
};
#define MLA_SPLIT_KERNEL(kernel, rows, format, products, threads, shared)           \
  using Of_##kernel = SplitKernelOf<rows, KvFormat::format, DType::products>::Type; \
  static_assert(Of_##kernel::kThreads == threads);                                  \
  static_assert(Of_##kernel::kSharedBytes == shared);                               \
  extern "C" __global__ void MLA_LAUNCH_BOUNDS(threads)                             \
      kernel(const MLA_KERNEL_ARGUMENT SplitArgs args) {                            \
    if (came_late(args)) return;                                                    \
    wait_for_previous_kernel();                                                     \
    Of_##kernel::run(args);                                                         \
  }
MLA_SPLIT_SM90(MLA_SPLIT_KERNEL)

template <int kRows, KvFormat kFormat, DType kProducts,
          class C = AttendConfig<kRows, kFormat, kProducts>>
struct BoxesKernelOf;
template <class C>
struct BoxesKernelOf<64, KvFormat::kBf16, DType::kBf16, C> {
  using Type = AttendWgmma<C, BoxArgs, BoxProducer<C>>;
};
template <class C>
struct BoxesKernelOf<64, KvFormat::kFp8Tensor, DType::kFp8E4m3, C> {
  using Type = AttendE4m3<C, BoxArgs, CodeBoxCopier<C, E4m3Layout<C>>>;
};
template <class C>
struct BoxesKernelOf<64, KvFormat::kFp8Row, DType::kFp8E4m3, C> {
  using Type = AttendE4m3Rows<C, BoxArgs, CodeBoxCopier<C, E4m3RowsLayout<C>>>;
};
#define MLA_BOXES_KERNEL(kernel, rows, format, products, threads, shared)           \
  using Of_##kernel = BoxesKernelOf<rows, KvFormat::format, DType::products>::Type; \
  static_assert(Of_##kernel::kThreads == threads);                                  \
  static_assert(Of_##kernel::kSharedBytes == shared);                               \
  extern "C" __global__ void MLA_LAUNCH_BOUNDS(threads)                             \
      kernel(const MLA_KERNEL_ARGUMENT BoxArgs args) {                              \
    if (came_late(args)) return;                                                    \
    wait_for_previous_kernel();                                                     \
    Of_##kernel::run(args);                                                         \
  }
MLA_BOXES_SM90(MLA_BOXES_KERNEL)

#define MLA_STREAM_KERNEL(kernel, rows, threads, shared)                   \
  static_assert(AttendStream<AttendConfig<rows>>::kThreads == threads);    \
  static_assert(AttendStream<AttendConfig<rows>>::kSharedBytes == shared); \
  extern "C" __global__ void MLA_LAUNCH_BOUNDS(threads)                    \
      kernel(const MLA_KERNEL_ARGUMENT StreamArgs args) {                  \
    AttendStream<AttendConfig<rows>>::run(args);                           \
  }
MLA_STREAM_SM90(MLA_STREAM_KERNEL)
#endif

#define MLA_EXPAND_KERNEL(kernel, nope, value, format, products, threads, shared)                 \
  using Of_##kernel = ExpandKernel<ExpandedDims{nope, value}, KvFormat::format, DType::products>; \
  static_assert(Of_##kernel::kThreads == threads);                                                \
  static_assert(MLA_AMD || Of_##kernel::kSharedBytes == shared);                                  \
  extern "C" __global__ void MLA_LAUNCH_BOUNDS(threads)                                           \
      kernel(const MLA_KERNEL_ARGUMENT ExpandArgs args) {                                         \
    Of_##kernel::run(args);                                                                       \
  }
MLA_EXPAND_VARIANTS(MLA_EXPAND_KERNEL)

#define MLA_BOUNDS_OF_1_BLOCKS(threads) MLA_LAUNCH_BOUNDS(threads)
#define MLA_BOUNDS_OF_2_BLOCKS(threads) MLA_LAUNCH_BOUNDS_OF_TWO(threads)
#define MLA_EXPANDED_KERNEL(kernel, nope, value, products, threads, shared, blocks) \
  using Of_##kernel = ExpandedKernel<ExpandedDims{nope, value}, DType::products>;   \
  static_assert(Of_##kernel::kThreads == threads);                                  \
  static_assert(MLA_AMD || Of_##kernel::kSharedBytes == shared);                    \
  extern "C" __global__ void MLA_BOUNDS_OF_##blocks##_BLOCKS(threads)               \
      kernel(const MLA_KERNEL_ARGUMENT ExpandedArgs args) {                         \
    Of_##kernel::run(args);                                                         \
  }
MLA_EXPANDED_VARIANTS(MLA_EXPANDED_KERNEL)

extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_FOUR(256)
    mla_move(const MLA_KERNEL_ARGUMENT MoveArgs args) {
  move_ranges(args);
}

extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(256)
    mla_digest(const MLA_KERNEL_ARGUMENT DigestArgs args) {
  Digest::run(args);
}

extern "C" __global__ void MLA_LAUNCH_BOUNDS(256)
    mla_copy_tensors(const MLA_KERNEL_ARGUMENT CopyTensorsArgs args) {
  copy_tensors(args);
}

extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_FOUR(kGateThreads)
    mla_gate(const MLA_KERNEL_ARGUMENT GateArgs args) {
  gate(args);
}

static_assert(kSignalThreads == kSmallThreads);
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_FOUR(kSignalThreads)
    mla_signal(const MLA_KERNEL_ARGUMENT SignalArgs args) {
  signal(args);
}

extern "C" __global__ void MLA_LAUNCH_BOUNDS(256)
    mla_append_kv(const MLA_KERNEL_ARGUMENT AppendArgs args) {
  AppendKv::run(args);
}

extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_FOUR(256)
    mla_combine(const MLA_KERNEL_ARGUMENT CombineArgs args) {
  if (came_late(args)) return;
  Combine::run(args);
}

#if MLA_GFX942
#define MLA_PROJECT_BOUNDS MLA_LAUNCH_BOUNDS(256)  // its LDS has room for one block
#else
#define MLA_PROJECT_BOUNDS MLA_LAUNCH_BOUNDS_OF_TWO(256)
#endif
extern "C" __global__ void MLA_PROJECT_BOUNDS
mla_project(const MLA_KERNEL_ARGUMENT ProjectArgs args) {
  if (came_late(args)) return;
  Project<ProjectConfig>::run(args);
}

using FewRows = RowProduct<WaveProducts<FewRowsConfig>>;
using FewCodeRows = CodeRowProduct<WaveProducts<FewCodeRowsConfig>>;
#if MLA_AMD
using ManyRows = RowProduct<WaveProducts<ManyRowsConfig>>;
using ManyCodeRows = CodeRowProduct<WaveProducts<ManyCodeRowsConfig>>;
#define MLA_MANY_ROWS_BOUNDS MLA_LAUNCH_BOUNDS_OF_TWO(256)
#else
using ManyRows = RowProduct<WarpgroupProducts<ManyRowsConfig>>;
using ManyCodeRows = CodeRowProduct<WarpgroupProducts<ManyCodeRowsConfig>>;
#define MLA_MANY_ROWS_BOUNDS MLA_LAUNCH_BOUNDS(256)
#endif
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_FOUR(256)
    mla_pack_rows(const MLA_KERNEL_ARGUMENT RowProductArgs args) {
  if (came_late(args)) return;
  PackRows::run(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(256)
    mla_row_product_few(const MLA_KERNEL_ARGUMENT RowProductArgs args) {
  if (came_late(args)) return;
  FewRows::run(args);
}
extern "C" __global__ void MLA_MANY_ROWS_BOUNDS
mla_row_product_many(const MLA_KERNEL_ARGUMENT RowProductArgs args) {
  if (came_late(args)) return;
  ManyRows::run(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(256)
    mla_row_product_few_e4m3(const MLA_KERNEL_ARGUMENT RowProductArgs args) {
  if (came_late(args)) return;
  FewCodeRows::run(args);
}
extern "C" __global__ void MLA_MANY_ROWS_BOUNDS
mla_row_product_many_e4m3(const MLA_KERNEL_ARGUMENT RowProductArgs args) {
  if (came_late(args)) return;
  ManyCodeRows::run(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_FOUR(256)
    mla_finish_rows(const MLA_KERNEL_ARGUMENT RowProductArgs args) {
  if (came_late(args)) return;
  FinishRows::run(args);
}
static_assert(FewRows::kRows == kRowProductFew);
static_assert(ManyRows::kRows == kRowProductMany);
static_assert(FewRows::kThreads == 256);
static_assert(ManyRows::kThreads == 256);
static_assert(FewCodeRows::kRows == kRowProductFew && FewCodeRows::kThreads == 256);
static_assert(ManyCodeRows::kRows == kRowProductMany && ManyCodeRows::kThreads == 256);
// Sums are then the same for weights of both types.
static_assert(FewCodeRows::kColumns == FewRows::kColumns);
static_assert(ManyCodeRows::kColumns == ManyRows::kColumns);
#if MLA_AMD
static_assert(FewRows::kColumns == kGfx950Traits.few_rows.columns);
static_assert(ManyRows::kColumns == kGfx942Traits.many_rows.columns);
static_assert(!kGfx950Traits.few_rows.finishes && !kGfx942Traits.many_rows.finishes);
#else
static_assert(FewRows::kColumns == kSm90Traits.few_rows.columns);
static_assert(ManyRows::kColumns == kSm90Traits.many_rows.columns);
#endif

#if MLA_AMD
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(kIndexLogitsThreads)
    mla_index_logits(const MLA_KERNEL_ARGUMENT IndexArgs args) {
  index_logits(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS(kIndexSelectThreads)
    mla_index_select(const MLA_KERNEL_ARGUMENT IndexArgs args) {
  IndexSelect::run(args);
}
static_assert(kIndexLogitsThreads == kGfx950Traits.index_logits_threads);
static_assert(kIndexLogitsThreads == kGfx942Traits.index_logits_threads);
#endif

// The host launches with the sizes of arch_traits.h.
#if MLA_SM90
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(IndexLayout::kThreads)
    mla_index_logits(const MLA_KERNEL_ARGUMENT IndexArgs args) {
  index_logits(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS(kIndexSelectThreads)
    mla_index_select(const MLA_KERNEL_ARGUMENT IndexArgs args) {
  IndexSelect::run(args);
}

extern "C" __global__ void MLA_LAUNCH_BOUNDS(256)
    mla_widen_rows(const MLA_KERNEL_ARGUMENT WidenArgs args) {
  WidenRows::run(args);
}

static_assert(IndexLayout::kThreads == kSm90Traits.index_logits_threads);
static_assert(IndexLayout::kFixedBytes == kSm90Traits.index_logits_shared_bytes);
static_assert(IndexSelect::kSharedBytes == kSm90Traits.index_select_shared_bytes);
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(256)
    mla_project_row_wide(const MLA_KERNEL_ARGUMENT ProjectArgs args) {
  ProjectRowWide::run(args);
}
extern "C" __global__ void MLA_LAUNCH_BOUNDS_OF_TWO(256)
    mla_project_row_deep(const MLA_KERNEL_ARGUMENT ProjectArgs args) {
  ProjectRowDeep::run(args);
}

static_assert(ProjectRowWide::kSharedBytes == kSm90Traits.project_row_wide_shared_bytes);
static_assert(ProjectRowDeep::kSharedBytes == kSm90Traits.project_row_deep_shared_bytes);
static_assert(ProjectRowWide::kColumns == kProjectWideCols);
static_assert(ProjectRowWide::kDepth == kProjectWideDepth);
static_assert(Combine::kSharedBytes == kSm90Traits.combine_shared_bytes);
static_assert(Project<ProjectConfig>::kSharedBytes == kSm90Traits.project_shared_bytes);
static_assert(FewRows::kSharedBytes == kSm90Traits.few_rows.shared_bytes);
static_assert(ManyRows::kSharedBytes == kSm90Traits.many_rows.shared_bytes);
static_assert(FewCodeRows::kSharedBytes == kSm90Traits.few_rows.code_shared_bytes);
static_assert(ManyCodeRows::kSharedBytes == kSm90Traits.many_rows.code_shared_bytes);
#endif

}  // namespace mla::kernels::hip
