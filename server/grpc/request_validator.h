// Turns messages of the contract into arguments of the engine, or reports their faults.
//
// Pure functions: no state, no engine, no transport. Every number is checked before it is narrowed,
// and products are 64-bit with overflow checks. A refusal names the field path, the value and the
// accepted values. Code after this file does not validate sizes again. Rules that need the engine's
// state (lengths, epochs, order of rows) are the engine's.
//
// Unless noted, each function returns OK and fills its output, or returns INVALID_ARGUMENT.
#ifndef MLA_SERVER_GRPC_REQUEST_VALIDATOR_H_
#define MLA_SERVER_GRPC_REQUEST_VALIDATOR_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "mla/v1/attention.pb.h"
#include "mla/v1/cache.pb.h"
#include "mla/v1/model.pb.h"
#include "mla/v1/sequence.pb.h"
#include "proto/wire/fp8/fp8_tensor.h"
#include "scheduler/engine.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"
#include "scheduler/request.h"

namespace mla::server {

// Byte sizes of an attend message's tensors, checked against overflow and the message limit.
struct AttendSizes {
  // Sizes that the engine reads. The sizes of kv and q are the decoded ones.
  int64_t kv_bytes = 0;
  int64_t q_bytes = 0;
  int64_t o_bytes = 0;
  int64_t lse_bytes = 0;
  int64_t list_bytes = 0;         // index lists as sent
  int32_t list_width = 0;         // entries of each row; 0: rows differ, or there are no lists
  int32_t list_entries = 0;       // in all rows
  int32_t list_top_k = 0;         // the most in one row
  int32_t list_ratio = 1;         // positions for which one list entry stands
  bool selects = false;           // list_bytes are bytes of index inputs
  int64_t lists_out_bytes = 0;    // 0 unless the client wants the indexer's lists
  wire::Fp8Tensor kv_fp8, q_fp8;  // empty unless the tensor was sent as 8-bit floats

  int64_t kv_sent() const { return kv_fp8.vectors > 0 ? kv_fp8.bytes() : kv_bytes; }
  int64_t q_sent() const { return q_fp8.vectors > 0 ? q_fp8.bytes() : q_bytes; }
};

// A reply may need this number of header bytes in addition to its payload.
inline constexpr int64_t kReplyHeaderBytes = 512;

// Returns the most bytes of an Attend stream's request without its payload: a BeginStep of as many
// sequences as a step may have, and what else a message carries. Its reader compares them before it
// parses, since two bytes of an empty StepSequence become a hundred of memory.
size_t MostHeaderBytes(const scheduler::Limits& limits);

// For ParseAttend: neither the message nor its reply contains the tensors.
inline constexpr int64_t kTensorsElsewhere = -1;

// `total_rows` is set to the sum of the sequences' rows.
absl::Status ParseBeginStep(const v1::BeginStep& message, const scheduler::Limits& limits,
                            scheduler::BeginStepArgs* args, int32_t* total_rows);

// Checks slices, profile and dtypes of an Attend in a step of `total_rows` rows. Checks that
// `payload_bytes` agrees with them (unless it is kTensorsElsewhere), and that the reply stays
// within `message_bytes`. `positions` are those of the step's rows; models with a window, whose
// rows bring entries, need them. REQUIRES: `*args` is as constructed; its pointers stay null.
// FAILED_PRECONDITION if the model does not have an expanded form.
absl::Status ParseAttend(const v1::Attend& message, const scheduler::ModelSpec& model,
                         int32_t total_rows, int64_t payload_bytes, int64_t message_bytes,
                         scheduler::AttendArgs* args, AttendSizes* sizes,
                         const scheduler::StepPositions& positions = nullptr);

absl::Status ParseEndStep(const v1::EndStep& message, const scheduler::Limits& limits,
                          scheduler::EndStepArgs* args);

// The contract and the kernels have the same numbers for the formats.
constexpr v1::KvFormat ToProto(kernels::KvFormat format) {
  return static_cast<v1::KvFormat>(format);
}
static_assert(ToProto(kernels::KvFormat::kBf16) == v1::KV_FORMAT_BF16);
static_assert(ToProto(kernels::KvFormat::kFp8Tensor) == v1::KV_FORMAT_FP8_TENSOR);
static_assert(ToProto(kernels::KvFormat::kFp8Row) == v1::KV_FORMAT_FP8_ROW);
static_assert(ToProto(kernels::KvFormat::kFp8Page) == v1::KV_FORMAT_FP8_PAGE);

absl::Status ParseModelSpec(const v1::ModelSpec& message, const scheduler::Limits& limits,
                            scheduler::ModelSpec* spec);
// Fills the message from the spec in force.
void FillModel(const scheduler::ModelSpec& from, v1::ModelSpec* message);

absl::Status ParseOpen(const v1::OpenRequest& message, const scheduler::Limits& limits,
                       scheduler::OpenArgs* args);
absl::Status ParseMatch(const v1::MatchRequest& message, const scheduler::Limits& limits,
                        scheduler::MatchArgs* args);
absl::Status ParseProbe(const v1::ProbeRequest& message, const scheduler::Limits& limits,
                        scheduler::PrefixArgs* prefix);
absl::Status ParseHint(const v1::HintRequest& message, const scheduler::Limits& limits,
                       scheduler::HintArgs* args);
absl::Status ParsePrefix(const v1::Prefix& message, const scheduler::Limits& limits,
                         scheduler::PrefixArgs* args);
absl::Status ParseFork(const v1::ForkRequest& message, const scheduler::Limits& limits,
                       scheduler::ForkArgs* args);
absl::Status ParseTruncate(const v1::TruncateRequest& message, int64_t* length);
absl::Status ParseGet(const v1::GetRequest& message, const scheduler::Limits& limits,
                      scheduler::SequenceSelection* selection, scheduler::SequencePage* page);
absl::Status ParseRenew(const v1::RenewLeaseRequest& message, const scheduler::Limits& limits,
                        scheduler::SequenceSelection* selection, int64_t* lease_ms);
absl::Status ParseRelease(const v1::ReleaseRequest& message, const scheduler::Limits& limits,
                          std::vector<scheduler::SequenceId>* ids);

// Checks a name of the client's choice: valid when 1 (or 0 if `optional`) .. max_name_bytes bytes
// without characters that show nothing or turn text around, as operators read it on terminals.
absl::Status CheckName(const std::string& name, std::string_view field, bool optional,
                       const scheduler::Limits& limits);

}  // namespace mla::server

#endif  // MLA_SERVER_GRPC_REQUEST_VALIDATOR_H_
