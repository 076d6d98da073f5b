#include "server/attend/list_checker.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::server {
namespace {

constexpr int32_t kFewEntries = 8;  // of a list, looked at first
constexpr int32_t kBlock = 128;     // entries that are looked at together
constexpr uint32_t kWordBits = 32;
constexpr size_t kWordStep = 4096;  // by which the memory of bits grows
// A list of a row that sees more positions than this for each entry clears the words of its own
// entries: it costs less than to clear those of all that the row sees.
constexpr size_t kSparseBits = 512;

// What is always inlined is written once for all instruction sets: the attribute of the caller
// decides.

// Whether every entry is a position below the bound and larger than the one before it.
[[gnu::always_inline]] inline bool Ascends(const int32_t* list, int32_t count, uint32_t bound) {
  uint32_t faults = 0;
  int32_t i = 0;
  const auto look_at = [&](int32_t k) {
    faults |= static_cast<uint32_t>(static_cast<uint32_t>(list[k]) >= bound);
    faults |= static_cast<uint32_t>(list[k] >= list[k + 1]);
  };
  // What does not ascend seldom does so for long.
  if (count > kFewEntries) {
    for (; i < kFewEntries; ++i) look_at(i);
  }
  for (; i + kBlock < count && faults == 0; i += kBlock) {
    for (int32_t k = 0; k < kBlock; ++k) look_at(i + k);
  }
  for (; i + 1 < count && faults == 0; ++i) look_at(i);
  return faults == 0 && (count == 0 || static_cast<uint32_t>(list[count - 1]) < bound);
}

// The largest of the entries; -1 is beyond every position.
[[gnu::always_inline]] inline uint32_t Highest(const int32_t* list, int32_t count) {
  uint32_t highest = 0;
  for (int32_t i = 0; i < count; ++i) highest = std::max(highest, static_cast<uint32_t>(list[i]));
  return highest;
}

// Moves the positions among the entries to `to`, which may be `list` or lie before it. Returns how
// many they are, or -1 - the slot of the first entry that is neither -1 nor below `bound`.
[[gnu::always_inline]] inline int32_t Compact(const int32_t* list, int32_t count, uint32_t bound,
                                              int32_t* to) {
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t entry = list[i];
    if (static_cast<uint32_t>(entry) + 1 > bound) return -1 - i;
    to[kept] = entry;
    kept += static_cast<int32_t>(entry != -1);
  }
  return kept;
}

// The same behind `done` entries, of which `kept` are moved.
[[gnu::always_inline]] inline int32_t CompactRest(const int32_t* list, int32_t count,
                                                  uint32_t bound, int32_t* to, int32_t done,
                                                  int32_t kept) {
  const int32_t rest = Compact(list + done, count - done, bound, to + kept);
  return rest < 0 ? rest - done : kept + rest;
}

#if defined(__x86_64__)
// By the bits of eight entries: where those that are kept lie, 3 bits each.
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
                                                     uint32_t bound, int32_t* to) {
  const __m256i none = _mm256_set1_epi32(-1);
  const __m256i bounds = _mm256_set1_epi32(static_cast<int32_t>(bound));
  const __m256i shifts = _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21);
  int32_t kept = 0, i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i entries = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(list + i));
    // Plus 1, -1 is below and a position at most the bound.
    const __m256i next = _mm256_sub_epi32(entries, none);
    const __m256i good = _mm256_cmpeq_epi32(_mm256_min_epu32(next, bounds), next);
    if (_mm256_movemask_epi8(good) != -1) break;
    const __m256i absent = _mm256_cmpeq_epi32(entries, none);
    const auto bits =
        0xffu & ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(absent)));
    // The instruction looks at the low three bits of a lane.
    const __m256i lanes =
        _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int32_t>(kKeptLanes[bits])), shifts);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kept),
                        _mm256_permutevar8x32_epi32(entries, lanes));
    kept += __builtin_popcount(bits);
  }
  return CompactRest(list, count, bound, to, i, kept);
}

