#include "client/cpp/cluster/marks.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "client/cpp/cluster/placement.h"

namespace mla::client {
namespace {

constexpr std::string_view kKey = "mla marks";

// The prefix in parts, each of which ends with a mark.
std::vector<std::string> PartsOf(const v1::Prefix& prefix) {
  std::vector<std::string> parts;
  if (prefix.page_keys_size() > 0) {
    const auto count = static_cast<size_t>(prefix.page_keys_size());
    const size_t whole = count / kMarkNames * kMarkNames;
    for (size_t i = 0; i < (whole > 0 ? whole : count); ++i) {
      if (i % kMarkNames == 0) parts.emplace_back();
      parts.back() += prefix.page_keys(static_cast<int>(i));
    }
    return parts;
  }
  const auto count = static_cast<size_t>(prefix.token_ids_size());
  const size_t whole = count / kMarkRows * kMarkRows;
  // What is left over is another one with the next turn.
  for (size_t begin = 0; begin < (whole > 0 ? whole : count); begin += kMarkRows) {
    const size_t rows = std::min(kMarkRows, count - begin);
    parts.emplace_back(reinterpret_cast<const char*>(prefix.token_ids().data() + begin),
                       rows * sizeof(uint32_t));
  }
  return parts;
}

}  // namespace

std::vector<std::string> MarksOf(std::string_view model_id, const v1::Prefix& prefix) {
  std::string state = ShortHash(
      kKey, absl::StrCat(model_id.size(), ":", std::string(model_id), ":", prefix.salt()));
  std::vector<std::string> marks;
  for (const std::string& part : PartsOf(prefix)) {
    state = ShortHash(state, part);
    marks.push_back(state);
  }
  return marks;
}

void Marks::Remember(std::string_view model_id, const v1::Prefix& prefix,
                     const std::string& address) {
  const std::vector<std::string> marks = MarksOf(model_id, prefix);
  const MutexLock lock(mutex_);
  for (const std::string& mark : marks) {
    if (const auto known = places_.find(mark); known != places_.end()) {
      order_.erase(known->second);
      places_.erase(known);
    }
    order_.emplace_back(mark, address);
    places_.emplace(mark, std::prev(order_.end()));
  }
  while (places_.size() > most_) {
    places_.erase(order_.front().first);
    order_.pop_front();
  }
}

std::string Marks::Recall(std::string_view model_id, const v1::Prefix& prefix) {
  const std::vector<std::string> marks = MarksOf(model_id, prefix);
  const MutexLock lock(mutex_);
  for (auto mark = marks.rbegin(); mark != marks.rend(); ++mark) {
    if (const auto known = places_.find(*mark); known != places_.end()) {
      return known->second->second;
    }
  }
  return "";
}

}  // namespace mla::client
