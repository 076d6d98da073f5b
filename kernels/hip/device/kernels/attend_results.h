// Writes what a wave of absorbed attention has computed.
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_ATTEND_RESULTS_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_ATTEND_RESULTS_H_

#include "kernels/hip/device/kv/window_source.h"
#include "kernels/hip/device/primitives/row_writer.h"

namespace mla::kernels::hip {

// The wave's packed rows begin with `first_row` of the item, its columns with fragment
// `first_fragment` of kLora columns. State is of Attend: the sums are complete.
template <class Format, int kOutFragments, int kLora, AttentionKind kKind, class Args, class State>
MLA_DEVICE void write_results(const Args& args, const Item& item, const State& state, int first_row,
                              int first_fragment) {
  using W = typename Format::W;
  const RowWriter<W, kOutFragments, Args> writer(args, item, kLora, first_fragment);
#pragma unroll
  for (int slot = 0; slot < W::kSlots; ++slot) {
    const int lane = tile::lane_again();
    const int p = first_row + W::row(lane, slot);
    RowScale scale(state.softmax.origin[slot], state.softmax.sum[slot]);
    if constexpr (Format::kCodes) {
      const float total = state.rounded.total();  // computed by all lanes together
      scale.inverse = scale.empty ? 0.0f : 1.0f / total;
    }
    if (p >= item.rows) continue;
    if constexpr (Format::Layout::kLayerScale) scale.inverse *= item.segment->kv_scale;
    if constexpr (kKind == AttentionKind::kWindow) {
      // In split tiles, the merge applies the sink.
      if (item.work.partial_row < 0) {
        scale.inverse *= sink_factor(args.windows[item.work.segment], item.head(p), scale.lse);
      }
    }
    writer.write(state.o, scale, slot, p, lane);
  }
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_ATTEND_RESULTS_H_
