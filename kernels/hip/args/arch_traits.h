// Gives the host the facts that it needs about each architecture's kernels, made from the lists of
// attend_variants.h. device_code.hip asserts the sizes.
#ifndef MLA_KERNELS_HIP_ARGS_ARCH_TRAITS_H_
#define MLA_KERNELS_HIP_ARGS_ARCH_TRAITS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/formats/dtype.h"
#include "kernels/formats/kv_format.h"
#include "kernels/hip/args/attend_variants.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/args/row_args.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/round_info.h"

namespace mla::kernels::hip {

// One line of attend_variants.h; that file describes the fields.
struct AttendVariant {
  const char* kernel;
  int32_t rows;
  int32_t tile;
  KvFormat format;
  DType products;
  AttentionKind attention;
  PartOrder order;
  int32_t threads;
  int32_t shared_bytes;

  constexpr bool Serves(KvFormat of_rows, DType of_products, AttentionKind kind) const {
    return format == of_rows && products == of_products && attention == kind;
  }
};
struct FormatVariant {  // of splits and of boxes
  const char* kernel;
  int32_t rows;
  KvFormat format;
  DType products;
  int32_t threads;
  int32_t shared_bytes;
};
struct RowsVariant {  // of streams
  const char* kernel;
  int32_t rows, threads, shared_bytes;
};
struct ExpandVariant {
  const char* kernel;
  kernels::ExpandedDims dims;
  KvFormat format;
  DType products;
  int32_t threads;
  int32_t shared_bytes;
};
struct ExpandedVariant {
  const char* kernel;
  kernels::ExpandedDims dims;
  DType products;
  int32_t threads;
  int32_t shared_bytes;
  int32_t blocks;
};

#define MLA_ATTEND_ROW(kernel, rows, tile, format, products, attention, threads, shared, order)   \
  {#kernel,          rows,    tile,  KvFormat::format, DType::products, AttentionKind::attention, \
   PartOrder::order, threads, shared},
#define MLA_FORMAT_ROW(kernel, rows, format, products, threads, shared) \
  {#kernel, rows, KvFormat::format, DType::products, threads, shared},
#define MLA_ROWS_VARIANT(kernel, rows, threads, shared) {#kernel, rows, threads, shared},
#define MLA_EXPAND_ROW(kernel, nope, value, format, products, threads, shared) \
  {#kernel, {nope, value}, KvFormat::format, DType::products, threads, shared},
#define MLA_EXPANDED_ROW(kernel, nope, value, products, threads, shared, blocks) \
  {#kernel, {nope, value}, DType::products, threads, shared, blocks},
inline constexpr AttendVariant kGfx950Attend[] = {MLA_ATTEND_GFX950(MLA_ATTEND_ROW)};
inline constexpr AttendVariant kGfx942Attend[] = {MLA_ATTEND_GFX942(MLA_ATTEND_ROW)};
inline constexpr AttendVariant kSm90Attend[] = {MLA_ATTEND_SM90(MLA_ATTEND_ROW)};
inline constexpr FormatVariant kSm90Split[] = {MLA_SPLIT_SM90(MLA_FORMAT_ROW)};
inline constexpr FormatVariant kSm90Boxes[] = {MLA_BOXES_SM90(MLA_FORMAT_ROW)};
inline constexpr RowsVariant kSm90Stream[] = {MLA_STREAM_SM90(MLA_ROWS_VARIANT)};
inline constexpr ExpandVariant kGfx950Expand[] = {MLA_EXPAND_GFX950(MLA_EXPAND_ROW)};
inline constexpr ExpandVariant kGfx942Expand[] = {MLA_EXPAND_GFX942(MLA_EXPAND_ROW)};
inline constexpr ExpandVariant kSm90Expand[] = {MLA_EXPAND_SM90(MLA_EXPAND_ROW)};
inline constexpr ExpandedVariant kGfx950Expanded[] = {MLA_EXPANDED_GFX950(MLA_EXPANDED_ROW)};
inline constexpr ExpandedVariant kGfx942Expanded[] = {MLA_EXPANDED_GFX942(MLA_EXPANDED_ROW)};
inline constexpr ExpandedVariant kSm90Expanded[] = {MLA_EXPANDED_SM90(MLA_EXPANDED_ROW)};
#undef MLA_ATTEND_ROW
#undef MLA_FORMAT_ROW
#undef MLA_ROWS_VARIANT
#undef MLA_EXPAND_ROW
#undef MLA_EXPANDED_ROW

struct ArchTraits {
  std::string_view arch;
  std::span<const AttendVariant> attend;
  std::span<const ExpandVariant> expand;
  std::span<const ExpandedVariant> expanded;
  std::span<const FormatVariant> split = {}, boxes = {};
  std::span<const RowsVariant> stream = {};
  Fp8Kind fp8 = Fp8Kind::kE4m3Fn;  // kind in the architecture's pools
  // Text of BackendInfo::fp8_compute: says for which rows and packed rows the absorbed form uses
  // 8-bit products. Empty if neither form has any.
  std::string_view fp8_compute = {};
  // The value of BackendInfo::fp8_prefill_keys; 0 if no kernel has 8-bit products.
  int32_t expanded_products_keys = 0;
  // True if the weights for the up-projection lie in panels (device_state/weight_panels.h).
  bool weight_panels = false;
  int32_t combine_shared_bytes = 0;
  int32_t project_shared_bytes = 0;
  // The shared memory of the kernels for tiles of one row; 0 if there are none.
  int32_t project_row_wide_shared_bytes = 0;
  int32_t project_row_deep_shared_bytes = 0;
  // The kernels for products of whole rows.
  RowProductShape few_rows = {128, 2, 0, 0, false};
  RowProductShape many_rows = {128, 2, 0, 0, false};
  // True if there is a kernel that widens the rows of a launch with lists beforehand (WidensLists).
  bool widens_lists = false;
  bool indexer = false;  // there are kernels for an indexer
  int32_t index_logits_threads = 256;
  // The shared memory of mla_index_logits without the queries, which may lie in shared memory too
  // (index_query_bytes).
  int32_t index_logits_shared_bytes = 0;
  bool index_queries_shared = false;
  int32_t index_select_shared_bytes = 0;
  int32_t index_blocks_per_unit = 4;     // wanted, of mla_index_logits
  int32_t index_most_block_keys = 8192;  // of a block of it
  int32_t waves_per_block = 8;           // for append (one wave a row) and combine: 256 threads
  // Blocks of combine may wait next to blocks of the attention kernel, on units that it leaves
  // idle.
  bool combine_overlaps = false;
  // The number of neighbouring blocks that share the packed rows of each work item, so that a tile
  // may have this many times the rows of the largest variant. They run at the same time and read KV
  // rows that a neighbour has just brought into the cache.
  int32_t blocks_per_unit = 1;
  // The blocks of a unit share at least this number of packed rows. So a unit has more blocks than
  // blocks_per_unit for rows whose largest kernel has fewer (BlocksOfUnit).
  int32_t unit_rows = 0;
  // True if launches of few work items use a kernel with fewer rows a block, and more blocks an
  // item.
  bool spreads_few_items = false;
  // The largest number of KV rows an item for which the smaller kernel is faster than more items of
  // a larger one, as measured over bf16 rows, and over rows of 8 bits. 0: it never is. For
  // PlanTraits::small.
  int32_t spread_kv_rows = 0;
  int32_t spread_code_rows = 0;
  // Units of a die with its own L2 (XCD); 0: all units share one L2.
  int32_t units_per_xcd = 0;
  int32_t few_tiles_rows = 0;  // most KV rows an item, on average, of AttendsFewTiles
  // expand_keeps_rows: the up-projection keeps a tile's rows over all heads. expand_hides_stores:
  // it rounds and stores during the products.
  bool expand_keeps_rows = false;
  bool expand_hides_stores = false;
  // Share of an L2 that keys and values of the expanded form may occupy, in bytes.
  int64_t cache_bytes = int64_t{24} << 20;
  int32_t kv_granularity = 64;
  int32_t item_overhead_rows = 256;
};

inline constexpr ArchTraits kSm90Traits{
    .arch = "sm_90",
    .attend = kSm90Attend,
    .expand = kSm90Expand,
    .expanded = kSm90Expanded,
    .split = kSm90Split,
    .boxes = kSm90Boxes,
    .stream = kSm90Stream,
    .fp8_compute =
        "8-bit products from 17 packed rows (heads x query rows) on, where they take half the time "
        "of bf16 products in large batches; bf16 products below, where reading the rows takes the "
        "time, and in launches so small that every 16 packed rows get an SM of their own",
    .expanded_products_keys = 2048,
    .weight_panels = true,
    .combine_shared_bytes = 16512,
    .project_shared_bytes = 49152,
    .project_row_wide_shared_bytes = 33280,
    .project_row_deep_shared_bytes = 10240,
    .few_rows = {96, 2, 114688, 107008, true},
    .many_rows = {192, 1, 204800, 221760, true},
    .widens_lists = true,
    .indexer = true,
    .index_logits_threads = 288,
    .index_logits_shared_bytes = 78848,
    .index_queries_shared = true,
    .index_select_shared_bytes = 73992,
    .index_blocks_per_unit = 2,
    .index_most_block_keys = 16384,
    .waves_per_block = 8,
    .combine_overlaps = true,
    .blocks_per_unit = 2,
    .spreads_few_items = true,
    .spread_kv_rows = 320,
    .spread_code_rows = 640,
    .few_tiles_rows = 2048,
    .expand_keeps_rows = true,
    .expand_hides_stores = true,
    .kv_granularity = 64,
    .item_overhead_rows = 256,
};
inline constexpr ArchTraits kGfx950Traits{
    .arch = "gfx950",
    .attend = kGfx950Attend,
    .expand = kGfx950Expand,
    .expanded = kGfx950Expanded,
    .fp8_compute =
        "8-bit products from 65 packed rows (heads x query rows) on, where bf16 products are "
        "counted to take 1.5 to 1.7 times as long; bf16 products below, where reading the rows "
        "takes the time",
    .expanded_products_keys = 2048,
    .indexer = true,
    .waves_per_block = 4,
    .blocks_per_unit = 1,
    .unit_rows = 128,
    .units_per_xcd = 32,
    .cache_bytes = int64_t{3} << 20,  // of an L2 of 4 MiB
    .kv_granularity = 32,
    .item_overhead_rows = 256,
};
inline constexpr ArchTraits kGfx942Traits{
    .arch = "gfx942",
    .attend = kGfx942Attend,
    .expand = kGfx942Expand,
    .expanded = kGfx942Expanded,
    .fp8 = Fp8Kind::kE4m3Fnuz,
    .fp8_compute =
        "8-bit products over fp8_tensor, where bf16 products are counted to take twice as long; "
        "bf16 products over other rows",
    .indexer = true,
    .waves_per_block = 4,
    .blocks_per_unit = 2,
    .units_per_xcd = 38,
    .cache_bytes = int64_t{3} << 20,
    .kv_granularity = 32,
    .item_overhead_rows = 256,
};

// Returns true if a launch with lists has its rows widened to bf16 once, beforehand. `places` are
// the places of its work items, `rows` the most packed rows of one, `kv_rows` the rows of its
// segments in `format`. It pays if rows are read twice or more on average, by blocks that would
// widen them. Measured: widening a row at each use takes at least twice the time of reading it
// widened.
constexpr bool WidensLists(const ArchTraits& arch, KvFormat format, int32_t rows, int64_t places,
                           int64_t kv_rows) {
  constexpr int32_t kFewRows = 16;  // kernels for so few rows multiply codes
  return arch.widens_lists && format == KvFormat::kFp8Row && rows > kFewRows &&
         places >= 2 * kv_rows;
}

// Returns true if the items are so short that each one's first tile should come early, whatever
// later ones cost. `places`: KV rows of all items.
constexpr bool AttendsFewTiles(const ArchTraits& arch, int64_t places, int64_t items) {
  return places <= items * arch.few_tiles_rows;
}

// Returns the keys of a block of mla_index_logits if query rows see `keys` in all: few enough that
// all units have blocks, and enough that loading the queries costs little in comparison.
constexpr int32_t IndexKeysPerBlock(const ArchTraits& arch, int64_t keys, int32_t units) {
  constexpr int32_t kLeast = 256;
  const int64_t blocks = int64_t{arch.index_blocks_per_unit} * units;
  int32_t chosen = kLeast;
  while (chosen < arch.index_most_block_keys && chosen < keys / blocks) chosen *= 2;
  return chosen;
}

// Returns the dynamic shared memory of mla_index_logits for queries of `heads` heads.
constexpr int32_t IndexLogitsSharedBytes(const ArchTraits& arch, int32_t heads, DType dtype) {
  const int32_t of_queries = arch.index_queries_shared ? index_query_bytes(heads, dtype) : 0;
  return arch.index_logits_shared_bytes + of_queries;
}

// Returns the number of dies of a device of `units` units, if it deals blocks to its dies in turn.
constexpr int32_t XcdsOf(const ArchTraits& arch, int32_t units) {
  const bool whole = arch.units_per_xcd > 0 && units % arch.units_per_xcd == 0;
  return whole ? units / arch.units_per_xcd : 1;
}

// Returns the most packed rows of a block over rows of `format` with these products, or 0 without a
// kernel for them.
constexpr int32_t MostRows(const ArchTraits& arch, KvFormat format, DType products,
                           AttentionKind kind) {
  int32_t largest = 0;
  for (const AttendVariant& v : arch.attend) {
    if (v.Serves(format, products, kind) && v.rows > largest) largest = v.rows;
  }
  return largest;
}

// Returns the number of neighbouring blocks that share the packed rows of each work item, if the
// largest kernel has `rows` of them. The KV rows that they share come from the memory once.
constexpr int32_t BlocksOfUnit(const ArchTraits& arch, int32_t rows) {
  const int32_t sharing = arch.unit_rows / rows;
  return sharing > arch.blocks_per_unit ? sharing : arch.blocks_per_unit;
}

// Returns the products that the absorbed form uses if `products` are asked for: bf16 if no kernel
// over such rows has them.
constexpr DType AbsorbedProducts(const ArchTraits& arch, KvFormat format, DType products,
                                 AttentionKind kind) {
  return MostRows(arch, format, products, kind) > 0 ? products : DType::kBf16;
}

// Returns the index in arch.expand of the kernel for attention with these products, or
// arch.expand.size() if there is none.
constexpr size_t FindExpand(const ArchTraits& arch, const kernels::ExpandedDims& dims,
                            KvFormat format, DType products) {
  size_t i = 0;
  while (i < arch.expand.size() &&
         (arch.expand[i].dims != dims || arch.expand[i].format != format ||
          arch.expand[i].products != products)) {
    ++i;
  }
  return i;
}

// Returns the index in arch.expanded of attention with these products, or arch.expanded.size() if
// there is none.
constexpr size_t FindExpanded(const ArchTraits& arch, const kernels::ExpandedDims& dims,
                              DType products) {
  size_t i = 0;
  while (i < arch.expanded.size() &&
         (arch.expanded[i].dims != dims || arch.expanded[i].products != products)) {
    ++i;
  }
  return i;
}

// Returns the most blocks of attention in the expanded form that a unit holds at a time, over all
// dims.
constexpr int32_t MostExpandedBlocks(const ArchTraits& arch) {
  int32_t most = 1;
  for (const ExpandedVariant& v : arch.expanded) most = v.blocks > most ? v.blocks : most;
  return most;
}

constexpr bool HasExpandedForm(const ArchTraits& arch, const kernels::ExpandedDims& dims) {
  return FindExpanded(arch, dims, DType::kBf16) < arch.expanded.size();
}

// Returns the largest dims that kernels are written for and that models of at most `geometry` can
// have; kDims128 if there are none.
constexpr kernels::ExpandedDims LargestDims(const ArchTraits& arch, const Geometry& geometry) {
  kernels::ExpandedDims largest = kernels::kDims128;
  for (const ExpandedVariant& v : arch.expanded) {
    const bool fits = v.dims.nope <= geometry.nope_dim && v.dims.value <= geometry.v_dim;
    if (fits && v.dims.panels() > largest.panels()) largest = v.dims;
  }
  return largest;
}

// Returns true if launches that ask for `products` may use the variant: it has these products, or
// it has bf16 products and no variant of as many rows has these.
constexpr bool Takes(const ArchTraits& arch, const AttendVariant& v, KvFormat format,
                     DType products, AttentionKind kind) {
  if (v.Serves(format, products, kind)) return true;
  if (!v.Serves(format, DType::kBf16, kind)) return false;
  for (const AttendVariant& other : arch.attend) {
    if (other.rows == v.rows && other.Serves(format, products, kind)) return false;
  }
  return true;
}

// Returns the number of rows of the smallest kernel that such launches may use. REQUIRES
// MostRows(...) > 0.
constexpr int32_t LeastRows(const ArchTraits& arch, KvFormat format, DType products,
                            AttentionKind kind) {
  int32_t least = MostRows(arch, format, products, kind);
  for (const AttendVariant& v : arch.attend) {
    if (Takes(arch, v, format, products, kind) && v.rows < least) least = v.rows;
  }
  return least;
}

// Returns the index in arch.attend of the kernel for a launch whose widest work item has `rows`
// packed rows. This is the smallest kernel that takes them in one block, or else the largest. If
// only `busy` units have work and all blocks of a smaller kernel run at a time, it is that smaller
// one: neighbours then read the same KV rows from the cache, and each has less to compute and to
// write. REQUIRES MostRows(arch, format, AbsorbedProducts(arch, format, products, kind), kind) > 0.
constexpr size_t ChooseAttend(const ArchTraits& arch, KvFormat format, DType products,
                              AttentionKind kind, int32_t rows, int32_t busy, int32_t units) {
  size_t chosen = arch.attend.size();
  for (size_t i = 0; i < arch.attend.size(); ++i) {
    const AttendVariant& v = arch.attend[i];
    if (!Takes(arch, v, format, products, kind)) continue;
    chosen = i;
    const int64_t blocks = (rows + v.rows - 1) / v.rows;
    if (blocks == 1 || (arch.spreads_few_items && busy * blocks <= units)) break;
  }
  return chosen;
}

// Returns the index in `kernels`, which is arch.split or arch.boxes, of the kernel that replaces
// `v`, or kernels.size() if there is none. A kernel of arch.split replaces combine as well.
constexpr size_t FindReplacement(std::span<const FormatVariant> kernels, const AttendVariant& v) {
  size_t i = 0;
  while (i < kernels.size() &&
         (kernels[i].rows != v.rows ||
          !v.Serves(kernels[i].format, kernels[i].products, AttentionKind::kDense))) {
    ++i;
  }
  return i;
}

// Blocks of combine that fit a unit at a time, by their registers.
inline constexpr int64_t kCombineBlocksPerUnit = 4;

// Returns the number of waves that merge one row, given the rows of a launch and the most parts of
// a row: one wave a part, unless that makes more blocks than the device runs at a time.
constexpr int32_t CombineWavesPerRow(const ArchTraits& arch, int64_t rows, int32_t parts,
                                     int32_t units) {
  int32_t waves = arch.waves_per_block;
  while (waves > 1 &&
         (waves > parts || rows * waves > kCombineBlocksPerUnit * units * arch.waves_per_block)) {
    waves /= 2;
  }
  return waves;
}

// Returns the number of blocks that divide the columns of each row of such a launch: a power of
// two. It is more than one only if units would otherwise have no block, and all blocks run at a
// time. A block has at least four columns a lane.
constexpr int32_t CombineColumnBlocks(const ArchTraits& arch, int64_t rows, int32_t waves_per_row,
                                      int32_t o_dim, int32_t units) {
  const int32_t least_columns = 4 * 256 / arch.waves_per_block;
  const int64_t row_blocks = rows * waves_per_row / arch.waves_per_block;
  int32_t blocks = 1;
  while (row_blocks <= units && 2 * blocks * least_columns <= o_dim &&
         2 * blocks * row_blocks <= kCombineBlocksPerUnit * units) {
    blocks *= 2;
  }
  return blocks;
}

// If columns are divided, a wave of combine loads the values of this number of parts at a time.
inline constexpr int32_t kCombinePartsAhead = 8;

// Returns the number of waves a row of such a launch if the attention kernel leaves `idle_units`
// units idle. It is fewer if all blocks can then start before that kernel ends, and a wave still
// takes its parts at one go.
constexpr int32_t CombineWavesBeside(const ArchTraits& arch, int64_t rows, int32_t parts,
                                     int32_t waves_per_row, int32_t column_blocks,
                                     int32_t idle_units) {
  const int64_t room = kCombineBlocksPerUnit * int64_t{idle_units} * arch.waves_per_block;
  if (!arch.combine_overlaps) return waves_per_row;
  int32_t waves = waves_per_row;
  while (waves > 1 && rows * waves * column_blocks > room &&
         waves / 2 * kCombinePartsAhead >= parts) {
    waves /= 2;
  }
  return rows * waves * column_blocks <= room ? waves : waves_per_row;
}

// Returns the number of blocks that up-project a round with this many pairs, heads and expansions.
// A block that keeps its rows waits for the rows of each new tile. So each block has whole tiles,
// or an equal part of one tile's heads, unless some block would get many more pairs that way.
constexpr int32_t ExpandBlocks(const ArchTraits& arch, int32_t pairs, int32_t heads,
                               int32_t expansions, int32_t units) {
  const int32_t all = pairs < units ? pairs : units;
  if (!arch.expand_keeps_rows || expansions <= 0 || heads % expansions != 0) return all;
  const int32_t least = (pairs + units - 1) / units;
  const int32_t tile = heads / expansions;  // pairs
  int32_t share = least;
  while (share < tile && tile % share != 0) ++share;
  if (share >= tile) share = (least + tile - 1) / tile * tile;
  constexpr int32_t kSlack = 16;  // at most one pair more in 16
  return share - least <= least / kSlack ? (pairs + share - 1) / share : all;
}

// Returns ExpandArgs::first_tile_pairs of a round whose pairs `blocks` blocks up-project. If stores
// take time of their own, a separate list pays as soon as a block has enough pairs that one more
// tile of rows costs little.
constexpr int32_t FirstTilePairs(const ArchTraits& arch, int32_t pairs, int32_t heads,
                                 int32_t blocks) {
  constexpr int32_t kPairsOfBlock = 12;
  return !arch.expand_hides_stores && pairs >= kPairsOfBlock * blocks ? heads : 0;
}

// Returns null if no kernels are written for `arch`.
constexpr const ArchTraits* FindArchTraits(std::string_view arch) {
  for (const ArchTraits* traits : {&kSm90Traits, &kGfx950Traits, &kGfx942Traits}) {
    if (traits->arch == arch) return traits;
  }
  return nullptr;
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_ARGS_ARCH_TRAITS_H_
