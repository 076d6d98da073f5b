// Copies the KV rows of a work item into shared memory, a tile of kTileKv rows at a time.
#ifndef MLA_KERNELS_HIP_DEVICE_KV_KV_STREAM_H_
#define MLA_KERNELS_HIP_DEVICE_KV_KV_STREAM_H_

#include "kernels/hip/device/kv/row_source.h"
#include "kernels/hip/device/kv/stage_layout.h"

namespace mla::kernels::hip {

// Every wave copies its share of each tile. A lane copies a chunk of every column block of
// kCopyRows rows, and a word of the rows' scales. Layout is a StageLayout. Tile n goes to stage n %
// kStages.
//
// Only the page table says where a row lies, so each tile's rows are looked up kLookAhead tiles
// before its copies are issued. Loads complete in order, so using a loaded entry at once would wait
// for all copies before it. On AMD entries therefore stay raw in registers until issue() makes
// addresses of them. With asynchronous copies (kLookUpInLds) even that would wait, because the
// compiler does not count them and waits for all. There the page table's entries are copied to LDS
// like the rows, early enough to land with a tile that is waited for anyway.
//
// An index list adds one more step: every wave fetches the list's entries earlier still, a tile of
// them at a time, into a ring of its own in LDS.
//
// A wave that reads such a word and uses it at once waits for the whole latency of LDS.
// read_ahead() therefore reads all words that a turn needs at its beginning, together with its
// first keys.
template <class Source, class Layout, int kStages, int kWaves, class Copies = tile::Copies>
class KvStream {
 public:
  using lds_t = tile::lds_t;
  static constexpr int kTileKv = Layout::kTileKv;
  // Lanes beyond the scales of a tile copy them again, to the space after them.
  static constexpr bool kScales = Layout::kRowScales;
  static constexpr int kLanes = kWaves * tile::kWave;
  static constexpr int kStageBytes = Layout::kScalesAt + (kScales ? kLanes * 4 : 0);
  static constexpr int kRowsPerCopy = tile::kWave / 8;
  static constexpr int kBlocks = Layout::kBlocks;
  static constexpr int kCopyRows = kTileKv / kRowsPerCopy / kWaves;
  static constexpr int kCopies = kCopyRows * kBlocks;
  static constexpr int kLookUps = kCopyRows + (kScales ? 1 : 0);  // per lane
  static constexpr bool kInLds = Copies::kLookUpInLds;
  static constexpr int kLookAhead = kInLds ? kStages - 1 : 1;
  static constexpr int kEntryBytes = kLookUps * tile::kWave * 4;  // per wave and tile
  // Ring of list entries, from the tile being computed to the last one fetched.
  static constexpr bool kLists = Source::kLists;
  static constexpr int kFetchAhead = kInLds ? kStages - 1 : 1;  // tiles before their look-up
  static constexpr int kFetchedTiles = kStages + kLookAhead + kFetchAhead;
  static constexpr int kFetchedBytes = tile::kWave * 4;  // per wave and tile
  static constexpr int kPagesBytes = kInLds ? kStages * kWaves * kEntryBytes : 0;
  static constexpr int kLookUpBytes =
      kPagesBytes + (kLists ? kWaves * kFetchedTiles * kFetchedBytes : 0);
  static constexpr int kCopiesOfGroup =
      kCopies + (kScales ? 1 : 0) + (kInLds ? kLookUps + (kLists ? 1 : 0) : 0);
  static_assert(kCopyRows * kRowsPerCopy * kWaves == kTileKv);
  static_assert(!kScales || kLanes % Layout::kScaleWords == 0);
  static_assert(!kLists || (MLA_AMD && kTileKv <= tile::kWave));

  // `entries_at` is kLookUpBytes of shared memory.
  MLA_DEVICE KvStream(const Source& rows, lds_t stages_at, lds_t entries_at, int wave_number)
      : source(rows), stages(stages_at), wave(wave_number) {
    if constexpr (kInLds) entries = entries_at + wave * (kStages * kEntryBytes);
    if constexpr (kLists) {
      fetched = entries_at + kPagesBytes + wave * (kFetchedTiles * kFetchedBytes);
    }
  }

