#include "client/cpp/cluster/targets.h"

#include <algorithm>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {
namespace {

constexpr absl::string_view kDns = "dns:///";
constexpr absl::string_view kEtcd = "etcd://";
constexpr absl::string_view kEtcdTls = "etcds://";

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

absl::Status Wrong(absl::string_view got, absl::string_view limit) {
  return RefuseValue("target", absl::StrCat("\"", got, "\""), std::string(limit));
}

bool IsNameCharacter(char one) {
  return absl::ascii_isalnum(static_cast<unsigned char>(one)) || one == '_' || one == '.' ||
         one == '-';
}

bool IsIpv6Character(char one) {
  return absl::ascii_isxdigit(static_cast<unsigned char>(one)) || one == ':' || one == '.' ||
         one == '%';
}

// Parses HOST[:PORT] or [IPV6][:PORT].
absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view text, uint16_t port,
                                       absl::string_view target) {
  absl::string_view host = text, digits;
  bool good = true;
  if (absl::ConsumePrefix(&host, "[")) {
    const size_t end = host.find(']');
    good = end != absl::string_view::npos;
    digits = good ? host.substr(end + 1) : absl::string_view();
    host = host.substr(0, end);
    good = good && std::all_of(host.begin(), host.end(), IsIpv6Character);
    good = good && (digits.empty() || absl::StartsWith(digits, ":"));
  } else {
    const size_t colon = host.find(':');
    digits = colon == absl::string_view::npos ? absl::string_view() : host.substr(colon);
    host = host.substr(0, colon);
    good = std::all_of(host.begin(), host.end(), IsNameCharacter);
  }
  uint32_t number = port;
  if (absl::ConsumePrefix(&digits, ":")) {
    good = good && !digits.empty() && digits.size() <= 5 &&
           std::all_of(digits.begin(), digits.end(),
                       [](unsigned char one) { return absl::ascii_isdigit(one); }) &&
           absl::SimpleAtoi(digits, &number);
  }
  if (!good || host.empty() || number == 0 || number > UINT16_MAX) {
    return Wrong(target, "of HOST:PORT");
  }
  return Endpoint{std::string(host), static_cast<uint16_t>(number)};
}

// Letters, digits, '_', '.' and '-', with '/' between them: names of other keys must not follow
// from what a user writes.
bool IsPrefix(absl::string_view prefix) {
  for (const absl::string_view part : absl::StrSplit(prefix, '/')) {
    if (part.empty() || !std::all_of(part.begin(), part.end(), IsNameCharacter)) return false;
  }
  return true;
}

}  // namespace

std::string Endpoint::ToString() const {
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

bool IsEtcdTarget(std::string_view target) {
  return absl::StartsWith(View(target), kEtcd) || absl::StartsWith(View(target), kEtcdTls);
}

bool IsDnsTarget(std::string_view target) { return absl::StartsWith(View(target), kDns); }

bool NamesCluster(std::string_view target) {
  const absl::string_view text = View(target);
  return IsEtcdTarget(target) || IsDnsTarget(target) ||
         (absl::StrContains(text, ',') && !absl::StartsWith(text, "unix:") &&
          !absl::StartsWith(text, "ipv4:") && !absl::StartsWith(text, "ipv6:"));
}

absl::StatusOr<EtcdTarget> ParseEtcdTarget(std::string_view target) {
  const absl::string_view text = View(target);
  if (absl::StrContains(text, '@')) {
    return Wrong("etcd://...@...", "without a user: a target is shown in logs");
  }
  EtcdTarget etcd;
  absl::string_view rest = text;
  etcd.tls = absl::ConsumePrefix(&rest, kEtcdTls);
  const bool known = etcd.tls || absl::ConsumePrefix(&rest, kEtcd);
  const size_t slash = rest.find('/');
  if (!known || slash == absl::string_view::npos) {
    return Wrong(text, "etcd://HOST:2379/PREFIX");
  }
  for (const absl::string_view one : absl::StrSplit(rest.substr(0, slash), ',')) {
    MLA_ASSIGN_OR_RETURN(auto endpoint, ParseEndpoint(one, kEtcdPort, text));
    etcd.endpoints.push_back(std::move(endpoint));
  }
  if (etcd.endpoints.size() > kMostEndpoints) {
    return Wrong(text, absl::StrCat("of at most ", kMostEndpoints, " endpoints"));
  }
  absl::string_view prefix = rest.substr(slash + 1);
  while (absl::ConsumeSuffix(&prefix, "/")) {
  }
  if (!IsPrefix(prefix)) {
    return Wrong(text, "with a prefix of letters, digits, '_', '.', '-' and '/' between them");
  }
  etcd.prefix = std::string(prefix);
  return etcd;
}

absl::StatusOr<Endpoint> ParseDnsTarget(std::string_view target) {
  absl::string_view name = View(target);
  if (!absl::ConsumePrefix(&name, kDns)) return Wrong(name, "dns:///NAME:50551");
  return ParseEndpoint(name, kServerPort, View(target));
}

absl::StatusOr<std::vector<std::string>> ParseStaticTarget(std::string_view target) {
  std::vector<std::string> addresses;
  std::set<std::string> known;
  const std::vector<absl::string_view> parts = absl::StrSplit(View(target), ',');
  if (parts.size() > kMostStatic) {
    return Wrong(absl::StrCat(parts.size(), " addresses"), absl::StrCat("at most ", kMostStatic));
  }
  for (const absl::string_view part : parts) {
    const absl::string_view one = absl::StripAsciiWhitespace(part);
    std::string address(one);
    if (!absl::StartsWith(one, "unix:")) {
      MLA_ASSIGN_OR_RETURN(const auto endpoint, ParseEndpoint(one, kServerPort, View(target)));
      address = endpoint.ToString();
    }
    if (!known.insert(address).second) return Wrong(View(target), "a list without repeats");
    addresses.push_back(std::move(address));
  }
  return addresses;
}

}  // namespace mla::client
