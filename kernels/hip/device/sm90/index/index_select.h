// The lists of an indexer on sm_90, from the ranks that index_logits.h stores: a block a query row.
//
// The rank of the last chosen position is found digit by digit, from the highest digit. For each
// value of a digit, the block counts the ranks that have it after the known digits. As soon as the
// remaining candidates fit, they and their positions are gathered in shared memory, and the search
// continues there. Mostly this happens after the first digit, which index_logits.h has counted, so
// ranks are read once. The last pass writes the positions in order: all with larger ranks, and the
// first of those with exactly this rank, as many as are missing.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_SELECT_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_SELECT_H_

#include "kernels/hip/device/primitives/memory.h"
#include "kernels/hip/device/sm90/fp8_instructions.h"
#include "kernels/hip/device/sm90/tile.h"

namespace mla::kernels::hip {

class IndexSelect {
 public:
  static constexpr int kWarps = kIndexSelectThreads / tile::kWave;
  static constexpr int kMostHeld = 8192;  // ranks in shared memory
  static constexpr int kSharedBytes = kMostHeld * 8 + kIndexBins * 4 + (2 * kWarps + 2) * 4;

  MLA_DEVICE static void run(const IndexArgs& args) {
    const int index = block_index();
    const IndexRow row = args.rows[index];
    const SelectRecord& record = args.records[row.record];
    const int begin = record.list_begin[row.row];
    IndexSelect self(record, row, begin - record.list_begin[0],
                     record.list_begin[row.row + 1] - begin);
    wait_for_previous_kernel();
    uint32_t* const of_row = args.bins + int64_t{index} * kIndexBins;
    uint32_t counts[kOwnBins];
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
      counts[i] = as_global<uint32_t>(of_row)[i * kIndexSelectThreads + thread_index()];
    }
    if (self.wanted >= row.visible) {
      self.put_all();
    } else if (self.wanted > 0) {
      self.take_bins(counts, of_row);
      self.choose(args.ranks + row.first_rank);
    }
    self.fill_rest();
  }

 private:
  static constexpr int kRun = 4;  // ranks that a thread reads at once
  static constexpr int kOwnBins = kIndexBins / kIndexSelectThreads;
  static constexpr int kStep = kIndexSelectThreads * kRun;

  // Source of ranks in memory: reads kRun of them at a multiple of kRun, and gives their positions.
  struct All {
    static constexpr int kAhead = 4;  // reads in flight
    const uint32_t* ranks;
    int count;
    MLA_DEVICE void load(uint32_t (&words)[kRun], int at) const { load_words(words, ranks + at); }
    MLA_DEVICE int position(int at) const { return at; }
  };
  struct Held {
    static constexpr int kAhead = 1;
    tile::lds_t ranks, positions;
    int count;
    MLA_DEVICE void load(uint32_t (&words)[kRun], int at) const {
      const Chunk c = tile::load_chunk_shared(ranks + at * 4);
#pragma unroll
      for (int k = 0; k < kRun; ++k) words[k] = c.w[k];
    }
    MLA_DEVICE int position(int at) const {
      return static_cast<int>(tile::load_word_shared(positions + at * 4));
    }
  };

  MLA_DEVICE IndexSelect(const SelectRecord& r, const IndexRow& row, int first, int count)
      : record(r),
        list(r.list + first),
        copy(r.wanted == nullptr ? nullptr : r.wanted + int64_t{row.row} * r.wanted_width),
        visible(row.visible),
        wanted(count),
        lane(tile::lane_index()),
        warp(tile::wave_index()),
        held{tile::shared_base<kSharedBytes>(), tile::shared_base<kSharedBytes>() + kMostHeld * 4,
             0},
        bins(held.positions + kMostHeld * 4),
        warp_sums(bins + kIndexBins * 4),
        result(warp_sums + 2 * kWarps * 4) {}

  MLA_DEVICE void put(int place, int position) const {
    as_global<int32_t>(list)[place] = position;
    if (copy != nullptr) as_global<int32_t>(copy)[place] = position;
  }
  MLA_DEVICE void put_all() const {
    for (int i = thread_index(); i < visible; i += kIndexSelectThreads) put(i, i);
  }
  MLA_DEVICE void fill_rest() const {
    if (copy == nullptr) return;
    const int chosen = wanted < visible ? wanted : visible;
    for (int i = chosen + thread_index(); i < record.wanted_width; i += kIndexSelectThreads) {
      as_global<int32_t>(copy)[i] = -1;
    }
  }

