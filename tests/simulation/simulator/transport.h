// The transport. From messages through the real validator to requests, and back.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_TRANSPORT_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_TRANSPORT_H_

#include <map>

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Transport final : public DeviceWatcher {
 public:
  // The world must outlive it.
  explicit Transport(World* world) : w_(*world) {}

  void OnViolation(const std::string& what) override { w_.Fail(what); }
  int OnStaged(const void* host, int64_t bytes, uint64_t serial) override;
  void OnSubmitted(uint64_t serial) override;
  void OnLaunchDone(uint64_t serial) override;
  void OnLaunchFailed(uint64_t serial) override;
  void OnDone(SimRequest* request);
  v1::Attend MessageOf(const OracleStep& step, const AttendSpec& spec) const;
  bool SendBegin(const OracleBegin& begin, bool joins);
  // Adds the KV rows to the oracle's step and submits the request.
  bool SendAttend(OracleStep* step, const AttendSpec& spec);
  // Parses through the validator; sets the request's arguments and the sizes of its tensors.
  absl::Status ParseRows(const scheduler::ModelSpec& known, const OracleStep& step,
                         const AttendSpec& spec, SimRequest* request);
  void FillTensors(SimRequest* request, const OracleStep& step, const AttendSpec& spec);
  // Submits the request; returns false if the queue is full, as predicted.
  bool Submit(std::unique_ptr<SimRequest> request);
  // Lets the engine take submitted requests, and checks the answers.
  bool Poll();
  void BeforeCall();
  void AfterCall();
  void CheckGuards(const SimRequest& request);

 private:
  Reasons CheckAttend(const OracleStep& step, const AttendSpec& spec, bool* repeat) const;
  void FillLists(SimRequest* request, const OracleStep& step, const AttendSpec& spec,
                 std::byte* at) const;
  static std::vector<int32_t> ListsOf(uint64_t key, const OracleStep& step, const AttendSpec& spec);
  void RenewAfterSteps();

  World& w_;
  std::map<const std::byte*, SimRequest*> memory_;  // memory of unanswered requests
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_TRANSPORT_H_
