#include "server/index_lists/list_marks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mla::server {
namespace {

constexpr int32_t kFewEntries = 8;  // first entries of a list, checked before the rest
constexpr int32_t kBlock = 128;     // entries checked together
constexpr int32_t kGroup = 8;       // positions marked without a branch between them
constexpr uint32_t kWordBits = 32;
constexpr size_t kWordStep = 4096;  // step by which the memory of bits grows
constexpr size_t kLineBytes = 64;   // of a cache; a vector that spans two lines takes longer
// For lists with more visible positions per entry than this, each entry is checked for repeats:
// this costs less than counting the marks of all visible positions.
constexpr size_t kSparseMarks = 256;

// Returns the first line that begins at or after the address.
template <typename T>
T* LineOf(T* memory) {
  const size_t behind = reinterpret_cast<uintptr_t>(memory) % kLineBytes;
  return memory + (kLineBytes - behind) % kLineBytes / sizeof(T);
}

// Functions that are always inlined are written once for all instruction sets, because the
// attribute of the caller decides which ones they use.

// Returns true if every entry is larger than the one before it. All entries are then positions if
// the first one is at least 0 and the last one is below the bound.
[[gnu::always_inline]] inline bool Ascends(const int32_t* list, int32_t count) {
  uint32_t falls = 0;
  int32_t i = 0;
  const auto look_at = [&](int32_t k) { falls |= static_cast<uint32_t>(list[k] >= list[k + 1]); };
  for (; i + kBlock < count && falls == 0; i += kBlock) {
    for (int32_t k = 0; k < kBlock; ++k) look_at(i + k);
  }
  for (; i + 1 < count && falls == 0; ++i) look_at(i);
  return falls == 0;
}

// Returns the largest entry as an unsigned number, so that -1 is above every position.
[[gnu::always_inline]] inline uint32_t Highest(const int32_t* list, int32_t count) {
  uint32_t highest = 0;
  for (int32_t i = 0; i < count; ++i) highest = std::max(highest, static_cast<uint32_t>(list[i]));
  return highest;
}

// Moves the positions among the entries to `target`, which may be `list` or lie before it. Returns
// their number. If entry i is neither -1 nor below `bound`, returns -1 - i for the first such i.
[[gnu::always_inline]] inline int32_t Compact(const int32_t* list, int32_t count, uint32_t bound,
                                              int32_t* target) {
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t entry = list[i];
    if (static_cast<uint32_t>(entry) + 1 > bound) return -1 - i;
    target[kept] = entry;
    kept += static_cast<int32_t>(entry != -1);
  }
  return kept;
}

// Does what Compact does, for the entries after the first `done`, of which `kept` have been moved.
[[gnu::always_inline]] inline int32_t CompactRest(const int32_t* list, int32_t count,
                                                  uint32_t bound, int32_t* target, int32_t done,
                                                  int32_t kept) {
  const int32_t rest = Compact(list + done, count - done, bound, target + kept);
  return rest < 0 ? rest - done : kept + rest;
}

#if defined(__x86_64__)
// Returns a table that gives, for each mask of eight entries, the lanes of the kept entries in 3
// bits each.
constexpr std::array<uint32_t, 256> MakeKeptLanes() {
  std::array<uint32_t, 256> table{};
  for (uint32_t bits = 0; bits < 256; ++bits) {
    uint32_t shift = 0;
    for (uint32_t lane = 0; lane < 8; ++lane) {
      if ((bits >> lane & 1) == 0) continue;
      table[bits] |= lane << shift;
      shift += 3;
    }
  }
  return table;
}
constexpr std::array<uint32_t, 256> kKeptLanes = MakeKeptLanes();

[[gnu::target("avx2,popcnt")]] int32_t CompactByAvx2(const int32_t* list, int32_t count,
                                                     uint32_t bound, int32_t* target) {
  const __m256i none = _mm256_set1_epi32(-1);
  const __m256i bounds = _mm256_set1_epi32(static_cast<int32_t>(bound));
  const __m256i shifts = _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21);
  int32_t kept = 0, i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i entries = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(list + i));
    // With 1 added, -1 becomes the smallest value and a valid position is at most the bound.
    const __m256i next = _mm256_sub_epi32(entries, none);
    const __m256i good = _mm256_cmpeq_epi32(_mm256_min_epu32(next, bounds), next);
    if (_mm256_movemask_epi8(good) != -1) break;
    const __m256i absent = _mm256_cmpeq_epi32(entries, none);
    const auto bits =
        0xffu & ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(absent)));
    // The instruction uses only the low three bits of a lane.
    const __m256i lanes =
        _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int32_t>(kKeptLanes[bits])), shifts);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + kept),
                        _mm256_permutevar8x32_epi32(entries, lanes));
    kept += __builtin_popcount(bits);
  }
  return CompactRest(list, count, bound, target, i, kept);
}
#endif

