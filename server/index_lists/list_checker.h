// Checks the index lists of an attend message, outside the engine role.
//
// A list holds positions of its row's sequence that the row sees, which are 0 to its own, and -1
// anywhere. What the engine gets holds each position once and no -1. The lists are checked in
// memory of the server's own, in place: nothing that a client could still write is looked at twice.
//
// A repeat is found by marks (list_marks.h), which take a store an entry, so lists of many entries
// are divided over a team's threads.
//
// Threading: one thread. Allocates while messages and sequences grow: a word a row, and the marks
// of a thread, in steps of 128 Ki positions.
#ifndef MLA_SERVER_INDEX_LISTS_LIST_CHECKER_H_
#define MLA_SERVER_INDEX_LISTS_LIST_CHECKER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "proto/wire/thread_team.h"
#include "scheduler/request.h"
#include "server/index_lists/list_marks.h"

namespace mla::server {

// Lists of rows [row_begin, row_begin + rows) of a step.
struct SentLists {
  int32_t row_begin = 0;
  int32_t rows = 0;
  int32_t width = 0;    // entries of every row; 0: ragged
  int32_t entries = 0;  // of all rows
  int32_t top_k = 0;    // of a row, at most
  int32_t ratio = 1;    // positions that what an entry names stands for

  // Of the memory in which they are checked, and where in it they lie as sent.
  size_t bytes() const { return (size_t{1} + rows + entries) * sizeof(int32_t); }
  size_t offset() const { return width > 0 ? (size_t{1} + rows) * sizeof(int32_t) : 0; }
};

// Where lists that the server's indexer makes for these rows begin: each has as many positions as
// its row sees, and top_k at most. `begins` is [rows + 1].
void PlaceSelectedLists(const SentLists& sent,
                        std::span<const scheduler::StepSequenceArgs> sequences, int32_t* begins);

class ListChecker final {
 public:
  // Messages with this many entries and more are divided over the team: 15 us of one thread.
  static constexpr int32_t kSharedEntries = 32 * 1024;

  // `team` outlives it; null: the caller checks alone. Uses the most that the processor has, and no
  // more than `most`.
  explicit ListChecker(wire::ThreadTeam* team, ListInstructions most = ListInstructions::kAvx512);

  // `memory` then holds where the list of each row begins, [rows + 1], and behind it the positions.
  // INVALID_ARGUMENT names row and slot of the first entry that is none, or the offset that is.
  // REQUIRES: the step of `sequences` has these rows.
  absl::Status Check(const SentLists& sent, std::span<const scheduler::StepSequenceArgs> sequences,
                     int32_t* memory);

 private:
  struct Lists;  // a message's

  // Of rows [begin, end): moves what is left of their lists to the first one's place, one behind
  // the other, and sets their counts. Returns where they end; null: a row has an entry that is
  // none, and those behind it have no count.
  int32_t* CheckRows(const Lists& lists, int32_t begin, int32_t end);
  // The same of one of `pieces` pieces; then, when its turn has come, moves it to where the one
  // before ends.
  void CheckPiece(const Lists& lists, int32_t piece, int32_t pieces);
  void CheckAllRows(const Lists& lists);
  // The answer to a row whose count says that an entry is none.
  absl::Status RefuseRow(const Lists& lists, int32_t row) const;

  wire::ThreadTeam* const team_;
  const ListInstructions instructions_;
  // By row: how many positions are left, or -1 - the slot of an entry that is none.
  std::vector<int32_t> counts_;
  std::atomic<int32_t> joined_{0};  // pieces that are where they belong
  int32_t* end_ = nullptr;          // of the last of those; null: a row is refused
};

}  // namespace mla::server

#endif  // MLA_SERVER_INDEX_LISTS_LIST_CHECKER_H_
