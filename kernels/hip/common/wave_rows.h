// The rows of a work item that a wave keeps to itself: their queries on the way into its registers,
// and their results on the way out.
#ifndef MLA_KERNELS_HIP_COMMON_WAVE_ROWS_H_
#define MLA_KERNELS_HIP_COMMON_WAVE_ROWS_H_

#include "kernels/hip/common/item.h"

namespace mla::kernels::hip {

// Reads queries of the wave that holds packed rows from `first_row` on straight into registers, in
// W's layout. Rows past the item's take its first: their results are dropped. Order::depth(step,
// group) is the first of the eight values that a lane of the group takes.
template <class W, int kSteps, class Order>
struct QueryLoader {
  using Queries = typename W::Q[kSteps];
  MLA_DEVICE static void load(const Item& item, int first_row, int lane, Queries& queries) {
    MLA_RECORD const SegmentRecord& r = *item.segment;
    const int own = first_row + W::row(lane, 0);
    const int p = own < item.rows ? own : 0;
    const uint16_t* source = static_cast<const uint16_t*>(r.q) + item.query(p) * r.q_row_stride +
                             item.head(p) * r.q_head_stride;
    const int group = W::group(lane);
    if (aligned_to(r.q, r.q_row_stride, r.q_head_stride, 2, 16)) {
      load_all<true>(source, group, queries);
    } else {
      load_all<false>(source, group, queries);
    }
  }

 private:
  template <bool kAligned>
  MLA_DEVICE static void load_all(const uint16_t* source, int group, Queries& queries) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const Chunk c = load_chunk(source, Order::depth(s, group), false, kAligned);
#pragma unroll
      for (int i = 0; i < 4; ++i) queries[s].r[i] = c.w[i];
    }
  }
};

// The depth as it lies in memory.
template <class W>
struct PlainOrder {
  MLA_DEVICE static constexpr int depth(int step, int group) {
    return step * W::kDepth + group * 8;
  }
};

// Writes a lane's elements of a packed row: fragments of outputs, scaled, and the row's LSE.
template <class W, int kFragments>
struct RowWriter {
  const AttendArgs& args;
  const Item& item;
  int columns;         // of a row
  int first_fragment;  // of this wave

  MLA_DEVICE RowWriter(const AttendArgs& attend, const Item& of, int row_columns, int fragment)
      : args(attend), item(of), columns(row_columns), first_fragment(fragment) {}

  MLA_DEVICE void write(const typename W::Out (&o)[kFragments], const RowScale& scale, int slot,
                        int p, int lane) const {
    const bool aligned = aligned_results(args, item, W::kRun);
    const RowTarget target(args, item, p, columns);
    if (first_fragment == 0 && W::score_col(lane, 0) == 0 && target.lse != nullptr) {
      *target.lse = scale.lse;
    }
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kOutElems; i += W::kRun) {
        if (W::out_slot(i) != slot) continue;
        float run[W::kRun];
#pragma unroll
        for (int j = 0; j < W::kRun; ++j) {
          run[j] = scale.empty ? 0.0f : o[f].at(i + j) * scale.inverse;
        }
        store_run(target.base, target.index + W::out_col(lane, first_fragment + f, i), run,
                  target.f32, aligned);
      }
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_COMMON_WAVE_ROWS_H_
