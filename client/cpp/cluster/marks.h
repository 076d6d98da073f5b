// Which server had a conversation last, by what its rows stand for. Bounded: the conversations that
// were remembered longest ago go first. Threading: any thread.
#ifndef MLA_CLIENT_CPP_CLUSTER_MARKS_H_
#define MLA_CLIENT_CPP_CLUSTER_MARKS_H_

#include <cstddef>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "mla/v1/sequence.pb.h"

namespace mla::client {

inline constexpr size_t kMostMarks = size_t{1} << 17;
inline constexpr size_t kMarkRows = 1024;             // rows between two marks
inline constexpr size_t kMarkNames = kMarkRows / 64;  // of pages that are named

// Marks of the first kMarkRows rows, of twice as many, and so on; of a shorter prefix one of all.
std::vector<std::string> MarksOf(std::string_view model_id, const v1::Prefix& prefix);

class Marks final {
 public:
  explicit Marks(size_t most = kMostMarks) : most_(most) {}

  // Rows that begin so are at `address` now.
  void Remember(std::string_view model_id, const v1::Prefix& prefix, const std::string& address);
  // The server that had the longest beginning; "": none is known.
  std::string Recall(std::string_view model_id, const v1::Prefix& prefix);

 private:
  using Order = std::list<std::pair<std::string, std::string>>;  // mark and address, oldest first

  const size_t most_;
  Mutex mutex_;
  Order order_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Order::iterator> places_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_MARKS_H_
