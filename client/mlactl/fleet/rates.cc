#include "client/mlactl/fleet/rates.h"

#include "client/mlactl/fleet/servers.h"

namespace mla::mlactl {

void SetRates(const v1::GetStatsReply& before, const v1::GetStatsReply& now, double seconds,
              fleet::ServerRates* rates) {
  using Stats = v1::GetStatsReply;
  const Rates rate(before, now, seconds);
  rates->set_bytes_used(now.kv_bytes_used());
  rates->set_bytes_total(now.kv_bytes_total());
  rates->set_sequences(now.sequences());
  rates->set_requests_waiting(now.requests_waiting());
  rates->set_requests_running(now.requests_running());
  rates->set_requests_per_s(rate(&Stats::requests_total));
  rates->set_failed_per_s(rate(&Stats::requests_failed));
  rates->set_decode_rows_per_s(rate(&Stats::rows_decode));
  rates->set_extend_rows_per_s(rate(&Stats::rows_extend));
  rates->set_prefill_rows_per_s(rate(&Stats::rows_prefill));
  rates->set_launches_per_s(rate(&Stats::launches));
  rates->set_received_bytes_per_s(rate(&Stats::received_bytes));
  rates->set_sent_bytes_per_s(rate(&Stats::sent_bytes));
  rates->set_shared_bytes_per_s(rate(&Stats::shared_bytes));
  rates->set_prefix_rows_asked_per_s(rate(&Stats::prefix_rows_asked));
  rates->set_prefix_rows_found_per_s(rate(&Stats::prefix_rows_found));
}

void SetTotal(fleet::FleetTop* top) {
  fleet::ServerRates sum;
  for (const fleet::ServerRates& one : top->servers()) {
    if (one.state() == kAway) continue;
    sum.set_bytes_used(sum.bytes_used() + one.bytes_used());
    sum.set_bytes_total(sum.bytes_total() + one.bytes_total());
    sum.set_sequences(sum.sequences() + one.sequences());
    sum.set_requests_waiting(sum.requests_waiting() + one.requests_waiting());
    sum.set_requests_running(sum.requests_running() + one.requests_running());
    sum.set_requests_per_s(sum.requests_per_s() + one.requests_per_s());
    sum.set_failed_per_s(sum.failed_per_s() + one.failed_per_s());
    sum.set_decode_rows_per_s(sum.decode_rows_per_s() + one.decode_rows_per_s());
    sum.set_extend_rows_per_s(sum.extend_rows_per_s() + one.extend_rows_per_s());
    sum.set_prefill_rows_per_s(sum.prefill_rows_per_s() + one.prefill_rows_per_s());
    sum.set_launches_per_s(sum.launches_per_s() + one.launches_per_s());
    sum.set_received_bytes_per_s(sum.received_bytes_per_s() + one.received_bytes_per_s());
    sum.set_sent_bytes_per_s(sum.sent_bytes_per_s() + one.sent_bytes_per_s());
    sum.set_shared_bytes_per_s(sum.shared_bytes_per_s() + one.shared_bytes_per_s());
    sum.set_prefix_rows_asked_per_s(sum.prefix_rows_asked_per_s() + one.prefix_rows_asked_per_s());
    sum.set_prefix_rows_found_per_s(sum.prefix_rows_found_per_s() + one.prefix_rows_found_per_s());
  }
  *top->mutable_total() = sum;
}

}  // namespace mla::mlactl
