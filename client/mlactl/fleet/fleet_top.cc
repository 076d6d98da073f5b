#include "client/mlactl/fleet/fleet_top.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/fleet/rates.h"
#include "client/mlactl/fleet/servers.h"
#include "client/mlactl/text/units.h"

namespace mla::mlactl {
namespace {

using Clock = std::chrono::steady_clock;

// A look must not wait long for a server that is away.
constexpr int64_t kAnswerMs = 2000;

// A server as the last look saw it, with the connection to it.
struct Seen {
  std::unique_ptr<client::Client> client;  // null: not connected
  v1::GetStatsReply stats;
  Clock::time_point read_time;
  bool known = false;  // `stats` is an answer
};

class Looks final {
 public:
  Looks(const CommonOptions& common, const client::EtcdFiles& etcd) : common_(common), etcd_(etcd) {
    common_.client.call_timeout_ms = std::min(common_.client.call_timeout_ms, kAnswerMs);
  }

  // Asks all members. Fails if no member has ever been read.
  absl::StatusOr<fleet::FleetTop> Look();

 private:
  absl::StatusOr<v1::GetStatsReply> Ask(const std::string& address, Seen* seen) const;

  CommonOptions common_;
  const client::EtcdFiles etcd_;
  Members members_;  // in the order of their addresses
  std::map<std::string, Seen> seen_;
};

// A client refuses to go on with a server that has restarted, so there may be a second one.
absl::StatusOr<v1::GetStatsReply> Looks::Ask(const std::string& address, Seen* seen) const {
  absl::StatusOr<v1::GetStatsReply> stats;
  for (int turn = 0; turn < 2; ++turn) {
    const bool fresh = seen->client == nullptr;
    if (fresh) {
      MLA_ASSIGN_OR_RETURN(seen->client, ConnectTo(common_, address));
    }
    stats = seen->client->GetStats();
    if (stats.ok()) return stats;
    seen->client.reset();
    if (fresh) break;
  }
  return stats;
}

absl::StatusOr<fleet::FleetTop> Looks::Look() {
  fleet::FleetTop top;
  auto members = ReadMembers(common_, etcd_);
  if (members.ok()) {
    members_ = *std::move(members);
    std::sort(members_.begin(), members_.end(),
              [](const auto& a, const auto& b) { return a.address() < b.address(); });
    // Anyone who may write to the registry may list an address twice.
    members_.erase(
        std::unique(members_.begin(), members_.end(),
                    [](const auto& a, const auto& b) { return a.address() == b.address(); }),
        members_.end());
  } else if (members_.empty()) {
    return members.status();
  } else {
    top.set_registry(std::string(members.status().message()));
  }
  std::map<std::string, Seen> seen;
  std::vector<Seen*> places;
  for (const client::Member& one : members_) {
    top.add_servers()->set_address(one.address());
    seen.emplace(one.address(), std::move(seen_[one.address()]));
  }
  seen_ = std::move(seen);  // without those that have left
  for (const client::Member& one : members_) places.push_back(&seen_[one.address()]);
  ForEach(places.size(), [&](size_t i) {
    fleet::ServerRates* const rates = top.mutable_servers(static_cast<int>(i));
    Seen* const one = places[i];
    const auto stats = Ask(rates->address(), one);
    const Clock::time_point now = Clock::now();
    rates->set_state(stats.ok() ? kServing : kAway);
    if (!stats.ok()) {
      rates->set_why(std::string(stats.status().message()));
      one->known = false;
      return;
    }
    SetRates(one->known ? one->stats : *stats, *stats,
             std::chrono::duration<double>(now - one->read_time).count(), rates);
    *one = {std::move(one->client), *stats, now, true};
  });
  SetTotal(&top);
  return top;
}

std::string RowText(const std::string& name, const fleet::ServerRates& one) {
  const auto count = [](double value) { return CountForPeople(value); };
  return absl::StrFormat(
      "%-28s %5.1f %9d %7d %7d %9s %8s %9s %9s %9s %11s %11s %6.0f\n", name,
      Percent(static_cast<double>(one.bytes_used()), static_cast<double>(one.bytes_total())),
      one.sequences(), one.requests_waiting(), one.requests_running(), count(one.requests_per_s()),
      count(one.failed_per_s()), count(one.decode_rows_per_s()),
      count(one.extend_rows_per_s() + one.prefill_rows_per_s()), count(one.launches_per_s()),
      BytesForPeople(one.received_bytes_per_s() + one.sent_bytes_per_s()),
      BytesForPeople(one.shared_bytes_per_s()),
      Percent(one.prefix_rows_found_per_s(), one.prefix_rows_asked_per_s()));
}

}  // namespace

std::string FleetTopText(const fleet::FleetTop& given) {
  const fleet::FleetTop top = WithPlainTexts(given);
  std::string text =
      absl::StrFormat("%-28s %5s %9s %7s %7s %9s %8s %9s %9s %9s %11s %11s %6s\n", "server", "kv %",
                      "sequences", "waiting", "running", "requests", "failed", "decode", "prompts",
                      "launches", "wire", "shared", "found");
  for (const fleet::ServerRates& one : top.servers()) {
    if (one.state() == kAway) {
      absl::StrAppendFormat(&text, "%-28s %s: %s\n", one.address(), one.state(), one.why());
    } else {
      text += RowText(one.address(), one);
    }
  }
  text += RowText("all", top.total());
  absl::StrAppend(&text,
                  "\na second: requests, failed, rows of decode and of prompts, launches, bytes\n");
  if (!top.registry().empty()) {
    absl::StrAppend(&text, "the registry was not read: ", top.registry(), "\n");
  }
  return text;
}

int ShowFleetTop(const CommonOptions& common, const client::EtcdFiles& etcd,
                 const TopOptions& options) {
  Looks looks(common, etcd);
  auto top = looks.Look();
  if (!top.ok()) return Fail(top.status());
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  for (uint64_t shown = 0; options.count == 0 || shown < options.count; ++shown) {
    std::this_thread::sleep_for(std::chrono::milliseconds(options.interval_ms));
    top = looks.Look();
    if (!top.ok()) return Fail(top.status());
    if (terminal) std::fputs(kClearScreen, stdout);
    const int code = Emit(common, ToJson(*top), FleetTopText(*top) + "\n");
    if (code != kOk) return code;
    std::fflush(stdout);
  }
  return kOk;
}

}  // namespace mla::mlactl
