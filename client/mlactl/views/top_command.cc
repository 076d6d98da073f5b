#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/targets.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/fleet/fleet_top.h"
#include "client/mlactl/fleet/rates.h"
#include "client/mlactl/text/units.h"
#include "client/mlactl/views/view_commands.h"

namespace mla::mlactl {
namespace {

std::string TopText(const std::string& target, const v1::GetStatsReply& now, const Rates& rate) {
  using Stats = v1::GetStatsReply;
  const auto used = static_cast<double>(now.kv_bytes_used());
  const auto total = static_cast<double>(now.kv_bytes_total());
  const double hits = rate(&Stats::plan_hits), misses = rate(&Stats::plan_misses);
  const double asked = rate(&Stats::prefix_rows_asked), hit_rows = rate(&Stats::prefix_rows_found);
  std::string text = absl::StrFormat("%s  boot %016x\n\n", target, now.boot_id());
  absl::StrAppendFormat(&text, "cache      %s of %s, %.1f %%   %d sequences, %d models\n",
                        BytesForPeople(used), BytesForPeople(total), Percent(used, total),
                        now.sequences(), now.models());
  absl::StrAppendFormat(&text, "requests   %s/s, %s failed/s   %d waiting, %d running\n",
                        CountForPeople(rate(&Stats::requests_total)),
                        CountForPeople(rate(&Stats::requests_failed)), now.requests_waiting(),
                        now.requests_running());
  absl::StrAppendFormat(&text, "rows       decode %s/s, extend %s/s, prefill %s/s\n",
                        CountForPeople(rate(&Stats::rows_decode)),
                        CountForPeople(rate(&Stats::rows_extend)),
                        CountForPeople(rate(&Stats::rows_prefill)));
  absl::StrAppendFormat(&text, "launches   %s/s   plans found %.0f %%\n",
                        CountForPeople(rate(&Stats::launches)), Percent(hits, hits + misses));
  absl::StrAppendFormat(&text, "wire       in %s/s, out %s/s, shared memory %s/s   %d streams\n",
                        BytesForPeople(rate(&Stats::received_bytes)),
                        BytesForPeople(rate(&Stats::sent_bytes)),
                        BytesForPeople(rate(&Stats::shared_bytes)), now.streams());
  absl::StrAppendFormat(&text, "prefixes   %.0f %% of %s rows/s found, %s page groups evicted/s\n",
                        Percent(hit_rows, asked), CountForPeople(asked),
                        CountForPeople(rate(&Stats::page_groups_evicted)));
  absl::StrAppendFormat(&text, "lost       %s leases/s expired, %s steps/s aborted\n",
                        CountForPeople(rate(&Stats::leases_expired)),
                        CountForPeople(rate(&Stats::steps_aborted)));
  return text;
}

int Top(const CommonOptions& common, const TopOptions& options) {
  using Clock = std::chrono::steady_clock;
  if (client::NamesCluster(common.target)) return ShowFleetTop(common, {}, options);
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  auto before = (*client)->GetStats();
  if (!before.ok()) return Fail(before.status());
  Clock::time_point then = Clock::now();
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  for (uint64_t shown = 0; options.count == 0 || shown < options.count; ++shown) {
    std::this_thread::sleep_for(std::chrono::milliseconds(options.interval_ms));
    auto now = (*client)->GetStats();
    if (!now.ok()) return Fail(now.status());
    const Clock::time_point read_time = Clock::now();
    const Rates rate(*before, *now, std::chrono::duration<double>(read_time - then).count());
    if (terminal) std::fputs(kClearScreen, stdout);
    const int code = Emit(common, ToJson(*now), TopText(common.target, *now, rate) + "\n");
    if (code != kOk) return code;
    std::fflush(stdout);
    before = std::move(now);
    then = read_time;
  }
  return kOk;
}

}  // namespace

void AddTop(Program* program) {
  const auto options = std::make_shared<TopOptions>();
  Command command = program->Add(
      {.name = "top",
       .group = "State of a server",
       .summary = "show rates and cache of the server or a cluster, live, until Ctrl-C",
       .examples = "mlactl top\nmlactl top --interval-ms=500 --count=10\n"
                   "mlactl top --target=etcd://etcd-0:2379/fleet\n"});
  command.Number({"interval-ms", "N", "between two looks (default 2000)"}, kLeastIntervalMs,
                 kMostIntervalMs, &options->interval_ms);
  command.Number({"count", "N", "end after N looks"}, 1, UINT64_MAX, &options->count);
  command.Run([options](const CommonOptions& common) { return Top(common, *options); });
}

}  // namespace mla::mlactl
