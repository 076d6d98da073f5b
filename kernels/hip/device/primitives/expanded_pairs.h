// Walks the pairs (tile of context rows, head) of an up-projection.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_EXPANDED_PAIRS_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_EXPANDED_PAIRS_H_

#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

// Walks the pairs of one block, in order. Each role of a block walks its own copy in step with the
// others.
template <ExpandedDims kDims>
class ExpandPairs {
 public:
  MLA_DEVICE explicit ExpandPairs(const ExpandArgs& a, int block_number)
      : args(a), block(block_number) {
    begin_list(false);
    if (done()) begin_list(true);
  }

  MLA_DEVICE bool done() const { return pair >= end; }
  // Returns true if the previous pair had another tile of rows.
  MLA_DEVICE bool fresh_tile() const { return fresh; }
  // Returns true if the next pair has another tile of rows or does not exist.
  MLA_DEVICE bool last_of_tile() const { return pair + 1 >= end || head + 1 >= current().heads; }
  MLA_DEVICE void next() {
    ++pair;
    fresh = false;
    if (done()) {
      if (!first_tiles) begin_list(true);
      return;
    }
    if (++head < current().heads) return;
    head = 0;
    fresh = true;
    if (!first_tiles && ++tile * kExpandedRows < current().padded_rows) return;
    do {  // the list of later tiles has no pairs of one-tile expansions
      enter(index + 1);
    } while (!first_tiles && apart() && current().padded_rows == kExpandedRows);
  }

  MLA_DEVICE const SegmentRecord& segment() const { return args.segments[current().segment]; }
  MLA_DEVICE int model_head() const { return segment().head_offset + current().head_begin + head; }
  MLA_DEVICE const uint16_t* w_uk() const {
    return args.w_uk[segment().weights_slot] +
           static_cast<int64_t>(model_head()) * kDims.nope * kExpandedLora;
  }
  MLA_DEVICE const uint16_t* w_uv() const {
    return args.w_uv[segment().weights_slot] +
           static_cast<int64_t>(model_head()) * kExpandedLora * kDims.value;
  }
  MLA_DEVICE PagedRows pages() const {
    const SegmentRecord& r = segment();
    return PagedRows(args.page_tables, r.page_table, args.pool, r.layer_offset, r.row_stride,
                     r.page_size, args.granule_bytes);
  }
  // Returns the position in the segment of row `row` of the tile. Rows past the expansion's end
  // repeat its last row.
  MLA_DEVICE int position(int row) const {
    const int inside = tile * kExpandedRows + row;
    return current().kv_begin + (inside < current().rows ? inside : current().rows - 1);
  }
  // Returns the number of rows of the tile that exist; may exceed a tile.
  MLA_DEVICE int existing_rows() const { return current().rows - tile * kExpandedRows; }
  MLA_DEVICE bool exists(int row) const { return row < existing_rows(); }
  // Returns the address of the tile's first row in a panel of the pair's head.
  MLA_DEVICE uint8_t* panel(int panel_index) const {
    return head_at(head) + tile * (kExpandedRows * kPanelRowBytes) + panel_index * panel_bytes();
  }
  // Returns the address of the values' rests, or null if the tile has none.
  MLA_DEVICE uint8_t* rest_panel(int panel_index) const {
    if (current().kv_begin > 0 || tile > 0) return nullptr;
    return head_at(head) + kDims.panels() * panel_bytes() + panel_index * kRestPanelBytes;
  }
  MLA_DEVICE uint8_t* rotated() const {
    return head_at(current().heads) + tile * (kExpandedRows * kPanelRowBytes);
  }

  const ExpandArgs& args;
  int head = 0;  // in the expansion

