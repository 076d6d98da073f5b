// The KV rows of a work item on their way into shared memory, a tile of kTileKv rows at a time.
#ifndef MLA_KERNELS_HIP_KV_KV_STREAM_H_
#define MLA_KERNELS_HIP_KV_KV_STREAM_H_

#include "kernels/hip/kv/stage_layout.h"

namespace mla::kernels::hip {

// Every wave copies its share of each tile: kCopyRows rows a lane, a chunk of every column block of
// each, and a word of the rows' scales. Layout is a StageLayout. Tile n goes to stage n % kStages.
//
// Where a row lies is known from the page table only, so each tile's rows are looked up kLookAhead
// tiles before it is issued. Loads are waited for in order: an answer that is used at once would
// hold everything up until all copies before it have landed. On AMD answers are therefore kept as
// they come and made into addresses by issue(). Where the copies are asynchronous (kLookUpInLds)
// even that would wait for them, since the compiler, which does not count them, waits for all:
// there the entries of the page table are copied to LDS as the rows are, a group of copies early
// enough to have landed with the tile that is waited for anyway.
template <class Layout, int kStages, int kWaves, class Copies = tile::Copies>
class KvStream {
 public:
  using lds_t = tile::lds_t;
  static constexpr int kTileKv = Layout::kTileKv;
  // Lanes beyond the scales of a tile copy them once more, behind the others.
  static constexpr bool kScales = Layout::kRowScales;
  static constexpr int kLanes = kWaves * tile::kWave;
  static constexpr int kStageBytes = Layout::kScalesAt + (kScales ? kLanes * 4 : 0);
  static constexpr int kRowsPerCopy = tile::kWave / 8;
  static constexpr int kBlocks = Layout::kBlocks;
  static constexpr int kCopyRows = kTileKv / kRowsPerCopy / kWaves;
  static constexpr int kCopies = kCopyRows * kBlocks;
  static constexpr int kLookUps = kCopyRows + (kScales ? 1 : 0);  // of a lane
  static constexpr bool kInLds = Copies::kLookUpInLds;
  static constexpr int kLookAhead = kInLds ? kStages - 1 : 1;
  static constexpr int kEntryBytes = kLookUps * tile::kWave * 4;  // of a wave and tile
  static constexpr int kLookUpBytes = kInLds ? kStages * kWaves * kEntryBytes : 0;
  static_assert(kCopyRows * kRowsPerCopy * kWaves == kTileKv);
  static_assert(!kScales || kLanes % Layout::kScaleWords == 0);

  // `entries_at`: kLookUpBytes of shared memory.
  MLA_DEVICE KvStream(const PagedRows& rows, int begin, int end, lds_t stages_at, lds_t entries_at,
                      int wave_number)
      : pages(rows), kv_begin(begin), kv_end(end), stages(stages_at), wave(wave_number) {
    if constexpr (kInLds) entries = entries_at + wave * (kStages * kEntryBytes);
  }

  // Of `tiles` > 0 tiles, the first: looks up where their rows lie, ...
  MLA_DEVICE void look_up_first() {
    look_up(0);
    if constexpr (kInLds) {
#pragma unroll
      for (int n = 1; n < kLookAhead; ++n) look_up(n);
    }
  }
  // ... and starts as many of them as there are stages to spare, or the one that registers hold.
  MLA_DEVICE void start(int tiles) {
    if constexpr (Copies::kThroughRegisters) {
      issue(0);
      look_up(1);
      return;
    }
    if constexpr (kInLds) wait<0>();
#pragma unroll
    for (int n = 0; n < kStages - 1; ++n) {
      if (n < tiles) issue(n);
      close_stage();
      look_up(n + kLookAhead);
    }
  }

  // Looks up where this lane's rows of tile n lie. REQUIRES: kv_end > 0.
  MLA_DEVICE void look_up(int n) {
    lane = tile::lane_again();
    if constexpr (kInLds) {
      copy_entries(n);
    } else {
#pragma unroll
      for (int g = 0; g < kLookUps; ++g) found[g] = find(position(n, g));
    }
  }

