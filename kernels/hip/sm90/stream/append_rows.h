// The append of KV rows by the items that see them first.
#ifndef MLA_KERNELS_HIP_SM90_STREAM_APPEND_ROWS_H_
#define MLA_KERNELS_HIP_SM90_STREAM_APPEND_ROWS_H_

#include "kernels/hip/kv/append_kv.h"

namespace mla::kernels::hip {

// Stores rows [begin, end) of an item's sequence where the pool has them, by kThreads threads, of
// which this is `thread`. Row `begin` lies at `from`, the next one `pitch` bytes behind. `sync`: a
// barrier of those threads, behind which all of them read the rows.
template <int kThreads, class Source, class Sync>
MLA_DEVICE void append_rows(const Source& source, int begin, int end, const uint8_t* from,
                            int64_t pitch, int thread, const Sync& sync) {
  constexpr int kChunks = 72;  // of a row of 576 elements
  static_assert(kChunks <= kThreads);
#pragma unroll 1
  for (int row = begin; thread < kChunks && row < end; ++row, from += pitch) {
    Chunk c;
    load_words(c.w, from + thread * 16);
#pragma unroll
    for (int w = 0; w < 4; ++w) c.w[w] = AppendKv::stored_pair(c.w[w]);
    store_words(const_cast<uint8_t*>(source.row(row)) + thread * 16, c.w);
  }
  tile::release_writes();
  sync();
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_STREAM_APPEND_ROWS_H_