// Marks for the positions of one list. The list has repeats if it has fewer marks than positions.
// Marks are counted after the whole list, so that each entry costs only one store.

// One byte a position; a position is in the list if its byte equals the list's mark. Counting them
// needs vectors.
class ByteMarks {
 public:
  ByteMarks(uint8_t* seen, uint8_t mark) : seen_(seen), mark_(mark) {}
  [[gnu::always_inline]] inline void Add(int32_t position) {
    seen_[static_cast<uint32_t>(position)] = mark_;
  }
  // Counts marked positions below the bound. The memory has whole cache lines to read as vectors.
#if defined(__x86_64__)
  [[gnu::target("avx2,popcnt")]] int32_t Count(uint32_t bound) const {
    const __m256i marks = _mm256_set1_epi8(static_cast<char>(mark_));
    int32_t count = 0;
    for (uint32_t at = 0; at < bound; at += sizeof(marks)) {
      const __m256i seen = _mm256_load_si256(reinterpret_cast<const __m256i*>(seen_ + at));
      const int bits = _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen, marks));
      count += __builtin_popcount(static_cast<uint32_t>(bits));
    }
    return count;
  }
  [[gnu::target("avx512f,avx512bw,popcnt")]] int32_t CountByAvx512(uint32_t bound) const {
    const __m512i marks = _mm512_set1_epi8(static_cast<char>(mark_));
    int64_t count = 0;
    for (uint32_t at = 0; at < bound; at += sizeof(marks)) {
      const __m512i seen = _mm512_load_si512(seen_ + at);
      count += __builtin_popcountll(_mm512_cmpeq_epi8_mask(seen, marks));
    }
    return static_cast<int32_t>(count);
  }
#endif

 private:
  uint8_t* seen_;
  uint8_t mark_;
};

// Keeps one bit for each position as its mark. All bits are 0 at first, and again after they have
// been counted.
class BitMarks {
 public:
  explicit BitMarks(uint32_t* words) : words_(words) {
#if defined(__x86_64__)
    // Keeps the compiler from using the bit-set instruction, which is slower than a shift of a
    // variable.
    asm("" : "+r"(one_));
#endif
  }
  [[gnu::always_inline]] inline void Add(int32_t position) {
    auto index = static_cast<uint32_t>(position);
    const uint32_t bit = one_ << index % kWordBits;
#if defined(__x86_64__)
    // Makes the compiler compute `bit` before it shifts `index`, which saves a copy.
    asm("" : "+r"(index) : "r"(bit));
#endif
    words_[index / kWordBits] |= bit;
  }
  // Counts marked positions below the bound. The memory has whole cache lines to read as vectors.
  [[gnu::always_inline]] inline int32_t Count(uint32_t bound) const {
    const size_t bytes = (size_t{bound} + 8 * sizeof(uint64_t) - 1) / 64 * sizeof(uint64_t);
    const auto* const memory = reinterpret_cast<const char*>(words_);
    int32_t count = 0;
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      uint64_t bits;
      std::memcpy(&bits, memory + at, sizeof(bits));
      count += std::popcount(bits);
    }
    std::memset(words_, 0, bytes);
    return count;
  }
#if defined(__x86_64__)
  [[gnu::target("avx512f,avx512vpopcntdq")]] int32_t CountByAvx512(uint32_t bound) const {
    __m512i count = _mm512_setzero_si512();
    for (uint32_t at = 0; at < bound; at += 8 * sizeof(count)) {
      uint32_t* const words = words_ + at / kWordBits;
      count = _mm512_add_epi64(count, _mm512_popcnt_epi64(_mm512_load_si512(words)));
      _mm512_store_si512(words, _mm512_setzero_si512());
    }
    alignas(64) std::array<int64_t, 8> counts;
    _mm512_store_si512(counts.data(), count);
    return static_cast<int32_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  }
#endif

 private:
  uint32_t* words_;
  uint32_t one_ = 1;
};

// Marks positions from index `done` on, in whole groups. Returns the number of positions marked so
// far.
template <typename Marks>
[[gnu::always_inline]] inline int32_t AddGroups(const int32_t* positions, int32_t done,
                                                int32_t count, Marks* marks) {
  for (; done + kGroup <= count; done += kGroup) {
    for (int32_t k = 0; k < kGroup; ++k) marks->Add(positions[done + k]);
  }
  return done;
}