  // Looks up where the rows of the first of `tiles` > 0 tiles lie.
  MLA_DEVICE void look_up_first() {
#if MLA_AMD
    if constexpr (kInPieces) {
      lane = tile::lane_again();
#pragma unroll
      for (int g = 0; g < kCopyRows; ++g) own_chunk[g] = tile::opaque(chunk(g));
    }
    // An opaque copy: the compiler would keep numbers made from it in scalar registers over all
    // items.
    if constexpr (kLists) wave = tile::again(wave);
#endif
    if constexpr (kLists) fetch_first();
    look_up(0);
    if constexpr (kInLds) {
#pragma unroll
      for (int n = 1; n < kLookAhead; ++n) look_up(n);
    }
  }
  // Starts as many tiles as there are spare stages. With copies through registers it starts the one
  // tile that they hold; if there are several stages, the first tile is then in its stage.
  MLA_DEVICE void start(int tiles) {
    if constexpr (Copies::kThroughRegisters) {
      issue(0);
      look_up_and_fetch(1);
      if constexpr (kStages > 1) bring_next(-1, tiles);
      return;
    }
    if constexpr (kInLds) wait<0>();
    for_constants<kStages - 1>([&](auto n) {
      if (n < tiles) issue(n);
      close_stage();
      look_up(n + kLookAhead);
      if constexpr (kLists) {
        constexpr int kFetch = n + kLookAhead + kFetchAhead;
        fetch_to<kFetch * kFetchedBytes>(fetched, kFetch);
      }
    });
  }

  // Holds a turn's knowledge of the tile that it brings. The words are read from LDS: the page
  // table's entries of that tile, and with lists the entries of that tile and of the one to be
  // looked up.
  struct Words {
    uint32_t granules[kLookUps];
    int issued[kLookUps];
    int looked_up[kLookUps];
  };
  struct Ahead {
    Words words;
    const uint8_t* from[kLookUps];  // rows
    int chunk[kLookUps];            // the chunk that this lane copies of each column block
  };
  // Reads the words for bring(n). REQUIRES: tile n has been looked up, and the entries of tile n +
  // kLookAhead have been fetched.
  MLA_DEVICE void read_ahead(int n, Ahead& ahead) {
    static_assert(kInLds);
    lane = tile::lane_again();
#pragma unroll
    for (int g = 0; g < kLookUps; ++g) ahead.words.granules[g] = granule_word(n, g);
    if constexpr (kLists) {
      read_entries(n, ahead.words.issued);
      read_entries(n + kLookAhead, ahead.words.looked_up);
    }
  }
  // As issue(n) and look_up_and_fetch(n + kLookAhead), with words that have been read ahead.
  MLA_DEVICE void bring(int n, Ahead& ahead) {
    static_assert(kInLds);
    lane = tile::lane_again();
    issue(n, ahead);
    schedule_fence();
    copy_entries(n + kLookAhead, ahead.words.looked_up);
    if constexpr (kLists) fetch(n + kLookAhead + kFetchAhead);
  }

  // Work done ahead for tile n: its look-up, and the fetch that a later look-up needs.
  MLA_DEVICE void look_up_and_fetch(int n) {
    look_up(n);
    if constexpr (kLists) fetch(n + kFetchAhead);
  }