  // Starts the copies of tile n, which is the next one that has been looked up.
  MLA_DEVICE void issue(int n) {
    lane = tile::lane_again();
    const uint8_t* from[kLookUps];
#pragma unroll
    for (int g = 0; g < kLookUps; ++g) {
      if constexpr (kInLds) {
        const tile::lds_t entry = entry_base(n) + g * tile::kWave * 4 + lane * 4;
        const uint32_t granule = float_to_bits(tile::load_float(entry));
        from[g] = pages.address(granule, pages.place(position(n, g)).inside);
      } else {
        from[g] = address(found[g]);
      }
    }
    const lds_t to = base(n % kStages);
    for_constants<kCopies>([&](auto index) {
      constexpr int kRow = index / kBlocks, kBlock = index % kBlocks;
      // Lanes past the chunks of a half block copy its first ones again.
      const int place = chunk(kRow) & (Layout::chunks(kBlock) - 1);
      copies.template issue<index, offset(kRow, kBlock)>(
          to, lane, from[kRow] + (place * 16 + Layout::source(kBlock)));
    });
    if constexpr (kScales) {
      copies.template issue_word<0>(scales(n % kStages), lane,
                                    from[kCopyRows] + (Layout::kRow.scales_at + scale_group() * 4));
    }
  }
  MLA_DEVICE void close_stage() { copies.close_stage(); }
  // Waits until all but the kYounger youngest tiles have landed, and what was looked up with them.
  template <int kYounger>
  MLA_DEVICE void wait() {
    copies.template wait<kYounger, kCopies + (kScales ? 1 : 0) + (kInLds ? kLookUps : 0)>();
  }
  // For copies through registers: writes the issued tile to stage 0.
  MLA_DEVICE void land() {
    lane = tile::lane_again();
    land_from<0>();
    if constexpr (kScales) copies.land_word(scales(0), lane);
  }

 private:
  // Of this lane's row g of tile n; the last of all is that whose scale it copies. Rows past the
  // range repeat its last row, so that masked probabilities, which are zero, always meet values
  // that exist.
  MLA_DEVICE int position(int n, int g) const {
    const int row = g < kCopyRows ? (g * kWaves + wave) * kRowsPerCopy + (lane >> 3)
                                  : (wave * tile::kWave + lane) % kTileKv;
    const int at = kv_begin + n * kTileKv + row;
    return at < kv_end ? at : kv_end - 1;
  }

#if MLA_AMD
  struct Found {
    uint32_t granule;
    int inside;
  };
  MLA_DEVICE Found find(int at) const {
    const PagedRows::Place p = pages.place(at);
    return Found{pages.granule(p.page), p.inside};
  }
  MLA_DEVICE const uint8_t* address(const Found& f) const {
    return pages.address(f.granule, f.inside);
  }
#else
  using Found = const uint8_t*;
  MLA_DEVICE Found find(int at) const { return pages.row(at); }
  MLA_DEVICE const uint8_t* address(Found f) const { return f; }
#endif

  MLA_DEVICE lds_t entry_base(int n) const { return entries + n % kStages * kEntryBytes; }
  template <int kRow = 0>
  MLA_DEVICE void copy_entries(int n) {
    if constexpr (kRow < kLookUps) {
      copies.template issue_word<kRow * tile::kWave * 4>(
          entry_base(n), lane, pages.table + pages.place(position(n, kRow)).page);
      copy_entries<kRow + 1>(n);
    }
  }

  template <int kIndex>
  MLA_DEVICE void land_from() {
    if constexpr (kIndex < kCopies) {
      copies.template land<kIndex, offset(kIndex / kBlocks, kIndex % kBlocks)>(base(0), lane);
      land_from<kIndex + 1>();
    }
  }
  // Where copy (g, block) of a wave goes: a constant from where its first one does.
  MLA_DEVICE static constexpr int offset(int g, int block) {
    return block * (kTileKv * 128) + g * kWaves * kRowsPerCopy * 128;
  }
  MLA_DEVICE lds_t base(int stage) const {
    return stages + stage * kStageBytes + wave * kRowsPerCopy * 128;
  }
  MLA_DEVICE lds_t scales(int stage) const {
    return stages + stage * kStageBytes + Layout::kScalesAt + wave * tile::kWave * 4;
  }
  MLA_DEVICE int scale_group() const {
    return (wave * tile::kWave + lane) % Layout::kScaleWords / kTileKv;
  }
  MLA_DEVICE int chunk(int g) const {
    const int row = (g * kWaves + wave) * kRowsPerCopy + (lane >> 3);
    return (lane & 7) ^ tile::swizzle(row);
  }

  const PagedRows& pages;
  const int kv_begin, kv_end;
  lds_t stages, entries;
  int wave, lane = 0;  // the latter is worked out where it is needed
  Copies copies;
  Found found[kInLds ? 1 : kLookUps];
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_KV_KV_STREAM_H_