// Moves the positions of a list to `target`, which may be `list` or lie before it, and marks them.
// Returns their number, and in `marked` the number of marks; or -1 - the slot of an entry that is
// not a position below `bound`. Marking runs one block later than moving, because values are slow
// to load just after their store.
template <auto kCompact, typename Marks>
[[gnu::always_inline]] inline int32_t Keep(const int32_t* list, int32_t count, uint32_t bound,
                                           int32_t* target, Marks marks, int32_t* marked) {
  int32_t kept = 0, done = 0;
  for (int32_t begin = 0; begin < count; begin += kBlock) {
    const int32_t* const block = list + begin;
    int32_t entries = std::min(kBlock, count - begin);
    if (Highest(block, entries) >= bound) {
      entries = kCompact(block, entries, bound, target + kept);
      if (entries < 0) return entries - begin;
    } else if (target + kept != block) {
      std::memmove(target + kept, block, static_cast<size_t>(entries) * sizeof(int32_t));
    }
    done = AddGroups(target, done, kept, &marks);
    kept += entries;
  }
  for (; done < kept; ++done) marks.Add(target[done]);
  *marked = marks.Count(bound);
  return kept;
}

#if defined(__x86_64__)
// GCC needs -O3 to vectorize these loops. clang does so at -O2 and does not know gnu::optimize.
#if __has_cpp_attribute(gnu::optimize)
#define MLA_FOR(features) [[gnu::target(features), gnu::optimize("O3")]]
#else
#define MLA_FOR(features) [[gnu::target(features)]]
#endif
#define MLA_AVX2 MLA_FOR("avx2,bmi2,popcnt")
#define MLA_AVX512 MLA_FOR("avx512f,bmi2,popcnt")
MLA_AVX2 bool AscendsByAvx2(const int32_t* list, int32_t count) { return Ascends(list, count); }
template <typename Marks>
MLA_AVX2 int32_t KeepByAvx2(const int32_t* list, int32_t count, uint32_t bound, int32_t* target,
                            Marks marks, int32_t* marked) {
  return Keep<CompactByAvx2>(list, count, bound, target, marks, marked);
}

// As Keep, except that blocks without -1 are not compacted.
template <typename Marks>
MLA_AVX512 int32_t KeepByAvx512(const int32_t* list, int32_t count, uint32_t bound, int32_t* target,
                                Marks marks, int32_t* marked) {
  constexpr int32_t kLanes = 16;
  constexpr __mmask16 kAll = 0xffff;  // without a mask GCC warns of reads of uninitialized values
  const __m512i none = _mm512_set1_epi32(-1);
  const __m512i bounds = _mm512_set1_epi32(static_cast<int32_t>(bound));
  int32_t kept = 0, done = 0, begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    // With 1 added, -1 becomes 0 and a valid position is at most the bound.
    __m512i highest = bounds, lowest = bounds;
    for (int32_t k = 0; k < kBlock; k += kLanes) {
      const __m512i next = _mm512_sub_epi32(_mm512_loadu_si512(list + begin + k), none);
      highest = _mm512_maskz_max_epu32(kAll, highest, next);
      lowest = _mm512_maskz_min_epu32(kAll, lowest, next);
    }
    if (_mm512_cmpneq_epi32_mask(highest, bounds) != 0) break;
    const int32_t before = kept;
    if (_mm512_testn_epi32_mask(lowest, lowest) != 0) {
      for (int32_t k = 0; k < kBlock; k += kLanes) {
        const __m512i entries = _mm512_loadu_si512(list + begin + k);
        const __mmask16 present = _mm512_cmpneq_epi32_mask(entries, none);
        _mm512_storeu_si512(target + kept, _mm512_maskz_compress_epi32(present, entries));
        kept += __builtin_popcount(present);
      }
    } else {
      for (int32_t k = 0; k < kBlock && target + kept != list + begin; k += kLanes) {
        _mm512_storeu_si512(target + kept + k, _mm512_loadu_si512(list + begin + k));
      }
      kept += kBlock;
    }
    done = AddGroups(target, done, before, &marks);
  }
  kept = CompactRest(list, count, bound, target, begin, kept);
  for (; done < kept; ++done) marks.Add(target[done]);
  *marked = kept < 0 ? 0 : marks.CountByAvx512(bound);
  return kept;
}
#endif

}  // namespace

