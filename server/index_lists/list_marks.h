// The positions of an index list, each once: one list at a time.
//
// Ascending lists are passed fastest: what follows is larger, so nothing is repeated. For the
// others the positions are marked, in memory that stays in the first-level cache whatever the
// context, and the marks are counted: by bytes where few positions are visible, else by bits. A
// list has a value of its own for its bytes, so that they are cleared once in 255 lists; bits are
// cleared as they are counted. Only a list with fewer marks than positions is looked at entry by
// entry.
//
// Threading: one thread. Allocates while sequences grow, in steps of 128 Ki positions.
#ifndef MLA_SERVER_INDEX_LISTS_LIST_MARKS_H_
#define MLA_SERVER_INDEX_LISTS_LIST_MARKS_H_

#include <cstdint>
#include <vector>

namespace mla::server {

// What the passes over lists are written for; each in all that the one before it needs.
enum class ListInstructions : uint8_t { kPortable, kAvx2, kAvx512 };

// Of the processor.
ListInstructions MostListInstructions();

class ListMarks final {
 public:
  // Moves a row's positions to `to`, which may be `list` or lie before it; writes nothing behind
  // what it has read. Returns how many they are, or -1 - the slot of an entry that is neither -1
  // nor a position below `visible`. REQUIRES: the processor has the instructions.
  int32_t Take(ListInstructions instructions, const int32_t* list, int32_t count, int32_t visible,
               int32_t* to);

 private:
  struct Passes;
  static const Passes& PassesOf(ListInstructions instructions);
  // Of a list that does not ascend.
  int32_t TakeByBytes(const Passes& passes, const int32_t* list, int32_t count, uint32_t bound,
                      int32_t* to);
  int32_t TakeByBits(const Passes& passes, const int32_t* list, int32_t count, uint32_t bound,
                     int32_t* to);
  // Keeps the first of equal positions. Returns how many are left.
  int32_t KeepFirst(int32_t* positions, int32_t count, uint32_t bound);
  uint32_t* Words(uint32_t bound);  // words_, grown for positions below the bound

  static constexpr uint32_t kByteMarks = 8 * 1024;  // positions

  std::vector<uint8_t> seen_;    // by position: the mark of the last list that has it, or 0
  uint8_t mark_ = 0;             // of the last list
  std::vector<uint32_t> words_;  // a bit of every position; all 0 between lists
};

}  // namespace mla::server

#endif  // MLA_SERVER_INDEX_LISTS_LIST_MARKS_H_
