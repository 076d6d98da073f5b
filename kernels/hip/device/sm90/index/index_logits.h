// Logits of an indexer on sm_90: for each position that a query row sees
//
//   scale of its key * sum over index heads of  weight * relu(query . codes of the key)
//
// Two groups of four warps share the keys of a block, 64 at a time in turn (index_keys.h). Keys,
// in registers, are the rows of their products, and 64 heads are the columns. Codes become
// binary16, which is exact. Queries lie in shared memory as binary16. Each head's query is
// multiplied by a power of two, and its weight is divided by it. This is exact for bf16 queries; an
// fp32 query becomes two numbers, which keep 22 bits.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_LOGITS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_LOGITS_H_

#include "kernels/hip/device/primitives/block.h"
#include "kernels/hip/device/primitives/memory.h"
#include "kernels/hip/device/sm90/index/index_keys.h"
#include "kernels/hip/device/sm90/index/index_queries.h"

namespace mla::kernels::hip {

// Queries are fp32 if kF32, else bf16.
template <bool kF32, class Keys>
class IndexLogits {
 public:
  using L = IndexLayout;
  using lds_t = tile::lds_t;

  MLA_DEVICE IndexLogits(const IndexTurns& all, const Keys& source, int of_heads, uint32_t* of_row)
      : heads(of_heads), ranks(of_row), t(all), keys(source) {}

  MLA_DEVICE void run() {
#pragma unroll 1
    for (int turn = 0; turn < t.turns; ++turn) {
      keys.await(turn);
      score(turn);
    }
    keys.end();
  }

 private:
  static constexpr int kRows = IndexTurns::kRows;
  static constexpr int kHalves = 2;                        // of the depth
  static constexpr int kSteps = kIndexDim / 16 / kHalves;  // steps of a half
  static constexpr int kHalfBytes = kIndexHeadBlock * 128;
  static constexpr int kTerms = kF32 ? 2 : 1;  // binary16 operands a query

  using Operands = uint32_t[kSteps][4];
  using Products = float[kIndexHeadBlock / 2];

