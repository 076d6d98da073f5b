// The messages of one transfer of weights, dealt to several calls as a sender with several streams
// would send them, and spoilt in one way or none.
#ifndef MLA_TESTS_SIMULATION_HAND_OVER_DEALT_WEIGHTS_H_
#define MLA_TESTS_SIMULATION_HAND_OVER_DEALT_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "mla/v1/model.pb.h"

namespace mla::simulation {

// What is wrong with a transfer: nothing may come of it then.
enum class WeightsFault {
  kNone,
  kCut,        // a part breaks off
  kRepeated,   // a part brings what another call brings
  kLost,       // a head that no call brings
  kLate,       // a part comes when the transfer has ended
  kMiscounted  // the trailer tells another number of parts
};
inline constexpr uint64_t kWeightsFaults = 6;

struct DealtWeights {
  using Messages = std::vector<v1::UploadWeightsRequest>;
  WeightsFault fault = WeightsFault::kNone;
  std::vector<Messages> calls;  // the transfer's own, then its parts
  // The part that the fault is of, in `calls`.
  size_t spoilt = 0;
};

// Deals the messages of a call that brings all. `pick(n)` draws a number below n. With a fault
// there is at least one part.
DealtWeights DealWeights(const DealtWeights::Messages& whole, WeightsFault fault,
                         const std::function<uint64_t(uint64_t)>& pick);

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_HAND_OVER_DEALT_WEIGHTS_H_