  // Returns the first place of tile n, and the number of places from it to the end.
  MLA_DEVICE int first(int n) const { return source.begin + n * kTileKv; }
  MLA_DEVICE int left(int n) const { return source.end - first(n); }
#if MLA_AMD
  // Returns the word of the lane's entry of tile n, for seen(). REQUIRES: it has been fetched.
  MLA_DEVICE int seen_word(int n) const {
    return entry_word(n, tile::lane_again() & (kTileKv - 1));
  }
  // Bit i of the result is set if the query row sees the entry at place i of tile n. Every lane
  // gets the same result.
  using Bits = std::conditional_t<kTileKv == 64, uint64_t, uint32_t>;
  MLA_DEVICE Bits seen(int n, int word) const {
    static_assert(kLists && (kTileKv == 64 || kTileKv == 32));
    const int at = first(n) + (tile::lane_again() & (kTileKv - 1));
    return static_cast<Bits>(tile::ballot(source.sees_entry(source.entry_of(at, word))));
  }
#endif

  // Looks up where this lane's rows of tile n lie. REQUIRES: the tile has places.
  MLA_DEVICE void look_up(int n) {
    lane = tile::lane_again();
    int entry[kLookUps];
    if constexpr (kLists) read_entries(n, entry);
    if constexpr (kInLds) {
      copy_entries(n, entry);
    } else {
#pragma unroll
      for (int g = 0; g < kLookUps; ++g) found[g] = find(position(n, g, kLists ? entry[g] : 0));
    }
  }

  // Starts the copies of tile n. REQUIRES: it was looked up last.
  MLA_DEVICE void issue(int n) {
    Ahead ahead;
    lane = tile::lane_again();
    if constexpr (kInLds) {
#pragma unroll
      for (int g = 0; g < kLookUps; ++g) ahead.words.granules[g] = granule_word(n, g);
      if constexpr (kLists) read_entries(n, ahead.words.issued);
    }
    issue(n, ahead);
  }
  MLA_DEVICE void close_stage() { copies.close_stage(); }
  // Waits until all but the kYounger youngest tiles, and the look-ups made with them, have landed.
  template <int kYounger>
  MLA_DEVICE void wait() {
    copies.template wait<kYounger, kCopiesOfGroup>();
  }
  // Waits for a tile that `later` tiles follow. At the end fewer copies are in flight than a wait
  // by count assumes.
  MLA_DEVICE void await(int later) {
    if (later >= kStages - 2) {
      wait<kStages - 2>();
    } else {
      exclude_from_report_begin();
      wait<0>();
      exclude_from_report_end();
    }
  }
  // For copies through registers: writes the issued tile n to its stage.
  MLA_DEVICE void land(int n) {
    lane = tile::lane_again();
    for_constants<kCopies>([&](auto index) { land_copy<index>(n); });
    for_constants<kCopyRows>([&](auto row) { finish_landing<row>(n); });
    if constexpr (kLists) land_entry(n + kLookAhead + kFetchAhead);
  }

  // While tile n of `tiles` is computed: writes the next tile to its stage and starts the one after
  // it.
  MLA_DEVICE void bring_next(int n, int tiles) {
    if constexpr (kInPieces) {
      Ahead ahead;
      for_constants<kPieces>([&](auto piece) { bring_piece<piece>(n, ahead); });
    } else {
      if (n + 1 < tiles) land(n + 1);
      if constexpr (kLists) copies.meet();
      if (n + 2 < tiles) issue(n + 2);
      look_up_and_fetch(n + 3);
    }
  }
  // The same in pieces, which a turn does between its products: a lump of as many instructions
  // would leave the matrix pipe and LDS idle. Tiles after the last one repeat its last row:
  // branches around them would make the compiler wait for loads in every turn.
  static constexpr bool kInPieces = Layout::kWidened;
  static constexpr int kLanePieces = 4;  // pieces that use one lane number
  static constexpr int kRowPieces = 2 * kBlocks + 3;
  static constexpr int kPieces = kCopyRows * kRowPieces;
  template <int kPiece>
  MLA_DEVICE void bring_piece(int n, Ahead& ahead) {
    constexpr int kRow = kPiece / kRowPieces, kPart = kPiece % kRowPieces;
    if constexpr (kPart % kLanePieces == 0) lane = tile::lane_again();
    if constexpr (kPart < kBlocks) {
      land_copy<kRow * kBlocks + kPart>(n + 1);
    } else if constexpr (kPart == kBlocks) {
      finish_landing<kRow>(n + 1);
      if constexpr (kLists && kRow == 0) {
        land_entry(n + 1 + kLookAhead + kFetchAhead);
        copies.meet();
        read_entries(n + 3, ahead.words.looked_up);
      }
    } else if constexpr (kPart == kBlocks + 1) {
      find_row<kRow>(n + 2, ahead);
    } else if constexpr (kPart == kBlocks + 2) {
      found[kRow] = find(position(n + 3, kRow, kLists ? ahead.words.looked_up[kRow] : 0));
      if constexpr (kLists && kRow == 0) fetch(n + 3 + kFetchAhead);
    } else {
      copy<kRow * kBlocks + kPart - kBlocks - 3>(n + 2, ahead);
    }
  }

