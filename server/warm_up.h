// Runs a test with a known answer through the whole engine before the server reports SERVING.
//
// One sequence of one row in the ABSORBED profile: with a single key the softmax weight is 1. So
// the output must be the latent part of the KV row bit for bit, and the LSE the scaled product of
// query and key. Runs under a tenant name that clients cannot have, and leaves no sequence or
// model.
#ifndef MLA_SERVER_WARM_UP_H_
#define MLA_SERVER_WARM_UP_H_

#include "absl/status/status.h"
#include "scheduler/engine.h"

namespace mla::server {

// INTERNAL if the answer is wrong; otherwise the engine's own status.
absl::Status WarmUp(scheduler::Engine* engine);

}  // namespace mla::server

#endif  // MLA_SERVER_WARM_UP_H_
