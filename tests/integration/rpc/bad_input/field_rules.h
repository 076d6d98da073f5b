// The contract's rule for every field that a client can set, as a table, and a walk that puts
// hostile values into each field.
//
// RequestFields lists the fields of all requests from the descriptors of the services, so a new
// field without a rule is noticed. Plain functions; any thread.
#ifndef MLA_TESTS_INTEGRATION_RPC_BAD_INPUT_FIELD_RULES_H_
#define MLA_TESTS_INTEGRATION_RPC_BAD_INPUT_FIELD_RULES_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "google/protobuf/message.h"

namespace mla::integration {

inline constexpr uint64_t kAnything = std::numeric_limits<uint64_t>::max();

// Numbers count as themselves, enumerations by their number, texts and bytes by their length.
struct FieldRule {
  uint64_t low = 0, high = kAnything;  // outside it a value is INVALID_ARGUMENT
  std::string path;                    // path under which it is refused
  // Other fields that a value inside the range may contradict, such as a payload's size.
  std::set<std::string> coupled = {};
};

// By full name ("mla.v1.Attend.layer"). Ranges follow from SmallConfig, from the model of Dims(),
// and from a sequence and a step of two rows, which the tested requests refer to.
const std::map<std::string, FieldRule>& FieldRules();

// Full names of the scalar fields of all requests of all services of mla.v1.
std::set<std::string> RequestFields();

struct Mutation {
  const google::protobuf::Message* request;  // with one field changed; valid during the call
  std::string field;                         // full name
  uint64_t value;                            // as FieldRule counts it
  std::string ToString() const;
};

// Calls `use` with `request` changed in one field at a time, at every depth. Values are {0, 1,
// 2^31-1, 2^31, 2^32-1, 2^63-1, 2^64-1 or -1}, as far as the type allows, and the bounds of the
// field's rule with their neighbours. Elements of repeated fields are changed in place; bytes that
// the request leaves empty stay empty. Adds the fields to `seen`.
void ForEachMutation(google::protobuf::Message* request, std::set<std::string>* seen,
                     const std::function<void(const Mutation&)>& use);

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_RPC_BAD_INPUT_FIELD_RULES_H_
