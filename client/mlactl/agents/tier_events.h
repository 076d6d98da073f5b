// Counts, from the server's events, a model's rows that were stored in each tier, left it or came
// back.
//
// Threading: not thread-safe.
#ifndef MLA_CLIENT_MLACTL_AGENTS_TIER_EVENTS_H_
#define MLA_CLIENT_MLACTL_AGENTS_TIER_EVENTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "mla/v1/cache.pb.h"

namespace mla::mlactl {

class TierEvents final {
 public:
  // Numbers of rows, by tier ("pool") and kind ("stored").
  using Rows = std::map<std::string, std::map<std::string, uint64_t>>;

  explicit TierEvents(const std::string& model_id) : model_id_(model_id) {}

  // Counts events since the last call. The server keeps its latest events only, so it should be
  // called often.
  absl::Status Read(client::Client* client);

  const Rows& rows() const { return rows_; }
  // Returns the times at which rows came back to the pool, in Unix milliseconds, each with the tier
  // that they came from; ordered by time.
  const std::vector<std::pair<int64_t, std::string>>& restored() const { return restored_; }
  bool complete() const { return complete_; }  // false: some events were lost

 private:
  const std::string model_id_;
  uint64_t last_ = 0;   // number of the last event that was read
  bool begun_ = false;  // true once an event of the model has been read
  bool complete_ = true;
  Rows rows_;
  std::vector<std::pair<int64_t, std::string>> restored_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_AGENTS_TIER_EVENTS_H_
