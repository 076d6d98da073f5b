// Checks that hold for a model on any backend. Pure. Errors are INVALID_ARGUMENT and name the
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

// The attention that a backend is asked to support for one form of the model.
kernels::AttentionDesc DescOf(const ModelSpec& spec, kernels::AttentionForm form);
// Replace values that a client leaves to the server. UNIMPLEMENTED if the backend lacks a requested
// value.
absl::Status SettlePrecision(const kernels::BackendInfo& backend, ModelSpec* spec);
// Call it after the checks of geometry, format and attention.
absl::Status SettleFp8Compute(const kernels::AttentionBackend& backend, ModelSpec* spec);
// Returns OK if the backend supports such a model.
absl::Status CheckSupported(const ModelSpec& spec, const kernels::AttentionBackend& backend);
absl::Status CheckModelSpec(const ModelSpec& spec, const Limits& limits);
// For a model with a window: [slice->layer_count, slice->head_count] numbers, finite or -inf.
// Replaces counts of 0 by the counts they stand for. Errors of the slice name "layer_begin" and so
// on; errors of a number append its index to `field`.
absl::Status CheckSinks(const ModelSpec& spec, std::span<const float> sinks,
                        const std::string& field, SinkSlice* slice);
// One scale a layer, from kSmallestKvScale to kLargestKvScale; an error appends the index to
// `field`. FAILED_PRECONDITION for a format without scales of layers.
absl::Status CheckKvScales(const ModelSpec& spec, std::span<const float> scales,
                           const std::string& field);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_
