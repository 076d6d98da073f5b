// Sequences and prefixes.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "client/c/connection.h"
#include "client/c/handles.h"
#include "client/cpp/cluster/placement.h"

namespace mla::capi {
namespace {

constexpr size_t kPageKeyBytes = 32;
static_assert(MLA_PAGE_NAME_BYTES == client::kPageNameBytes);

template <typename Sequence>
absl::Status Give(absl::StatusOr<Sequence> sequence, mla_sequence** out) {
  if (!sequence.ok()) return sequence.status();
  *out = new mla_sequence{*std::move(sequence)};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::Prefix> PrefixOf(const mla_prefix* given) {
  mla_prefix known;
  MLA_RETURN_IF_ERROR(Read(given, false, "prefix", &known));
  v1::Prefix prefix;
  if (known.token_count > 0) {
    absl::Status status = CheckNotNull(known.token_ids, "prefix.token_ids");
    if (!status.ok()) return status;
    prefix.mutable_token_ids()->Add(known.token_ids, known.token_ids + known.token_count);
  }
  if (known.page_key_count > 0) {
    absl::Status status = CheckNotNull(known.page_keys, "prefix.page_keys");
    if (!status.ok()) return status;
  }
  const size_t bytes = known.page_key_bytes == 0 ? kPageKeyBytes : known.page_key_bytes;
  if (bytes != kPageKeyBytes && bytes != MLA_PAGE_NAME_BYTES) {
    return Refuse("prefix.page_key_bytes", "0, 16 or 32", std::to_string(bytes));
  }
  for (size_t i = 0; i < known.page_key_count; ++i) {
    prefix.add_page_keys(static_cast<const char*>(known.page_keys) + i * bytes, bytes);
  }
  prefix.set_salt(Text(known.salt));
  prefix.set_max_rows(known.max_rows);
  return prefix;
}

}  // namespace mla::capi

using mla::capi::CheckNotNull;
using mla::capi::Guard;

mla_code mla_page_names(const uint32_t* token_ids, size_t token_count, uint32_t page_size,
                        const void* salt, size_t salt_bytes, void* names, mla_error** error) {
  return Guard(error, [&]() -> absl::Status {
    const std::pair<const void*, const char*> given[] = {
        {token_ids, "token_ids"}, {salt, "salt"}, {names, "names"}};
    for (const auto& [pointer, field] : given) {
      MLA_RETURN_IF_ERROR(CheckNotNull(pointer, field));
    }
    MLA_ASSIGN_OR_RETURN(const auto page_names,
                         mla::client::PageNames({token_ids, token_count}, page_size,
                                                {static_cast<const char*>(salt), salt_bytes}));
    auto* to = static_cast<char*>(names);
    for (const std::string& name : page_names) to = std::copy(name.begin(), name.end(), to);
    return absl::OkStatus();
  });
}

mla_code mla_client_probe(mla_client* client, const char* model_id, const mla_prefix* prefix,
                          mla_probe* probe, mla_error** error) {
  return Guard(error, [&] {
    mla_probe known{};
    absl::Status status = mla::capi::Read(probe, true, "probe", &known);
    if (!status.ok()) return status;
    const auto asked = mla::capi::PrefixOf(prefix);
    if (!asked.ok()) return asked.status();
    const std::string model = mla::capi::Text(model_id);
    const auto reply = client->cluster != nullptr ? client->cluster->ProbeHome(model, *asked)
                                                  : client->client->Probe(model, *asked);
    if (!reply.ok()) return reply.status();
    known.boot_id = reply->boot_id();
    known.rows_asked = reply->rows_asked();
    known.rows_in_pool = reply->rows_in_pool();
    known.rows_in_host = reply->rows_in_host();
    known.rows_in_file = reply->rows_in_file();
    known.bytes_free = reply->kv_bytes_free();
    known.bytes_cached = reply->kv_bytes_cached();
    known.bytes_total = reply->kv_bytes_total();
    known.wait_us = reply->wait_us();
    known.sequences = reply->sequences();
    known.queued_requests = reply->queued_requests();
    known.draining = reply->draining() ? 1 : 0;
    mla::capi::Write(known, probe);
    return absl::OkStatus();
  });
}

mla_code mla_sequence_open(mla_client* client, const char* model_id, const mla_prefix* prefix,
                           mla_sequence** out, mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(out, "out"); !status.ok()) return status;
    *out = nullptr;
    if (absl::Status status = CheckNotNull(model_id, "model_id"); !status.ok()) return status;
    const auto known = mla::capi::PrefixOf(prefix);
    if (!known.ok()) return known.status();
    if (client->cluster != nullptr) {
      return mla::capi::Give(client->cluster->OpenSequence(model_id, *known), out);
    }
    return mla::capi::Give(client->client->OpenSequence(model_id, "", *known), out);
  });
}

uint64_t mla_sequence_id(const mla_sequence* sequence) {
  return sequence->With([](const auto& one) { return one.id(); });
}
uint64_t mla_sequence_epoch(const mla_sequence* sequence) {
  return sequence->With([](const auto& one) { return one.epoch(); });
}
uint64_t mla_sequence_length(const mla_sequence* sequence) {
  return sequence->With([](const auto& one) { return one.length(); });
}

mla_code mla_sequence_fork(mla_sequence* sequence, uint64_t length, mla_sequence** out,
                           mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(out, "out"); !status.ok()) return status;
    *out = nullptr;
    const bool all = length == std::numeric_limits<uint64_t>::max();
    return sequence->With([&](auto& one) {
      return mla::capi::Give(one.Fork(all ? std::nullopt : std::optional(length)), out);
    });
  });
}

mla_code mla_sequence_match(mla_sequence* sequence, const mla_prefix* prefix, uint64_t first_row,
                            mla_prefix_match* match, mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(prefix, "prefix"); !status.ok()) return status;
    const auto known = mla::capi::PrefixOf(prefix);
    if (!known.ok()) return known.status();
    const auto prefix_match =
        sequence->With([&](auto& one) { return one.Match(*known, first_row); });
    if (!prefix_match.ok()) return prefix_match.status();
    mla_prefix_match result{};
    result.rows = prefix_match->rows();
    result.end = static_cast<mla_match_end>(prefix_match->end());
    mla::capi::Write(result, match);
    return absl::OkStatus();
  });
}

mla_code mla_sequence_truncate(mla_sequence* sequence, uint64_t length, mla_error** error) {
  return Guard(error,
               [&] { return sequence->With([&](auto& one) { return one.Truncate(length); }); });
}

mla_code mla_sequence_refresh(mla_sequence* sequence, mla_error** error) {
  return Guard(error, [&] { return sequence->With([](auto& one) { return one.Refresh(); }); });
}

mla_code mla_sequence_release(mla_sequence* sequence, mla_error** error) {
  return Guard(error, [&] {
    const std::unique_ptr<mla_sequence> freed(sequence);
    if (freed == nullptr) return absl::OkStatus();
    return freed->With([](auto& one) { return one.Release(); });
  });
}

void mla_sequence_free(mla_sequence* sequence) { mla_sequence_release(sequence, nullptr); }
