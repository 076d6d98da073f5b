#include "server/index_lists/list_checker.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/wire/futex.h"

namespace mla::server {
namespace {

// The lists of a message are divided into at most this many pieces: several for each thread of a
// team, so that a slow thread takes fewer; with more pieces threads would wait for their turn more
// often.
constexpr int32_t kMostPieces = 16;
// Spins until the piece before has been joined, for some tens of microseconds: this is longer than
// a check takes, so a longer wait means that its thread lacks a core.
constexpr int kSpinsForPiece = 2000;

// Walks over the rows of a step, with the number of positions that each row sees.
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
  // REQUIRES: row_ is not past the last row, because no sequence follows.
  void Settle() {
    while (row_ >= sequence_->rows) {
      row_ -= sequence_->rows;
      ++sequence_;
    }
  }

  std::span<const scheduler::StepSequenceArgs>::iterator sequence_;
  int32_t row_;  // row of that sequence in the step
};

absl::Status RefuseOffset(const SentLists& sent, int32_t row, int32_t got) {
  return RefuseField(
      "payload", absl::StrCat("offset ", row, ": ", got),
      absl::StrCat("row offsets that ascend from 0 to ", sent.entries, " by at most ", sent.top_k),
      "list_offset");
}

// `begins`: begins of ragged lists, as sent.
absl::Status CheckOffsets(const SentLists& sent, const int32_t* begins) {
  if (sent.width == 0 && begins[0] != 0) return RefuseOffset(sent, 0, begins[0]);
  for (int32_t row = 0, begin = 0; row < sent.rows; ++row) {
    const int32_t end = sent.width > 0 ? begin + sent.width : begins[row + 1];
    const bool last = row + 1 == sent.rows;
    if (end < begin || end > sent.entries || end - begin > sent.top_k ||
        (last && end != sent.entries)) {
      return RefuseOffset(sent, row + 1, end);
    }
    begin = end;
  }
  return absl::OkStatus();
}

// Returns the first row of a piece; the lengths of `pieces` pieces differ by at most one row.
int32_t FirstRow(int32_t rows, int32_t piece, int32_t pieces) {
  return static_cast<int32_t>(int64_t{rows} * piece / pieces);
}

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

ListChecker::ListChecker(wire::ThreadTeam* team, ListInstructions most)
    : team_(team), instructions_(std::min(most, MostListInstructions())) {}

struct ListChecker::Lists {
  const SentLists& sent;
  std::span<const scheduler::StepSequenceArgs> sequences;
  const int32_t* begins;  // for ragged lists
  int32_t* entries;

  int32_t begin(int32_t row) const { return sent.width > 0 ? row * sent.width : begins[row]; }
};

int32_t* ListChecker::CheckRows(const Lists& lists, int32_t begin, int32_t end) {
  // One for each thread instead of each checker: there are fewer threads than streams.
  thread_local ListMarks marks;
  RowCursor cursor(lists.sequences, lists.sent.row_begin + begin);
  int32_t* target = lists.entries + lists.begin(begin);
  for (int32_t row = begin; row < end; ++row) {
    const int32_t from = lists.begin(row);
    int32_t& count = counts_[static_cast<size_t>(row)];
    count = marks.Take(instructions_, lists.entries + from, lists.begin(row + 1) - from,
                       cursor.visible() / lists.sent.ratio, target);
    if (count < 0) return nullptr;
    target += count;
    if (row + 1 < end) cursor.Next();
  }
  return target;
}

void ListChecker::CheckPiece(const Lists& lists, int32_t piece, int32_t pieces) {
  const int32_t begin = FirstRow(lists.sent.rows, piece, pieces);
  const int32_t* const end = CheckRows(lists, begin, FirstRow(lists.sent.rows, piece + 1, pieces));
  int32_t joined = joined_.load(std::memory_order_acquire);
  for (int spins = 0; joined != piece; joined = joined_.load(std::memory_order_acquire)) {
    if (spins++ < kSpinsForPiece) {
      wire::SpinPause();
    } else {
      joined_.wait(joined, std::memory_order_acquire);
    }
  }
  // This thread's cache still has the entries that it checked last. Entries after a refused row are
  // not moved.
  if (end == nullptr || end_ == nullptr) {
    end_ = nullptr;
  } else {
    const int32_t* const from = lists.entries + lists.begin(begin);
    if (end_ != from) std::memmove(end_, from, static_cast<size_t>(end - from) * sizeof(*from));
    end_ += end - from;
  }
  joined_.store(piece + 1, std::memory_order_release);
  joined_.notify_all();
}

void ListChecker::CheckAllRows(const Lists& lists) {
  const int32_t rows = lists.sent.rows, pieces = std::min(rows, kMostPieces);
  if (team_ != nullptr && lists.sent.entries >= kSharedEntries) {
    joined_.store(0, std::memory_order_relaxed);
    end_ = lists.entries;
    const auto check = [&](uint32_t piece) {
      CheckPiece(lists, static_cast<int32_t>(piece), pieces);
    };
    if (team_->Run(static_cast<uint32_t>(pieces), check)) return;
  }
  (void)CheckRows(lists, 0, rows);
}

absl::Status ListChecker::RefuseRow(const Lists& lists, int32_t row) const {
  const SentLists& sent = lists.sent;
  const int32_t slot = -1 - counts_[static_cast<size_t>(row)];
  const int32_t bound = RowCursor(lists.sequences, sent.row_begin + row).visible() / sent.ratio;
  return RefuseField("payload",
                     absl::StrCat(lists.entries[lists.begin(row) + slot], " at row ",
                                  sent.row_begin + row, ", slot ", slot, " of the index lists"),
                     absl::StrCat("-1, or 0..", bound - 1, ": the ",
                                  sent.ratio == 1 ? "positions" : "entries", " that the row sees"),
                     "list_position");
}

absl::Status ListChecker::Check(const SentLists& sent,
                                std::span<const scheduler::StepSequenceArgs> sequences,
                                int32_t* memory) {
  int32_t* const begins = memory;
  MLA_RETURN_IF_ERROR(CheckOffsets(sent, begins));
  const Lists lists{sent, sequences, begins, memory + sent.rows + 1};
  counts_.assign(static_cast<size_t>(sent.rows), 0);
  CheckAllRows(lists);
  const auto bad = std::find_if(counts_.begin(), counts_.end(), [](int32_t n) { return n < 0; });
  if (bad != counts_.end()) return RefuseRow(lists, static_cast<int32_t>(bad - counts_.begin()));
  begins[0] = 0;
  for (int32_t row = 0; row < sent.rows; ++row) {
    begins[row + 1] = begins[row] + counts_[static_cast<size_t>(row)];
  }
  return absl::OkStatus();
}

}  // namespace mla::server
