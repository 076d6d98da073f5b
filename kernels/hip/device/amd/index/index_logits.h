// Logits of an indexer on AMD: for each position that a query row sees
//
//   scale of its key * sum over index heads of  weight * relu(query . codes of the key)
//
// A wave takes 32 keys at a time. Heads are the rows of its products, 32 each, and keys are the
// columns. Each lane therefore sums its half of the heads; the other half-wave holds the rest. A
// product may take any elements of the depth if both operands agree, so two lanes hold 64
// consecutive codes of each key, in the order of the load. Queries stay in registers: 64 heads of
// bf16, or 32 heads of fp32 as two bf16 each. More heads take further turns over the same keys.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_INDEX_INDEX_LOGITS_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_INDEX_INDEX_LOGITS_H_

#include "kernels/hip/device/amd/formats/fp8_format.h"
#include "kernels/hip/device/primitives/block.h"

namespace mla::kernels::hip {

inline constexpr int kIndexLogitsThreads = 256;

// Queries are fp32 if kF32, else bf16.
template <bool kF32>
class IndexLogits {
 public:
  using W = tile::Wave<32>;
  static constexpr int kKeys = W::kRows;  // keys of a wave and turn
  static constexpr int kWaves = kIndexLogitsThreads / tile::kWave;
  static constexpr int kSharedBytes = kIndexBins * 4;

  MLA_DEVICE IndexLogits(const IndexArgs& a, const IndexRow& query_row, const SelectRecord& r,
                         int first_key)
      : args(a),
        row(query_row),
        record(r),
        pages(a.page_tables, r.page_table, a.pool, r.layer_offset, r.row_stride, r.page_size,
              kPageGranuleBytes),
        lane(tile::lane_index()),
        first(first_key + tile::wave_index() * kKeys),
        end(first_key + a.keys_per_block < query_row.visible ? first_key + a.keys_per_block
                                                             : query_row.visible) {}

  MLA_DEVICE void run() {
    for (int head = 0; head < record.indexer.heads; head += kHeads) {
      load_queries(head);
      for_all_keys(head > 0, head + kHeads >= record.indexer.heads);
    }
  }

 private:
  static constexpr int kSteps = kIndexDim / W::kDepth;
  static constexpr int kTerms = kF32 ? 2 : 1;  // bf16 operands a query
  static constexpr int kBlocks = 2;            // blocks of 32 rows of products
  static constexpr int kSums = kBlocks / kTerms;
  static constexpr int kHeads = W::kRows * kSums;  // at a time
  static constexpr int kAhead = 2;                 // turns that keys are loaded ahead
  static constexpr int kStride = kKeys * kWaves;
  static constexpr int kCodes = kIndexDim / W::kGroups;  // codes of a key in a lane
  static_assert(kCodes == 8 * kSteps);

  struct Keys {
    uint32_t codes[kCodes / 4];
    float scale;
  };

  MLA_DEVICE int key() const { return W::row(lane, 0); }
  MLA_DEVICE int half() const { return W::group(lane); }
  // Returns the position of this lane's key in a turn; positions past the end repeat the last one.
  MLA_DEVICE int position(int turn) const {
    const int at = first + turn * kStride + key();
    return at < end ? at : end - 1;
  }
  MLA_DEVICE uint32_t granule(int turn) const {
    return pages.granule(pages.place(position(turn)).page);
  }

  MLA_DEVICE const uint8_t* query(int head) const {
    const int64_t query_bytes = kIndexDim * (kF32 ? 4 : 2);
    const int64_t row_bytes = record.indexer.heads * (query_bytes + 4);
    return static_cast<const uint8_t*>(record.inputs) + row.row * row_bytes + head * query_bytes;
  }

  // Loads elements 2 i and 2 i + 1 of this lane's half; for fp32 queries also their remainders
  // after rounding to bf16.
  MLA_DEVICE void load_pair(int head, int i, uint32_t& high, uint32_t& low) const {
    high = low = 0;
    if (head >= record.indexer.heads) return;
    const auto* from = as_global<const uint32_t>(query(head)) + half() * (kCodes / 2) * kTerms;
    if constexpr (kF32) {
      const float x = bits_to_float(from[2 * i]), y = bits_to_float(from[2 * i + 1]);
      high = pack_bf16(x, y);
      low = pack_bf16(x - bits_to_float(high << 16), y - bits_to_float(high & 0xffff0000u));
    } else {
      high = from[i];
    }
  }

