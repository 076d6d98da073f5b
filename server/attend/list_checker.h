// Checks the index lists of an attend message, outside the engine role.
//
// A list holds positions of its row's sequence that the row sees, which are 0 to its own, and -1
// anywhere. What the engine gets holds each position once and no -1. The lists are checked in
// memory of the server's own, in place: nothing that a client could still write is looked at twice.
//
// Ascending lists are checked fastest: what follows is larger, so nothing is repeated. For the
// others the positions are marked, in memory that stays in the first-level cache whatever the
// context, and the marks are counted: by bytes where few positions are visible, else by bits. A
// list has a value of its own for its bytes, so that they are cleared once in 255 lists; bits are
// cleared as they are counted. Only a list with fewer marks than positions is looked at entry by
// entry.
//
// Threading: one thread. Allocates while sequences grow, in steps of 128 Ki positions.
#ifndef MLA_SERVER_ATTEND_LIST_CHECKER_H_
#define MLA_SERVER_ATTEND_LIST_CHECKER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/request.h"

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
  // What the passes over lists are written for; each in all that the one before it needs.
  enum class Instructions : uint8_t { kPortable, kAvx2, kAvx512 };

  // Uses the most that the processor has, and no more than `most`.
  explicit ListChecker(Instructions most = Instructions::kAvx512);

  // `memory` then holds where the list of each row begins, [rows + 1], and behind it the positions.
  // INVALID_ARGUMENT names row and slot of the first entry that is none, or the offset that is.
  // REQUIRES: the step of `sequences` has these rows.
  absl::Status Check(const SentLists& sent, std::span<const scheduler::StepSequenceArgs> sequences,
                     int32_t* memory);

 private:
  // Moves a row's positions to `to`, which may be `list` or lie before it. Returns how many they
  // are, or -1 - the slot of an entry that is no position below `visible`.
  int32_t Take(const int32_t* list, int32_t count, int32_t visible, int32_t* to);
  // Of a list that does not ascend, by what marks its positions.
  int32_t TakeByBytes(const int32_t* list, int32_t count, uint32_t bound, int32_t* to);
  int32_t TakeByBits(const int32_t* list, int32_t count, uint32_t bound, int32_t* to);
  // Keeps the first of equal positions. Returns how many are left.
  int32_t KeepFirst(int32_t* positions, int32_t count, uint32_t bound);
  uint32_t* Words(uint32_t bound);  // words_, grown for positions below the bound

  static constexpr uint32_t kByteMarks = 8 * 1024;  // positions

  const Instructions instructions_;

  std::vector<uint8_t> seen_;    // by position: the mark of the last list that has it, or 0
  uint8_t mark_ = 0;             // of the last list
  std::vector<uint32_t> words_;  // a bit of every position; all 0 between lists
};

}  // namespace mla::server

#endif  // MLA_SERVER_ATTEND_LIST_CHECKER_H_
