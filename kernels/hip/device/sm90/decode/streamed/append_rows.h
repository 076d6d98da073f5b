// Appends KV rows in the blocks whose items see them.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_STREAMED_APPEND_ROWS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_STREAMED_APPEND_ROWS_H_

#include "kernels/hip/device/kv/append_kv.h"
#include "kernels/hip/device/kv/row_source.h"

namespace mla::kernels::hip {

// Stores the new rows that this block's items see in the pool, with one of kWarps warps for each
// item. Other blocks may store the same rows with the same values. After the block's next barrier,
// all of its threads may read them.
//
// It runs at the start of the block, not of the item: once outputs use the bus as well, a row takes
// 8 to 10 us to arrive from host memory.
template <int kRows, int kWarps>
MLA_DEVICE void append_rows(const StreamArgs& args) {
  constexpr int kChunks = 72;  // in a row of 576 elements
  constexpr int kLaneChunks = (kChunks + tile::kWave - 1) / tile::kWave;
  const auto append = [&args](const Item& item, int, int) {
    const RowSource<AttentionKind::kDense> source(args, item);
    const StreamedTensors& t = args.tensors[item.work.segment];
    const int first = item.segment->kv_rows - item.segment->q_rows;
    const int begin = first > source.begin ? first : source.begin;
    if (begin >= source.end || t.rows == nullptr) return;
    const uint8_t* from = t.rows + (begin - first) * t.row_pitch;
#pragma unroll 1
    for (int row = begin; row < source.end; ++row, from += t.row_pitch) {
      uint8_t* const target = const_cast<uint8_t*>(source.row(row));
      Chunk c[kLaneChunks];
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const int chunk = i * tile::kWave + tile::lane_index();
        if (chunk < kChunks) load_words(c[i].w, from + chunk * 16);
      }
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const int chunk = i * tile::kWave + tile::lane_index();
        if (chunk >= kChunks) continue;
#pragma unroll
        for (int w = 0; w < 4; ++w) c[i].w[w] = AppendKv::stored_pair(c[i].w[w]);
        store_words(target + chunk * 16, c[i].w);
      }
    }
  };
  for_each_indexed_item<kRows>(args, append, tile::wave_index(), kWarps);
  tile::release_writes();
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_STREAMED_APPEND_ROWS_H_
