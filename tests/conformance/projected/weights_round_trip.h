// Weights that a backend was given and gives back: the same bits, whatever form it keeps them in.
#ifndef MLA_TESTS_CONFORMANCE_PROJECTED_WEIGHTS_ROUND_TRIP_H_
#define MLA_TESTS_CONFORMANCE_PROJECTED_WEIGHTS_ROUND_TRIP_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"

namespace mla::conformance {

// Loads random finite weights of all heads into the slot: W_UK and W_UV in two ranges of heads, and
// with a shape W_UQ and W_O. Then reads each head. INTERNAL names the first one that differs, or a
// head that can be read although it was not loaded. REQUIRES: the backend is configured, the slot
// is empty, and there are at least two heads.
absl::Status CheckWeightsComeBack(kernels::AttentionBackend& backend, int32_t slot,
                                  const kernels::Geometry& geometry,
                                  const kernels::ProjectedShape& shape);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PROJECTED_WEIGHTS_ROUND_TRIP_H_
