// Decides where a sequence is to be, by pure functions over what members say of themselves.
//
// A turn of a conversation asks at most kMostCandidates servers what they hold of its prefix: the
// server of the turn before; and of the servers that are not too full (Bounded) the worker's home
// if the turn is the first, the first two by rendezvous hash of the prefix's first rows, and the
// emptier of two random ones. The cheapest gets the sequence.
//
// The Python client (mla_client/cluster/placement.py) makes the same keys and orders, so that a
// worker of either language finds what the other has left. tests/cluster/placement_golden.txt holds
// both to it. Threading: any thread.
#ifndef MLA_CLIENT_CPP_CLUSTER_PLACEMENT_H_
#define MLA_CLIENT_CPP_CLUSTER_PLACEMENT_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "mla/v1/sequence.pb.h"

namespace mla::client {

inline constexpr size_t kMostCandidates = 4;
inline constexpr size_t kCandidatesByHash = 2;
// A server whose fill is more than this multiple of the mean is passed over, unless the difference
// is smaller than kSlack of a whole server: at the beginning all are nearly empty.
inline constexpr double kBound = 1.25;
inline constexpr double kSlack = 0.05;
// The number of first rows of a prefix that decide which servers it belongs to.
inline constexpr int kKeyRows = 256;
// The bytes of a page's name, which is made with the salt of a fleet.
inline constexpr size_t kPageNameBytes = 16;
inline constexpr double kImpossible = std::numeric_limits<double>::infinity();

// Costs that placement adds up (CostOf). All but `requests` are seconds, and only their ratios
// matter. The defaults fit DeepSeek-V3 on one GPU.
struct Costs {
  double prefill_row_s = 100e-6;  // to compute a row again, in the worker and in the server
  double host_row_s = 4e-6;       // to bring a row back from host memory
  double file_row_s = 25e-6;      // to bring a row back from a file
  double requests = 61 * 16;      // a turn's requests; each waits for the server's wait_us
  double full_s = 6.0;            // a full pool; a fill of one half costs a quarter of it
  double away_s = 2e-3;           // a server that is not the worker's home
};

// A server's answer to a probe; nullopt: it did not answer.
using MaybeProbe = std::optional<v1::ProbeReply>;

// A candidate, and what it would cost.
struct Choice {
  std::string address;
  double cost_s = kImpossible;
  MaybeProbe probe;
};

// Maps each server to how full it is, from 0 to 1, as far as it is known.
using Fills = std::map<std::string, double>;

// Returns the part of `total` that is taken; 0 if `total` is 0.
double FillOf(double free, double total);
// Returns the part of the server's pool that rows take, cached ones included.
double FillOf(const v1::ProbeReply& probe);
uint64_t RowsOf(const v1::ProbeReply& probe);  // rows that need not be computed again

// Returns the key, of 16 bytes, by which a prefix chooses its servers. Equal first rows, models and
// salts give equal keys.
std::string KeyOfPrefix(std::string_view model_id, const v1::Prefix& prefix);

// Returns a hash of 16 bytes. REQUIRES: at most 64 bytes of key.
std::string ShortHash(std::string_view key, std::string_view bytes);

// Returns the names of whole pages, for Prefix.page_keys. A name stands for the tokens of its page
// and of all pages before it. It tells nothing about them to a reader without the fleet's salt.
// INVALID_ARGUMENT unless the salt has 1 to 64 bytes and page_size > 0.
absl::StatusOr<std::vector<std::string>> PageNames(std::span<const uint32_t> token_ids,
                                                   uint32_t page_size, std::string_view salt);

// Rendezvous hashing: all addresses, best first for this key. If an address comes or goes, the
// order of the others stays.
std::vector<std::string> ByHash(std::string_view key, const std::vector<std::string>& addresses);

// Servers whose fill is at most kBound times the mean of all entries, or at most kSlack above it,
// and servers without an entry in `fills`: nothing is known of them. The order stays.
std::vector<std::string> Bounded(const std::vector<std::string>& addresses, const Fills& fills);

// Returns the servers to ask, without repeats, in the order of the first paragraph. `addresses` are
// the members that take new sequences. `last` is the server of the turn before, or empty; `home`
// takes its place then, and may be empty too. A prompt that shares nothing has no key, so none is
// chosen by hash.
std::vector<std::string> Candidates(const std::optional<std::string>& key,
                                    const std::vector<std::string>& addresses, const Fills& fills,
                                    std::mt19937_64* random, const std::string& last,
                                    const std::string& home);

// Returns the seconds that a turn of `rows` rows costs at the server of the probe. kImpossible if
// the server drains, has less than `bytes_wanted` free or did not answer. `bytes_wanted` is the
// size of the rows that it does not have.
double CostOf(const MaybeProbe& probe, uint64_t rows, uint64_t bytes_wanted, const Costs& costs,
              bool at_home);

struct Answer {
  std::string address;
  MaybeProbe probe;
  uint64_t bytes_wanted = 0;
};

// Returns the candidates by cost, the impossible ones last; equals stay in the given order.
std::vector<Choice> Ranked(const std::vector<Answer>& answers, uint64_t rows, const Costs& costs,
                           const std::string& home);

// Returns the servers that a worker uses, its home first; with `most` 0 all. A member that comes or
// goes changes nothing in the order of the others.
std::vector<std::string> SubsetOf(std::string_view worker,
                                  const std::vector<std::string>& addresses, size_t most);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_PLACEMENT_H_
