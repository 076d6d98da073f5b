// Reduces an index list to its distinct positions, one list at a time.
//
// Ascending lists are passed fastest: each entry is larger than the one before, so none repeats.
// For the others the positions are marked, in memory that stays in the first-level cache whatever
// the context, and the marks are counted: by bytes where few positions are visible, else by bits.
// Each list has its own value for its bytes, so bytes are cleared only once in 255 lists; bits are
// cleared as they are counted. Only a list with fewer marks than positions is looked at entry by
// entry.
//
// Threading: one thread. Memory grows with the sequences, in steps of 128 Ki positions.
#ifndef MLA_SERVER_INDEX_LISTS_LIST_MARKS_H_
#define MLA_SERVER_INDEX_LISTS_LIST_MARKS_H_

#include <cstdint>
#include <vector>

namespace mla::server {

// Instruction sets that the passes over lists are written for; each includes the one before it.
enum class ListInstructions : uint8_t { kPortable, kAvx2, kAvx512 };

// Returns the best set that the processor has.
ListInstructions MostListInstructions();

class ListMarks final {
 public:
  // Moves a row's positions to `target`, which may be `list` or lie before it; writes only where it
  // has read already. Returns how many they are, or -1 - the slot of an entry that is neither -1
  // nor a position below `visible`. REQUIRES: the processor has the instructions.
  int32_t Take(ListInstructions instructions, const int32_t* list, int32_t count, int32_t visible,
               int32_t* target);

 private:
  struct Passes;
  static const Passes& PassesOf(ListInstructions instructions);
  // Handles lists that do not ascend.
  int32_t TakeByBytes(const Passes& passes, const int32_t* list, int32_t count, uint32_t bound,
                      int32_t* target);
  int32_t TakeByBits(const Passes& passes, const int32_t* list, int32_t count, uint32_t bound,
                     int32_t* target);
  // Keeps the first of several equal positions. Returns the number kept.
  int32_t KeepFirst(int32_t* positions, int32_t count, uint32_t bound);
  uint32_t* Words(uint32_t bound);  // words_, grown to hold all positions below the bound

  static constexpr uint32_t kByteMarks = 8 * 1024;  // positions

  // For each position the mark of the last list that contained it, or 0.
  std::vector<uint8_t> seen_;
  uint8_t mark_ = 0;             // of the latest list
  std::vector<uint32_t> words_;  // one bit for each position; all 0 between lists
};

}  // namespace mla::server

#endif  // MLA_SERVER_INDEX_LISTS_LIST_MARKS_H_
