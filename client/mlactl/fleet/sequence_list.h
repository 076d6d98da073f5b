// The list of open sequences, of one server or of many, as a table for people.
#ifndef MLA_CLIENT_MLACTL_FLEET_SEQUENCE_LIST_H_
#define MLA_CLIENT_MLACTL_FLEET_SEQUENCE_LIST_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "mla/v1/sequence.pb.h"
#include "proto/fleet/report.pb.h"

namespace mla::mlactl {

// Returns the tenant's sequences, or with `all_tenants`, for operators, those of all tenants.
absl::StatusOr<v1::GetReply> OpenSequences(client::Client* client, bool all_tenants);

// Adds the sequences of a reply. `address`: of the server; empty: there is only one.
void AddSequences(const v1::GetReply& reply, const std::string& address,
                  fleet::FleetSequences* list);

// Orders a list by server and tenant, and those of a tenant by age, the oldest first.
void OrderSequences(fleet::FleetSequences* list);

// Returns a line a sequence. It has columns for the server and the tenant only if the list knows
// them. `wide`: numbers as they are, and more columns.
std::string SequencesText(const fleet::FleetSequences& list, bool wide);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_FLEET_SEQUENCE_LIST_H_
