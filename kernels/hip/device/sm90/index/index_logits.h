// Logits of an indexer on sm_90: for each position that a query row sees
//
//   scale of its key * sum over index heads of  weight * relu(query . codes of the key)
//
// Three groups of four warps share the keys of a block, 64 at a time in turn. Keys, in registers,
// are the rows of their products, and 64 heads are the columns. Codes become binary16, which is
// exact. Queries lie in shared memory as binary16. Each head's query is multiplied by a power of
// two, and its weight is divided by it. This is exact for bf16 queries; an fp32 query becomes two
// numbers, which keep 22 bits.
//
// A product may take any elements of the depth if both operands agree, so four lanes hold 32
// consecutive codes of each key. A lane copies them through shared memory that no other lane
// touches, kStages turns deep. Keys in flight therefore need neither registers nor barriers.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_LOGITS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_LOGITS_H_

#include "kernels/hip/device/primitives/block.h"
#include "kernels/hip/device/primitives/memory.h"
#include "kernels/hip/device/sm90/index/index_queries.h"

namespace mla::kernels::hip {

// Queries are fp32 if kF32, else bf16.
template <bool kF32>
class IndexLogits {
 public:
  using L = IndexLayout;
  using lds_t = tile::lds_t;

  MLA_DEVICE IndexLogits(const IndexArgs& a, const IndexRow& query_row, const SelectRecord& record,
                         int first_key)
      : heads(record.indexer.heads),
        pages(a.page_tables, record.page_table, a.pool, record.layer_offset, record.row_stride,
              record.page_size, kPageGranuleBytes),
        ranks(a.ranks + query_row.first_rank),
        keep(tile::cache_policy(record.rows > 1)),
        warp(tile::wave_index()),
        lane(tile::lane_index()),
        first(first_key + (warp / L::kGroupWarps) * L::kKeys + (warp % L::kGroupWarps) * 16),
        end(first_key + a.keys_per_block < query_row.visible ? first_key + a.keys_per_block
                                                             : query_row.visible) {}

  MLA_DEVICE void run() const {
    const int of_group = first - (warp % L::kGroupWarps) * 16;
    const int turns = of_group < end ? (end - of_group + kStride - 1) / kStride : 0;
    uint32_t granules[kRows];
    for (int turn = 0; turn < kAhead; ++turn) {
      find(granules, turn);
      if (turn < turns) copy(granules, turn);
      tile::close_copies();
    }
    find(granules, kAhead);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      if (turn + kAhead < turns) copy(granules, turn + kAhead);
      tile::close_copies();
      find(granules, turn + kAhead + 1);
      tile::wait_for_copies<kAhead>();
      score(turn);
    }
    tile::wait_for_copies<0>();
  }

 private:
  static constexpr int kRows = 2;  // rows of a warp's 16 whose codes a lane shares: 8 apart
  static constexpr int kSteps = kIndexDim / 16;  // steps of the depth
  static constexpr int kAhead = L::kStages - 1;  // turns that keys are copied ahead
  static constexpr int kStride = L::kKeys * L::kGroups;
  static constexpr int kTerms = kF32 ? 2 : 1;  // binary16 operands a query

