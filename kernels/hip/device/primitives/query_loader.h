// Loads the queries of a work item from the caller's tensor.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_QUERY_LOADER_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_QUERY_LOADER_H_

#include "kernels/hip/device/primitives/item.h"

namespace mla::kernels::hip {

// Addresses queries by packed row, in chunks of eight elements. Rows past the item's end load its
// first row; their results are dropped.
struct QueryLoader {
  const Item& item;
  bool aligned;  // chunks lie at multiples of 16 bytes

  MLA_DEVICE explicit QueryLoader(const Item& of) : item(of) {
    MLA_RECORD const SegmentRecord& r = *item.segment;
    aligned = aligned_to(r.q, r.q_row_stride, r.q_head_stride, 2, 16);
  }

  MLA_DEVICE const uint16_t* row(int p) const {
    MLA_RECORD const SegmentRecord& r = *item.segment;
    const int source = p < item.rows ? p : 0;
    return static_cast<const uint16_t*>(r.q) + item.query(source) * r.q_row_stride +
           item.head(source) * r.q_head_stride;
  }

  // Starts the copy of a chunk into shared memory. It is complete with the copy stage that is
  // closed next.
  template <bool kAligned>
  MLA_DEVICE static void copy(tile::lds_t target, const uint16_t* from) {
    if constexpr (kAligned) {
      tile::copy_chunk(target, from);
    } else {
      tile::store_chunk(target, load_chunk(from, 0, false, false));
    }
  }
  // Copies a shared tile of kRows rows, by kWaves waves.
  template <int kRows, int kDim, int kWaves>
  MLA_DEVICE void copy_tile(tile::lds_t tile_base, int wave, int lane) const {
    for (int p = wave; p < kRows; p += kWaves) {
      const uint16_t* from = row(p);
      for (int c = lane; c < kDim / 8; c += tile::kWave) {
        const tile::lds_t target = tile::chunk_at<kRows>(tile_base, p, c);
        if (aligned) {
          copy<true>(target, from + c * 8);
        } else {
          copy<false>(target, from + c * 8);
        }
      }
    }
  }

  // Loads the queries of the wave's packed rows, from `first_row` on, straight into registers in
  // W's layout. Order::depth(step, group) is the first of the eight values that a lane of the group
  // takes.
  template <class W, class Order, int kSteps>
  MLA_DEVICE void load(int first_row, int lane, typename W::Q (&queries)[kSteps]) const {
    const uint16_t* from = row(first_row + W::row(lane, 0));
    if (aligned) {
      load_all<true, W, Order>(from, W::group(lane), queries);
    } else {
      load_all<false, W, Order>(from, W::group(lane), queries);
    }
  }

 private:
  template <bool kAligned, class W, class Order, int kSteps>
  MLA_DEVICE static void load_all(const uint16_t* from, int group,
                                  typename W::Q (&queries)[kSteps]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const Chunk c = load_chunk(from, Order::depth(s, group), false, kAligned);
#pragma unroll
      for (int i = 0; i < 4; ++i) queries[s].r[i] = c.w[i];
    }
  }
};

// Takes the depth in the order of memory.
template <class W>
struct PlainOrder {
  MLA_DEVICE static constexpr int depth(int step, int group) {
    return step * W::kDepth + group * 8;
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_QUERY_LOADER_H_
