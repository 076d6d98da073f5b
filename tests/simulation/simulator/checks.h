// The checks of every answer and after every operation, and the end of a run.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_CHECKS_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_CHECKS_H_

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Checks final {
 public:
  // The world must outlive it.
  explicit Checks(World* world) : w_(*world) {}

  bool Launch();
  void CheckAnswers();
  void CheckBooks();
  void FinishAborts();
  void Settle();
  void ReleaseAll(int tenant);
  void Finish();

 private:
  void CheckAnswer(SimRequest* request);
  void CheckBeginAnswer(SimRequest* request);
  void CheckAttendAnswer(SimRequest* request);
  void CheckAttendFailure(const SimRequest& request, OracleStep* step);
  void CheckEndAnswer(SimRequest* request);
  void CheckOutput(const SimRequest& request, const OracleStep& step);
  void CheckQuotas();
  static int64_t PagesOnTheBooks(const scheduler::EngineStats& stats);
  int64_t OpenAttends() const;
  bool MayWait(const SimRequest& request);

  World& w_;
  std::vector<std::unique_ptr<SimRequest>> answered_;  // the last checked ones
  size_t next_answered_ = 0;
  int64_t bytes_cached_ = 0;  // held by the prefix cache alone, at the last check
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_CHECKS_H_