 private:
  // Returns this lane's row g of a tile. The last g is the row whose scale the lane copies.
  MLA_DEVICE int row(int g) const {
    return g < kCopyRows ? (g * kWaves + wave) * kRowsPerCopy + (lane >> 3)
                         : (wave * tile::kWave + lane) % kTileKv;
  }
  // Returns the position of that row of tile n; `word` is of its entry in the list, if there is
  // one.
  MLA_DEVICE int position(int n, int g, int word) const {
    const int index = first(n) + row(g);
    if constexpr (kLists) {
      return source.position_of(source.entry_of(index, word));
    } else {
      return source.place(index);
    }
  }
  MLA_DEVICE uint32_t granule_word(int n, int g) const {
    return float_to_bits(tile::load_float(entry_base(n) + g * tile::kWave * 4 + lane * 4));
  }

  // --- Entries of lists: one lane holds one entry of tile n.
  MLA_DEVICE lds_t fetched_base(int n) const { return fetched + n % kFetchedTiles * kFetchedBytes; }
  MLA_DEVICE int entry_word(int n, int of_row) const {
    return static_cast<int>(float_to_bits(tile::load_float(fetched_base(n) + of_row * 4)));
  }
  MLA_DEVICE void read_entries(int n, int (&words)[kLookUps]) const {
#pragma unroll
    for (int g = 0; g < kLookUps; ++g) words[g] = entry_word(n, row(g));
  }
  MLA_DEVICE void fetch(int n) { fetch_to<0>(fetched_base(n), n); }
  template <int kOffset>
  MLA_DEVICE void fetch_to(lds_t target, int n) {
    lane = tile::lane_again();
    const int32_t* const from = source.entry_at(first(n) + (lane & (kTileKv - 1)));
    if constexpr (kInLds) {
      copies.template issue_word<kOffset>(target, lane, from);
    } else {
      held_entry = *as_global<const int32_t>(from);
    }
  }
  MLA_DEVICE void land_entry(int n) {
    tile::store_float(fetched_base(n) + tile::lane_again() * 4,
                      bits_to_float(static_cast<uint32_t>(held_entry)));
  }
  MLA_DEVICE void fetch_first() {
    for_constants<kLookAhead + kFetchAhead>([&](auto n) {
      fetch_to<n * kFetchedBytes>(fetched, n);
      if constexpr (!kInLds) land_entry(n);
    });
    if constexpr (kInLds) {
      wait<0>();
    } else {
      copies.meet();
    }
  }

#if MLA_AMD
  struct Found {
    uint32_t granule;
    int inside;
  };
  MLA_DEVICE Found find(int at) const {
    const RowSpot spot = source.spot(at);
    return Found{*as_global<const uint32_t>(spot.entry), spot.inside};
  }
  MLA_DEVICE const uint8_t* address(const Found& f) const {
    return source.address(f.granule, f.inside);
  }
#else
  using Found = const uint8_t*;
  MLA_DEVICE Found find(int at) const { return source.pages.row(at); }
  MLA_DEVICE const uint8_t* address(Found f) const { return f; }
#endif