  // Takes the counts of the first digit and clears them for the next launch.
  MLA_DEVICE void take_bins(const uint32_t (&counts)[kOwnBins], uint32_t* from) const {
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
      const int bin = i * kIndexSelectThreads + thread_index();
      tile::store_word(bins + bin * 4, counts[i]);
      as_global<uint32_t>(from)[bin] = 0;
    }
    block_barrier();
  }

  MLA_DEVICE void choose(const uint32_t* ranks) {
    const All all{ranks, visible};
    int shift = 32, bits = kIndexBinBits;
    int remaining = wanted;  // to choose among the ranks that begin with `rank`
    uint32_t rank = 0;
    while (true) {
      shift -= bits;
      rank = rank << bits | find_digit(1 << bits, remaining);
      if (held.count == 0 && wanted - remaining + of_digit <= kMostHeld) gather(all, rank, shift);
      if (shift == 0) break;
      bits = shift < kIndexBinBits ? shift : kIndexBinBits;
      if (held.count > 0) {
        count_digit(held, rank, shift, bits);
      } else {
        count_digit(all, rank, shift, bits);
      }
    }
    if (held.count > 0) {
      write(held, rank, remaining);
    } else {
      write(all, rank, remaining);
    }
  }

  // Counts the values of the next `bits` bits among ranks whose bits from `shift` on are `prefix`.
  template <class Ranks>
  MLA_DEVICE void count_digit(const Ranks& from, uint32_t prefix, int shift, int bits) const {
    for (int i = thread_index(); i < kIndexBins; i += kIndexSelectThreads) {
      tile::store_word(bins + i * 4, 0);
    }
    block_barrier();
    constexpr int kAhead = Ranks::kAhead;
    const uint32_t mask = (1u << bits) - 1;
    for (int index = thread_index() * kRun; index < from.count; index += kAhead * kStep) {
      uint32_t words[kAhead][kRun] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (index + i * kStep < from.count) from.load(words[i], index + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
          if (index + i * kStep + k >= from.count || words[i][k] >> shift != prefix) continue;
          tile::add_word_shared(bins + (words[i][k] >> (shift - bits) & mask) * 4, 1);
        }
      }
    }
    block_barrier();
  }

  // Gathers the ranks whose bits from `shift` on are at least `prefix`, in the order of positions.
  // A warp marks the ranks of 1024 positions at a time, a bit each, 32 bits a lane.
  MLA_DEVICE void gather(const All& from, uint32_t prefix, int shift) {
    constexpr int kOfLane = 32, kOfWarp = kOfLane * tile::kWave;
    for (int first = 0; first < from.count; first += kWarps * kOfWarp) {
      const int begin = first + warp * kOfWarp;
      uint32_t taken = begin < from.count ? find_taken(from, begin, prefix, shift) : 0, all;
      int place = held.count + static_cast<int>(sum_before(tile::bits_set(taken), all));
      for (; taken != 0; taken &= taken - 1) {
        const int bit = 31 - leading_zeros(static_cast<int>(taken & (0u - taken)));
        tile::store_word(held.positions + place++ * 4,
                         static_cast<uint32_t>(begin + lane * kOfLane + bit));
      }
      held.count += static_cast<int>(all);
    }
    block_barrier();
    for (int i = thread_index(); i < held.count; i += kIndexSelectThreads) {
      const auto position = tile::load_word_shared(held.positions + i * 4);
      tile::store_word(held.ranks + i * 4, as_global<const uint32_t>(from.ranks)[position]);
    }
    block_barrier();
  }
  // Marks which positions from begin + 32 * lane on are taken, a bit each.
  MLA_DEVICE uint32_t find_taken(const All& from, int begin, uint32_t prefix, int shift) const {
    constexpr int kLoads = 16;  // loads in flight
    uint32_t taken = 0;
#pragma unroll 1
    for (int row = 0; row < tile::kWave; row += kLoads) {
      const int index = begin + row * tile::kWave + lane;
      uint32_t ranks[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool there = index + i * tile::kWave < from.count;
        ranks[i] = there ? as_global<const uint32_t>(from.ranks)[index + i * tile::kWave] : 0;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool there = index + i * tile::kWave < from.count;
        const uint32_t bits = tile::ballot(there && ranks[i] >> shift >= prefix);
        if (lane == row + i) taken = bits;
      }
    }
    return taken;
  }

  // Finds the largest digit for which at least `remaining` ranks have this or a larger digit.
  // Subtracts the ranks with larger digits from `remaining`.
  MLA_DEVICE uint32_t find_digit(int digits, int& remaining) {
    // Threads go from the largest digit on, two digits each.
    const int mine = digits - 1 - 2 * thread_index();
    const uint32_t high = mine >= 0 ? count_of(mine) : 0, low = mine >= 1 ? count_of(mine - 1) : 0;
    const uint32_t both = high + low, of_warp = tile::sum_of_warp(both);
    const int before_warp = static_cast<int>(sum_of_warps_before(of_warp));
    // Exactly one warp holds the digit.
    if (before_warp < remaining && before_warp + static_cast<int>(of_warp) >= remaining) {
      const int before = before_warp + static_cast<int>(scan(both) - both);
      if (before < remaining && before + static_cast<int>(both) >= remaining) {
        const bool first = before + static_cast<int>(high) >= remaining;
        tile::store_word(result, static_cast<uint32_t>(first ? mine : mine - 1));
        tile::store_word(result + 4, static_cast<uint32_t>(first ? before : before + int(high)));
      }
    }
    block_barrier();
    const uint32_t digit = tile::load_word_shared(result);
    of_digit = static_cast<int>(count_of(static_cast<int>(digit)));
    remaining -= static_cast<int>(tile::load_word_shared(result + 4));
    block_barrier();
    return digit;
  }
  MLA_DEVICE uint32_t count_of(int digit) const { return tile::load_word_shared(bins + digit * 4); }

  // Returns the sum over the warps before this one; `all` receives the sum over all warps.
  MLA_DEVICE uint32_t sum_of_warps_before(uint32_t of_warp) {
    uint32_t all;
    return sum_of_warps_before(of_warp, all);
  }
  MLA_DEVICE uint32_t sum_of_warps_before(uint32_t of_warp, uint32_t& all) {
    const tile::lds_t sums = warp_sums + (turn++ & 1) * kWarps * 4;
    if (lane == 0) tile::store_word(sums + warp * 4, of_warp);
    block_barrier();
    const uint32_t of_warps = tile::load_word_shared(sums + lane * 4);
    all = tile::sum_of_warp(of_warps);
    return tile::sum_of_warp(lane < warp ? of_warps : 0);
  }
  // Returns the sum of x over the threads before this one; `all` receives the sum over all threads.
  MLA_DEVICE uint32_t sum_before(uint32_t x, uint32_t& all) {
    const uint32_t in_warp = scan(x);
    return sum_of_warps_before(tile::from_lane(in_warp, tile::kWave - 1), all) + in_warp - x;
  }
  // Returns the sum of x over the lanes up to this one.
  MLA_DEVICE uint32_t scan(uint32_t x) const {
#pragma unroll
    for (int step = 1; step < tile::kWave; step *= 2) {
      const uint32_t other = tile::from_lane(x, lane >= step ? lane - step : 0);
      if (lane >= step) x += other;
    }
    return x;
  }
  static_assert(kWarps == tile::kWave);

  // Writes in order the positions of larger ranks and the first `equals` positions of the rank
  // itself.
  template <class Ranks>
  MLA_DEVICE void write(const Ranks& from, uint32_t rank, int equals) {
    int larger_before = 0, equal_before = 0;  // counts of the previous turns
    for (int first = 0; first < from.count; first += kStep) {
      const int index = first + thread_index() * kRun;
      uint32_t words[kRun] = {};
      if (index < from.count) from.load(words, index);
      uint32_t counts = 0;  // larger ones in the low half, equal ones in the high half
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (index + k >= from.count) continue;
        counts += words[k] > rank ? 1u : words[k] == rank ? 1u << 16 : 0u;
      }
      uint32_t all;
      const uint32_t before = sum_before(counts, all);
      int larger = larger_before + static_cast<int>(before & 0xffffu);
      int equal = equal_before + static_cast<int>(before >> 16);
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (index + k >= from.count) continue;
        const int taken = equal < equals ? equal : equals;
        if (words[k] > rank) {
          put(larger++ + taken, from.position(index + k));
        } else if (words[k] == rank && equal++ < equals) {
          put(larger + taken, from.position(index + k));
        }
      }
      larger_before += static_cast<int>(all & 0xffffu);
      equal_before += static_cast<int>(all >> 16);
    }
  }

  const SelectRecord& record;
  int32_t* const list;
  int32_t* const copy;  // null: none
  const int visible, wanted, lane, warp;
  Held held;  // empty until ranks are gathered
  const tile::lds_t bins, warp_sums, result;
  int of_digit = 0;   // ranks with the digit found last
  uint32_t turn = 0;  // two sets of sums alternate, so that one barrier is enough
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_SELECT_H_
