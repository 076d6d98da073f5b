// Arguments of every device kernel, shared by host and device. Each kernel takes exactly one of
// these structs by value. All addresses are device addresses.
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
// Of tiles of one row, where there are such kernels: wide for weights of at most
// kProjectWideDepth rows, with kProjectWideCols columns a block, and deep for others.
inline constexpr char kProjectRowWideKernel[] = "mla_project_row_wide";
inline constexpr char kProjectRowDeepKernel[] = "mla_project_row_deep";
// Those of attention and up-projection are in attend_variants.h.
inline constexpr char kAttendPrefix[] = "mla_attend_";

// The unit of the plan that a block serves, and its share of that unit's rows.
struct BlockPlace {
  int32_t unit, share;
};
// Neighbouring units, and all shares of a unit, read the same KV rows more often than others, so
// they go to one L2. `xcds`: dies with an L2 each, which blocks go to in turn, block b to b % xcds;
// then units are dealt to dies in runs. At most 1: all blocks share the L2.
constexpr BlockPlace PlaceOf(int32_t block, int32_t blocks, int32_t blocks_per_unit, int32_t xcds) {
  const int32_t turn = blocks_per_unit * (xcds > 1 ? xcds : 1);
  const int32_t runs = blocks / turn;  // units a die; blocks that fill no turn serve the last units
  if (xcds <= 1 || block >= runs * turn) {
    return {block / blocks_per_unit, block % blocks_per_unit};
  }
  const int32_t inside = block / xcds;  // of its die's blocks
  return {block % xcds * runs + inside / blocks_per_unit, inside % blocks_per_unit};
}

// `late` of arguments: the word in which the launch's gate leaves whether its inputs came too late
// (device/primitives/late.h), or null where there is no gate.

// Records say what a row's layer is scaled with (kv_scale) in terms of the pool's own kind of 8-bit
// floats, and 1 in formats without such a scale.

// Absorbed attention over a plan. A block serves the unit and share s that PlaceOf gives and, of
// each work item, the packed rows [s * R, (s + 1) * R) with R the kernel's tile rows.
struct AttendArgs {
  static constexpr bool kSplit = false, kStreams = false;
  const SegmentRecord* segments;
  const uint32_t* page_tables;
  const uint8_t* pool;
  const int32_t* work_indptr;
  const WorkInfo* work_info;
  const WindowRecord* windows;  // by segment, of kWindow; else null
  float* partial_o;       // [partial rows, kv_lora_rank], normalised; AttendVariant has the order
  float* partial_lse;     // [partial rows], natural log
  int64_t granule_bytes;  // of a page-table entry: kPageGranuleBytes in the server's pool
  int32_t blocks_per_unit;
  int32_t o_is_f32;
  int32_t blocks;  // of the grid
  int32_t xcds;
  const uint32_t* late;
};

// Absorbed attention to one tile of one segment, cut into pieces of as many KV rows, and the merge
// of the parts, which the blocks do themselves. A block serves unit b / blocks_per_unit and share
// b % blocks_per_unit; unit u attends to KV rows [u * piece_rows, (u + 1) * piece_rows), the last
// one up to kv_end. All that a block needs to begin is here, since memory is slow to answer the
// first time. The blocks wait for each other, so all of them have to run at a time
// (LaunchShape::blocks_meet).
inline constexpr int32_t kMostSplitPieces = 160;
inline constexpr int32_t kMostSplitShares = 8;
struct SplitArgs {
  static constexpr bool kSplit = true, kStreams = false;
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

// Absorbed attention over a plan whose queries are on their way from the host's memory, and the
// merge of its parts, which the blocks do themselves. `blocks` blocks of the grid serve the plan's
// units; behind them, kPushBlocks bring the outputs of one segment after the other to the host's
// memory, each once it is complete, with its log-sum-exps.
//
// Queries are copied in the order of segments, over words of kToCome. A word of another value has
// arrived; one of this value has if `arrived` says that all have. The host gives the copy to the
// device after the kernel, and a driver call of another thread that waits for the device keeps it
// from that. So a block waits for patience_ns from its start, by the device's clock, and then reads
// in the host's memory what has not come, where SegmentRecord::list leads to in these launches.
//
// Parts of a tile are its pieces of piece_rows KV rows, the last one of what is left behind the
// last cut that its first query row sees, and their partial rows follow one another. Each unit has
// its items in the order of segments, and none has two pieces of a tile: so blocks that wait for
// each other wait for work that goes on. All blocks have to run at a time
// (LaunchShape::blocks_meet).
inline constexpr int32_t kPushBlocks = 2;  // as many as the bus takes bytes from
inline constexpr int32_t kMostStreamPieces = 64;
inline constexpr uint32_t kToCome = 0xffffffffu;
// Of one segment of a stream: where its tensors lie in the host's memory, and on the device.
struct StreamedTensors {
  uint8_t* o_to;
  const uint8_t* o_from;
  int64_t o_bytes;  // a multiple of 16, as both addresses
  // In the host's memory at once, log-sum-exps would hold up the blocks that write them.
  float* lse_to;
  const float* lse_from;
  // KV rows of its queries, which the blocks whose items see them append, each for itself, when
  // they begin; null: they are in the pool. bf16, row_pitch bytes apart.
  const uint8_t* rows;
  int64_t row_pitch;
  int32_t lse_count;  // or 0
  // Blocks that write outputs, each counted once for each of its items.
  uint32_t writers;
};
// Of the blocks that push, in the host's memory.
struct StreamReport {
  uint64_t begun;               // by the device's clock
  uint64_t ended[kPushBlocks];  // the same
  // The launch's, once all that the block has to bring to the host's memory is there.
  uint32_t tickets[kPushBlocks];
  // The ticket of the last launch in which a block has read queries in the host's memory.
  uint32_t impatient;
  uint32_t padding;
};
struct StreamArgs : AttendArgs {
  static constexpr bool kStreams = true;
  const uint32_t* arrived;         // `ticket` once all queries have
  const StreamedTensors* tensors;  // by segment
  // [kPushBlocks, segment_count]: writers so far; zeros before the first launch.
  uint32_t* finished;
  uint32_t* meetings;  // by the first partial row of a tile + share; zeros before the first launch
  StreamReport* report;
  uint32_t ticket;  // none of earlier launches
  int32_t segment_count;
  int32_t piece_rows;
  uint32_t patience_ns;
};

// Merge of partial tiles. Grid: x = reduce tile, y = packed rows inside the tile, W / waves_per_row
// of them a block of W waves, times column_blocks: the blocks of some rows are neighbours.
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
  int32_t exchanged;      // as AttendVariant::exchanged_partials; o_dim is a multiple of 16 then
  const uint32_t* late;
};