[[gnu::target("avx512f,popcnt")]] int32_t CompactByAvx512(const int32_t* list, int32_t count,
                                                          uint32_t bound, int32_t* to) {
  const __m512i none = _mm512_set1_epi32(-1);
  const __m512i bounds = _mm512_set1_epi32(static_cast<int32_t>(bound));
  int32_t kept = 0, i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512i entries = _mm512_loadu_si512(list + i);
    if (_mm512_cmpgt_epu32_mask(_mm512_sub_epi32(entries, none), bounds) != 0) break;
    const __mmask16 present = _mm512_cmpneq_epi32_mask(entries, none);
    _mm512_storeu_si512(to + kept, _mm512_maskz_compress_epi32(present, entries));
    kept += __builtin_popcount(present);
  }
  return CompactRest(list, count, bound, to, i, kept);
}
#endif

// Marks of positions, of one list. `Add` marks kGroup of them.

// By bytes: each list has a bit of its own.
class ByteMarks {
 public:
  static constexpr int32_t kGroup = 8;
  ByteMarks(uint8_t* seen, uint8_t mark) : seen_(seen), mark_(mark) {}
  [[gnu::always_inline]] inline void AddOne(int32_t position) {
    a_ |= Swap(static_cast<uint32_t>(position));
  }
  [[gnu::always_inline]] inline void Add(const int32_t* positions) {
    AddFour(positions);
    AddFour(positions + 4);
  }
  bool repeats() const { return ((a_ | b_) & mark_) != 0; }

 private:
  // Two positions a load, in chains that keep ahead of the loads.
  [[gnu::always_inline]] inline void AddFour(const int32_t* positions) {
    uint64_t pair, next;
    std::memcpy(&pair, positions, sizeof(pair));
    std::memcpy(&next, positions + 2, sizeof(next));
    a_ |= Swap(static_cast<uint32_t>(pair));
    b_ |= Swap(static_cast<uint32_t>(pair >> 32));
    a_ |= Swap(static_cast<uint32_t>(next));
    b_ |= Swap(static_cast<uint32_t>(next >> 32));
  }
  [[gnu::always_inline]] inline uint32_t Swap(uint32_t position) {
    const uint8_t before = seen_[position];
    seen_[position] = mark_;
    return before;
  }

  uint8_t* seen_;
  uint8_t mark_;
  uint32_t a_ = 0, b_ = 0;  // marks of before, joined
};

// By bits, all 0 at first.
class BitMarks {
 public:
  static constexpr int32_t kGroup = 16;
  explicit BitMarks(uint32_t* words) : words_(words) {
#if defined(__x86_64__)
    asm("" : "+r"(shift_));  // a shift by a register needs no copy of what it shifts
#endif
  }
  [[gnu::always_inline]] inline void AddOne(int32_t position) {
    const auto at = static_cast<uint32_t>(position);
    uint32_t& word = words_[at >> shift_];
#if defined(__x86_64__)
    // GCC needs twice as many instructions, and their number is what this costs.
    uint32_t bits;
    asm("mov %[word], %[bits]\n\t"
        "bts %[at], %[bits]\n\t"
        "adc $0, %[repeats]\n\t"
        "mov %[bits], %[word]"
        : [word] "+m"(word), [bits] "=&r"(bits), [repeats] "+r"(repeats_)
        : [at] "r"(at)
        : "cc");
#else
    const uint32_t bit = uint32_t{1} << at % kWordBits;
    repeats_ += static_cast<uint32_t>((word & bit) != 0);
    word |= bit;
#endif
  }
  [[gnu::always_inline]] inline void Add(const int32_t* positions) {
    AddFour(positions);
    AddFour(positions + 4);
    AddFour(positions + 8);
    AddFour(positions + 12);
  }
  bool repeats() const { return repeats_ != 0; }

 private:
  [[gnu::always_inline]] inline void AddFour(const int32_t* positions) {
    AddOne(positions[0]);
    AddOne(positions[1]);
    AddOne(positions[2]);
    AddOne(positions[3]);
  }

  uint32_t* words_;
  uint32_t shift_ = std::countr_zero(kWordBits);
  uint32_t repeats_ = 0;
};

