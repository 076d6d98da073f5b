// Checks of a model at its registration: of its numbers against each other and the limits, and of
// what it asks of the backend. Pure functions. Errors name the field. They are INVALID_ARGUMENT, or
// UNIMPLEMENTED if only the backend lacks what is asked.
#ifndef MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_
#define MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_

#include <span>
#include <string>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"

namespace mla::scheduler {

// Returns the attention that a backend is asked to support for one form of the model.
kernels::AttentionDesc DescOf(const ModelSpec& spec, kernels::AttentionForm form);
// Replaces a query_precision of kDefault by the backend's best, and refuses one that it lacks.
absl::Status SettlePrecision(const kernels::BackendInfo& backend, ModelSpec* spec);
// Replaces an fp8_compute of kAuto: kOn if the backend offers 8-bit products and prefers them, else
// kOff. Rows of bf16 have no such products; they keep kAuto. Refuses a kOn that cannot be kept.
// REQUIRES: CheckModelSpec has passed.
absl::Status SettleFp8Compute(const kernels::AttentionBackend& backend, ModelSpec* spec);
// Returns OK if the backend computes the model's attention in the absorbed form, and has its
// indexer, window and projections if the model asks for them.
absl::Status CheckSupported(const ModelSpec& spec, const kernels::AttentionBackend& backend);
// Checks each number against its limits, and the numbers against each other. Does not ask a
// backend.
absl::Status CheckModelSpec(const ModelSpec& spec, const Limits& limits);
// Checks sinks for a model with a window: [slice->layer_count, slice->head_count] numbers, finite
// or -inf. Replaces counts of 0 by the counts they stand for. Errors of the slice name
// "layer_begin" and so on; errors of a number append its index to `field`.
absl::Status CheckSinks(const ModelSpec& spec, std::span<const float> sinks,
                        const std::string& field, SinkSlice* slice);
// Checks scales of rows: one a layer, from kSmallestKvScale to kLargestKvScale; an error appends
// the index to `field`. FAILED_PRECONDITION for a format without scales of layers.
absl::Status CheckKvScales(const ModelSpec& spec, std::span<const float> scales,
                           const std::string& field);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_MODEL_CHECKS_H_
