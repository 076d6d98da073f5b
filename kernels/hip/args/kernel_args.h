// Declares the arguments of every device kernel, shared by host and device. Each kernel takes
// exactly one of these structs by value. All addresses are device addresses.
#ifndef MLA_KERNELS_HIP_ARGS_KERNEL_ARGS_H_
#define MLA_KERNELS_HIP_ARGS_KERNEL_ARGS_H_

#include <cstdint>
#include <type_traits>

#include "kernels/types/attention_params.h"
#include "kernels/types/part_digest.h"
#include "kernels/types/select.h"
#include "kernels/types/window.h"

namespace mla::kernels::hip {

using kernels::AppendRecord;
using kernels::AttentionKind;
using kernels::DType;
using kernels::Fp8Kind;
using kernels::KvFormat;
using kernels::ProjectionRecord;
using kernels::ReduceTile;
using kernels::SegmentRecord;
using kernels::SelectRecord;
using kernels::WindowRecord;
using kernels::WorkInfo;

// Names of the kernels, as the module loader looks them up.
inline constexpr char kMoveKernel[] = "mla_move";
inline constexpr char kCopyTensorsKernel[] = "mla_copy_tensors";
inline constexpr char kDigestKernel[] = "mla_digest";
inline constexpr char kAppendKernel[] = "mla_append_kv";
inline constexpr char kCombineKernel[] = "mla_combine";
inline constexpr char kProjectKernel[] = "mla_project";
// The names of the kernels for tiles of one row, on architectures that have them. "Wide" is for
// weights of at most kProjectWideDepth rows and takes kProjectWideCols columns a block; "deep" is
// for other weights.
inline constexpr char kProjectRowWideKernel[] = "mla_project_row_wide";
inline constexpr char kProjectRowDeepKernel[] = "mla_project_row_deep";
// Names of attention and up-projection kernels are in attend_variants.h.
inline constexpr char kAttendPrefix[] = "mla_attend_";

// The unit of the plan that a block serves, and its share of that unit's rows.
struct BlockPlace {
  int32_t unit, share;
};
// Neighbouring units, and all shares of a unit, often read the same KV rows, so they go to one L2.
// `xcds` is the number of dies, each with an L2; the device puts block b on die b % xcds. Units are
// then dealt to dies in runs. At most 1: all blocks share the L2.
constexpr BlockPlace PlaceOf(int32_t block, int32_t blocks, int32_t blocks_per_unit, int32_t xcds) {
  const int32_t turn = blocks_per_unit * (xcds > 1 ? xcds : 1);
  const int32_t runs = blocks / turn;  // units a die; blocks that do not fill a turn serve the last
                                       // units
  if (xcds <= 1 || block >= runs * turn) {
    return {block / blocks_per_unit, block % blocks_per_unit};
  }
  const int32_t inside = block / xcds;  // index among its die's blocks
  return {block % xcds * runs + inside / blocks_per_unit, inside % blocks_per_unit};
}

// `late` in arguments points to the word in which the launch's gate stores whether its inputs came
// too late (device/primitives/late.h); null if there is no gate.

// kv_scale in records is the scale of a row's layer, for the pool's own kind of 8-bit floats. It is
// 1 in formats without such a scale.

// Order of the columns of partial rows. Other orders than kColumns are those of accumulators in
// lanes, so that a lane stores 16 bytes at a time.
enum class PartOrder : int32_t {
  kColumns,
  kExchanged,  // in each 16 columns, words 4 q and on are columns 2 q, 2 q + 1, 8 + 2 q and 9 + 2 q
  kPaired,     // in each 128, words 4 q and on are columns 2 q, 2 q + 1, 64 + 2 q and 65 + 2 q
};

// The arguments of absorbed attention over a plan. A block serves the unit and share s that PlaceOf
// gives. The block processes the packed rows [s * R, (s + 1) * R) of each work item, with R the
// kernel's tile rows.
struct AttendArgs {
  static constexpr bool kSplit = false, kStreams = false, kBoxes = false;
  const SegmentRecord* segments;
  const uint32_t* page_tables;
  const uint8_t* pool;
  const int32_t* work_indptr;
  const WorkInfo* work_info;
  const WindowRecord* windows;  // by segment, for kWindow; else null
  float* partial_o;       // [partial rows, kv_lora_rank], normalised; AttendVariant has the order
  float* partial_lse;     // [partial rows], natural log
  int64_t granule_bytes;  // bytes of a page-table unit: kPageGranuleBytes in the server's pool
  int32_t blocks_per_unit;
  int32_t o_is_f32;
  int32_t blocks;  // size of the grid
  int32_t xcds;
  const uint32_t* late;
  int32_t few_tiles;  // not 0: items are short (AttendsFewTiles); means nothing with boxes
  int32_t segment_count, item_count;
  int32_t one_item_per_unit;  // not 0: unit u has item u alone, so work_indptr need not be read
};

// Bytes of a KV row of bf16, which boxes bring from the pool and WidenArgs makes of 8-bit rows.
inline constexpr int32_t kBf16RowBytes = (512 + 64) * 2;

// Absorbed attention whose copy engine brings KV rows, by boxes of tensor maps: some columns of
// `box_rows` rows of a page. A map has the dimensions [granule of the pool, row of a page, column]
// from the layer's first byte on; a column is 16 bits wide. All segments have one page size, a
// multiple of box_rows, one row stride and one layer offset, and items begin at multiples of
// box_rows.
inline constexpr int32_t kBoxColumns = 64;  // of `rows`: what the 128-byte swizzle spans
inline constexpr int32_t kMostBoxRows = 64;
// Rows after which the swizzle repeats. The scales of as many rows fill the 128 bytes at whose
// multiples a box may begin.
inline constexpr int32_t kLeastBoxRows = 8;
// Returns the columns of `narrow`: over fp8_tensor the rotated part, under the 64-byte swizzle;
// over fp8_row the scales of a row, not swizzled.
constexpr int32_t NarrowColumns(KvFormat format) {
  return format == KvFormat::kFp8Tensor ? 32 : format == KvFormat::kFp8Row ? 8 : 0;
}
struct
#ifdef __CUDACC__
    alignas(64)  // as the copy engine reads it, in the kernel's arguments
#endif
    TensorMap {
  uint64_t words[16];  // as the driver encodes it
};
struct BoxArgs : AttendArgs {
  static constexpr bool kBoxes = true;
  int32_t box_rows;  // a power of two, kLeastBoxRows .. kMostBoxRows
  int32_t padding[3];
  TensorMap rows;
  TensorMap narrow;  // for rows of 8 bits only: boxes of NarrowColumns
};
static_assert(sizeof(BoxArgs) == 384, "equal on the host, which does not align the map");

// Absorbed attention to one tile of one segment, cut into pieces of equally many KV rows. The
// blocks merge the parts themselves. A block serves unit b / blocks_per_unit and share b %
// blocks_per_unit; unit u attends to KV rows [u * piece_rows, (u + 1) * piece_rows), the last one
// up to kv_end. The arguments hold everything that a block needs to begin, because the first read
// of memory is slow. The blocks wait for each other, so all of them must run at the same time
// (LaunchShape::blocks_meet).
inline constexpr int32_t kMostSplitPieces = 160;
inline constexpr int32_t kMostSplitShares = 8;
struct SplitArgs {
  static constexpr bool kSplit = true, kStreams = false, kBoxes = false;
  SegmentRecord segment;
  const uint32_t* page_tables;
  const uint8_t* pool;
  float* partial_o;  // as AttendArgs; unit u has rows [u * packed_rows, (u + 1) * packed_rows)
  float* partial_lse;
  uint32_t* meetings;     // [kMostSplitShares], zeros before the first launch
  int64_t granule_bytes;  // as AttendArgs
  int32_t pieces;         // 2 .. kMostSplitPieces
  int32_t piece_rows;
  int32_t kv_end;
  uint32_t heads;  // as WorkInfo
  int32_t q_rows;  // the tile has query rows [0, q_rows)
  int32_t packed_rows;
  int32_t blocks_per_unit;  // at most kMostSplitShares
  int32_t o_is_f32;
  const uint32_t* late;
};

// The arguments of absorbed attention over a plan whose queries are still arriving from host
// memory. The blocks merge the parts themselves. `blocks` blocks of the grid serve the plan's
// units. After them, kPushBlocks blocks copy the outputs and log-sum-exps of each segment to host
// memory, in order, as soon as they are complete.
//
// Queries are copied in the order of segments, over words that were set to kToCome. A word of
// another value has arrived; a word of this value has arrived if `arrived` says that all have. The
// host submits the copy after the kernel, and a driver call of another thread that waits for the
// device can delay that. A block therefore waits for patience_ns from its start, by the device's
// clock. Then it reads missing queries in host memory, whose address SegmentRecord::list holds in
// these launches.
//
// Parts of a tile are pieces of piece_rows KV rows. The last piece ends at the last KV row that the
// tile's first query row sees, and the partial rows of a tile's pieces are contiguous. Each unit
// has its items in the order of segments, and has at most one piece of a tile. So blocks that wait
// for each other wait for work that is in progress. All blocks must run at the same time
// (LaunchShape::blocks_meet).
inline constexpr int32_t kPushBlocks = 2;  // enough to saturate the bus
inline constexpr int32_t kMostStreamPieces = 64;
inline constexpr uint32_t kToCome = 0xffffffffu;
// One segment of a stream: the places of its tensors in host memory and on the device.
struct StreamedTensors {
  uint8_t* o_to;
  const uint8_t* o_from;
  int64_t o_bytes;  // a multiple of 16, like both addresses
  // Log-sum-exps are pushed too, because stores to host memory would delay the blocks that compute
  // them.
  float* lse_to;
  const float* lse_from;
  // The KV rows of its queries, bf16, row_pitch bytes apart; null if they are in the pool already.
  // Each block whose items see these rows appends them when it begins.
  const uint8_t* rows;
  int64_t row_pitch;
  int32_t lse_count;  // 0 if none are wanted
  // Blocks that write outputs, each counted once per item.
  uint32_t writers;
};
// Report of the blocks that push, in host memory.
struct StreamReport {
  uint64_t begun;               // on the device's clock
  uint64_t ended[kPushBlocks];  // on the device's clock
  // The launch's ticket, once everything that the block copies is in host memory.
  uint32_t tickets[kPushBlocks];
  // The ticket of the last launch in which a block read queries in host memory.
  uint32_t impatient;
  uint32_t padding;
};
struct StreamArgs : AttendArgs {
  static constexpr bool kStreams = true;
  const uint32_t* arrived;         // equals `ticket` once all queries have arrived
  const StreamedTensors* tensors;  // by segment
  // [kPushBlocks, segment_count]: writers so far; zeros before the first launch.
  uint32_t* finished;
  uint32_t* meetings;  // by the first partial row of a tile + share; zeros before the first launch
  StreamReport* report;
  uint32_t ticket;  // unlike that of any earlier launch
  int32_t piece_rows;
  uint32_t patience_ns;
};

// Merge of partial tiles. Grid: x = reduce tile; y = packed rows inside the tile, W / waves_per_row
// of them a block of W waves, times column_blocks. The blocks of the same rows are neighbours.
struct CombineArgs {
  const SegmentRecord* segments;
  const WindowRecord* windows;  // as AttendArgs
  const int32_t* reduce_indptr;
  const ReduceTile* reduce_final_map;
  const int32_t* reduce_partial_map;
  const float* partial_o;
  const float* partial_lse;
  int32_t o_dim;  // a multiple of 4
  int32_t o_is_f32;
  int32_t waves_per_row;  // a power of two, at most W
  int32_t column_blocks;  // at least 1
  PartOrder order;        // o_dim is a multiple of 16 with kExchanged, of 128 with kPaired
  const uint32_t* late;
};

// Ranges of device memory that are filled with copies or zeros, in any order: no range reads or
// writes bytes that another writes. Grid: blocks that share the chunks of all ranges.
inline constexpr int32_t kMoveChunkBytes = 32 * 1024;
struct MoveRange {
  uint8_t* to;
  const uint8_t* from;  // null: zeros
  int64_t bytes;
};
struct MoveArgs {
  const MoveRange* ranges;
  const int32_t* first_chunk;  // [count + 1]: chunks of the ranges before it
  int32_t count;
  int32_t blocks;  // size of the grid
};

// The arguments of the kernel that computes digests of the parts of some transfers
// (kernels/types/part_digest.h), read in the pool. Low and high half of each digest are stored,
// range after range. Grid: a block for kDigestsPerBlock parts.
inline constexpr int32_t kDigestsPerBlock = 32;
struct DigestRange {
  const uint8_t* from;
  int64_t bytes;  // a multiple of kPageGranuleBytes, above 0
};
struct DigestArgs {
  const DigestRange* ranges;
  const int32_t* first_part;  // [count + 1]: parts of the ranges before it
  uint64_t* digests;          // [first_part[count], 2]
  int32_t count;              // at least 1
};

// Copies small tensors between host and device memory. Grid: a block for every kCopyBlockBytes of
// each tensor. Its threads load once each, so that all loads are in flight at once.
inline constexpr int32_t kCopyBlockBytes = 4 * 1024;
inline constexpr int32_t kTensorCopies = 8;
struct TensorCopy {
  uint8_t* to;
  const uint8_t* from;
  int64_t bytes;
  constexpr int32_t blocks() const {
    return static_cast<int32_t>((bytes + kCopyBlockBytes - 1) / kCopyBlockBytes);
  }
};
struct CopyTensorsArgs {
  TensorCopy copies[kTensorCopies];
  int32_t count;
  // The place for the timestamps of a launch that is one sequence of kernels between two events.
  // The copy of the inputs stores the time of its end at `begun`, in device memory. The copy of the
  // outputs stores at `lasted`, in pinned memory, how many nanoseconds later it began. Null in
  // other copies.
  uint64_t* begun;
  uint64_t* lasted;
};

// The arguments of the kernel that scatters KV rows into pages. One wave a row; `first_row[i]`
// counts the source rows of records before i.
struct AppendArgs {
  const AppendRecord* records;
  const int32_t* first_row;  // [count + 1]
  const uint32_t* page_tables;
  uint8_t* pool;
  int32_t count;
  // nonzero if blocks of the next kernel may be placed before this kernel may begin
  int32_t next_starts_early;
  const uint32_t* late;
};

// Widens all KV rows of some segments, of fp8_row, to contiguous rows of bf16. One wave a row;
// `first_row[i]` counts the rows of segments before i.
inline constexpr char kWidenKernel[] = "mla_widen_rows";
struct WidenArgs {
  const SegmentRecord* segments;
  const int32_t* first_row;  // [count + 1]
  const uint32_t* page_tables;
  const uint8_t* pool;
  uint8_t* rows;
  int32_t count;
};

// out[r, h, :n] = in[r, h, :k] x w[h, k, n], and out[r, h, n:n+copy] = in[r, h, k:k+copy].
// Rows of all records are gathered into tiles of kProjectRows; a tile stays within one weight slot
// and head range.
inline constexpr int32_t kProjectRows = 64;
inline constexpr int32_t kProjectCols = 64;
inline constexpr int32_t kProjectWideCols = 256;
inline constexpr int32_t kProjectWideDepth = 128;
struct ProjectTile {
  int32_t first_row;  // index in ProjectArgs::rows
  int32_t rows;       // 1 .. kProjectRows
  int32_t weights_slot;
  int32_t head_offset;
  int32_t num_heads;
};
struct ProjectRow {
  const void* in;  // the row's first head
  void* out;
  int64_t in_head_stride, out_head_stride;  // elements
};
// The grid has x = tile, y = head x column block.
//
// For a single tile of one row, the arguments hold everything and `tiles` is null, because a
// look-up would delay the loads of the weights.
struct ProjectArgs {
  const ProjectRow* rows;
  const ProjectTile* tiles;
  const uint16_t* const* weights;  // by weights_slot; [heads, k, n] of this product
  int32_t k;
  int32_t n;
  int32_t copy;  // a multiple of 4
  int32_t in_is_f32;
  int32_t out_is_f32;
  int32_t weight_panels;  // nonzero if weights lie in panels (device_state/weight_panels.h)
  const uint32_t* late;
  ProjectTile only_tile;
  ProjectRow only_row;
  const uint16_t* only_weights;
};

// The arguments of the kernels that choose rows as the indexer does (kernels/types/select.h): two
// kernels for each round of query rows. In mla_index_logits, blocks share the rows' keys,
// `keys_per_block` each. It stores a number for each position, larger for better ones, and counts
// for each row how many numbers begin with the same kIndexBinBits bits. In mla_index_select, one
// block a row makes the list from these and clears the counts.
inline constexpr char kIndexLogitsKernel[] = "mla_index_logits";
inline constexpr char kIndexSelectKernel[] = "mla_index_select";
inline constexpr int32_t kIndexDim = 128;  // dim of keys and queries
inline constexpr int32_t kIndexSelectThreads = 1024;
inline constexpr int32_t kIndexBinBits = 11;
inline constexpr int32_t kIndexBins = 1 << kIndexBinBits;
inline constexpr int32_t kIndexRowAlignment = 4;  // multiple of IndexRow::first_rank
// The layout of queries in the shared memory of mla_index_logits: one operand for kIndexHeadBlock
// heads, two for fp32 queries.
inline constexpr int32_t kIndexHeadBlock = 64;
inline constexpr int32_t kIndexOperandBytes = kIndexHeadBlock * kIndexDim * 2;
constexpr int32_t index_blocks(int32_t heads) {
  return (heads + kIndexHeadBlock - 1) / kIndexHeadBlock;
}
constexpr int32_t index_query_bytes(int32_t heads, DType dtype) {
  return index_blocks(heads) * (dtype == DType::kF32 ? 2 : 1) * kIndexOperandBytes;
}
struct IndexRow {
  int32_t record;      // index in IndexArgs::records
  int32_t row;         // row of that record
  int32_t visible;     // positions that it sees
  int32_t first_rank;  // of position 0, in IndexArgs::ranks
};
struct IndexArgs {
  const SelectRecord* records;
  const IndexRow* rows;
  const int32_t* first_block;  // [count + 1]: blocks of the rows before it
  const uint32_t* page_tables;
  const uint8_t* pool;
  uint32_t* ranks;
  uint32_t* bins;  // [count, kIndexBins], zeros between rounds
  int32_t count;   // number of rows
  int32_t keys_per_block;
};

static_assert(std::is_trivially_copyable_v<AttendArgs>);
static_assert(std::is_trivially_copyable_v<BoxArgs>);
static_assert(std::is_trivially_copyable_v<SplitArgs>);
static_assert(std::is_trivially_copyable_v<StreamArgs>);
static_assert(std::is_trivially_copyable_v<StreamedTensors>);
static_assert(std::is_trivially_copyable_v<IndexArgs>);
static_assert(std::is_trivially_copyable_v<WidenArgs>);
static_assert(std::is_trivially_copyable_v<MoveRange>);
static_assert(std::is_trivially_copyable_v<DigestRange>);
static_assert(std::is_trivially_copyable_v<CopyTensorsArgs>);
static_assert(std::is_trivially_copyable_v<ProjectArgs>);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_ARGS_KERNEL_ARGS_H_
