#include "server/metrics/stats_table.h"

#include <algorithm>

namespace mla::server {
namespace {

template <typename Number>
uint64_t Unsigned(Number value) {
  return static_cast<uint64_t>(std::max(value, Number{0}));
}

#define MLA_ENGINE(member) \
  [](const StatSources& from) -> uint64_t { return Unsigned(from.engine.member); }
#define MLA_WIRE(member) \
  [](const StatSources& from) -> uint64_t { return Unsigned(from.wire.member.load()); }

#define MLA_CHECKPOINTS(member) \
  [](const StatSources& from) -> uint64_t { return Unsigned(from.checkpoints.member.load()); }

#define MLA_HAND_OVERS(member) \
  [](const StatSources& from) -> uint64_t { return Unsigned(from.hand_overs.member.load()); }

constexpr Stat Row(const char* field, const char* metric, const char* help,
                   uint64_t (*read)(const StatSources&), const char* label = nullptr,
                   const char* value = nullptr, double unit = 1) {
  return {field, metric, help, read, label, value, unit};
}

constexpr Stat kStats[] = {
    Row("sequences", "mla_leases_active", "Open sequences; each holds a lease.",
        MLA_ENGINE(sequences)),
    Row("open_steps", "mla_open_steps", "Steps that clients have begun and not ended.",
        MLA_ENGINE(open_steps)),
    Row("models", "mla_models", "Registered models.", MLA_ENGINE(models)),
    Row("streams", "mla_streams_open", "Open Attend streams.", MLA_WIRE(streams)),
    Row("requests_waiting", "mla_requests_waiting",
        "Requests accepted whose launch has not started.", MLA_ENGINE(requests_waiting)),
    Row("requests_running", "mla_requests_running", "Requests in the running launch.",
        MLA_ENGINE(requests_running)),
    Row(nullptr, "mla_oldest_waiting_seconds",
        "Age of the oldest waiting request, by stage: decode, extend, prefill, or kv_rows if it "
        "waits for KV rows that have not arrived.",
        MLA_ENGINE(oldest_waiting_ns[0]), "stage", "decode", 1e-9),
    Row(nullptr, "mla_oldest_waiting_seconds", nullptr, MLA_ENGINE(oldest_waiting_ns[1]), "stage",
        "extend", 1e-9),
    Row(nullptr, "mla_oldest_waiting_seconds", nullptr, MLA_ENGINE(oldest_waiting_ns[2]), "stage",
        "prefill", 1e-9),
    Row(nullptr, "mla_oldest_waiting_seconds", nullptr, MLA_ENGINE(oldest_waiting_ns[3]), "stage",
        "kv_rows", 1e-9),
    // metrics.cc exposes these by tenant and by the contents of launches.
    Row("requests_total", nullptr, nullptr, MLA_ENGINE(requests_total)),
    Row("requests_failed", nullptr, nullptr, MLA_ENGINE(requests_failed)),
    Row("launches", nullptr, nullptr, MLA_ENGINE(launches)),
    Row("launches_mixed_layers", nullptr, nullptr, MLA_ENGINE(launches_mixed_layers)),
    Row("launches_mixed_clients", nullptr, nullptr, MLA_ENGINE(launches_mixed_clients)),
    Row("longest_launch_us", nullptr, nullptr, MLA_ENGINE(longest_launch_ns / 1000)),
    Row("rows_decode", "mla_rows_total", "Query rows computed, by stage.", MLA_ENGINE(rows_decode),
        "stage", "decode"),
    Row("rows_extend", "mla_rows_total", nullptr, MLA_ENGINE(rows_extend), "stage", "extend"),
    Row("rows_prefill", "mla_rows_total", nullptr, MLA_ENGINE(rows_prefill), "stage", "prefill"),
    Row("plan_hits", "mla_plan_reuse_total", "Launches by whether their plan was reused.",
        MLA_ENGINE(plan_hits), "result", "hit"),
    Row("plan_misses", "mla_plan_reuse_total", nullptr, MLA_ENGINE(plan_misses), "result", "miss"),
    Row("slices_fused", "mla_slices_fused_total",
        "Head slices of tensor-parallel ranks computed as one with their siblings.",
        MLA_ENGINE(slices_fused)),
    Row("slice_waits_expired", "mla_slice_waits_expired_total",
        "Times that head slices were computed without a sibling that had not come in time.",
        MLA_ENGINE(slice_waits_expired)),
    Row("slice_waits_skipped", "mla_slice_waits_skipped_total",
        "Times that head slices did not wait for a sibling that had missed an earlier wait.",
        MLA_ENGINE(slice_waits_skipped)),
    Row("steps_aborted", "mla_open_steps_aborted_total",
        "Client steps dropped instead of committed.", MLA_ENGINE(steps_aborted)),
    Row("leases_expired", "mla_leases_expired_total", "Leases that ran out: vanished workers.",
        MLA_ENGINE(leases_expired)),
    Row(nullptr, "mla_pauses_total",
        "Times that the server did not run for 0.4 s or more, stopped or starved of CPU. Leases do "
        "not count these.",
        MLA_ENGINE(pauses)),
    Row(nullptr, "mla_models_expired_total",
        "Models whose lease ran out, or that were not used and made room for others.",
        MLA_ENGINE(models_expired)),
    Row("kv_bytes_total", nullptr, nullptr, MLA_ENGINE(kv_bytes_total)),
    Row("kv_bytes_used", "mla_kv_used_bytes", "Bytes of the page pool in use.",
        MLA_ENGINE(kv_bytes_used)),
    Row("page_groups_used", "mla_kv_page_groups_used", "Page groups in use.",
        MLA_ENGINE(page_groups_used)),
    Row(nullptr, "mla_kv_page_groups_free", "Page groups free in existing slabs.",
        MLA_ENGINE(page_groups_free)),
    Row("page_groups_shared", "mla_kv_page_groups_shared",
        "Page groups held by more than one sequence.", MLA_ENGINE(page_groups_shared)),
    Row("page_groups_scrubbed", "mla_kv_page_groups_scrubbed_total",
        "Page groups zeroed between tenants.", MLA_ENGINE(page_groups_scrubbed)),
    Row("copies_on_write", "mla_kv_copies_on_write_total",
        "Page groups copied for a forked sequence.", MLA_ENGINE(copies_on_write)),
    Row(nullptr, "mla_kv_copied_bytes_total", "Bytes copied for forked sequences, on the device.",
        MLA_ENGINE(kv_bytes_copied)),
    Row(nullptr, "mla_kv_page_group_allocations_total", "Page groups handed out.",
        MLA_ENGINE(page_groups_taken)),
    Row(nullptr, "mla_kv_page_group_releases_total",
        "Page groups that came back, by reason: released, lease_expired, truncated, uncommitted "
        "(an aborted step, or rows that a step did not keep), evicted (the prefix cache gave them "
        "up).",
        MLA_ENGINE(page_groups_released), "reason", "released"),
    Row(nullptr, "mla_kv_page_group_releases_total", nullptr, MLA_ENGINE(page_groups_expired),
        "reason", "lease_expired"),
    Row(nullptr, "mla_kv_page_group_releases_total", nullptr, MLA_ENGINE(page_groups_truncated),
        "reason", "truncated"),
    Row(nullptr, "mla_kv_page_group_releases_total", nullptr, MLA_ENGINE(page_groups_uncommitted),
        "reason", "uncommitted"),
    Row(nullptr, "mla_kv_page_group_releases_total", nullptr, MLA_ENGINE(page_groups_evicted),
        "reason", "evicted"),
    Row("page_groups_cached", "mla_prefix_page_groups_cached",
        "Page groups that the prefix cache alone holds; they yield when their room is needed, "
        "unless "
        "hints pin them.",
        MLA_ENGINE(page_groups_cached)),
    Row(nullptr, "mla_prefix_cached_bytes",
        "Bytes of page groups that the prefix cache alone holds.", MLA_ENGINE(kv_bytes_cached)),
    Row(nullptr, "mla_prefix_page_groups_pinned",
        "Page groups that hints pin: they stay in the pool until their time is up.",
        MLA_ENGINE(page_groups_kept)),
    Row(nullptr, "mla_prefix_pinned_bytes", "Bytes of page groups that hints pin.",
        MLA_ENGINE(kv_bytes_kept)),
    Row(nullptr, "mla_prefix_page_groups_published_total",
        "Page groups that the prefix cache took.", MLA_ENGINE(prefix.published)),
    Row("page_groups_evicted", "mla_prefix_page_groups_evicted_total",
        "Page groups that the prefix cache gave up because their room was needed, in the pool or "
        "in "
        "the slower tier that had them.",
        MLA_ENGINE(prefix.evicted)),
    Row("prefix_hits", "mla_prefix_hits_total", "Matches that found rows.",
        MLA_ENGINE(prefix.hits)),
    Row(nullptr, "mla_prefix_matches_total",
        "Matches by where they ended: all (everything asked for was found), or why the next page "
        "was not: absent, diverged (other rows follow), evicted (also where a slower tier has it "
        "and "
        "the pool no room), deferred (on its way back).",
        MLA_ENGINE(prefix.ends[1]), "end", "all"),
    Row(nullptr, "mla_prefix_matches_total", nullptr, MLA_ENGINE(prefix.ends[2]), "end", "absent"),
    Row(nullptr, "mla_prefix_matches_total", nullptr, MLA_ENGINE(prefix.ends[3]), "end",
        "diverged"),
    Row(nullptr, "mla_prefix_matches_total", nullptr, MLA_ENGINE(prefix.ends[4]), "end", "evicted"),
    Row(nullptr, "mla_prefix_matches_total", nullptr, MLA_ENGINE(prefix.ends[5]), "end",
        "deferred"),
    Row(nullptr, "mla_prefix_page_groups_demoted_total",
        "Page groups that left the pool and can still be found, their rows in a slower tier.",
        MLA_ENGINE(prefix.demoted)),
    Row(nullptr, "mla_tier_bytes", "Bytes that slower tiers have room for.",
        MLA_ENGINE(tiers.host.bytes_total), "tier", "host"),
    Row(nullptr, "mla_tier_bytes", nullptr, MLA_ENGINE(tiers.file.bytes_total), "tier", "file"),
    Row(nullptr, "mla_tier_used_bytes", "Bytes of cached rows in slower tiers.",
        MLA_ENGINE(tiers.host.bytes_used), "tier", "host"),
    Row(nullptr, "mla_tier_used_bytes", nullptr, MLA_ENGINE(tiers.file.bytes_used), "tier", "file"),
    Row(nullptr, "mla_tier_page_groups", "Page groups in slower tiers.",
        MLA_ENGINE(tiers.host.groups), "tier", "host"),
    Row(nullptr, "mla_tier_page_groups", nullptr, MLA_ENGINE(tiers.file.groups), "tier", "file"),
    Row(nullptr, "mla_tier_page_groups_stored_total", "Page groups that a slower tier took.",
        MLA_ENGINE(tiers.host.groups_in), "tier", "host"),
    Row(nullptr, "mla_tier_page_groups_stored_total", nullptr, MLA_ENGINE(tiers.file.groups_in),
        "tier", "file"),
    Row(nullptr, "mla_tier_page_groups_restored_total",
        "Page groups that came back to the pool, by the tier that had them.",
        MLA_ENGINE(tiers.host.groups_out), "tier", "host"),
    Row(nullptr, "mla_tier_page_groups_restored_total", nullptr, MLA_ENGINE(tiers.file.groups_out),
        "tier", "file"),
    Row(nullptr, "mla_tier_stored_bytes_total", "Bytes of page groups that a slower tier took.",
        MLA_ENGINE(tiers.host.bytes_in), "tier", "host"),
    Row(nullptr, "mla_tier_stored_bytes_total", nullptr, MLA_ENGINE(tiers.file.bytes_in), "tier",
        "file"),
    Row(nullptr, "mla_tier_restored_bytes_total",
        "Bytes of page groups that came back to the pool, by the tier that had them.",
        MLA_ENGINE(tiers.host.bytes_out), "tier", "host"),
    Row(nullptr, "mla_tier_restored_bytes_total", nullptr, MLA_ENGINE(tiers.file.bytes_out), "tier",
        "file"),
    Row(nullptr, "mla_tier_store_seconds_total",
        "Time from the beginning of a move into the tier to its end, summed over page groups; "
        "several "
        "move at a time.",
        MLA_ENGINE(tiers.host.ns_in), "tier", "host", 1e-9),
    Row(nullptr, "mla_tier_store_seconds_total", nullptr, MLA_ENGINE(tiers.file.ns_in), "tier",
        "file", 1e-9),
    Row(nullptr, "mla_tier_restore_seconds_total",
        "Time from the beginning of a move back into the pool to its end, summed over page groups; "
        "several move at a time.",
        MLA_ENGINE(tiers.host.ns_out), "tier", "host", 1e-9),
    Row(nullptr, "mla_tier_restore_seconds_total", nullptr, MLA_ENGINE(tiers.file.ns_out), "tier",
        "file", 1e-9),
    Row(nullptr, "mla_tier_page_groups_dropped_total",
        "Copies that a slower tier gave up because their room was needed; the rows may be in "
        "another "
        "tier or in the pool.",
        MLA_ENGINE(tiers.host.dropped), "tier", "host"),
    Row(nullptr, "mla_tier_page_groups_dropped_total", nullptr, MLA_ENGINE(tiers.file.dropped),
        "tier", "file"),
    Row(nullptr, "mla_tier_page_groups_damaged_total",
        "Page groups that were not what had been put into the tier. They were dropped, not used.",
        MLA_ENGINE(tiers.host.damaged), "tier", "host"),
    Row(nullptr, "mla_tier_page_groups_damaged_total", nullptr, MLA_ENGINE(tiers.file.damaged),
        "tier", "file"),
    Row(nullptr, "mla_tier_failures_total", "Reads and writes of a tier that the system refused.",
        MLA_ENGINE(tiers.file.failed), "tier", "file"),
    Row(nullptr, "mla_tier_page_groups_moving", "Page groups on their way between tiers.",
        MLA_ENGINE(tiers.moving)),
    Row("prefix_rows_asked", "mla_prefix_rows_asked_total", "Rows that matches asked for.",
        MLA_ENGINE(prefix.rows_asked)),
    Row("prefix_rows_found", "mla_prefix_rows_found_total",
        "Rows that matches found, and that no client has to compute and send.",
        MLA_ENGINE(prefix.rows_found)),
    Row("checkpoints", "mla_checkpoints", "Checkpoint files.", MLA_CHECKPOINTS(files)),
    Row("checkpoint_bytes", "mla_checkpoint_bytes", "Bytes of checkpoint files.",
        MLA_CHECKPOINTS(bytes)),
    Row("checkpoint_last_unix_ms", "mla_checkpoint_last_timestamp_seconds",
        "When the latest checkpoint was written, in seconds since 1970; 0: there is none.",
        MLA_CHECKPOINTS(last_unix_ms), nullptr, nullptr, 1e-3),
    Row("checkpoint_saves", "mla_checkpoint_saves_total",
        "Checkpoints by result: ok, or failed where the disk failed or had no room. Calls beyond a "
        "bound of the tenant or the server count as neither.",
        MLA_CHECKPOINTS(saves), "result", "ok"),
    Row("checkpoint_save_failures", "mla_checkpoint_saves_total", nullptr,
        MLA_CHECKPOINTS(save_failures), "result", "failed"),
    Row("checkpoint_restores", "mla_checkpoint_restores_total",
        "Sequences opened from their checkpoints by result: ok, or failed where the file could not "
        "be read. Calls beyond a bound of the tenant or the server count as neither.",
        MLA_CHECKPOINTS(restores), "result", "ok"),
    Row("checkpoint_restore_failures", "mla_checkpoint_restores_total", nullptr,
        MLA_CHECKPOINTS(restore_failures), "result", "failed"),
    Row(nullptr, "mla_hand_over_sequences_total",
        "Sequences of drains to another server by what became of them: moved, refused (by the "
        "peer), peer_failed (not reached, another server by now, or without an answer), changed "
        "(cut "
        "on their way), stopped (the drain ended first) or empty (without rows). All but those "
        "moved stay here.",
        MLA_HAND_OVERS(moved), "outcome", "moved"),
    Row(nullptr, "mla_hand_over_sequences_total", nullptr, MLA_HAND_OVERS(refused), "outcome",
        "refused"),
    Row(nullptr, "mla_hand_over_sequences_total", nullptr, MLA_HAND_OVERS(peer_failed), "outcome",
        "peer_failed"),
    Row(nullptr, "mla_hand_over_sequences_total", nullptr, MLA_HAND_OVERS(changed), "outcome",
        "changed"),
    Row(nullptr, "mla_hand_over_sequences_total", nullptr, MLA_HAND_OVERS(stopped), "outcome",
        "stopped"),
    Row(nullptr, "mla_hand_over_sequences_total", nullptr, MLA_HAND_OVERS(empty), "outcome",
        "empty"),
    Row(nullptr, "mla_hand_over_taken_back_total",
        "Tries to move a sequence whose answer was lost, and which the peer was told to forget.",
        MLA_HAND_OVERS(taken_back)),
    Row(nullptr, "mla_hand_over_taken_total", "Sequences that came from servers that drained.",
        MLA_HAND_OVERS(taken_over)),
    Row(nullptr, "mla_hand_over_bytes_total",
        "Bytes of rows that went with sequences to another server (out), or came so (in).",
        MLA_HAND_OVERS(sent_bytes), "direction", "out"),
    Row(nullptr, "mla_hand_over_bytes_total", nullptr, MLA_HAND_OVERS(taken_bytes), "direction",
        "in"),
    Row(nullptr, "mla_hand_over_weights_total",
        "Models of drains to another server by what became of their weights: moved (the peer has "
        "them), refused (by the peer) or failed (the peer was not reached or gave no answer, or "
        "the drain ended). Workers upload again what has not moved.",
        MLA_HAND_OVERS(weights_moved), "outcome", "moved"),
    Row(nullptr, "mla_hand_over_weights_total", nullptr, MLA_HAND_OVERS(weights_refused), "outcome",
        "refused"),
    Row(nullptr, "mla_hand_over_weights_total", nullptr, MLA_HAND_OVERS(weights_failed), "outcome",
        "failed"),
    Row(nullptr, "mla_hand_over_weights_taken_total",
        "Models whose weights came from servers that drained.", MLA_HAND_OVERS(weights_taken)),
    Row(nullptr, "mla_hand_over_weights_bytes_total",
        "Bytes of weights that went to another server (out), or came so (in).",
        MLA_HAND_OVERS(weights_sent_bytes), "direction", "out"),
    Row(nullptr, "mla_hand_over_weights_bytes_total", nullptr, MLA_HAND_OVERS(weights_taken_bytes),
        "direction", "in"),
    Row(nullptr, "mla_kv_read_bytes_total",
        "Bytes of KV rows that launches attended to, once for each record.",
        MLA_ENGINE(kv_bytes_read)),
    Row("received_bytes", "mla_received_bytes_total", "Message bytes received, by path.",
        MLA_WIRE(received_bytes), "path", "inline"),
    Row(nullptr, "mla_received_bytes_total", nullptr, MLA_WIRE(shared_received_bytes), "path",
        "shared"),
    Row("sent_bytes", "mla_sent_bytes_total", "Message bytes sent, by path.", MLA_WIRE(sent_bytes),
        "path", "inline"),
    Row(nullptr, "mla_sent_bytes_total", nullptr, MLA_WIRE(shared_sent_bytes), "path", "shared"),
    Row("shared_bytes", nullptr, nullptr,
        [](const StatSources& from) -> uint64_t {
          return from.wire.shared_received_bytes.load() + from.wire.shared_sent_bytes.load();
        }),
    Row("copied_bytes", "mla_copied_bytes_total", "Payload bytes copied on the host, by path.",
        MLA_WIRE(copied_bytes), "path", "inline"),
    Row(nullptr, "mla_device_copied_bytes_total",
        "Tensor bytes that the host itself copied on their way to the GPU or from it.",
        MLA_ENGINE(host_work.copied_bytes)),
    Row(nullptr, "mla_launches_ahead_total",
        "Launches of chained calls that were submitted before the client's GPU was done with the "
        "tensors.",
        MLA_ENGINE(launches_ahead)),
    Row(nullptr, "mla_expanded_refused_total",
        "Launches of prompts that were computed in the slower absorbed form, since keys and values "
        "for gpu.expanded_workspace_bytes at a time would have taken too many rounds.",
        MLA_ENGINE(rounds_refused)),
    Row(nullptr, "mla_ahead_refused_total",
        "Chained calls that were computed later than they were handed over ahead: other requests "
        "waited (busy), or their launch waited for limits.ahead_us (late).",
        MLA_ENGINE(requests_handed_back), "why", "busy"),
    Row(nullptr, "mla_ahead_refused_total", nullptr, MLA_ENGINE(launches_late), "why", "late"),
    Row(nullptr, "mla_device_sleeps_total",
        "Times that a thread slept until the GPU was done: with a launch, or with a client's work "
        "before a request.",
        MLA_ENGINE(host_work.sleeps), "with", "launch"),
    Row(nullptr, "mla_device_sleeps_total", nullptr, MLA_WIRE(device_sleeps), "with", "client"),
    Row(nullptr, "mla_device_polling_seconds_total",
        "Time in which a thread looked whether the GPU was done: with a launch, or with a client's "
        "work before a request.",
        MLA_ENGINE(host_work.polling_ns), "with", "launch", 1e-9),
    Row(nullptr, "mla_device_polling_seconds_total", nullptr, MLA_WIRE(device_polling_ns), "with",
        "client", 1e-9),
    Row(nullptr, "mla_late_query_copies_total",
        "Launches that read queries in the host's memory because their copy was late: another "
        "thread's call to the GPU's driver waited for the GPU.",
        MLA_ENGINE(host_work.late_copies)),
    Row("shared_regions", "mla_shared_regions", "Shared-memory regions of connected clients.",
        MLA_WIRE(shared_regions)),
    Row("rings", "mla_rings_open", "Command rings of connected clients.", MLA_WIRE(rings)),
    Row(nullptr, "mla_ucx_rings_open", "Rings over UCX of connected clients, each with a relay.",
        MLA_WIRE(ucx_rings)),
    Row(nullptr, "mla_ucx_rings_opened_total", "Rings over UCX that were opened.",
        MLA_WIRE(ucx_rings_opened)),
    Row(nullptr, "mla_ucx_rings_ended_total",
        "Rings over UCX that have ended: by the call's end, or by a relay that has lost its "
        "client, "
        "refused a frame or crashed.",
        MLA_WIRE(ucx_ended_by_client), "by", "call"),
    Row(nullptr, "mla_ucx_rings_ended_total", nullptr, MLA_WIRE(ucx_ended_by_relay), "by", "relay"),
    Row(nullptr, "mla_ucx_frames_total", "Frames of rings over UCX, as relays report them.",
        MLA_WIRE(ucx_received_frames), "direction", "in"),
    Row(nullptr, "mla_ucx_frames_total", nullptr, MLA_WIRE(ucx_sent_frames), "direction", "out"),
    Row(nullptr, "mla_ucx_payload_bytes_total",
        "Tensor and message bytes over UCX, by the way they took. What clients put is not seen.",
        MLA_WIRE(ucx_received_bytes), "way", "frame_in"),
    Row(nullptr, "mla_ucx_payload_bytes_total", nullptr, MLA_WIRE(ucx_sent_bytes), "way",
        "frame_out"),
    Row(nullptr, "mla_ucx_payload_bytes_total", nullptr, MLA_WIRE(ucx_put_bytes), "way", "put_out"),
    Row(nullptr, "mla_streams_disconnected_total",
        "Clients disconnected: slow readers, rings and regions whose client broke a rule.",
        MLA_WIRE(streams_disconnected), "reason", "slow_reader"),
    Row(nullptr, "mla_streams_disconnected_total", nullptr, MLA_WIRE(rings_disconnected), "reason",
        "ring_rules"),
    Row(nullptr, "mla_streams_disconnected_total", nullptr, MLA_WIRE(regions_disconnected),
        "reason", "region_holes"),
    Row(nullptr, "mla_connections_refused_total",
        "Connections for gRPC that were closed at once: a bound was reached, or descriptors ran "
        "out.",
        MLA_WIRE(connections_refused)),
    Row(nullptr, "mla_shm_connections_displaced_total",
        "Connections to the shared-memory socket that had sent no request and made room for "
        "others.",
        MLA_WIRE(shm_displaced)),
    Row(nullptr, "mla_shm_connections_refused_total",
        "Times that the server had no descriptor for a connection to the shared-memory socket.",
        MLA_WIRE(shm_refusals)),
    Row(nullptr, "mla_stream_write_blocked_seconds_total",
        "Time replies waited for the transport to take them.", MLA_WIRE(write_blocked_ns), nullptr,
        nullptr, 1e-9),
};

#undef MLA_ENGINE
#undef MLA_WIRE
#undef MLA_CHECKPOINTS
#undef MLA_HAND_OVERS

}  // namespace

std::span<const Stat> AllStats() { return kStats; }

}  // namespace mla::server