  MLA_DEVICE void load_queries(int first_head) {
    const auto* const weight_at = as_global<const float>(query(record.indexer.heads));
#pragma unroll
    for (int b = 0; b < kSums; ++b) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        const int head = first_head + b * W::kRows + W::score_col(lane, i);
        weights[b][i] = head < record.indexer.heads ? weight_at[head] : 0.0f;
      }
      const int head = first_head + b * W::kRows + W::row(lane, 0);
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {
        uint32_t high, low;
        load_pair(head, i, high, low);
        queries[b][i / 4].r[i % 4] = high;
        if constexpr (kF32) queries[b + kSums][i / 4].r[i % 4] = low;
      }
    }
  }

  MLA_DEVICE void load(Keys& keys, int turn, uint32_t granule_of_page) const {
    const int inside = pages.place(position(turn)).inside;
    const uint8_t* const page = pages.address(granule_of_page, 0);
    const uint8_t* const codes = page + inside * pages.row_stride + half() * kCodes;
#pragma unroll
    for (int i = 0; i < kCodes / 16; ++i) {
      uint32_t words[4];
      load_words(words, codes + 16 * i);
#pragma unroll
      for (int w = 0; w < 4; ++w) keys.codes[4 * i + w] = words[w];
    }
    keys.scale = *as_global<const float>(page + pages.page_size * pages.row_stride + inside * 4);
  }

  // Runs all turns of this wave. Keys are loaded kAhead turns before their use, and their page
  // entries kAhead turns before that.
  MLA_DEVICE void for_all_keys(bool adds, bool last) const {
    const int turns = first < end ? (end - first + kStride - 1) / kStride : 0;
    if (turns == 0) return;
    Keys keys[kAhead];
    uint32_t granules[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load(keys[i], i, granule(i));
      granules[i] = granule(i + kAhead);
    }
    for (int turn = 0; turn < turns; turn += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (turn + i >= turns) break;
        add(keys[i], turn + i, adds, last);
        load(keys[i], turn + i + kAhead, granules[i]);
        granules[i] = granule(turn + i + 2 * kAhead);
      }
    }
  }

  MLA_DEVICE void add(const Keys& keys, int turn, bool adds, bool last) const {
    typename W::Scores sums[kSums];
#pragma unroll
    for (int b = 0; b < kSums; ++b) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) sums[b].set(i, 0.0f);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      typename W::Q of_keys;
      of_keys.r =
          Fp8Codes::widened<false, false>(keys.codes[2 * step], keys.codes[2 * step + 1], 1.0f);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) W::scores(sums[b % kSums], of_keys, queries[b][step]);
    }
    float logit = 0.0f;  // sum over this lane's heads
#pragma unroll
    for (int b = 0; b < kSums; ++b) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        const float product = sums[b].at(i) < 0.0f ? 0.0f : sums[b].at(i);  // NaN stays NaN
        logit = fma_f(weights[b][i], product, logit);
      }
    }
    logit = W::row_sum(logit);
    const int at = first + turn * kStride + key();
    if (half() != 0 || at >= end) return;
    auto* const target = as_global<uint32_t>(args.ranks + row.first_rank + at);
    if (adds) logit += bits_to_float(*target);
    if (!last) {
      *target = float_to_bits(logit);
      return;
    }
    const uint32_t rank = index_rank(logit * stored_scale(keys.scale));
    *target = rank;
    tile::add_word_shared(tile::shared_base<kSharedBytes>() + (rank >> (32 - kIndexBinBits)) * 4,
                          1);
  }

  const IndexArgs& args;
  const IndexRow row;
  const SelectRecord& record;
  const PagedRows pages;
  const int lane;
  const int first, end;                    // positions: first of this wave's first turn, end of the
                                           // block
  typename W::K queries[kBlocks][kSteps];  // operands
  float weights[kSums][W::kScoreElems];
};

MLA_DEVICE void index_logits(const IndexArgs& args) {
  const int index = find_range(args.first_block, args.count, block_index());
  const IndexRow row = args.rows[index];
  const SelectRecord& record = args.records[row.record];
  const int wanted = record.list_begin[row.row + 1] - record.list_begin[row.row];
  if (wanted <= 0 || wanted >= row.visible) return;  // nothing to choose
  const tile::lds_t bins = tile::shared_base<IndexLogits<false>::kSharedBytes>();
  for (int i = thread_index(); i < kIndexBins; i += kIndexLogitsThreads) {
    tile::store_word(bins + i * 4, 0);
  }
  block_barrier();
  const int first_key = (block_index() - args.first_block[index]) * args.keys_per_block;
  if (record.dtype == DType::kF32) {
    IndexLogits<true>(args, row, record, first_key).run();
  } else {
    IndexLogits<false>(args, row, record, first_key).run();
  }
  block_barrier();
  for (int i = thread_index(); i < kIndexBins; i += kIndexLogitsThreads) {
    const uint32_t count = tile::load_word_shared(bins + i * 4);
    if (count > 0) tile::add_word(args.bins + int64_t{index} * kIndexBins + i, count);
  }
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_INDEX_INDEX_LOGITS_H_
