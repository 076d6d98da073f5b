#include "server/attend/list_checker.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::server {
namespace {

constexpr int32_t kBlock = 64;               // entries of a loop that compilers make a vector of
constexpr size_t kPositionStep = 64 * 1024;  // by which the memory of positions grows

struct Order {
  bool below;      // every entry is a position below the bound
  bool ascending;  // every entry is larger than the one before it
};

// One source for all instruction sets: the attribute of the caller decides.
[[gnu::always_inline]] inline Order OrderOf(const int32_t* list, int32_t count, uint32_t bound) {
  uint32_t outside = 0, falls = 0;
  int32_t i = 0;
  for (; i + kBlock < count; i += kBlock) {
    for (int32_t k = 0; k < kBlock; ++k) {
      outside |= static_cast<uint32_t>(static_cast<uint32_t>(list[i + k]) >= bound);
      falls |= static_cast<uint32_t>(list[i + k] >= list[i + k + 1]);
    }
  }
  for (; i < count; ++i) {
    outside |= static_cast<uint32_t>(static_cast<uint32_t>(list[i]) >= bound);
    if (i + 1 < count) falls |= static_cast<uint32_t>(list[i] >= list[i + 1]);
  }
  return {outside == 0, falls == 0};
}

#if defined(__x86_64__)
[[gnu::target("avx2"), gnu::optimize("O3")]] Order OrderByAvx2(const int32_t* list, int32_t count,
                                                               uint32_t bound) {
  return OrderOf(list, count, bound);
}
#endif

Order FindOrder(const int32_t* list, int32_t count, int32_t visible) {
  const auto bound = static_cast<uint32_t>(visible);
#if defined(__x86_64__)
  static const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;
  if (kHasAvx2) return OrderByAvx2(list, count, bound);
#endif
  return OrderOf(list, count, bound);
}

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

void ListChecker::NextRow() {
  if (++row_ != 0) return;
  std::fill(seen_.begin(), seen_.end(), uint8_t{0});
  row_ = 1;
}

bool ListChecker::Repeats(const int32_t* list, int32_t count) {
  NextRow();
  uint8_t* const seen = seen_.data();
  const uint8_t row = row_;
  int32_t repeats = 0;
  for (int32_t i = 0; i < count; ++i) {
    uint8_t* const position = seen + list[i];
    repeats += static_cast<int32_t>(*position == row);
    *position = row;
  }
  return repeats != 0;
}

int32_t ListChecker::Take(const int32_t* list, int32_t count, int32_t visible, int32_t* to) {
  if (seen_.size() < static_cast<size_t>(visible)) {
    seen_.resize((static_cast<size_t>(visible) + kPositionStep - 1) / kPositionStep *
                 kPositionStep);
  }
  const Order order = FindOrder(list, count, visible);
  if (order.below && (order.ascending || !Repeats(list, count))) {
    if (to != list) std::memmove(to, list, static_cast<size_t>(count) * sizeof(int32_t));
    return count;
  }
  NextRow();
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = list[i];
    if (position == -1) continue;
    if (position < 0 || position >= visible) return -1 - i;
    uint8_t& seen = seen_[static_cast<size_t>(position)];
    if (seen == row_) continue;
    seen = row_;
    to[kept++] = position;
  }
  return kept;
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
    const int32_t taken = Take(entries + from, end - from, cursor.visible(), entries + kept);
    if (taken < 0) {
      const int32_t slot = -1 - taken;
      return RefuseField(
          "payload",
          absl::StrCat(entries[from + slot], " at row ", sent.row_begin + row, ", slot ", slot,
                       " of the index lists"),
          absl::StrCat("-1, or 0..", cursor.visible() - 1, ": the positions that the row sees"),
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
