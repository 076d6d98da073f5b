#include "client/mlactl/fleet/sequence_list.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/mlactl/text/units.h"

namespace mla::mlactl {
namespace {

std::string StateOf(const v1::SequenceInfo& sequence) {
  if (!sequence.in_step()) return "idle";
  return sequence.open_step() != 0 ? "step" : "import";
}

std::string AgeText(const fleet::FleetSequence& row, bool wide) {
  if (!row.has_age_ms()) return "-";
  return wide ? absl::StrCat(row.age_ms()) : MillisForPeople(static_cast<double>(row.age_ms()));
}

std::string SizeText(const fleet::FleetSequence& row, bool wide) {
  if (!row.has_age_ms()) return "-";
  return wide ? absl::StrCat(row.kv_bytes()) : BytesForPeople(static_cast<double>(row.kv_bytes()));
}

std::string LeaseText(const fleet::FleetSequence& row, bool wide) {
  return wide ? absl::StrCat(row.lease_left_ms())
              : MillisForPeople(static_cast<double>(row.lease_left_ms()));
}

}  // namespace

absl::StatusOr<v1::GetReply> OpenSequences(client::Client* client, bool all_tenants) {
  return all_tenants ? client->GetAllSequences() : client->GetSequences({}, /*own_only=*/false);
}

void AddSequences(const v1::GetReply& reply, const std::string& address,
                  fleet::FleetSequences* list) {
  for (const v1::SequenceInfo& one : reply.sequences()) {
    fleet::FleetSequence* const row = list->add_sequences();
    row->set_address(address);
    row->set_tenant(one.tenant());
    row->set_sequence_id(absl::StrFormat("%016x", one.sequence_id()));
    row->set_length(one.length());
    row->set_model_id(one.model_id());
    row->set_client_id(one.client_id());
    if (one.has_age_ms()) row->set_age_ms(one.age_ms());
    row->set_kv_bytes(one.kv_bytes());
    row->set_page_groups(one.page_groups());
    row->set_state(StateOf(one));
    row->set_lease_left_ms(one.lease_left_ms());
    row->set_epoch(one.epoch());
    if (one.has_tail_position()) row->set_tail_position(one.tail_position());
  }
}

void OrderSequences(fleet::FleetSequences* list) {
  std::sort(list->mutable_sequences()->begin(), list->mutable_sequences()->end(),
            [](const fleet::FleetSequence& a, const fleet::FleetSequence& b) {
              return std::tie(a.address(), a.tenant()) != std::tie(b.address(), b.tenant())
                         ? std::tie(a.address(), a.tenant()) < std::tie(b.address(), b.tenant())
                         : std::tuple(b.age_ms(), a.sequence_id()) <
                               std::tuple(a.age_ms(), b.sequence_id());
            });
}

std::string SequencesText(const fleet::FleetSequences& list, bool wide) {
  const auto any = [&](const auto& known) {
    return std::any_of(list.sequences().begin(), list.sequences().end(), known);
  };
  const bool servers = any([](const auto& row) { return !row.address().empty(); });
  const bool tenants = any([](const auto& row) { return !row.tenant().empty(); });
  std::string text;
  if (servers) absl::StrAppendFormat(&text, "%-28s ", "server");
  if (tenants) absl::StrAppendFormat(&text, "%-20s ", "tenant");
  absl::StrAppendFormat(&text, "%-16s %10s %14s %8s %14s %-6s %14s ", "sequence", "length", "size",
                        "pages", "age", "state", "lease left");
  if (wide) absl::StrAppendFormat(&text, "%8s %10s ", "epoch", "tail");
  absl::StrAppendFormat(&text, "%-20s %s\n", "model", "client");
  for (const fleet::FleetSequence& row : list.sequences()) {
    if (servers) absl::StrAppendFormat(&text, "%-28s ", row.address());
    if (tenants) absl::StrAppendFormat(&text, "%-20s ", row.tenant());
    absl::StrAppendFormat(&text, "%-16s %10d %14s %8d %14s %-6s %14s ", row.sequence_id(),
                          row.length(), SizeText(row, wide), row.page_groups(), AgeText(row, wide),
                          row.state(), LeaseText(row, wide));
    if (wide) {
      absl::StrAppendFormat(
          &text, "%8d %10s ", row.epoch(),
          row.has_tail_position() ? absl::StrCat(row.tail_position()) : std::string("-"));
    }
    absl::StrAppendFormat(&text, "%-20s %s\n", row.model_id(), row.client_id());
  }
  return text;
}

}  // namespace mla::mlactl
