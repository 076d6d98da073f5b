#include "client/cpp/cluster/placement.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/blake2b.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {
namespace {

constexpr size_t kKeyBytes = 16;
constexpr size_t kWeightBytes = 8;

std::string Hash(std::string_view key, std::string_view bytes, size_t digest_bytes) {
  Blake2b hash(digest_bytes, key);
  hash.Add(bytes);
  return hash.Digest();
}

bool Has(const std::vector<std::string>& addresses, const std::string& address) {
  return std::find(addresses.begin(), addresses.end(), address) != addresses.end();
}

double FillIn(const Fills& fills, const std::string& address) {
  const auto found = fills.find(address);
  return found == fills.end() ? 0.0 : found->second;
}

}  // namespace

double FillOf(double free, double total) {
  return total <= 0 ? 0.0 : std::clamp(1.0 - free / total, 0.0, 1.0);
}

double FillOf(const v1::ProbeReply& probe) {
  return FillOf(
      static_cast<double>(probe.kv_bytes_free()) - static_cast<double>(probe.kv_bytes_cached()),
      static_cast<double>(probe.kv_bytes_total()));
}

std::string ShortHash(std::string_view key, std::string_view bytes) {
  return Hash(key, bytes, kKeyBytes);
}

uint64_t RowsOf(const v1::ProbeReply& probe) {
  return probe.rows_in_pool() + probe.rows_in_host() + probe.rows_in_file();
}

std::string KeyOfPrefix(std::string_view model_id, const v1::Prefix& prefix) {
  Blake2b hash(kKeyBytes);
  for (const std::string_view text : {model_id, std::string_view(prefix.salt())}) {
    hash.AddNumber(static_cast<uint32_t>(text.size()));
    hash.Add(text);
  }
  if (prefix.page_keys_size() > 0) {
    hash.Add(prefix.page_keys(0));
  } else {
    for (int row = 0; row < std::min(kKeyRows, prefix.token_ids_size()); ++row) {
      hash.AddNumber(prefix.token_ids(row));
    }
  }
  return hash.Digest();
}

absl::StatusOr<std::vector<std::string>> PageNames(std::span<const uint32_t> token_ids,
                                                   uint32_t page_size, std::string_view salt) {
  if (page_size == 0) return RefuseValue("page_size", "0", "at least 1");
  if (salt.empty() || salt.size() > kMostBlake2bBytes) {
    return RefuseValue("salt", absl::StrCat(salt.size(), " bytes"),
                       absl::StrCat("1..", kMostBlake2bBytes, " bytes"));
  }
  std::vector<std::string> names;
  for (size_t begin = 0; begin + page_size <= token_ids.size(); begin += page_size) {
    Blake2b hash(kPageNameBytes, salt);
    if (!names.empty()) hash.Add(names.back());
    for (const uint32_t token : token_ids.subspan(begin, page_size)) hash.AddNumber(token);
    names.push_back(hash.Digest());
  }
  return names;
}

std::vector<std::string> ByHash(std::string_view key, const std::vector<std::string>& addresses) {
  const std::string_view used = key.substr(0, kMostBlake2bBytes);
  std::vector<std::pair<std::string, std::string>> weighed;
  weighed.reserve(addresses.size());
  for (const std::string& address : addresses) {
    weighed.emplace_back(Hash(used, address, kWeightBytes), address);
  }
  std::stable_sort(weighed.begin(), weighed.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> order;
  order.reserve(weighed.size());
  for (auto& one : weighed) order.push_back(std::move(one.second));
  return order;
}

std::vector<std::string> Bounded(const std::vector<std::string>& addresses, const Fills& fills) {
  double sum = 0;
  int known = 0;
  for (const std::string& address : addresses) {
    const auto fill = fills.find(address);
    if (fill == fills.end()) continue;
    sum += fill->second;
    ++known;
  }
  const double mean = known > 0 ? sum / known : 0.0;
  const double limit = std::max(kBound * mean, mean + kSlack);
  std::vector<std::string> good;
  for (const std::string& address : addresses) {
    if (FillIn(fills, address) <= limit) good.push_back(address);
  }
  return good;
}

std::vector<std::string> Candidates(const std::optional<std::string>& key,
                                    const std::vector<std::string>& addresses, const Fills& fills,
                                    std::mt19937_64* random, const std::string& last,
                                    const std::string& home) {
  std::vector<std::string> chosen;
  const auto add = [&](const std::string& address) {
    if (Has(addresses, address) && !Has(chosen, address)) chosen.push_back(address);
  };
  const std::vector<std::string> with_room = Bounded(addresses, fills);
  add(!last.empty() ? last : Has(with_room, home) ? home : "");
  if (key) {
    std::vector<std::string> good = ByHash(*key, with_room);
    if (good.size() > kCandidatesByHash) good.resize(kCandidatesByHash);
    for (const std::string& address : good) add(address);
  }
  std::vector<std::string> rest, some;
  for (const std::string& address : with_room) {
    if (!Has(chosen, address)) rest.push_back(address);
  }
  std::sample(rest.begin(), rest.end(), std::back_inserter(some), 2, *random);
  if (!some.empty()) {
    add(*std::min_element(some.begin(), some.end(), [&](const auto& a, const auto& b) {
      return FillIn(fills, a) < FillIn(fills, b);
    }));
  }
  if (chosen.size() > kMostCandidates) chosen.resize(kMostCandidates);
  return chosen;
}

double CostOf(const MaybeProbe& probe, uint64_t rows, uint64_t bytes_wanted, const Costs& costs,
              bool at_home) {
  if (!probe || probe->draining() || probe->kv_bytes_free() < bytes_wanted) return kImpossible;
  const uint64_t found = RowsOf(*probe);
  const double missing = rows > found ? static_cast<double>(rows - found) : 0.0;
  const double fill = FillOf(*probe);
  return missing * costs.prefill_row_s +
         static_cast<double>(probe->rows_in_host()) * costs.host_row_s +
         static_cast<double>(probe->rows_in_file()) * costs.file_row_s +
         static_cast<double>(probe->wait_us()) * 1e-6 * costs.requests +
         fill * fill * costs.full_s + (at_home ? 0.0 : costs.away_s);
}

std::vector<Choice> Ranked(const std::vector<Answer>& answers, uint64_t rows, const Costs& costs,
                           const std::string& home) {
  std::vector<Choice> choices;
  for (const Answer& one : answers) {
    choices.push_back({one.address,
                       CostOf(one.probe, rows, one.bytes_wanted, costs, one.address == home),
                       one.probe});
  }
  std::stable_sort(choices.begin(), choices.end(),
                   [](const Choice& a, const Choice& b) { return a.cost_s < b.cost_s; });
  return choices;
}

std::vector<std::string> SubsetOf(std::string_view worker,
                                  const std::vector<std::string>& addresses, size_t most) {
  std::vector<std::string> order = ByHash(ShortHash({}, worker), addresses);
  if (most > 0 && order.size() > most) order.resize(most);
  return order;
}

}  // namespace mla::client
