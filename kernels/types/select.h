// Describes the choice of rows by an indexer, as DeepSeek V3.2 has it. For each query row it
// chooses, among the positions that the row sees, those with the largest
//
//   logit(s) = scale(s) * sum over index heads h of  weight[h] * relu(query[h] . code(s))
//
// with the index keys as KvFormat::kIndexKey keeps them: e4m3 codes and a scale a row. The choice
// is exact: lower positions win between equal logits, and NaN counts as the largest. A row that
// sees no more positions than are wanted gets all of them.
#ifndef MLA_KERNELS_TYPES_SELECT_H_
#define MLA_KERNELS_TYPES_SELECT_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/formats/dtype.h"

namespace mla::kernels {

// Bounds of any indexer.
inline constexpr int32_t kMaxIndexHeads = 128;
inline constexpr int32_t kMaxIndexDim = 128;

// An indexer's shape; heads is 0 if a model has none.
struct IndexerShape {
  int32_t heads = 0;
  int32_t dim = 0;  // per query head and per key

  // Returns the number of bytes of the inputs of a row: queries [heads, dim] of `dtype`, then
  // weights [heads], fp32.
  int64_t input_bytes(DType dtype) const {
    return int64_t{heads} * (dim * int64_t(ElementSize(dtype)) + int64_t{sizeof(float)});
  }
  friend bool operator==(const IndexerShape&, const IndexerShape&) = default;
};

// Some query rows of one sequence at one layer. Query row i sees positions 0 to kv_rows - rows + i.
// Their index keys are addressed by page_table, layer_offset, row_stride and page_size, as in a
// SegmentRecord.
struct SelectRecord {
  const void* inputs;  // [rows], IndexerShape::input_bytes each, contiguous
  DType dtype;         // dtype of the queries
  IndexerShape indexer;
  int64_t page_table;
  int64_t layer_offset;
  int64_t row_stride;
  int32_t page_size;
  int32_t rows;
  int32_t kv_rows;
  // Receives the positions, ascending. Row i begins at list_begin[i] - list_begin[0] and gets as
  // many as list_begin leaves room for, at most as many as it sees.
  int32_t* list;
  const int32_t* list_begin;  // [rows + 1], ascending
  // If not null, receives the positions too, [rows, wanted_width], padded with -1.
  int32_t* wanted;
  int32_t wanted_width;
};
static_assert(std::is_trivially_copyable_v<SelectRecord>);

// Returns how many positions a query row sees.
inline int32_t SelectVisible(const SelectRecord& record, int32_t row) {
  return record.kv_rows - record.rows + row + 1;
}

inline int32_t SelectedRows(const SelectRecord& record, int32_t row) {
  return record.list_begin[row + 1] - record.list_begin[row];
}

// Returns the first place of a query row's choice.
inline int32_t* SelectedList(const SelectRecord& record, int32_t row) {
  return record.list + (record.list_begin[row] - record.list_begin[0]);
}

// Orders logits and their positions as numbers; the larger number is the better choice. Zeros of
// either sign are equal.
inline uint64_t SelectRank(float logit, int32_t position) {
  const float same = logit + 0.0f;
  uint32_t bits = 0;
  std::memcpy(&bits, &same, sizeof bits);
  if (same != same) bits = 0x7fffffffu;
  bits = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{bits} << 32 | (0xffffffffu - static_cast<uint32_t>(position));
}

inline int32_t SelectPosition(uint64_t rank) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(rank));
}

// Copies a finished list to `wanted`, if it is set.
inline void CopyWanted(const SelectRecord& record, int32_t row) {
  if (record.wanted == nullptr) return;
  int32_t* const to = record.wanted + int64_t{row} * record.wanted_width;
  const int32_t count = SelectedRows(record, row);
  std::memcpy(to, SelectedList(record, row), static_cast<size_t>(count) * sizeof(int32_t));
  for (int32_t i = count; i < record.wanted_width; ++i) to[i] = -1;
}

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_SELECT_H_
