// Moves results of the expanded form's attention on sm_90a between memory and the accumulators of a
// warpgroup.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_RESULTS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_RESULTS_H_

#include "kernels/hip/device/primitives/expanded_item.h"
#include "kernels/hip/device/sm90/warpgroup.h"

namespace mla::kernels::hip {

// For 64 query rows of one head; a thread holds kOutputs of two rows (wgmma.h).
template <int kValue>
struct ExpandedResults {
  static constexpr int kOutputs = kValue / 2;
  using Rows = WarpgroupRows<kValue>;

  const ExpandedArgs& args;
  int half;  // index of these 64 rows in the item
  int warp, lane;

  MLA_DEVICE int row(int slot) const { return half * 64 + Rows::row(warp, lane, slot); }

  // Loads normalised results of earlier keys, without the layer's scale. Calls seen(slot, lse) for
  // each of the thread's rows that has any.
  template <class Seen>
  MLA_DEVICE void carry_in(const ExpandedItem& e, const Item& item, float (&o)[kOutputs],
                           const Seen& seen) const {
    if (e.carried_row < 0) return;
    const float unscaled = 1.0f / item.segment->kv_scale;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int r = row(slot);
      if (r >= item.rows) continue;
      const int64_t carried = static_cast<int64_t>(e.carried_row) + r;
      const float lse = args.partial_lse[carried];
      if (lse == negative_infinity()) continue;
      seen(slot, lse);
      const float* from = args.partial_o + carried * kValue + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < kOutputs / 4; ++j) {
        o[4 * j + 2 * slot] = from[8 * j] * unscaled;
        o[4 * j + 2 * slot + 1] = from[8 * j + 1] * unscaled;
      }
    }
  }

  // Stores outputs times scale.inverse, and log-sum-exps, of the thread's two rows.
  MLA_DEVICE void store(const Item& item, const RowScale (&scale)[2],
                        const float (&o)[kOutputs]) const {
    const AttendArgs results = results_of(args);
    const bool f32 = item.work.partial_row >= 0 || args.o_is_f32 != 0;
    const bool whole = aligned_results(results, item, 8);
    const bool pairs = aligned_results(results, item, 2);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int r = row(slot);
      const RowTarget target(results, item, r < item.rows ? r : 0, kValue);
      const bool stored = r < item.rows;
      if (stored && (lane & 3) == 0 && target.lse != nullptr) *target.lse = scale[slot].lse;
      if (!f32 && whole) {
        store_chunks(o, slot, scale[slot], target, stored);
        continue;
      }
      if (!stored) continue;
#pragma unroll
      for (int j = 0; j < kOutputs / 4; ++j) {
        const float run[2] = {scaled(o[4 * j + 2 * slot], scale[slot]),
                              scaled(o[4 * j + 2 * slot + 1], scale[slot])};
        store_run(target.base, target.index + 8 * j + 2 * (lane & 3), run, target.f32, pairs);
      }
    }
  }

 private:
  MLA_DEVICE static float scaled(float x, const RowScale& scale) {
    return scale.empty ? 0.0f : x * scale.inverse;
  }
  // For bf16, 16 bytes a lane: the four lanes of a row exchange their words.
  MLA_DEVICE void store_chunks(const float (&o)[kOutputs], int slot, const RowScale& scale,
                               const RowTarget& target, bool stored) const {
#pragma unroll
    for (int j = 0; j < kOutputs / 4; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (j + i) + 2 * slot;
        words[i] = scale.empty ? 0 : pack_bf16(o[at] * scale.inverse, o[at + 1] * scale.inverse);
      }
      tile::gather_chunks(words, lane);
      if (stored) {
        store_words(static_cast<uint16_t*>(target.base) + target.index + 8 * (j + (lane & 3)),
                    words);
      }
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_RESULTS_H_
