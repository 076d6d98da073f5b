// Tells which keys of a tile the packed rows of a wave see: keys up to a row's own position, or
// keys that the index list or window of the item's query row names.
#ifndef MLA_KERNELS_HIP_DEVICE_KV_VISIBILITY_H_
#define MLA_KERNELS_HIP_DEVICE_KV_VISIBILITY_H_

#include "kernels/hip/device/kv/row_source.h"

namespace mla::kernels::hip {

// Visibility for one item and wave; of_tile() moves it from tile to tile. `word(slot, column)` has
// bit c set if the row of that slot sees key `column` + c of the tile, c < 32.
template <AttentionKind kKind, class C, class W>
class Visibility {
 public:
  // `first_row` is the wave's first packed row in the item.
  MLA_DEVICE void begin(const Item& item, int first_row, int lane) {
#pragma unroll
    for (int s = 0; s < W::kSlots; ++s) {
      const int p = first_row + W::row(lane, s);
      limit[s] = p < item.rows ? item.limit(p) : item.work.kv_end;
    }
  }
  MLA_DEVICE void begin(const Item& item) {
    unmasked_end = item.limit(0);
    ragged = unmasked_end < item.work.kv_end;
  }
  template <class Stream>
  MLA_DEVICE void of_tile(const Stream& kv, int n) {
    first = kv.first(n);
  }
  template <class Stream>
  MLA_DEVICE void look_at_first(const Stream&) {}
  template <class Stream>
  MLA_DEVICE void read_ahead(const Stream&, int) {}
  template <class Stream>
  MLA_DEVICE void look_ahead(const Stream&, int) {}

  // Returns true if some packed row does not see some key of the tile.
  MLA_DEVICE bool masked() const { return first + C::kTileKv > unmasked_end; }
  // Returns true if only some packed rows see the values from key first_hidden() of the tile on.
  MLA_DEVICE bool hides_values() const { return masked() && ragged; }
  MLA_DEVICE int first_hidden() const { return unmasked_end - first; }
  MLA_DEVICE uint32_t word(int slot, int column) const {
    const int count = limit[slot] - first - column;
    const uint32_t below = (1u << (count & 31)) - 1;
    return count <= 0 ? 0 : count < 32 ? below : ~0u;
  }

 private:
  int limit[W::kSlots];
  int first;             // first place of the tile
  int unmasked_end = 0;  // kv rows below it are seen by all packed rows
  bool ragged = false;   // some packed rows do not see all kv rows of the item
};

// Visibility of list entries: the source of rows says for each whether the item's query row sees
// it.
template <class C, class W, bool kHidesValues>
class ListVisibility {
 public:
  MLA_DEVICE void begin(const Item&, int, int) {}
  MLA_DEVICE void begin(const Item&) {}
  // Call it before the first tile. REQUIRES: the stream has looked it up.
  template <class Stream>
  MLA_DEVICE void look_at_first(const Stream& kv) {
    next = kv.seen(0, kv.seen_word(0));
  }
  template <class Stream>
  MLA_DEVICE void of_tile(const Stream& kv, int n) {
    entries = next;
    remaining = kv.left(n);
  }
  // Entries of the next tile, n, are checked while products of this tile run. Their words are read
  // before those products, so that nothing waits for them.
  template <class Stream>
  MLA_DEVICE void read_ahead(const Stream& kv, int n) {
    word_of_next = kv.seen_word(n);
  }
  template <class Stream>
  MLA_DEVICE void look_ahead(const Stream& kv, int n) {
    next = kv.seen(n, word_of_next);
  }
  MLA_DEVICE bool masked() const { return remaining < C::kTileKv || entries != kAll; }
  MLA_DEVICE bool hides_values() const { return kHidesValues && entries != kAll; }
  MLA_DEVICE int first_hidden() const { return 0; }
  MLA_DEVICE uint32_t word(int, int column) const {
    const Bits places =
        remaining >= C::kTileKv ? kAll : (Bits{1} << (remaining & (C::kTileKv - 1))) - 1;
    return static_cast<uint32_t>((entries & places) >> (column & (C::kTileKv - 1)));
  }

 private:
  using Bits = std::conditional_t<C::kTileKv == 64, uint64_t, uint32_t>;
  static constexpr Bits kAll = ~Bits{0};
  int remaining;  // places from the first of this tile on
  Bits entries;   // seen entries of this tile
  Bits next;      // seen entries of the next tile
  int word_of_next;
};
template <class C, class W>
class Visibility<AttentionKind::kSparse, C, W> : public ListVisibility<C, W, true> {};
// Unseen entries of a window lead to a row that is seen, so no values need hiding.
template <class C, class W>
class Visibility<AttentionKind::kWindow, C, W> : public ListVisibility<C, W, false> {};

// Sets scores of keys that a row does not see to -inf; the wave's scores begin with the tile's key
// `first_column`. Bit c of a row's word stands for the column score_col(0, i) = c further than the
// lane's first. Format::score_col(lane, i) exceeds score_col(lane, 0) by the same distance.
template <class Format, class Visible, class Scores, int kFragments>
MLA_DEVICE void hide_unseen_scores(const Visible& visible, int first_column,
                                   Scores (&s)[kFragments]) {
  using W = typename Format::W;
  exclude_from_report_begin();
  const int lane = tile::lane_again();
  uint32_t words[W::kSlots];
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    if (f * W::kScoreCols % 32 == 0) {
      const int first = first_column + f * W::kScoreCols + Format::score_col(lane, 0);
#pragma unroll
      for (int slot = 0; slot < W::kSlots; ++slot) words[slot] = visible.word(slot, first);
    }
#pragma unroll
    for (int i = 0; i < W::kScoreElems; ++i) {
      if (i % 4 == 0) schedule_fence();
      const int column = f * W::kScoreCols % 32 + Format::score_col(0, i);
      const uint32_t seen = bit_as_mask(words[W::score_slot(i)], column);
      const uint32_t x = float_to_bits(s[f].at(i));
      s[f].set(i, bits_to_float((x & seen) | (float_to_bits(negative_infinity()) & ~seen)));
    }
  }
  exclude_from_report_end();
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_VISIBILITY_H_
