// Makes the lists of an indexer on AMD from the ranks that index_logits.h stores: one block for
// each query row.
//
// The rank of the last chosen position is found digit by digit, from the highest digit. For each
// value of a digit, the block counts the ranks that have it after the known digits. One pass over
// the ranks then writes the positions in order: all with larger ranks, and the first of those with
// exactly this rank, as many as are missing.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_INDEX_INDEX_SELECT_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_INDEX_INDEX_SELECT_H_

#include "kernels/hip/device/amd/mfma_wave.h"
#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

class IndexSelect {
 public:
  static constexpr int kWaves = kIndexSelectThreads / tile::kWave;
  static constexpr int kSharedBytes = kIndexBins * 4 + (2 * kWaves + 2) * 4;

  MLA_DEVICE static void run(const IndexArgs& args) {
    const int index = block_index();
    const IndexRow row = args.rows[index];
    const SelectRecord& record = args.records[row.record];
    const int begin = record.list_begin[row.row];
    IndexSelect self(record, row, begin - record.list_begin[0],
                     record.list_begin[row.row + 1] - begin);
    if (self.wanted >= row.visible) {
      self.put_all();
    } else if (self.wanted > 0) {
      self.take_bins(args.bins + int64_t{index} * kIndexBins);
      self.choose(args.ranks + row.first_rank);
    }
    self.fill_rest();
  }

 private:
  static constexpr int kRun = 4;    // ranks that a thread reads at once
  static constexpr int kAhead = 4;  // reads in flight
  static constexpr int kStep = kIndexSelectThreads * kRun;

  MLA_DEVICE IndexSelect(const SelectRecord& r, const IndexRow& row, int first, int count)
      : record(r),
        list(r.list + first),
        copy(r.wanted == nullptr ? nullptr : r.wanted + int64_t{row.row} * r.wanted_width),
        visible(row.visible),
        wanted(count),
        lane(tile::lane_index()),
        wave(tile::wave_index()),
        bins(tile::shared_base<kSharedBytes>()),
        wave_sums(bins + kIndexBins * 4),
        result(wave_sums + 2 * kWaves * 4) {}

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
  MLA_DEVICE void take_bins(uint32_t* from) const {
    for (int i = thread_index(); i < kIndexBins; i += kIndexSelectThreads) {
      tile::store_word(bins + i * 4, as_global<uint32_t>(from)[i]);
      as_global<uint32_t>(from)[i] = 0;
    }
    block_barrier();
  }

  MLA_DEVICE void choose(const uint32_t* ranks) {
    int shift = 32 - kIndexBinBits;
    int remaining = wanted;  // to choose among the ranks that begin with `rank`
    uint32_t rank = find_digit(kIndexBins, remaining);
    while (shift > 0) {
      const int bits = shift < kIndexBinBits ? shift : kIndexBinBits;
      count_digit(ranks, rank, shift, bits);
      shift -= bits;
      rank = rank << bits | find_digit(1 << bits, remaining);
    }
    write(ranks, rank, remaining);
  }

