// Sequences and prefixes.
#include <cstdint>
#include <limits>
#include <optional>

#include "absl/status/statusor.h"
#include "client/c/connection.h"
#include "client/c/handles.h"

namespace mla::capi {
namespace {

constexpr size_t kPageKeyBytes = 32;

template <typename Sequence>
absl::Status Give(absl::StatusOr<Sequence> sequence, mla_sequence** out) {
  if (!sequence.ok()) return sequence.status();
  *out = new mla_sequence{*std::move(sequence)};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::Prefix> PrefixOf(const mla_prefix* given) {
  mla_prefix known;
  if (absl::Status status = Read(given, false, "prefix", &known); !status.ok()) return status;
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
  for (size_t i = 0; i < known.page_key_count; ++i) {
    prefix.add_page_keys(static_cast<const char*>(known.page_keys) + i * kPageKeyBytes,
                         kPageKeyBytes);
  }
  prefix.set_salt(Text(known.salt));
  prefix.set_max_rows(known.max_rows);
  return prefix;
}

}  // namespace mla::capi

using mla::capi::CheckNotNull;
using mla::capi::Guard;

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
    const auto found = sequence->With([&](auto& one) { return one.Match(*known, first_row); });
    if (!found.ok()) return found.status();
    mla_prefix_match result{};
    result.rows = found->rows();
    result.end = static_cast<mla_match_end>(found->end());
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