// The passes over a list, for each set of instructions.
struct ListMarks::Passes {
  bool (*ascends)(const int32_t*, int32_t) = Ascends;
  int32_t (*by_bits)(const int32_t*, int32_t, uint32_t, int32_t*, BitMarks,
                     int32_t*) = Keep<Compact, BitMarks>;
  int32_t (*by_bytes)(const int32_t*, int32_t, uint32_t, int32_t*, ByteMarks,
                      int32_t*) = nullptr;  // null: bits are used for all lists
};

const ListMarks::Passes& ListMarks::PassesOf(ListInstructions instructions) {
  static constexpr Passes kPortable;
#if defined(__x86_64__)
  static constexpr Passes kAvx2 = {AscendsByAvx2, KeepByAvx2<BitMarks>, KeepByAvx2<ByteMarks>};
  static constexpr Passes kAvx512 = {AscendsByAvx2, KeepByAvx512<BitMarks>,
                                     KeepByAvx512<ByteMarks>};
  if (instructions == ListInstructions::kAvx2) return kAvx2;
  if (instructions == ListInstructions::kAvx512) return kAvx512;
#endif
  return kPortable;
}

ListInstructions MostListInstructions() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2") ||
      !__builtin_cpu_supports("popcnt")) {
    return ListInstructions::kPortable;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vpopcntdq")) {
    return ListInstructions::kAvx2;
  }
  return ListInstructions::kAvx512;
#else
  return ListInstructions::kPortable;
#endif
}

int32_t ListMarks::TakeByBytes(const Passes& passes, const int32_t* list, int32_t count,
                               uint32_t bound, int32_t* target) {
  if (++mark_ == 0 || seen_.empty()) {
    seen_.assign(kByteMarks + kLineBytes, 0);
    mark_ = 1;
  }
  int32_t marked = 0;
  const int32_t kept =
      passes.by_bytes(list, count, bound, target, ByteMarks(LineOf(seen_.data()), mark_), &marked);
  return kept < 0 || marked == kept ? kept : KeepFirst(target, kept, bound);
}

int32_t ListMarks::TakeByBits(const Passes& passes, const int32_t* list, int32_t count,
                              uint32_t bound, int32_t* target) {
  int32_t marked = 0;
  const int32_t kept = passes.by_bits(list, count, bound, target, BitMarks(Words(bound)), &marked);
  if (kept < 0) std::fill(words_.begin(), words_.end(), 0);
  return kept < 0 || marked == kept ? kept : KeepFirst(target, kept, bound);
}

int32_t ListMarks::KeepFirst(int32_t* positions, int32_t count, uint32_t bound) {
  uint32_t* const words = Words(bound);
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const auto index = static_cast<uint32_t>(positions[i]);
    const uint32_t bit = uint32_t{1} << index % kWordBits;
    const bool first = (words[index / kWordBits] & bit) == 0;
    words[index / kWordBits] |= bit;
    positions[kept] = positions[i];
    kept += static_cast<int32_t>(first);
  }
  for (int32_t i = 0; i < kept; ++i) words[static_cast<uint32_t>(positions[i]) / kWordBits] = 0;
  return kept;
}

uint32_t* ListMarks::Words(uint32_t bound) {
  const size_t words = (size_t{bound} + kWordBits - 1) / kWordBits;
  if (words_.size() < words + kLineBytes / sizeof(uint32_t)) {
    words_.assign((words / kWordStep + 1) * kWordStep + kLineBytes / sizeof(uint32_t), 0);
  }
  return LineOf(words_.data());
}

int32_t ListMarks::Take(ListInstructions instructions, const int32_t* list, int32_t count,
                        int32_t visible, int32_t* target) {
  if (count == 0) return 0;
  const Passes& passes = PassesOf(instructions);
  const auto bound = static_cast<uint32_t>(visible);
  // Most lists that do not ascend fail within the first entries.
  if (list[0] >= 0 && static_cast<uint32_t>(list[count - 1]) < bound &&
      Ascends(list, std::min(count, kFewEntries)) && passes.ascends(list, count)) {
    if (target != list) std::memmove(target, list, static_cast<size_t>(count) * sizeof(int32_t));
    return count;
  }
  if (static_cast<size_t>(count) * kSparseMarks < bound) {
    const int32_t kept = Compact(list, count, bound, target);
    return kept < 0 ? kept : KeepFirst(target, kept, bound);
  }
  return bound <= kByteMarks && passes.by_bytes != nullptr
             ? TakeByBytes(passes, list, count, bound, target)
             : TakeByBits(passes, list, count, bound, target);
}

}  // namespace mla::server