  // Calls body(position, rank) for the positions of this thread.
  template <class Body>
  MLA_DEVICE void for_each_rank(const uint32_t* ranks, const Body& body) const {
    for (int index = thread_index() * kRun; index < visible; index += kAhead * kStep) {
      uint32_t words[kAhead][kRun] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (index + i * kStep < visible) load_words(words[i], ranks + index + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
          const int position = index + i * kStep + k;
          if (position < visible) body(words[i][k]);
        }
      }
    }
  }

  // Counts the values of the next `bits` bits among ranks whose bits from `shift` on are `prefix`.
  MLA_DEVICE void count_digit(const uint32_t* ranks, uint32_t prefix, int shift, int bits) const {
    for (int i = thread_index(); i < kIndexBins; i += kIndexSelectThreads) {
      tile::store_word(bins + i * 4, 0);
    }
    block_barrier();
    const uint32_t mask = (1u << bits) - 1;
    for_each_rank(ranks, [&](uint32_t rank) {
      if (rank >> shift != prefix) return;
      tile::add_word_shared(bins + (rank >> (shift - bits) & mask) * 4, 1);
    });
    block_barrier();
  }

  // Finds the largest digit for which at least `remaining` ranks have this or a larger digit.
  // Subtracts the ranks with larger digits from `remaining`.
  MLA_DEVICE uint32_t find_digit(int digits, int& remaining) {
    // Threads go from the largest digit on, two digits each.
    const int mine = digits - 1 - 2 * thread_index();
    const uint32_t high = mine >= 0 ? count_of(mine) : 0, low = mine >= 1 ? count_of(mine - 1) : 0;
    uint32_t all;
    const auto before = static_cast<int>(sum_before(high + low, all));
    const int both = static_cast<int>(high + low);
    if (before < remaining && before + both >= remaining) {
      const bool first = before + static_cast<int>(high) >= remaining;
      tile::store_word(result, static_cast<uint32_t>(first ? mine : mine - 1));
      tile::store_word(result + 4, static_cast<uint32_t>(first ? before : before + int(high)));
    }
    block_barrier();
    const uint32_t digit = tile::load_word_shared(result);
    remaining -= static_cast<int>(tile::load_word_shared(result + 4));
    block_barrier();
    return digit;
  }
  MLA_DEVICE uint32_t count_of(int digit) const { return tile::load_word_shared(bins + digit * 4); }

  // Returns the sum of x over the threads before this one; `all` receives the sum over all threads.
  MLA_DEVICE uint32_t sum_before(uint32_t x, uint32_t& all) {
    const tile::lds_t sums = wave_sums + (turn++ & 1) * kWaves * 4;
    const uint32_t in_wave = scan(x);
    if (lane == tile::kWave - 1) tile::store_word(sums + wave * 4, in_wave);
    block_barrier();
    const uint32_t of_waves = scan(tile::load_word_shared(sums + lane % kWaves * 4));
    all = tile::from_lane(of_waves, kWaves - 1);
    const uint32_t before = tile::from_lane(of_waves, wave > 0 ? wave - 1 : 0);
    return (wave > 0 ? before : 0) + in_wave - x;
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
  static_assert(kWaves <= tile::kWave);

  // Writes in order the positions of larger ranks and the first `equals` positions of the rank
  // itself.
  MLA_DEVICE void write(const uint32_t* ranks, uint32_t rank, int equals) {
    int larger_before = 0, equal_before = 0;  // counts of the previous turns
    for (int first = 0; first < visible; first += kStep) {
      const int index = first + thread_index() * kRun;
      uint32_t words[kRun] = {};
      if (index < visible) load_words(words, ranks + index);
      uint32_t counts = 0;  // larger ones in the low half, equal ones in the high half
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (index + k >= visible) continue;
        counts += words[k] > rank ? 1u : words[k] == rank ? 1u << 16 : 0u;
      }
      uint32_t all;
      const uint32_t before = sum_before(counts, all);
      int larger = larger_before + static_cast<int>(before & 0xffffu);
      int equal = equal_before + static_cast<int>(before >> 16);
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (index + k >= visible) continue;
        const int taken = equal < equals ? equal : equals;
        if (words[k] > rank) {
          put(larger++ + taken, index + k);
        } else if (words[k] == rank && equal++ < equals) {
          put(larger + taken, index + k);
        }
      }
      larger_before += static_cast<int>(all & 0xffffu);
      equal_before += static_cast<int>(all >> 16);
    }
  }

  const SelectRecord& record;
  int32_t* const list;
  int32_t* const copy;  // null: none
  const int visible, wanted, lane, wave;
  const tile::lds_t bins, wave_sums, result;
  uint32_t turn = 0;  // two sets of sums alternate, so that one barrier is enough
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_INDEX_INDEX_SELECT_H_
