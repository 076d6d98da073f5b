// Device records of the expanded form's rounds: keys and values of some heads and rows are
// up-projected into a workspace, then attended to, round after round.
//
//   round 0: expand {segment 0, heads 0..63}    attend its tiles
//   round 1: expand {segment 0, heads 64..127}  attend its tiles
//
// The workspace holds expansions: rows [kv_begin, kv_begin + rows) of one segment for some of its
// heads. Everything in it is a panel: 64 bf16 columns, 128 bytes a row, rows packed.
//
//   base | head 0: keys 0..63, keys 64..127, ..., values 0..63, ..., rests | head 1 ... |
//        | rotated part, for all heads |        each panel is padded_rows x 128 bytes
//
// kernels/hip/args/expanded_args.h says what the panels hold and how kernels walk the records.
#ifndef MLA_KERNELS_TYPES_ROUND_INFO_H_
#define MLA_KERNELS_TYPES_ROUND_INFO_H_

#include <cstdint>
#include <span>
#include <type_traits>

#include "kernels/types/work_info.h"

namespace mla::kernels {

inline constexpr int32_t kExpandedRope = 64;
// Query rows of an attention item; KV cut points and padded rows are multiples of it.
inline constexpr int32_t kExpandedRows = 128;
inline constexpr int32_t kPanelColumns = 64;
inline constexpr int32_t kPanelRowBytes = 128;
inline constexpr int32_t kRotatedPanels = kExpandedRope / kPanelColumns;
// A launch has at most this number of rounds: a round is two kernels, and a launch has a bounded
// number of kernels.
inline constexpr int32_t kMostRounds = 1024;
inline constexpr int64_t kRestPanelBytes = int64_t{kExpandedRows} * kPanelRowBytes;

// The dims of a head's keys, without the rotated part, and of its values. Both are multiples of
// kPanelColumns.
struct ExpandedDims {
  int32_t nope = 128, value = 128;

  constexpr int32_t key_panels() const { return nope / kPanelColumns; }
  constexpr int32_t value_panels() const { return value / kPanelColumns; }
  constexpr int32_t panels() const { return key_panels() + value_panels(); }  // per head
  constexpr int64_t rest_bytes() const { return value_panels() * kRestPanelBytes; }
  // Returns the number of bytes of one head's keys, values and rests.
  constexpr int64_t head_bytes(int64_t padded_rows) const {
    return padded_rows * kPanelRowBytes * panels() + rest_bytes();
  }
  friend constexpr bool operator==(const ExpandedDims&, const ExpandedDims&) = default;
};
// The dims for which kernels are written: those of DeepSeek V2 and V3, and of GLM-4.7-Flash.
inline constexpr ExpandedDims kDims128{128, 128}, kDims256{192, 256};

// Returns the number of bytes of an expansion in the workspace.
constexpr int64_t ExpansionBytes(const ExpandedDims& dims, int64_t padded_rows, int64_t heads) {
  return heads * dims.head_bytes(padded_rows) + padded_rows * kPanelRowBytes * kRotatedPanels;
}
// Returns the bytes of the smallest workspace that works: one head of kExpandedRows rows.
constexpr int64_t LeastRoundWorkspace(const ExpandedDims& dims) {
  return ExpansionBytes(dims, kExpandedRows, 1);
}

struct Expansion {
  int64_t base;         // byte offset in the workspace
  int32_t segment;      // index into the launch's records
  int32_t kv_begin;     // a multiple of kExpandedRows
  int32_t rows;         // >= 1
  int32_t padded_rows;  // `rows` rounded up to a multiple of kExpandedRows
  int32_t head_begin;   // in the segment's slice
  int32_t heads;
  int32_t first_pair;  // pairs (tile of kExpandedRows rows, head) of the expansions before this one
  int32_t first_head;  // heads of the expansions before this one
  int32_t sections;    // for the planner: groups of heads attended to one after the other
  int32_t pad;
};

// One head, at most kExpandedRows query rows, and KV rows [kv_begin, kv_end). Keys and values of
// those KV rows lie in the workspace.
struct ExpandedItem {
  WorkInfo work;        // kv_begin is a multiple of kExpandedRows
  int64_t keys;         // byte offset of row kv_begin in the head's first panel
  int64_t rotated;      // byte offset of row kv_begin in the rotated part
  int64_t panel_bytes;  // from one panel of the head to the next, and from the last to the rests
  // Packed row in the partial buffers that holds the same query rows' results over earlier KV rows;
  // the item continues from it. kUnsplit: there are no earlier results.
  int32_t carried_row;
  int32_t pad;
};

struct Round {
  int32_t first_expansion = 0, expansions = 0;
  int32_t first_indptr = 0;  // into unit_indptr: units + 1 entries, which count all items
  int32_t pairs = 0;         // (tile of rows, head) pairs to up-project
  int32_t heads = 0;         // over all expansions
};

// Rounds of a plan. Empty if the backend's work items up-project for themselves.
struct RoundView {
  int32_t units = 0;  // blocks that items are dealt to
  std::span<const Round> rounds;
  std::span<const Expansion> expansions;
  std::span<const ExpandedItem> items;
  std::span<const int32_t> unit_indptr;
  bool merges = false;  // the plan's cuts are kept, and its partial tiles remain to be merged
};

static_assert(sizeof(Expansion) == 48 && std::is_trivially_copyable_v<Expansion>);
static_assert(sizeof(ExpandedItem) == 64 && std::is_trivially_copyable_v<ExpandedItem>);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_ROUND_INFO_H_