  MLA_DEVICE int quarter() const { return lane & 3; }
  // Returns the position of one of this lane's rows in a turn; positions past the end repeat the
  // last one.
  MLA_DEVICE int position(int turn, int i) const {
    const int at = first + turn * kStride + i * 8 + (lane >> 2);
    return at < end ? at : end - 1;
  }
  MLA_DEVICE void find(uint32_t (&granules)[kRows], int turn) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      granules[i] = pages.granule(pages.place(position(turn, i)).page);
    }
  }
  // Shared-memory address of this lane's chunk, or of its scale, for a turn.
  MLA_DEVICE lds_t chunk_of(int turn, int i) const {
    return shared.keys() + (((turn % L::kStages) * L::kWarps + warp) * (2 * kRows) + i) * 512 +
           lane * 16;
  }
  MLA_DEVICE lds_t scale_of(int turn) const {
    return shared.scales() + ((turn % L::kStages) * L::kWarps + warp) * 128 + lane * 4;
  }

  MLA_DEVICE void copy(const uint32_t (&granules)[kRows], int turn) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int inside = pages.place(position(turn, i)).inside;
      const uint8_t* const page = pages.address(granules[i], 0);
      const uint8_t* const codes = page + inside * pages.row_stride + quarter() * 16;
      tile::copy_chunk(chunk_of(turn, 2 * i), codes, keep);
      tile::copy_chunk(chunk_of(turn, 2 * i + 1), codes + 64, keep);
      if (quarter() == i) {
        tile::copy_word(scale_of(turn), page + pages.page_size * pages.row_stride + inside * 4);
      }
    }
  }

  MLA_DEVICE void score(int turn) const {
    float logits[kRows] = {};
#pragma unroll 1
    for (int first_head = 0; first_head < heads; first_head += kIndexHeadBlock) {
      float products[kIndexHeadBlock / 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t keys[kSteps / 2][4];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const Chunk codes = tile::load_chunk_shared(chunk_of(turn, 2 * i + half));
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            keys[w][i] = tile::fp8_to_f16<0>(codes.w[w]);
            keys[w][i + 2] = tile::fp8_to_f16<1>(codes.w[w]);
          }
        }
        multiply(products, keys, first_head, half);
      }
      add_heads(logits, products, first_head);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      logits[i] += tile::exchange<1>(logits[i]);
      logits[i] += tile::exchange<2>(logits[i]);
    }
    const int at = first + turn * kStride + quarter() * 8 + (lane >> 2);
    if (quarter() >= kRows || at >= end) return;
    const float scale = stored_scale(tile::load_float(scale_of(turn)));
    const uint32_t rank = index_rank((quarter() == 0 ? logits[0] : logits[1]) * scale);
    *as_global<uint32_t>(ranks + at) = rank;
    tile::add_word_shared(shared.bins() + (rank >> (32 - kIndexBinBits)) * 4, 1);
  }

  // Products of 64 heads and 64 keys, over half of the depth; the first half starts the sums.
  MLA_DEVICE void multiply(float (&products)[kIndexHeadBlock / 2],
                           const uint32_t (&keys)[kSteps / 2][4], int first_head, int half) const {
    const int block = first_head / kIndexHeadBlock;
    tile::wgmma_begin();
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      const lds_t queries = shared.queries(block * kTerms + term);
#pragma unroll
      for (int step = 0; step < kSteps / 2; ++step) {
        const lds_t at = tile::chunk_at<kIndexHeadBlock>(queries, 0, half * 8 + step * 2);
        tile::multiply_held_f16(products, keys[step], tile::along_rows(at), term + step + half > 0);
      }
    }
    tile::wgmma_commit();
    tile::wgmma_wait<0>();
    tile::pin(products);
  }

  // This lane's heads are 8 j + 2 (lane % 4) and the next.
  MLA_DEVICE void add_heads(float (&logits)[kRows], const float (&products)[kIndexHeadBlock / 2],
                            int first_head) const {
    float sums[kRows][2] = {};
#pragma unroll
    for (int j = 0; j < kIndexHeadBlock / 8; ++j) {
      float weights[2];
      tile::load_two_floats(weights, shared.weights() + (first_head + 8 * j + 2 * quarter()) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[i >> 1][i & 1];
        sum = fma_f(weights[i & 1], tile::positive(products[4 * j + i]), sum);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) logits[i] += sums[i][0] + sums[i][1];
  }

  const L shared{};
  const int heads;
  const PagedRows pages;
  uint32_t* const ranks;
  const tile::CachePolicy keep;  // makes keys that one row reads leave the L2 before ranks do
  const int warp, lane;
  const int first, end;  // positions: first of this warp's first turn, end of the block
};

template <bool kF32>
MLA_DEVICE void index_logits_of(const IndexArgs& args, const IndexRow& row,
                                const SelectRecord& record, int first_key) {
  IndexQueries<kF32>::write(record, row.row);
  IndexLogits<kF32>(args, row, record, first_key).run();
}

MLA_DEVICE void index_logits(const IndexArgs& args) {
  const int index = find_range(args.first_block, args.count, block_index());
  const IndexRow row = args.rows[index];
  const SelectRecord& record = args.records[row.record];
  const int wanted = record.list_begin[row.row + 1] - record.list_begin[row.row];
  if (wanted <= 0 || wanted >= row.visible) return;  // nothing to choose
  const int first_key = (block_index() - args.first_block[index]) * args.keys_per_block;
  const tile::lds_t bins = IndexLayout().bins();
  for (int i = thread_index(); i < kIndexBins; i += IndexLayout::kThreads) {
    tile::store_word(bins + i * 4, 0);
  }
  if (record.dtype == DType::kF32) {
    index_logits_of<true>(args, row, record, first_key);
  } else {
    index_logits_of<false>(args, row, record, first_key);
  }
  block_barrier();
  for (int i = thread_index(); i < kIndexBins; i += IndexLayout::kThreads) {
    const uint32_t count = tile::load_word_shared(bins + i * 4);
    if (count > 0) tile::add_word(args.bins + int64_t{index} * kIndexBins + i, count);
  }
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_LOGITS_H_
