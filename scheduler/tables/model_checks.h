// What a model must be like, whatever the backend. Pure. Errors are INVALID_ARGUMENT and name the
// field, unless said otherwise.
#ifndef MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_
#define MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_

#include <span>
#include <string>

#include "absl/status/status.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"

namespace mla::scheduler {

absl::Status CheckModelSpec(const ModelSpec& spec, const Limits& limits);
// [layers, num_heads] numbers or infinities, of a model with a window.
absl::Status CheckSinks(const ModelSpec& spec, std::span<const float> sinks,
                        const std::string& field);
// One a layer, from kSmallestKvScale to kLargestKvScale; an error has the index behind `field`.
// FAILED_PRECONDITION for a format without scales of layers.
absl::Status CheckKvScales(const ModelSpec& spec, std::span<const float> scales,
                           const std::string& field);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_
