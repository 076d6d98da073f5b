// Sequences that declare their rows and take rows of others; hints, and tiers.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_PREFIXES_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_PREFIXES_H_

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Prefixes final {
 public:
  // The world must outlive it.
  explicit Prefixes(World* world) : w_(*world) {}

  bool Match();
  DrawnPrefix DrawPrefix(int model);
  size_t MostPages(int model) const;  // most pages that a sequence may declare
  static void FillPrefix(const DrawnPrefix& drawn, v1::Prefix* message);
  // Checks that the found pages may be found. Notes them, and returns their number.
  size_t CheckFound(const scheduler::SequenceInfo& info, const DrawnPrefix& drawn);
  // Pages that were not found will hold different rows, so they get new names.
  void RenameFrom(uint64_t id, size_t found, DrawnPrefix drawn);
  // Changes bytes of the host tier, or of the tiers' file.
  bool Damage();
  // Sends a hint about declared pages, and waits for its moves.
  bool Hint();
  void CountPinned(const scheduler::EngineStats& stats);
  void SendHint(scheduler::HintKind kind, int model, const DrawnPrefix& drawn);

 private:
  void DamageFile();
  // Waits until requested rows of slower tiers are back.
  void AwaitTiers();
  // Draws a name of an existing model, with at least one page, which usually was published. Returns
  // false if there is none.
  bool DrawHinted(History* hinted);
  // Releases sequences whose rows begin with these pages, except those in a step.
  void ReleaseHolders(const History& hinted);

  World& w_;
  std::vector<History> histories_;  // declared pages of sequences
  History hinted_;                  // of the last hint; without a model: used up
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_PREFIXES_H_