  MLA_DEVICE lds_t entry_base(int n) const { return entries + n % kStages * kEntryBytes; }
  template <int kRow = 0>
  MLA_DEVICE void copy_entries(int n, const int (&words)[kLookUps]) {
    if constexpr (kRow < kLookUps) {
      copy_entry<kRow>(n, words[kRow]);
      copy_entries<kRow + 1>(n, words);
    }
  }
  template <int kRow>
  MLA_DEVICE void copy_entry(int n, int word) {
    copies.template issue_word<kRow * tile::kWave * 4>(entry_base(n), lane,
                                                       source.table_at(position(n, kRow, word)));
  }

  // --- Copies of rows.
  MLA_DEVICE void issue(int n, Ahead& ahead) {
    for_constants<kLookUps>([&](auto g) { find_row<g>(n, ahead); });
    for_constants<kCopies>([&](auto index) { copy<index>(n, ahead); });
    copy_scales(n, ahead);
  }
  // Finds where row kRow lies, and starts the load of the scales with which it is widened.
  template <int kRow>
  MLA_DEVICE void find_row(int n, Ahead& ahead) {
    if constexpr (kInLds) {
      const int at = source.inside(position(n, kRow, ahead.words.issued[kRow]));
      ahead.from[kRow] = source.address(ahead.words.granules[kRow], at);
    } else {
      ahead.from[kRow] = address(found[kRow]);
    }
    if constexpr (kRow < kCopyRows) ahead.chunk[kRow] = kInPieces ? own_chunk[kRow] : chunk(kRow);
    if constexpr (Layout::kPageScales) {
      static_assert(!kInLds);
      copies.template issue_scales<kRow>(source.exponents(found[kRow].granule, found[kRow].inside));
    } else if constexpr (Layout::kWidened) {
      copies.template issue_scales<kRow>(ahead.from[kRow] + Layout::kRow.scales_at);
    }
  }
  template <int kIndex>
  MLA_DEVICE void copy(int n, const Ahead& ahead) {
    constexpr int kRow = kIndex / kBlocks, kBlock = kIndex % kBlocks;
    // Lanes past the chunks of a half block copy its first chunks again.
    const int place = ahead.chunk[kRow] & (Layout::chunks(kBlock) - 1);
    copies.template issue<kIndex, offset(kRow, kBlock)>(
        base(n % kStages), lane,
        ahead.from[kRow] + (place * Layout::chunk_bytes(kBlock) + Layout::source(kBlock)));
  }
  MLA_DEVICE void copy_scales(int n, const Ahead& ahead) {
    if constexpr (kScales) {
      copies.template issue_word<0>(
          scales(n % kStages), lane,
          ahead.from[kCopyRows] + (Layout::kRow.scales_at + scale_group() * 4));
    }
  }

  template <int kIndex>
  MLA_DEVICE void land_copy(int n) {
    copies.template land<kIndex, offset(kIndex / kBlocks, kIndex % kBlocks)>(base(n % kStages),
                                                                             lane);
  }
  // Writes a row's chunks again if its scales are odd.
  template <int kRow>
  MLA_DEVICE void finish_landing(int n) {
    if constexpr (Layout::kWidened) {
      if (!tile::any(copies.template odd<kRow>())) return;
      exclude_from_report_begin();
      for_constants<kBlocks>([&](auto block) {
        copies.template land_again<kRow * kBlocks + block, offset(kRow, block)>(base(n % kStages),
                                                                                lane);
      });
      exclude_from_report_end();
    }
  }
  // Returns the offset of copy (g, block) of a wave from its first copy; a constant.
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

  const Source& source;
  lds_t stages, entries, fetched;
  int wave, lane = 0;  // the latter is recomputed where it is needed
  Copies copies;
  Found found[kInLds ? 1 : kLookUps];
  int own_chunk[kInPieces ? kCopyRows
                          : 1];  // of each row; kept, since there are registers for them
  int held_entry = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_KV_STREAM_H_