// Moves the positions of a list to `to`, which may be `list` or lie before it, and marks them.
// Returns how many they are, or -1 - the slot of an entry that is no position below `bound`.
// What lies before the first block with such an entry or a -1 is looked at once.
template <auto kCompact, typename Marks>
[[gnu::always_inline]] inline int32_t Keep(const int32_t* list, int32_t count, uint32_t bound,
                                           int32_t* to, Marks* result) {
  Marks marks = *result;  // in registers
  int32_t front = 0;
  for (; front + kBlock <= count; front += kBlock) {
    if (Highest(list + front, kBlock) >= bound) break;
    for (int32_t k = 0; k < kBlock; k += Marks::kGroup) marks.Add(list + front + k);
  }
  if (to != list) std::memmove(to, list, static_cast<size_t>(front) * sizeof(int32_t));
  const int32_t rest = kCompact(list + front, count - front, bound, to + front);
  if (rest < 0) return rest - front;
  const int32_t kept = front + rest;
  for (; front + Marks::kGroup <= kept; front += Marks::kGroup) marks.Add(to + front);
  for (; front < kept; ++front) marks.AddOne(to[front]);
  *result = marks;
  return kept;
}

// Keeps the entries that `is_first` says are the first of their position. Returns how many.
template <typename IsFirst>
int32_t KeepFirst(int32_t* list, int32_t count, const IsFirst& is_first) {
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = list[i];
    if (is_first(static_cast<uint32_t>(position))) list[kept++] = position;
  }
  return kept;
}

#if defined(__x86_64__)
// clang vectorizes at -O2 and does not know the second attribute.
#if __has_cpp_attribute(gnu::optimize)
#define MLA_AVX2 [[gnu::target("avx2,bmi2,popcnt"), gnu::optimize("O3")]]
#else
#define MLA_AVX2 [[gnu::target("avx2,bmi2,popcnt")]]
#endif
MLA_AVX2 bool AscendsByAvx2(const int32_t* list, int32_t count, uint32_t bound) {
  return Ascends(list, count, bound);
}
bool HasAvx512() {
  static const bool kHas = __builtin_cpu_supports("avx512f") != 0;
  return kHas;
}
template <typename Marks>
MLA_AVX2 int32_t KeepByAvx2(const int32_t* list, int32_t count, uint32_t bound, int32_t* to,
                            Marks* marks) {
  if (HasAvx512()) return Keep<CompactByAvx512>(list, count, bound, to, marks);
  return Keep<CompactByAvx2>(list, count, bound, to, marks);
}
bool HasAvx2() {
  static const bool kHas = __builtin_cpu_supports("avx2") != 0 &&
                           __builtin_cpu_supports("bmi2") != 0 &&
                           __builtin_cpu_supports("popcnt") != 0;
  return kHas;
}
#else
bool HasAvx2() { return false; }
constexpr auto AscendsByAvx2 = Ascends;
template <typename Marks>
constexpr auto KeepByAvx2 = Keep<Compact, Marks>;
#endif

// The rows of a step one after the other, and what each of them sees.
class RowCursor {
 public:
  RowCursor(std::span<const scheduler::StepSequenceArgs> sequences, int32_t row)
      : sequence_(sequences.begin()), row_(row) {
    Settle();
  }
  int32_t visible() const { return static_cast<int32_t>(sequence_->start_position) + row_ + 1; }
  void Next() {
    ++row_;
    Settle();
  }

 private:
  // Behind the last row nothing is asked for.
  void Settle() {
    while (row_ >= sequence_->rows) {
      row_ -= sequence_->rows;
      ++sequence_;
    }
  }

  std::span<const scheduler::StepSequenceArgs>::iterator sequence_;
  int32_t row_;  // of that sequence in the step
};

}  // namespace

void PlaceSelectedLists(const SentLists& sent,
                        std::span<const scheduler::StepSequenceArgs> sequences, int32_t* begins) {
  RowCursor cursor(sequences, sent.row_begin);
  begins[0] = 0;
  for (int32_t row = 0; row < sent.rows; ++row) {
    begins[row + 1] = begins[row] + std::min(cursor.visible(), sent.top_k);
    if (row + 1 < sent.rows) cursor.Next();
  }
}

uint8_t ListChecker::NextMark() {
  mark_ = static_cast<uint8_t>(mark_ << 1);
  if (mark_ == 0) {
    seen_.assign(kByteMarks, 0);
    mark_ = 1;
  }
  return mark_;
}