  MLA_DEVICE void score(int turn) {
    Operands operands[kHalves];
    Products products;
    float logits[kRows] = {};
    // The second half is widened while the products of the first are made.
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      widen(turn, half, operands[half]);
      multiply(products, operands[half], 0, half);
    }
    const float scale = stored_scale(keys.scale(turn));
    keys.release(turn);
    add_heads(logits, products, 0);
#pragma unroll 1
    for (int first_head = kIndexHeadBlock; first_head < heads; first_head += kIndexHeadBlock) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        multiply(products, operands[half], first_head / kIndexHeadBlock, half);
      }
      add_heads(logits, products, first_head);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      logits[i] += tile::exchange<1>(logits[i]);
      logits[i] += tile::exchange<2>(logits[i]);
    }
    const int at = t.position(turn, t.key(t.quarter()));
    if (t.quarter() >= kRows || at >= t.end) return;
    const uint32_t rank = index_rank((t.quarter() == 0 ? logits[0] : logits[1]) * scale);
    *as_global<uint32_t>(ranks + at) = rank;
    tile::add_word_shared(shared.bins() + (rank >> (32 - kIndexBinBits)) * 4, 1);
  }

  MLA_DEVICE void widen(int turn, int half, Operands& operands) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Chunk codes = keys.load(turn, i, half);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        operands[s][i] = tile::fp8_to_f16<0>(codes.w[s]);
        operands[s][i + 2] = tile::fp8_to_f16<1>(codes.w[s]);
      }
    }
  }

  // Starts the products of 64 heads and 64 keys over half of the depth; the first half starts the
  // sums.
  MLA_DEVICE void multiply(Products& products, const Operands& operands, int block,
                           int half) const {
    // The descriptor of an operand is that of the first, plus the distance.
    const uint64_t queries = tile::along_rows(shared.queries(block * kTerms));
    tile::wgmma_begin();
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int offset = (term * kIndexOperandBytes + half * kHalfBytes + step * 32) >> 4;
        tile::multiply_held_f16(products, operands[step], queries + offset, half + term + step > 0);
      }
    }
    tile::wgmma_commit();
  }

  // Waits for the products, and adds what their heads contribute. This lane's heads are 8 j + 2
  // (lane % 4) and the next.
  MLA_DEVICE void add_heads(float (&logits)[kRows], Products& products, int first_head) const {
    tile::wgmma_wait<0>();
    tile::pin(products);
    float sums[kRows][2] = {};
#pragma unroll
    for (int j = 0; j < kIndexHeadBlock / 8; ++j) {
      float weights[2];
      tile::load_two_floats(weights, shared.weights() + (first_head + 8 * j + 2 * t.quarter()) * 4);
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
  uint32_t* const ranks;
  const IndexTurns t;
  Keys keys;
};

template <bool kF32, class Keys>
MLA_DEVICE void index_logits_of(const IndexArgs& args, const IndexRow& row,
                                const SelectRecord& record, int first_key) {
  const int end =
      first_key + args.keys_per_block < row.visible ? first_key + args.keys_per_block : row.visible;
  const PagedRows pages(args.page_tables, record.page_table, args.pool, record.layer_offset,
                        record.row_stride, record.page_size, kPageGranuleBytes);
  const tile::CachePolicy keep = tile::cache_policy(record.rows > 1);
  if (tile::wave_index() < IndexLayout::kWarps) {
    const IndexTurns turns(first_key, end);
    Keys keys(turns, pages, keep);
    keys.begin();
    IndexQueries<kF32>::write(record, row.row);
    block_barrier();
    IndexLogits<kF32, Keys>(turns, keys, record.indexer.heads, args.ranks + row.first_rank).run();
  } else if constexpr (Keys::kFed) {
    BulkFeeder feeder(first_key, end, pages, keep);
    feeder.begin();
    block_barrier();
    feeder.run();
  } else {
    block_barrier();
  }
}

template <class Keys>
MLA_DEVICE void index_logits_over(const IndexArgs& args, const IndexRow& row,
                                  const SelectRecord& record, int first_key) {
  if (record.dtype == DType::kF32) {
    index_logits_of<true, Keys>(args, row, record, first_key);
  } else {
    index_logits_of<false, Keys>(args, row, record, first_key);
  }
}

// Returns the row of a block: the last whose first block is at most this one. A warp looks at 32
// rows at a time.
MLA_DEVICE int index_row_of(const IndexArgs& args, int block) {
  int low = 0;
  for (int count = args.count; count > 1;) {
    const int step = (count + tile::kWave - 1) / tile::kWave;
    const int at = tile::lane_index() * step;
    const bool begun = at < count && as_global<const int32_t>(args.first_block)[low + at] <= block;
    const int skipped = (static_cast<int>(tile::bits_set(tile::ballot(begun))) - 1) * step;
    low += skipped;
    count = count - skipped < step ? count - skipped : step;
  }
  return low;
}

MLA_DEVICE void index_logits(const IndexArgs& args) {
  let_next_kernel_start();
  const int index = index_row_of(args, block_index());
  const IndexRow row = args.rows[index];
  const SelectRecord& record = args.records[row.record];
  const int wanted = record.list_begin[row.row + 1] - record.list_begin[row.row];
  if (wanted <= 0 || wanted >= row.visible) return;  // nothing to choose
  const int first_key = (block_index() - args.first_block[index]) * args.keys_per_block;
  const tile::lds_t bins = IndexLayout().bins();
  for (int i = thread_index(); i < kIndexBins; i += IndexLayout::kThreads) {
    tile::store_word(bins + i * 4, 0);
  }
  if (BulkKeys::serves(record)) {
    index_logits_over<BulkKeys>(args, row, record, first_key);
  } else {
    index_logits_over<LaneKeys>(args, row, record, first_key);
  }
  block_barrier();
  for (int i = thread_index(); i < kIndexBins; i += IndexLayout::kThreads) {
    const uint32_t count = tile::load_word_shared(bins + i * 4);
    if (count > 0) tile::add_word(args.bins + int64_t{index} * kIndexBins + i, count);
  }
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_LOGITS_H_
