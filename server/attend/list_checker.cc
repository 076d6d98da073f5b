#include "server/attend/list_checker.h"

#include <algorithm>
#include <array>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::server {
namespace {

constexpr int32_t kBlock = 64;               // entries that are looked at together
constexpr size_t kPositionStep = 64 * 1024;  // by which the memory of positions grows
// A list of a row that sees more positions than this for each entry clears its own marks: it costs
// less than to clear all that the row sees, once in eight lists.
constexpr size_t kSparseMarks = 64;

// What is always inlined is written once for all instruction sets: the attribute of the caller
// decides.

struct Order {
  bool below;      // every entry is a position below the bound
  bool ascending;  // every entry is larger than the one before it
};

[[gnu::always_inline]] inline Order OrderOf(const int32_t* list, int32_t count, uint32_t bound) {
  uint32_t outside = 0, falls = 0;
  int32_t i = 0;
  // What does not ascend seldom does so for long.
  for (; i + kBlock < count && falls == 0; i += kBlock) {
    for (int32_t k = 0; k < kBlock; ++k) {
      outside |= static_cast<uint32_t>(static_cast<uint32_t>(list[i + k]) >= bound);
      falls |= static_cast<uint32_t>(list[i + k] >= list[i + k + 1]);
    }
  }
  for (; i < count && falls == 0; ++i) {
    outside |= static_cast<uint32_t>(static_cast<uint32_t>(list[i]) >= bound);
    if (i + 1 < count) falls |= static_cast<uint32_t>(list[i] >= list[i + 1]);
  }
  return {outside == 0, falls == 0};
}

// Entries in the order of what they stand for: -1 as 0, position p as p + 1, others beyond.
struct Extent {
  uint32_t lowest, highest;
};

[[gnu::always_inline]] inline Extent ExtentOf(const int32_t* list, int32_t count) {
  uint32_t lowest = ~uint32_t{0}, highest = 0;
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t rank = static_cast<uint32_t>(list[i]) + 1;
    lowest = std::min(lowest, rank);
    highest = std::max(highest, rank);
  }
  return {lowest, highest};
}

// Moves the positions among the entries to `to`, which may be `list` or lie before it.
[[gnu::always_inline]] inline int32_t Compact(const int32_t* list, int32_t count, int32_t* to) {
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t entry = list[i];
    to[kept] = entry;
    kept += static_cast<int32_t>(entry != -1);
  }
  return kept;
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
                                                     int32_t* to) {
  const __m256i none = _mm256_set1_epi32(-1);
  const __m256i shifts = _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21);
  int32_t kept = 0, i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i entries = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(list + i));
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
  return kept + Compact(list + i, count - i, to + kept);
}
#endif

// Marks a position. Returns its mark of before.
inline uint8_t MarkOne(uint32_t position, uint8_t mark, uint8_t* seen) {
  const uint8_t before = seen[position];
  seen[position] = mark;
  return before;
}

// Marks the positions with `mark`. Returns the marks of before, joined, in chains that keep ahead
// of the loads.
uint8_t Mark(const int32_t* list, int32_t count, uint8_t mark, uint8_t* seen) {
  uint8_t a = 0, b = 0, c = 0, d = 0;
  int32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    uint64_t pairs[2];  // two positions a load
    std::memcpy(pairs, list + i, sizeof(pairs));
    a |= MarkOne(static_cast<uint32_t>(pairs[0]), mark, seen);
    b |= MarkOne(static_cast<uint32_t>(pairs[0] >> 32), mark, seen);
    c |= MarkOne(static_cast<uint32_t>(pairs[1]), mark, seen);
    d |= MarkOne(static_cast<uint32_t>(pairs[1] >> 32), mark, seen);
  }
  for (; i < count; ++i) a |= MarkOne(static_cast<uint32_t>(list[i]), mark, seen);
  return a | b | c | d;
}

#if defined(__x86_64__)
// clang vectorizes at -O2 and does not know the second attribute.
#if __has_cpp_attribute(gnu::optimize)
#define MLA_AVX2 [[gnu::target("avx2"), gnu::optimize("O3")]]
#else
#define MLA_AVX2 [[gnu::target("avx2")]]
#endif
MLA_AVX2 Order OrderByAvx2(const int32_t* list, int32_t count, uint32_t bound) {
  return OrderOf(list, count, bound);
}
MLA_AVX2 Extent ExtentByAvx2(const int32_t* list, int32_t count) { return ExtentOf(list, count); }
bool HasAvx2() {
  static const bool kHas =
      __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("popcnt") != 0;
  return kHas;
}
#else
bool HasAvx2() { return false; }
constexpr auto OrderByAvx2 = OrderOf;
constexpr auto ExtentByAvx2 = ExtentOf;
constexpr auto CompactByAvx2 = Compact;
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

void ListChecker::NextMark(size_t marked) {
  mark_ = static_cast<uint8_t>(mark_ << 1);
  if (mark_ == 0) {
    std::memset(seen_.data(), 0, marked_);
    marked_ = 0;
    mark_ = 1;
  }
  marked_ = std::max(marked_, marked);
}

int32_t ListChecker::DropRepeats(int32_t* list, int32_t count, size_t marked) {
  NextMark(marked);
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = list[i];
    uint8_t& seen = seen_[static_cast<size_t>(position)];
    if ((seen & mark_) != 0) continue;
    seen = mark_;
    list[kept++] = position;
  }
  return kept;
}

int32_t ListChecker::Take(const int32_t* list, int32_t count, int32_t visible, int32_t* to) {
  const auto bound = static_cast<uint32_t>(visible);
  const auto move = [&] {
    if (to != list) std::memmove(to, list, static_cast<size_t>(count) * sizeof(int32_t));
    return count;
  };
  const Order order = (HasAvx2() ? OrderByAvx2 : OrderOf)(list, count, bound);
  if (order.below && order.ascending) return move();
  const Extent extent = (HasAvx2() ? ExtentByAvx2 : ExtentOf)(list, count);
  if (extent.highest > bound) {
    int32_t slot = 0;
    while (static_cast<uint32_t>(list[slot]) + 1 <= bound) ++slot;
    return -1 - slot;
  }
  const int32_t kept =
      extent.lowest > 0 ? move() : (HasAvx2() ? CompactByAvx2 : Compact)(list, count, to);
  if (seen_.size() < bound) {
    seen_.resize((size_t{bound} + kPositionStep - 1) / kPositionStep * kPositionStep);
  }
  // Without marks that stay, no cost of a list depends on more than its entries.
  const bool clears = static_cast<size_t>(kept) * kSparseMarks < bound;
  const size_t marked = clears ? 0 : bound;
  NextMark(marked);
  const bool repeats = (Mark(to, kept, mark_, seen_.data()) & mark_) != 0;
  const int32_t left = repeats ? DropRepeats(to, kept, marked) : kept;
  if (clears) {
    for (int32_t i = 0; i < left; ++i) seen_[static_cast<size_t>(to[i])] = 0;
  }
  return left;
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