int32_t ListChecker::TakeByBytes(const int32_t* list, int32_t count, uint32_t bound, int32_t* to) {
  uint8_t mark = NextMark();
  ByteMarks marks(seen_.data(), mark);
  const auto keep = HasAvx2() ? KeepByAvx2<ByteMarks> : Keep<Compact, ByteMarks>;
  const int32_t kept = keep(list, count, bound, to, &marks);
  if (kept < 0 || !marks.repeats()) return kept;
  mark = NextMark();
  return KeepFirst(to, kept, [&](uint32_t position) {
    return (std::exchange(seen_[position], mark) & mark) == 0;
  });
}

int32_t ListChecker::TakeByBits(const int32_t* list, int32_t count, uint32_t bound, int32_t* to) {
  const size_t words = (size_t{bound} + kWordBits - 1) / kWordBits;
  if (words_.size() < words) words_.resize((words + kWordStep - 1) / kWordStep * kWordStep);
  const auto clear = [&](int32_t entries) {
    if (entries < 0 || static_cast<size_t>(entries) * kSparseBits >= bound) {
      std::memset(words_.data(), 0, words * sizeof(uint32_t));
      return;
    }
    for (int32_t i = 0; i < entries; ++i) words_[static_cast<uint32_t>(to[i]) / kWordBits] = 0;
  };
  BitMarks marks(words_.data());
  const auto keep = HasAvx2() ? KeepByAvx2<BitMarks> : Keep<Compact, BitMarks>;
  int32_t kept = keep(list, count, bound, to, &marks);
  if (kept >= 0 && marks.repeats()) {
    clear(kept);
    kept = KeepFirst(to, kept, [&](uint32_t position) {
      BitMarks of_one(words_.data());
      of_one.AddOne(static_cast<int32_t>(position));
      return !of_one.repeats();
    });
  }
  clear(kept);
  return kept;
}

int32_t ListChecker::Take(const int32_t* list, int32_t count, int32_t visible, int32_t* to) {
  const auto bound = static_cast<uint32_t>(visible);
  if ((HasAvx2() ? AscendsByAvx2 : Ascends)(list, count, bound)) {
    if (to != list) std::memmove(to, list, static_cast<size_t>(count) * sizeof(int32_t));
    return count;
  }
  return bound <= kByteMarks ? TakeByBytes(list, count, bound, to)
                             : TakeByBits(list, count, bound, to);
}

absl::Status ListChecker::Check(const SentLists& sent,
                                std::span<const scheduler::StepSequenceArgs> sequences,
                                int32_t* memory) {
  int32_t* const begins = memory;
  int32_t* const entries = memory + sent.rows + 1;
  const auto refuse_offset = [&](int32_t row, int32_t got) {
    return RefuseField("payload", absl::StrCat("offset ", row, ": ", got),
                       absl::StrCat("row offsets that ascend from 0 to ", sent.entries,
                                    " by at most ", sent.top_k),
                       "list_offset");
  };
  if (sent.width == 0 && begins[0] != 0) return refuse_offset(0, begins[0]);
  RowCursor cursor(sequences, sent.row_begin);
  int32_t from = 0, kept = 0;
  begins[0] = 0;
  for (int32_t row = 0; row < sent.rows; ++row) {
    const int32_t end = sent.width > 0 ? from + sent.width : begins[row + 1];
    const bool last = row + 1 == sent.rows;
    if (end < from || end > sent.entries || end - from > sent.top_k ||
        (last && end != sent.entries)) {
      return refuse_offset(row + 1, end);
    }
    const int32_t taken =
        Take(entries + from, end - from, cursor.visible() / sent.ratio, entries + kept);
    if (taken < 0) {
      const int32_t slot = -1 - taken;
      return RefuseField(
          "payload",
          absl::StrCat(entries[from + slot], " at row ", sent.row_begin + row, ", slot ", slot,
                       " of the index lists"),
          absl::StrCat("-1, or 0..", cursor.visible() / sent.ratio - 1, ": the ",
                       sent.ratio == 1 ? "positions" : "entries", " that the row sees"),
          "list_position");
    }
    kept += taken;
    begins[row + 1] = kept;
    from = end;
    if (!last) cursor.Next();
  }
  return absl::OkStatus();
}

}  // namespace mla::server
