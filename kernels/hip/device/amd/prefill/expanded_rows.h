// Keeps a wave's state for its query rows in attention of the expanded form.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPANDED_ROWS_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPANDED_ROWS_H_

#include "kernels/hip/device/primitives/expanded_item.h"
#include "kernels/hip/device/primitives/row_writer.h"
#include "kernels/hip/device/primitives/softmax.h"

namespace mla::kernels::hip {

// W describes how scores and outputs lie in a wave. The wave has packed rows [first_row, first_row
// + W::kRows) of an item, over tiles of kScoreFragments * W::kScoreCols keys.
template <class W, ExpandedDims kDims, int kScoreFragments>
struct ExpandedRows {
  static constexpr int kOutFragments = kDims.value / W::kOutCols;
  using Scores = typename W::Scores[kScoreFragments];
  using Outputs = typename W::Out[kOutFragments];

  Outputs o;  // without the layer's scale
  OnlineSoftmax<W, kScoreFragments> softmax;
  int limit[W::kSlots];  // keys that the row sees

  // Starts with no keys seen, or with the results that the item continues from.
  MLA_DEVICE void clear(const ExpandedArgs& args, const ExpandedItem& e, const Item& item,
                        int first_row, int lane) {
#pragma unroll
    for (int f = 0; f < kOutFragments; ++f) W::clear(o[f]);
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      const int p = first_row + W::row(lane, slot);
      softmax.clear(slot);
      limit[slot] = p < item.rows ? item.limit(p) : item.work.kv_end;
      if (e.carried_row >= 0 && p < item.rows) carry_in(args, item, e.carried_row + p, slot, lane);
    }
  }

  // Sets scores of keys that a row does not see to -inf, in the tile from key `first` on.
  MLA_DEVICE void mask(Scores& s, int first, int lane) const {
    exclude_from_report_begin();
#pragma unroll
    for (int f = 0; f < kScoreFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        const int position = first + f * W::kScoreCols + W::score_col(lane, i);
        if (position >= limit[W::score_slot(i)]) s[f].set(i, negative_infinity());
      }
    }
    exclude_from_report_end();
  }

  MLA_DEVICE void rescale(const float (&factor)[W::kSlots]) {
    exclude_from_report_begin();
#pragma unroll
    for (int f = 0; f < kOutFragments; ++f) W::scale(o[f], factor);
    exclude_from_report_end();
  }

  // `adjust(scale)` may replace the inverse of the sum of probabilities.
  template <class Adjust>
  MLA_DEVICE void write(const ExpandedArgs& args, const Item& item, int first_row, int lane,
                        const Adjust& adjust) const {
    const AttendArgs results = results_of(args);
    const RowWriter<W, kOutFragments> writer(results, item, kDims.value, 0);
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      RowScale scale(softmax.origin[slot], W::row_sum(softmax.sum[slot]));
      adjust(scale);
      scale.inverse *= item.segment->kv_scale;
      const int p = first_row + W::row(lane, slot);
      if (p < item.rows) writer.write(o, scale, slot, p, lane);
    }
  }

 private:
  // Continues from normalised results, as if one key with that log-sum-exp and value had been seen.
  MLA_DEVICE void carry_in(const ExpandedArgs& args, const Item& item, int64_t row, int slot,
                           int lane) {
    const float lse = args.partial_lse[row];
    if (lse == negative_infinity()) return;
    softmax.origin[slot] = lse * kLog2e;
    softmax.sum[slot] = W::score_col(lane, 0) == 0 ? 1.0f : 0.0f;  // in one lane of the row
    const float* from = args.partial_o + row * kDims.value;
    const float unscaled = 1.0f / item.segment->kv_scale;
#pragma unroll
    for (int f = 0; f < kOutFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kOutElems; ++i) {
        if (W::out_slot(i) == slot) o[f].set(i, from[W::out_col(lane, f, i)] * unscaled);
      }
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPANDED_ROWS_H_
