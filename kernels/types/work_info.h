// Declares the device records of an execution plan.
//
// A plan is five arrays (the persistent-scheduling metadata of MLA kernels):
//
// clang-format off
//   work_indptr         int32 [units + 1]          unit u executes items work_indptr[u] .. [u + 1]
//   work_info           WorkInfo [work items]      what to compute
//   reduce_indptr       int32 [reduce tiles + 1]   CSR over reduce_partial_map, a row a split tile
//   reduce_final_map    ReduceTile [reduce tiles]  where the merged rows go
//   reduce_partial_map  int32 [partials]           first row of each partial tile in the buffers
// clang-format on
//
// Nothing in a plan is an address or a layer, so one plan serves every layer of a step and is
// reused while the lengths stay as they are. Rows are counted inside the segment: query row i of a
// segment is the i-th of its new rows, kv row j is position j of its sequence.
//
// A *packed row* is one (query row, head) pair. Partial buffers hold packed rows in the order
// q-major, head-minor: the partial of a work item occupies (q_end - q_begin) * (head_end -
// head_begin) rows from `partial_row` on.
#ifndef MLA_KERNELS_TYPES_WORK_INFO_H_
#define MLA_KERNELS_TYPES_WORK_INFO_H_

#include <cstdint>
#include <type_traits>

namespace mla::kernels {

// Value of WorkInfo::partial_row when the tile is not split: the kernel writes the final output
// itself.
inline constexpr int32_t kUnsplit = -1;

struct alignas(32) WorkInfo {
  int32_t segment;      // index into the launch's segment records
  int32_t partial_row;  // first packed row in the partial buffers, or kUnsplit
  int32_t q_begin;      // query rows [q_begin, q_end) of the segment
  int32_t q_end;
  int32_t kv_begin;  // kv rows [kv_begin, kv_end) of the segment; may be empty
  int32_t kv_end;
  // The number of rows of the segment after kv_end (kv_rows - kv_end). With the causal rule, query
  // row i of a segment sees kv rows j <= kv_rows - q_rows + i. The kernel applies this mask inside
  // [kv_begin, kv_end).
  int32_t kv_after;
  uint32_t heads;  // head range of the tile: low 16 bits begin, high 16 bits end (exclusive)

  int32_t head_begin() const { return static_cast<int32_t>(heads & 0xffffu); }
  int32_t head_end() const { return static_cast<int32_t>(heads >> 16); }
};

struct alignas(16) ReduceTile {
  int32_t segment;
  int32_t q_begin;
  int32_t q_end;
  uint32_t heads;  // packed as in WorkInfo

  int32_t head_begin() const { return static_cast<int32_t>(heads & 0xffffu); }
  int32_t head_end() const { return static_cast<int32_t>(heads >> 16); }
};

constexpr uint32_t PackHeads(int32_t begin, int32_t end) {
  return static_cast<uint32_t>(begin) | (static_cast<uint32_t>(end) << 16);
}

static_assert(sizeof(WorkInfo) == 32 && std::is_trivially_copyable_v<WorkInfo>);
static_assert(sizeof(ReduceTile) == 16 && std::is_trivially_copyable_v<ReduceTile>);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_WORK_INFO_H_
