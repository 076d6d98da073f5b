// Stores the results of a wave's packed rows.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_ROW_WRITER_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_ROW_WRITER_H_

#include "kernels/hip/device/primitives/item.h"

namespace mla::kernels::hip {

// Writes a lane's elements of a packed row: fragments of outputs, scaled, and the row's LSE.
template <class W, int kFragments, class Args = AttendArgs>
struct RowWriter {
  const Args& args;
  const Item& item;
  int columns;         // outputs a row
  int first_fragment;  // first fragment of this wave

  MLA_DEVICE RowWriter(const Args& attend, const Item& of, int row_columns, int fragment)
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

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_ROW_WRITER_H_