// Ranges of device memory filled with copies or zeros, in any order: what one writes is neither
// read nor written by another. Grid: blocks that share the chunks of all ranges.
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
  int32_t blocks;  // of the grid
};

// Digests of the parts of some transfers (kernels/types/part_digest.h), where they lie in the
// pool: low and high half of each, those of a range behind those of the ranges before it. Grid: a
// block for kDigestsPerBlock parts.
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

// Small tensors on their way between host and device memory. Grid: a block for every
// kCopyBlockBytes of each; its threads load once each, so that all loads are on their way at once.
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
  // Of a launch that is one sequence of kernels, whose events are around all of it: the copy of its
  // inputs leaves the time of its end at `begun`, in device memory, and that of its outputs how
  // many nanoseconds later it began at `lasted`, in pinned memory. Null: not of this copy.
  uint64_t* begun;
  uint64_t* lasted;
};

// Scatter of KV rows. One wave a row; `first_row[i]` counts the source rows of records before i.
struct AppendArgs {
  const AppendRecord* records;
  const int32_t* first_row;  // [count + 1]
  const uint32_t* page_tables;
  uint8_t* pool;
  int32_t count;
  // Whether the kernel behind this one may have its blocks in place before this one may begin.
  int32_t next_starts_early;
  const uint32_t* late;
};

// All KV rows of some segments, of fp8_row, as rows of bf16 one behind the other. One wave a row;
// `first_row[i]` counts the rows of segments before i.
inline constexpr char kWidenKernel[] = "mla_widen_rows";
inline constexpr int32_t kWidenedRowBytes = (512 + 64) * 2;
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
  int32_t first_row;  // in ProjectArgs::rows
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
// Grid: x = tile, y = head x column block.
//
// Of one tile of one row all is in the arguments and `tiles` is null: what a kernel has to look up
// first delays the weights by as much.
struct ProjectArgs {
  const ProjectRow* rows;
  const ProjectTile* tiles;
  const uint16_t* const* weights;  // by weights_slot; [heads, k, n] of this product
  int32_t k;
  int32_t n;
  int32_t copy;  // a multiple of 4
  int32_t in_is_f32;
  int32_t out_is_f32;
  int32_t weight_panels;  // whether weights lie in panels (device_state/weight_panels.h)
  const uint32_t* late;
  ProjectTile only_tile;
  ProjectRow only_row;
  const uint16_t* only_weights;
};

// The choice of rows by the indexer (kernels/types/select.h), two kernels for a round of query
// rows. mla_index_logits: blocks share the rows' keys, `keys_per_block` each. It leaves of each
// position a number that is the larger, the better it is, and of each row how many numbers begin
// with the same kIndexBinBits bits. mla_index_select: a block a row makes the list of those, and
// clears them.
inline constexpr char kIndexLogitsKernel[] = "mla_index_logits";
inline constexpr char kIndexSelectKernel[] = "mla_index_select";
inline constexpr int32_t kIndexDim = 128;  // of keys and queries
inline constexpr int32_t kIndexSelectThreads = 1024;
inline constexpr int32_t kIndexBinBits = 11;
inline constexpr int32_t kIndexBins = 1 << kIndexBinBits;
inline constexpr int32_t kIndexRowAlignment = 4;  // of IndexRow::first_rank
// Where mla_index_logits keeps queries in shared memory: operands of some heads each, of fp32
// queries two.
inline constexpr int32_t kIndexHeadBlock = 64;
inline constexpr int32_t kIndexOperandBytes = kIndexHeadBlock * kIndexDim * 2;
constexpr int32_t index_blocks(int32_t heads) {
  return (heads + kIndexHeadBlock - 1) / kIndexHeadBlock;
}
constexpr int32_t index_query_bytes(int32_t heads, DType dtype) {
  return index_blocks(heads) * (dtype == DType::kF32 ? 2 : 1) * kIndexOperandBytes;
}
struct IndexRow {
  int32_t record;      // in IndexArgs::records
  int32_t row;         // of that record
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
  int32_t count;   // of rows
  int32_t keys_per_block;
};

static_assert(std::is_trivially_copyable_v<AttendArgs>);
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