 private:
  MLA_DEVICE int64_t panel_bytes() const {
    return static_cast<int64_t>(current().padded_rows) * kPanelRowBytes;
  }
  MLA_DEVICE uint8_t* head_at(int index_in_expansion) const {
    return args.workspace + current().base +
           index_in_expansion * kDims.head_bytes(current().padded_rows);
  }
  // Returns true if pairs of first tiles have a list of their own.
  MLA_DEVICE bool apart() const { return args.first_tile_pairs > 0; }
  // Begins this block's part of one of the two lists.
  MLA_DEVICE void begin_list(bool of_first_tiles) {
    first_tiles = of_first_tiles;
    fresh = true;
    const int64_t count = first_tiles ? args.first_tile_pairs : args.pairs - args.first_tile_pairs;
    pair = static_cast<int>(count * block / args.blocks);
    end = static_cast<int>(count * (block + 1) / args.blocks);
    if (done()) return;
    int low = 0, high = args.expansion_count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_of(args.expansions[middle]) <= pair) {
        low = middle;
      } else {
        high = middle;
      }
    }
    enter(low);
    const int inside = pair - first_of(current());
    tile += inside / current().heads;
    head = inside % current().heads;
  }
  MLA_DEVICE int first_of(const Expansion& s) const {
    return first_tiles ? s.first_head : s.first_pair - (apart() ? s.first_head : 0);
  }
  MLA_DEVICE void enter(int expansion_index) {
    index = expansion_index;
#if MLA_AMD
    expansion = args.expansions + expansion_index;
#else
    expansion = args.expansions[expansion_index];
#endif
    tile = !first_tiles && apart() ? 1 : 0;
  }

  // AMD has few scalar registers, so the expansion stays in memory there. Elsewhere its fields are
  // kept in registers.
#if MLA_AMD
  MLA_DEVICE const Expansion& current() const { return *expansion; }
  const Expansion* expansion = nullptr;
#else
  MLA_DEVICE const Expansion& current() const { return expansion; }
  Expansion expansion;
#endif
  const int block;
  int pair = 0, end = 0, index = 0, tile = 0;
  bool fresh = true, first_tiles = false;
};

// Returns two packed values with non-finite ones set to zero (expanded_args.h).
MLA_DEVICE uint32_t only_finite(uint32_t pair) {
  const uint32_t low = (pair & 0x7f80u) == 0x7f80u ? 0xffffu : 0u;
  const uint32_t high = (pair & 0x7f800000u) == 0x7f800000u ? 0xffff0000u : 0u;
  return pair & ~(low | high);
}

// Returns the rounding remainders of two values after rounding to bf16; 0 for a value that is not
// finite.
MLA_DEVICE uint32_t rest_of(float low, float high) {
  const uint32_t rounded = pack_bf16(low, high);
  return only_finite(
      pack_bf16(low - bits_to_float(rounded << 16), high - bits_to_float(rounded & 0xffff0000u)));
}

// The number of 16-byte chunks of the rotated part of a pair's rows.
inline constexpr int kRotatedChunks = kExpandedRows * kPanelRowBytes / 16;

// Copies one of these chunks. Codes are widened without the layer's scale.
template <KvFormat kFormat, ExpandedDims kDims>
MLA_DEVICE void copy_rotated_chunk(const ExpandPairs<kDims>& pairs, const PagedRows& pages,
                                   int index) {
  constexpr int kChunks = kPanelRowBytes / 16;
  const int row = index / kChunks, chunk = index % kChunks;
  uint32_t words[4] = {0, 0, 0, 0};
  if (pairs.exists(row)) {
    constexpr kernels::KvRowLayout kRow =
        kernels::MakeKvRowLayout(kFormat, kExpandedLora, kExpandedRope);
    const uint8_t* const source = pages.row(pairs.position(row)) + kRow.rope_at;
    if constexpr (kRow.traits.rope == DType::kFp8E4m3) {
      uint32_t codes[2];
      load_words(codes, source + chunk * 8);
      for (int w = 0; w < 2; ++w) {
        words[2 * w] = tile::plain_bf16_of<false>(codes[w]);
        words[2 * w + 1] = tile::plain_bf16_of<true>(codes[w]);
      }
    } else {
      load_words(words, source + chunk * 16);
    }
  }
  store_words(pairs.rotated() + row * kPanelRowBytes + ((chunk ^ tile::swizzle(row)) << 4), words);
}
// Copies all chunks; `thread` of `threads` takes its share.
template <KvFormat kFormat, ExpandedDims kDims>
MLA_DEVICE void copy_rotated(const ExpandPairs<kDims>& pairs, int thread, int threads) {
  const PagedRows pages = pairs.pages();
  for (int i = thread; i < kRotatedChunks; i += threads) {
    copy_rotated_chunk<kFormat>(pairs, pages, i);
  }
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_EXPANDED_PAIRS_H_
