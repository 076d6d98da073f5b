// Checks the index lists of an attend message; works outside the engine role.
//
// A list holds positions of its row's sequence that the row sees, which are 0 to its own, and -1
// anywhere. The engine gets each position once and no -1. The lists are checked in memory of the
// server's own, in place: no entry that a client could still write is read twice.
//
// Marks (list_marks.h) find repeated positions. They take a store for each entry, so messages with
// many entries are divided among a team's threads.
//
// Threading: one thread. Memory grows with messages and sequences: a word for each row, and each
// thread's marks, in steps of 128 Ki positions.
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

// The lists of rows [row_begin, row_begin + rows) of a step.
struct SentLists {
  int32_t row_begin = 0;
  int32_t rows = 0;
  int32_t width = 0;    // entries of each row; 0: rows differ
  int32_t entries = 0;  // of all rows
  int32_t top_k = 0;    // the most of one row
  int32_t ratio = 1;    // positions for which one list entry stands

  // bytes() is the size of the memory in which lists are checked, and offset() the place of the
  // sent lists in it.
  size_t bytes() const { return (size_t{1} + rows + entries) * sizeof(int32_t); }
  size_t offset() const { return width > 0 ? (size_t{1} + rows) * sizeof(int32_t) : 0; }
};

// Sets the begins of lists that the server's indexer makes for these rows: each has as many
// positions as its row sees, and top_k at most. `begins` is [rows + 1].
void PlaceSelectedLists(const SentLists& sent,
                        std::span<const scheduler::StepSequenceArgs> sequences, int32_t* begins);

class ListChecker final {
 public:
  // Messages with at least this many entries, 15 us of one thread, are divided among the team.
  static constexpr int32_t kSharedEntries = 32 * 1024;

  // `team` outlives it; null: the caller checks alone. Uses the best instructions of the processor,
  // but at most `most`.
  explicit ListChecker(wire::ThreadTeam* team, ListInstructions most = ListInstructions::kAvx512);

  // Afterwards `memory` holds the begin of each row's list, [rows + 1], and then the positions.
  // INVALID_ARGUMENT names the row and slot of the first invalid entry, or the invalid offset.
  // REQUIRES: the step of `sequences` has these rows.
  absl::Status Check(const SentLists& sent, std::span<const scheduler::StepSequenceArgs> sequences,
                     int32_t* memory);

 private:
  struct Lists;  // a message's

  // For rows [begin, end): moves the remaining positions of their lists together, to the place of
  // the first list, and sets their counts. Returns their end, or null if a row has an invalid
  // entry; later rows then have no count.
  int32_t* CheckRows(const Lists& lists, int32_t begin, int32_t end);
  // Does what CheckRows does, for one of `pieces` pieces. When its turn comes, moves its positions
  // to the end of the piece before.
  void CheckPiece(const Lists& lists, int32_t piece, int32_t pieces);
  void CheckAllRows(const Lists& lists);
  // Returns the error for a row whose count says that an entry is invalid.
  absl::Status RefuseRow(const Lists& lists, int32_t row) const;

  wire::ThreadTeam* const team_;
  const ListInstructions instructions_;
  // For each row: the number of remaining positions, or -1 - the slot of an invalid entry.
  std::vector<int32_t> counts_;
  std::atomic<int32_t> joined_{0};  // pieces that have been moved to their final place
  int32_t* end_ = nullptr;          // end of the joined pieces; null: a row is refused
};

}  // namespace mla::server

#endif  // MLA_SERVER_INDEX_LISTS_LIST_CHECKER_H_
