// Export and import of rows, and sequences that are restored from them. Other operations run in
// between, among them steps and copies of the same tenant. A launch then has moves of several
// imports, and page work that was queued after theirs.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_COPIES_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_COPIES_H_

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Copies final {
 public:
  // The world must outlive it.
  explicit Copies(World* world) : w_(*world) {}

  // Exports rows of one sequence and imports them into another.
  bool Copy();
  void ReleaseOne(int tenant, uint64_t id);

 private:
  bool ExportRows(const OracleSequence& source, int64_t first, int64_t end, CopiedRows* rows);
  // `restored` is the id that the new sequence had before; 0: it gets a new id.
  void ImportRows(const CopiedRows& rows, uint64_t behind, uint64_t restored);
  bool ReserveImport(const CopiedRows& rows, int model, uint64_t behind, uint64_t restored,
                     scheduler::MovingPages* to);
  // Moves every part of all groups; returns false if one fails.
  bool MoveParts(int tenant, const scheduler::MovingPages& pages, bool in,
                 std::vector<std::vector<std::byte>>* payloads);
  // Other operations, usually.
  void Interlude();
  bool HasRows(const OracleSequence* sequence, const scheduler::PageMove& part) const;
  // Returns false if the engine has refused it, as predicted.
  bool HandOver(int tenant, const scheduler::PageMove& part, std::vector<SimMove*>* moves);
  // Waits until all have been moved; returns false if one was not.
  bool AwaitMoves(std::vector<SimMove*>* moves);

  World& w_;
  int inside_ = 0;  // copies that surround this operation
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_COPIES_H_
