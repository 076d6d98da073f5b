// The part of request_validator.h for sequences and what they declare.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/field_checks.h"
#include "server/grpc/request_validator.h"

namespace mla::server {

using scheduler::Limits;

namespace {

// An answer has this many of the sequences of all tenants by default, and at most kMostListed: then
// it has at most 3 MB, which gRPC's clients take by default.
constexpr int32_t kListedByDefault = 1000;
constexpr int32_t kMostListed = 4096;

absl::Status CheckIds(int count, const Limits& limits) {
  // A request may name all sequences that can be open, and as many that have already ended.
  const int64_t limit = int64_t{limits.max_sequences} * 2;
  if (count > limit) {
    return RefuseField("sequence_ids", absl::StrCat(count),
                       absl::StrCat("at most ", limit, " entries"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParsePrefix(const v1::Prefix& message, const Limits& limits,
                         scheduler::PrefixArgs* args) {
  const int64_t tokens = message.token_ids_size(), keys = message.page_keys_size();
  MLA_RETURN_IF_ERROR(CheckCount("prefix.token_ids", tokens, limits.max_sequence_rows));
  MLA_RETURN_IF_ERROR(CheckCount("prefix.page_keys", keys, limits.max_pages_per_sequence));
  if (tokens > 0 && keys > 0) {
    return RefuseField("prefix.page_keys", "keys together with token_ids", "one of both",
                       "conflict");
  }
  for (int64_t i = 0; i < keys; ++i) {
    const size_t bytes = message.page_keys(static_cast<int>(i)).size();
    using kvcache::PrefixHasher;
    if (bytes == PrefixHasher::kPageKeyBytes || bytes == PrefixHasher::kShortPageKeyBytes) continue;
    return RefuseField(absl::StrCat("prefix.page_keys[", i, "]"), absl::StrCat(bytes, " bytes"),
                       absl::StrCat(PrefixHasher::kShortPageKeyBytes, " or ",
                                    PrefixHasher::kPageKeyBytes, " bytes"),
                       "out_of_range");
  }
  if (message.salt().size() > static_cast<size_t>(limits.max_name_bytes)) {
    return RefuseField("prefix.salt", absl::StrCat(message.salt().size(), " bytes"),
                       absl::StrCat("at most ", limits.max_name_bytes, " bytes"), "name_too_long");
  }
  args->token_ids.assign(message.token_ids().begin(), message.token_ids().end());
  args->page_keys.assign(message.page_keys().begin(), message.page_keys().end());
  args->salt = message.salt();
  // A bound above the length that a sequence can have does not bound anything.
  args->max_rows = static_cast<int64_t>(
      std::min(message.max_rows(), static_cast<uint64_t>(limits.max_sequence_rows)));
  return absl::OkStatus();
}

absl::Status ParseMatch(const v1::MatchRequest& message, const Limits& limits,
                        scheduler::MatchArgs* args) {
  if (message.first_row() > static_cast<uint64_t>(limits.max_sequence_rows)) {
    return RefuseField("first_row", absl::StrCat(message.first_row()),
                       absl::StrCat("0..", limits.max_sequence_rows), "out_of_range");
  }
  args->id = message.sequence_id();
  args->expected_epoch = message.expected_epoch();
  args->first_row = static_cast<int64_t>(message.first_row());
  absl::Status status = ParsePrefix(message.prefix(), limits, &args->prefix);
  if (!status.ok() || !args->prefix.empty()) return status;
  return RefuseField("prefix", "neither token_ids nor page_keys", "one of both", "missing");
}

absl::Status ParseProbe(const v1::ProbeRequest& message, const Limits& limits,
                        scheduler::PrefixArgs* prefix) {
  MLA_RETURN_IF_ERROR(ParsePrefix(message.prefix(), limits, prefix));
  return CheckName(message.model_id(), "model_id", prefix->empty(), limits);
}

absl::Status ParseHint(const v1::HintRequest& message, const Limits& limits,
                       scheduler::HintArgs* args) {
  constexpr int kLast = static_cast<int>(scheduler::HintKind::kDemote);
  constexpr int32_t kMostPriority = kvcache::PrefixCache::kMostPriority;
  MLA_RETURN_IF_ERROR(CheckRange("kind", static_cast<int>(message.kind()), 1, kLast));
  args->kind = static_cast<scheduler::HintKind>(message.kind());
  MLA_RETURN_IF_ERROR(CheckRange("ttl_ms", message.ttl_ms(), 0, limits.max_lease_ms));
  MLA_RETURN_IF_ERROR(CheckRange("priority", message.priority(), 0, kMostPriority));
  args->ttl_ms = message.ttl_ms();
  args->priority = static_cast<int32_t>(message.priority());
  args->id = message.sequence_id();
  args->expected_epoch = message.expected_epoch();
  MLA_RETURN_IF_ERROR(ParsePrefix(message.prefix(), limits, &args->prefix));
  if (args->id != 0 && !args->prefix.empty()) {
    return RefuseField("prefix", "a prefix together with sequence_id", "one of both", "conflict");
  }
  if (args->id != 0) return absl::OkStatus();
  args->model_id = message.model_id();
  MLA_RETURN_IF_ERROR(CheckName(message.model_id(), "model_id", false, limits));
  if (!args->prefix.empty()) return absl::OkStatus();
  return RefuseField("prefix", "neither a prefix nor sequence_id", "one of both", "missing");
}

absl::Status ParseOpen(const v1::OpenRequest& message, const Limits& limits,
                       scheduler::OpenArgs* args) {
  MLA_RETURN_IF_ERROR(CheckName(message.model_id(), "model_id", false, limits));
  MLA_RETURN_IF_ERROR(CheckName(message.request_id(), "request_id", true, limits));
  MLA_RETURN_IF_ERROR(CheckName(message.client_id(), "client_id", true, limits));
  args->model_id = message.model_id();
  args->request_id = message.request_id();
  args->client_id = message.client_id();
  MLA_RETURN_IF_ERROR(ParsePrefix(message.prefix(), limits, &args->prefix));
  return CheckLease(message.lease_ms(), limits.max_lease_ms, "lease_ms", &args->lease_ms);
}

absl::Status ParseFork(const v1::ForkRequest& message, const Limits& limits,
                       scheduler::ForkArgs* args) {
  MLA_RETURN_IF_ERROR(CheckName(message.request_id(), "request_id", true, limits));
  MLA_RETURN_IF_ERROR(CheckName(message.client_id(), "client_id", true, limits));
  args->parent = message.sequence_id();
  args->expected_epoch = message.expected_epoch();
  if (message.has_length()) {
    int64_t length = 0;
    MLA_RETURN_IF_ERROR(Narrow64(message.length(), "length", &length));
    args->length = length;
  }
  args->request_id = message.request_id();
  args->client_id = message.client_id();
  return CheckLease(message.lease_ms(), limits.max_lease_ms, "lease_ms", &args->lease_ms);
}

absl::Status ParseTruncate(const v1::TruncateRequest& message, int64_t* length) {
  return Narrow64(message.length(), "length", length);
}

absl::Status ParseGet(const v1::GetRequest& message, const Limits& limits,
                      scheduler::SequenceSelection* selection, scheduler::SequencePage* page) {
  MLA_RETURN_IF_ERROR(CheckIds(message.sequence_ids_size(), limits));
  MLA_RETURN_IF_ERROR(CheckName(message.client_id(), "client_id", true, limits));
  MLA_RETURN_IF_ERROR(CheckRange("most", message.most(), 0, kMostListed));
  const bool paged = message.all_tenants() || message.most() > 0 || message.after() > 0;
  if (message.sequence_ids_size() > 0 && paged) {
    return RefuseField("sequence_ids", absl::StrCat(message.sequence_ids_size()),
                       "none together with all_tenants, most or after", "inconsistent");
  }
  selection->ids.assign(message.sequence_ids().begin(), message.sequence_ids().end());
  selection->client_id = message.client_id();
  page->all_tenants = message.all_tenants();
  page->after = message.after();
  if (message.most() > 0) {
    page->most = static_cast<int32_t>(message.most());
  } else if (message.all_tenants()) {
    page->most = kListedByDefault;
  }
  return absl::OkStatus();
}

absl::Status ParseRenew(const v1::RenewLeaseRequest& message, const Limits& limits,
                        scheduler::SequenceSelection* selection, int64_t* lease_ms) {
  MLA_RETURN_IF_ERROR(CheckIds(message.sequence_ids_size(), limits));
  MLA_RETURN_IF_ERROR(CheckName(message.client_id(), "client_id", true, limits));
  if (message.sequence_ids_size() == 0 && message.client_id().empty()) {
    return RefuseField("sequence_ids", "neither", "sequence ids, or a client_id", "missing");
  }
  selection->ids.assign(message.sequence_ids().begin(), message.sequence_ids().end());
  selection->client_id = message.client_id();
  return CheckLease(message.lease_ms(), limits.max_lease_ms, "lease_ms", lease_ms);
}

absl::Status ParseRelease(const v1::ReleaseRequest& message, const Limits& limits,
                          std::vector<scheduler::SequenceId>* ids) {
  MLA_RETURN_IF_ERROR(CheckIds(message.sequence_ids_size(), limits));
  ids->assign(message.sequence_ids().begin(), message.sequence_ids().end());
  return absl::OkStatus();
}

}  // namespace mla::server
