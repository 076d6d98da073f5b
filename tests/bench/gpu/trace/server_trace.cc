#include "tests/bench/gpu/trace/server_trace.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace mla::bench {
namespace {

// Sum over the samples of a metric whose labels contain `label`.
double Sum(absl::string_view text, absl::string_view name, absl::string_view label = "") {
  double sum = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, name) || !absl::StrContains(line, label)) continue;
    double value = 0;
    if (absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) sum += value;
  }
  return sum;
}

// A connected socket, or -1.
int Connect(const std::string& host, const std::string& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return -1;
  int connected = -1;
  for (const addrinfo* at = found; at != nullptr && connected < 0; at = at->ai_next) {
    connected = socket(at->ai_family, at->ai_socktype, at->ai_protocol);
    if (connected < 0 || connect(connected, at->ai_addr, at->ai_addrlen) == 0) continue;
    close(connected);
    connected = -1;
  }
  freeaddrinfo(found);
  return connected;
}

}  // namespace

ServerTrace ServerTrace::Since(const ServerTrace& before, double layers) const {
  return {(copied_bytes - before.copied_bytes) / layers, (sleeps - before.sleeps) / layers,
          (client_polling_us - before.client_polling_us) / layers,
          (launch_polling_us - before.launch_polling_us) / layers};
}

ServerTrace ParseTrace(absl::string_view text) {
  return {Sum(text, "mla_device_copied_bytes_total") + Sum(text, "mla_copied_bytes_total"),
          Sum(text, "mla_device_sleeps_total"),
          1e6 * Sum(text, "mla_device_polling_seconds_total", "\"client\""),
          1e6 * Sum(text, "mla_device_polling_seconds_total", "\"launch\"")};
}

absl::StatusOr<ServerTrace> ReadTrace(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("want HOST:PORT, got ", address));
  }
  const int connected = Connect(address.substr(0, colon), address.substr(colon + 1));
  if (connected < 0) return absl::UnavailableError(absl::StrCat("cannot connect to ", address));
  const std::string request =
      absl::StrCat("GET /metrics HTTP/1.1\r\nHost: ", address, "\r\nConnection: close\r\n\r\n");
  std::string text;
  char part[4096];
  ssize_t bytes = send(connected, request.data(), request.size(), MSG_NOSIGNAL);
  while (bytes > 0 && (bytes = recv(connected, part, sizeof(part), 0)) > 0) {
    text.append(part, static_cast<size_t>(bytes));
  }
  close(connected);
  if (!absl::StrContains(text, "mla_device_sleeps_total")) {
    return absl::UnavailableError(absl::StrCat(address, " answers without the counters"));
  }
  return ParseTrace(text);
}

}  // namespace mla::bench
