// What a model must be like, whatever the backend. Pure. Errors are INVALID_ARGUMENT and name the
// field, unless said otherwise.
#ifndef MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_
#define MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_

#include <span>
#include <string>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"

namespace mla::scheduler {

// What a backend is asked for a form of the model's.
kernels::AttentionDesc DescOf(const ModelSpec& spec, kernels::AttentionForm form);
// Replace what a client leaves to the server. UNIMPLEMENTED for what the backend does not have.
absl::Status SettlePrecision(const kernels::BackendInfo& backend, ModelSpec* spec);
// After the geometry, the format and the attention have been checked.
absl::Status SettleFp8Compute(const kernels::AttentionBackend& backend, ModelSpec* spec);
// Whether the backend can have such a model.
absl::Status CheckSupported(const ModelSpec& spec, const kernels::AttentionBackend& backend);
absl::Status CheckModelSpec(const ModelSpec& spec, const Limits& limits);
// [at->layer_count, at->head_count] finite numbers or -inf, of a model with a window. Replaces
// counts of 0 by what they stand for. Errors of the slice name "layer_begin" and so on, those of a
// number have its index behind `field`.
absl::Status CheckSinks(const ModelSpec& spec, std::span<const float> sinks,
                        const std::string& field, SinkSlice* at);
// One a layer, from kSmallestKvScale to kLargestKvScale; an error has the index behind `field`.
// FAILED_PRECONDITION for a format without scales of layers.
absl::Status CheckKvScales(const ModelSpec& spec, std::span<const float> scales,
                           const std::string& field);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_
