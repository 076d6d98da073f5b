// Reads the keys of one JSON object, within their bounds. After the first fault every read returns
// zero, so that a caller can read all its keys and check the status once. Values nested deeper than
// 8 are refused. Threading: not thread-safe.
#ifndef MLA_CLIENT_MLACTL_REPLAY_RECORD_FIELDS_H_
#define MLA_CLIENT_MLACTL_REPLAY_RECORD_FIELDS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {

class RecordFields final {
 public:
  explicit RecordFields(const std::string& text);
  explicit RecordFields(nlohmann::json object);

  uint64_t Number(const char* key, uint64_t least, uint64_t limit);
  double Real(const char* key);  // finite
  bool Flag(const char* key);
  std::string Text(const char* key);
  std::vector<RecordFields> Objects(const char* key);
  std::vector<uint64_t> Numbers(const char* key, uint64_t limit);

  void Fault(std::string_view key, std::string_view got, std::string_view must);
  // Returns OK, or DATA_LOSS of the first fault: "key: got ..., must be ...".
  const absl::Status& status() const { return status_; }

 private:
  // Returns the value of the key; null, which is a fault, if the object does not have it.
  const nlohmann::json* Find(const char* key);

  nlohmann::json object_;
  absl::Status status_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_REPLAY_RECORD_FIELDS_H_
