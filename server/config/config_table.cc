#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/config/config.h"
#include "server/config/config_key.h"

namespace mla::server {
namespace {

void AddListenKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Text("server.listen", "TCP address host:port; port 0 takes any free port; empty: no TCP.",
               "An address beyond loopback needs tls.* or server.insecure.",
               MLA_SLOT(listen.address), "--listen"),
          Text("server.unix_path",
               "Path of a unix socket to serve on as well; auto: mla-server-PORT.sock in the "
               "user's runtime folder, else in /tmp/mla-server-UID; empty: none.",
               "At most 107 bytes; the folder must exist; only owner and group may connect, with "
               "TLS only the owner.",
               MLA_SLOT(listen.unix_path), "--unix-path"),
          Text("server.socket_group",
               "Group, by name or number, whose members may use the unix socket and shared "
               "memory; empty: the socket's own group may use the unix socket, the server's own "
               "user shared memory.",
               "The server must be a member of the group.", MLA_SLOT(listen.socket_group)),
          Text("server.unix_tenant",
               "Tenant of every caller over the unix socket and of its shared memory; empty or *: "
               "the name that the caller gives.",
               "If it is empty and TLS is on, only the server's own user and root may connect; "
               "otherwise the group may too.",
               MLA_SLOT(listen.unix_tenant)),
          Bool("server.open_folder",
               "Make unix sockets also in a folder that every user may write to.",
               "Any of these users can replace the socket by their own.",
               MLA_SLOT(listen.open_folder)),
          Bool("server.insecure", "Serve beyond loopback without TLS.",
               "Every caller that reaches the port can name any tenant.", MLA_SLOT(listen.insecure),
               "--insecure"),
          Choice("server.reflection", "auto|on|off",
                 "gRPC reflection; auto: on when every listener is local.",
                 "Reflection shows the contract to every client that can connect.",
                 MLA_SLOT(listen.reflection)),
          Text("server.operators",
               "Tenants that may call operator RPCs such as Admin.Drain over TLS, separated by "
               "commas.",
               "Empty: none over TLS. Callers without TLS: see server.plain_operators.",
               MLA_SLOT(listen.operators)),
          Choice("server.plain_operators", "none|host|any",
                 "Callers without TLS that may call operator RPCs: none, those on the server's own "
                 "host, or any.",
                 "host: every user of the unix socket or of a loopback address can drain the "
                 "server; any: every caller that reaches the port of an insecure server can.",
                 MLA_SLOT(listen.plain_operators)),
          Millis("server.drain_deadline_ms", 0, kDayMs,
                 "How long a drain waits for open steps before it aborts them.",
                 "Must be below the service manager's own stop timeout.",
                 MLA_SLOT(drain_deadline_ms)),
          Int("server.hand_over_streams", 1, 16, "Connections of a drain to another server.",
              "Each takes the time of a core on both sides.", MLA_SLOT(hand_over_streams)),
          Millis("server.unhealthy_after_ms", 100, kDayMs,
                 "An engine that does not answer for this long is reported NOT_SERVING.",
                 "Below the longest launch it reports false alarms.", MLA_SLOT(unhealthy_after_ms)),
          Millis("server.restart_after_ms", 0, kDayMs,
                 "After this long without an answer, beyond unhealthy_after_ms, /livez is 503.",
                 "A supervisor that probes it restarts the server, which loses its sequences; 0: "
                 "never.",
                 MLA_SLOT(restart_after_ms)),
      });
}

void AddTlsAndOpsKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Text("tls.cert", "PEM file with the server's certificate chain.",
               "Needs tls.key and tls.client_ca too.", MLA_SLOT(tls.cert)),
          Text("tls.key", "PEM file with the server's private key.",
               "Must belong to the certificate; readable by the server alone.", MLA_SLOT(tls.key)),
          Text("tls.client_ca", "PEM file with the authorities that sign client certificates.",
               "Clients without a certificate of these are refused in the handshake.",
               MLA_SLOT(tls.client_ca), "--client-ca"),
          Text("tls.client_crl", "PEM file with revocation lists of the authorities; empty: none.",
               "Clients whose certificate is listed are UNAUTHENTICATED at every call, on open "
               "connections too.",
               MLA_SLOT(tls.client_crl)),
          Millis("tls.reload_ms", 1000, kDayMs,
                 "How often the PEM files are looked at for changes.",
                 "Files that cannot be used are refused, and the last good ones stay in use.",
                 MLA_SLOT(tls.reload_ms)),
          Text("ops.listen", "Address of the operations port (metrics, health, status page).",
               "Plain HTTP and read-only: keep it on loopback or a private network; empty: off.",
               MLA_SLOT(ops.address)),
          Int("ops.connections", 1, 1024,
              "Connections of the operations port at a time, in addition to a reserve of 32.",
              "Beyond it a new connection displaces the oldest that has sent no request.",
              MLA_SLOT(ops.connections)),
          Choice("log.format", "text|json", "Lines for people, or one JSON object a line.",
                 "Each event is one line either way.", MLA_SLOT(log.format)),
          Choice("log.level", "debug|info|warning|error", "Least severity that is written.",
                 "debug writes a line for every control call.", MLA_SLOT(log.level)),
      });
}

void AddWireKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Bytes("wire.message_bytes", 65536, 1073741824,
                "Largest request or reply message, header included.",
                "Stock gRPC clients receive at most 4 MiB unless told otherwise.",
                MLA_SLOT(wire.message_bytes)),
          Bytes("wire.inflight_bytes", 65536, kTiB,
                "Staged for one stream, requests and replies together; then its reads pause.",
                "Below two messages a stream cannot overlap sending and computing.",
                MLA_SLOT(wire.inflight_bytes)),
          Bytes("wire.staging_bytes", 1048576, kTiB, "Staging memory of all streams together.",
                "When it is used up, streams wait for each other.", MLA_SLOT(wire.staging_bytes)),
          Bytes("wire.weight_chunk_bytes", 65536, 1073741824,
                "Largest chunk of an UploadWeights call.", "Held once for each upload under way.",
                MLA_SLOT(wire.weight_chunk_bytes)),
          Int("wire.max_streams", 1, 1000000, "Open Attend streams, all clients together.",
              "Further streams end with RESOURCE_EXHAUSTED.", MLA_SLOT(wire.max_streams)),
          Int("wire.max_connections", 1, 1000000, "Connections for gRPC, all peers together.",
              "Further ones are closed at once, as they are when the process has no descriptors "
              "left.",
              MLA_SLOT(wire.max_connections)),
          Int("wire.peer_connections", 1, 1000000,
              "Connections for gRPC from one address or unix-socket user.",
              "Further ones are closed at once.", MLA_SLOT(wire.peer_connections)),
          Int("wire.connection_streams", 1, 100000, "Concurrent calls of one connection.",
              "Calls beyond it wait inside the client.", MLA_SLOT(wire.connection_streams)),
          Int("wire.control_threads", 4, 4096,
              "Threads for control calls, uploads and status watchers.",
              "A watcher or an upload holds one for its whole life.",
              MLA_SLOT(wire.control_threads)),
          Int("wire.control_reserve", 1, 1024,
              "Threads of wire.control_threads that only RenewLease, Get, Release and "
              "administration may use; at most a quarter of all.",
              "Without one, uploads could keep every sequence's lease from being renewed.",
              MLA_SLOT(wire.control_reserve)),
          Bytes("wire.control_bytes", 1048576, kTiB,
                "Serialized requests of control calls under way, those above 16 KiB.",
                "Once parsed, a request may take thirty times its bytes. Further ones are "
                "RESOURCE_EXHAUSTED, and not parsed.",
                MLA_SLOT(wire.control_bytes)),
          Int("wire.max_uploads", 1, 4096,
              "UploadWeights, Export, Import, Checkpoint and Restore calls at a time, all tenants "
              "together.",
              "Further uploads are RESOURCE_EXHAUSTED; each holds a control thread.",
              MLA_SLOT(wire.max_uploads)),
          Millis("wire.upload_idle_ms", 100, kDayMs,
                 "An UploadWeights call that sends nothing for this long is cancelled.",
                 "Its weights are discarded and its thread is free again.",
                 MLA_SLOT(wire.upload_idle_ms)),
          Int("wire.max_watchers", 1, 4096,
              "WatchStatus and WatchEvents calls at a time; one tenant may have half of them.",
              "Must be below wire.control_threads.", MLA_SLOT(wire.max_watchers)),
          Int("wire.max_health_calls", 2, 100000,
              "Open calls of grpc.health.v1, Watch above all; one tenant may have half of them.",
              "Clients that watch health see the server as unavailable beyond it.",
              MLA_SLOT(wire.max_health_calls)),
          Bytes("wire.metadata_bytes", 1024, 1048576, "Header bytes of one call.",
                "Below 8 KiB some proxies' headers do not fit.", MLA_SLOT(wire.metadata_bytes)),
          Bytes("wire.quota_bytes", 16777216, kTiB, "Memory that gRPC's own buffers may use.",
                "When short, connections are slowed down or dropped. Over a backend that reads "
                "queries in place, a CPU's, it holds them, too: at least twice wire.staging_bytes "
                "then.",
                MLA_SLOT(wire.quota_bytes)),
      });
}

void AddConnectionKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Millis("wire.connection_age_ms", 0, kDayMs * 365,
                 "Connections are closed gracefully at this age; 0: never.",
                 "A stream that is closed loses its open steps.", MLA_SLOT(wire.connection_age_ms)),
          Millis("wire.connection_idle_ms", 0, kDayMs * 365,
                 "Connections without calls are closed after this time; 0: never.",
                 "Too short and workers reconnect between steps.",
                 MLA_SLOT(wire.connection_idle_ms)),
          Millis("wire.handshake_ms", 100, kDayMs,
                 "A new connection must have finished TLS and sent its first frame within this "
                 "time, or it is closed.",
                 "Silent connections hold a descriptor each for this time.",
                 MLA_SLOT(wire.handshake_ms)),
          Millis("wire.keepalive_ms", 1000, kDayMs,
                 "Silent connections are probed this often, so that a dead peer is noticed.",
                 "Short times cost traffic; long ones delay the release of a dead client's steps.",
                 MLA_SLOT(wire.keepalive_ms)),
          Millis("wire.slow_reader_ms", 100, kDayMs,
                 "A stream whose reply is not taken for this long is disconnected.",
                 "Its open steps are aborted.", MLA_SLOT(wire.slow_reader_ms)),
          Int("wire.poll_threads", 1, 1024,
              "Threads that serve the streams; one polls at a time, the others copy and compute.",
              "With 1 a long copy or launch keeps every client of every service waiting, health "
              "included.",
              MLA_SLOT(wire.poll_threads)),
          Int("wire.copy_threads", 0, 64,
              "Threads that share the copy of a large message into staging memory and the check of "
              "its index lists, its stream's own among them; 0: a quarter of the CPUs, 1 to 4, "
              "and 1 where the backend reads queries in place.",
              "All but one spin for wire.spin_us after each such message.",
              MLA_SLOT(wire.copy_threads)),
          Int("wire.spin_us", -1, 10000000,
              "How long polling goes on after an event before it sleeps; -1: 1000, 50 where the "
              "backend computes on the CPUs, 0 below four CPUs.",
              "Each sleep costs a wake-up of 5 to 50 us; spinning past the pause between layers "
              "keeps a core busy while a client decodes.",
              MLA_SLOT(wire.spin_us)),
      });
}

template <size_t kIndex>
ConfigSlot TenantSlot(Config& c) {
  return &c.tenants.bounds[static_cast<scheduler::Resource>(kIndex + 1)];
}

// Makes the row from the resource's description.
template <size_t kIndex>
void AddTenantKey(std::vector<ConfigKey>* keys) {
  const scheduler::ResourceRow& row = scheduler::ResourceRows()[kIndex];
  if (std::string(row.config_key).rfind("tenants.", 0) != 0) return;
  // Keys live as long as the process.
  static const std::string* const meaning =
      new std::string(absl::StrCat("Bound of one tenant. ", row.meaning));
  static const std::string* const edge = new std::string(TenantBoundText(row));
  keys->push_back(
      row.bytes
          ? Bytes(row.config_key, 0, kTiB, meaning->c_str(), edge->c_str(), TenantSlot<kIndex>)
          : Int(row.config_key, 0, 1 << 30, meaning->c_str(), edge->c_str(), TenantSlot<kIndex>));
}

template <size_t... kIndices>
void AddTenantRows(std::vector<ConfigKey>* keys, std::index_sequence<kIndices...>) {
  (AddTenantKey<kIndices>(keys), ...);
}

void AddTenantKeys(std::vector<ConfigKey>* keys) {
  AddTenantRows(keys, std::make_index_sequence<scheduler::kResourceCount>());
  keys->push_back(Int("tenants.metrics", 1, 1000,
                      "Tenants with metrics of their own: tenants in tenants.quotas first, then "
                      "the tenants that use most.",
                      "The others are summed as other; each takes a few dozen time series.",
                      MLA_SLOT(tenants.metrics)));
}

void AddShmKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Bool("shm.enabled", "Offer shared memory to clients of the unix socket.",
               "Without it their tensors travel through the socket.", MLA_SLOT(shm.enabled)),
          Text("shm.path",
               "Path of the socket through which regions are handed out; auto: the unix socket's "
               "path followed by .shm.",
               "At most 107 bytes; only the server's own user and server.socket_group may connect.",
               MLA_SLOT(shm.path)),
          Bytes("shm.region_bytes", 65536, kTiB, "Tensor bytes of one region.",
                "Holds what one client has in flight, requests and replies together.",
                MLA_SLOT(shm.region_bytes)),
          Bytes("shm.total_bytes", 65536, kTiB, "Memory of all regions together.",
                "Counted at start and taken as clients connect; further clients use the socket.",
                MLA_SLOT(shm.total_bytes)),
          Int("shm.regions_max", 1, 4096, "Regions at a time, all tenants together.",
              "Each ring has a thread of its own.", MLA_SLOT(shm.regions_max)),
          Int("shm.tenant_regions", 1, 4096, "Regions of one tenant at a time.",
              "Further clients of the tenant use the socket.", MLA_SLOT(shm.tenant_regions)),
          Int("shm.handshakes_max", 1, 4096, "Connections without a request, all users together.",
              "One more displaces the oldest of the user that has most.",
              MLA_SLOT(shm.handshakes_max)),
          Int("shm.user_handshakes", 1, 4096,
              "Connections without a request of one user of the host.",
              "One more displaces the oldest.", MLA_SLOT(shm.user_handshakes)),
          Millis("shm.handshake_ms", 1, kDayMs, "Time from a connection to its request.",
                 "Others are closed, within a second more.", MLA_SLOT(shm.handshake_ms)),
          Int("shm.ring_entries", 2, 4096, "Requests in flight on one command ring.",
              "A power of two; a client that sends more is disconnected.",
              MLA_SLOT(shm.ring_entries)),
          Int("shm.spin_us", 0, 10000000,
              "Longest time that a ring's thread spins for the next request before it sleeps.",
              "Spinning saves a wake-up of 5 to 50 us and takes a core while it lasts.",
              MLA_SLOT(shm.spin_us)),
          Bytes("shm.device_bytes", 0, kTiB,
                "Memory of the GPU for tensors of all regions together, in addition to the "
                "regions; 0: none.",
                "Kept free at start and taken as clients ask for it, in units of 2 MiB; it also "
                "counts towards tenants.region_bytes; if that is 0, a tenant has 7/8 of each kind.",
                MLA_SLOT(shm.device_bytes)),
          Millis("shm.device_wait_ms", 1, kDayMs,
                 "How long a request in device memory waits for the GPU work that comes before it.",
                 "It is DEADLINE_EXCEEDED then, with reason device_not_ready.",
                 MLA_SLOT(shm.device_wait_ms)),
      });
}

void AddCapacityKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Bytes("kv_cache.bytes", 0, kTiB,
                "The KV cache: one pool for all models, taken at start; 0: on a GPU what "
                "gpu.memory_fraction leaves, else 1 GiB.",
                "A step that finds no page group is refused.", MLA_SLOT(limits.kv_cache_bytes)),
          Int("kv_cache.page_size", 1, 4096, "Rows a page when a model names no size.",
              "A page group holds one page of every layer, so large pages waste the tail of short "
              "sequences and small ones cost table entries.",
              MLA_SLOT(limits.default_page_size)),
          Int("kv_cache.pinned_percent", 0, 90,
              "Part of the pool that the hints of all tenants may pin.",
              "Steps cannot use pinned room.", MLA_SLOT(limits.pinned_percent)),
          Int("kv_cache.tenant_pinned_percent", 0, 90,
              "Part of a tenant's share of the pool that its hints may pin.",
              "Hints beyond it are clipped.", MLA_SLOT(limits.tenant_pinned_percent)),
          Int("limits.max_sequences", 1, 1000000, "Open sequences, all tenants together.",
              "Open is RESOURCE_EXHAUSTED beyond it.", MLA_SLOT(limits.max_sequences)),
          Int("limits.max_sequence_rows", 1, 1073741824, "Rows of one sequence.",
              "Longer contexts are refused at BeginStep.", MLA_SLOT(limits.max_sequence_rows)),
          Int("limits.max_pages_per_sequence", 1, 16777216, "Page-table entries of one sequence.",
              "Models with small pages get shorter sequences: entries x page size rows.",
              MLA_SLOT(limits.max_pages_per_sequence)),
          Int("limits.max_tenants", 1, 1000000, "Tenants that use something at a time.",
              "Calls of further tenants are refused; tenants that use nothing do not count.",
              MLA_SLOT(limits.max_tenants)),
          Int("limits.prefix_tokens", 1, 1 << 30,
              "Rows that open sequences have declared for the prefix cache.",
              "4 bytes of host memory each; Open and Match are RESOURCE_EXHAUSTED beyond it.",
              MLA_SLOT(limits.prefix_tokens)),
          Int("limits.max_models", 1, 1024, "Registered models, all tenants together.",
              "Register is RESOURCE_EXHAUSTED beyond it.", MLA_SLOT(limits.max_models)),
          Int("limits.max_layers", 1, 4096, "Layers of one model.",
              "Register refuses models above it.", MLA_SLOT(limits.max_layers)),
          Int("limits.max_heads", 1, 4096, "Heads of one model; sizes the launch workspaces.",
              "Workspace grows with launch_rows x max_heads.", MLA_SLOT(limits.max_heads)),
          Int("limits.max_row_dim", 1, 8192, "kv_lora_rank + rope_dim of a model, in elements.",
              "Register refuses models above it.", MLA_SLOT(limits.max_row_dim)),
          Int("limits.max_v_dim", 1, 8192, "nope_dim and v_dim of a model, in elements.",
              "Register refuses models above it.", MLA_SLOT(limits.max_v_dim)),
          Int("limits.max_hidden_size", 1, 65536,
              "q_lora_rank and hidden_size of a model of the PROJECTED profile, in elements.",
              "Register refuses models above it.", MLA_SLOT(limits.max_hidden_size)),
          Int("limits.max_top_k", 0, 65536, "Entries of one index list of sparse attention.",
              "Register refuses models above it. On a GPU, a launch has room for launch_rows "
              "lists.",
              MLA_SLOT(limits.max_top_k)),
          Bytes(
              "limits.max_tail_bytes", 0, 1 << 30,
              "The tail of one sequence: data that workers store in addition to rows and entries.",
              "Register refuses models above it. An inline EndStep with a tail must fit "
              "wire.message_bytes.",
              MLA_SLOT(limits.max_tail_bytes)),
          Bytes("limits.tail_bytes", 0, kTiB,
                "Tails of all sequences and rotations of all open steps, in host memory.",
                "EndStep with a tail, or BeginStep with rotations (rope_dim x 4 bytes a row), is "
                "RESOURCE_EXHAUSTED beyond it; without its tail the step ends. A replaced tail "
                "counts until EndStep is answered.",
                MLA_SLOT(limits.tail_bytes)),
          Bytes("limits.weights_bytes", -1, kTiB,
                "Weights of all models: as bf16, or as e4m3 where the model says so; -1: 2 GiB, or "
                "an eighth of the memory at hand where that is less.",
                "heads x kv_lora_rank x (nope_dim + v_dim) x 2 bytes a layer; the 61 layers of "
                "DeepSeek-V3 need 1.91 GiB, with W_UQ and W_O (PROJECTED) 19.5, 10.7 in e4m3. "
                "CPUs without bf16 take twice the memory. 0: neither EXPANDED nor PROJECTED.",
                MLA_SLOT(limits.weights_bytes)),
      });
}

void AddSchedulingKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Int("limits.max_step_rows", 1, 1048576, "Rows of one step, its sequences together.",
              "Prompts above it take several steps.", MLA_SLOT(limits.max_step_rows)),
          Int("limits.max_step_sequences", 1, 65536, "Sequences of one step.",
              "Larger batches take several steps.", MLA_SLOT(limits.max_step_sequences)),
          Int("limits.max_open_steps", 1, 65536, "Open steps, all streams together.",
              "BeginStep is RESOURCE_EXHAUSTED beyond it.", MLA_SLOT(limits.max_open_steps)),
          Int("limits.max_participants", 1, 1024, "Streams that may take part in one step.",
              "Must cover the largest tensor-parallel group.", MLA_SLOT(limits.max_participants)),
          Int("limits.queue_requests", 1, 1048576,
              "Requests accepted and not yet answered, all streams together.",
              "Requests beyond it are RESOURCE_EXHAUSTED.", MLA_SLOT(limits.queue_requests)),
          Int("limits.launch_rows", 1, 1048576, "Query rows of one launch.",
              "Sizes the launch workspaces.", MLA_SLOT(limits.launch_rows)),
          Int("limits.launch_packed_rows", 1, 16777216, "Query rows x heads of one launch.",
              "Sizes the launch workspaces; below max_heads no row fits.",
              MLA_SLOT(limits.launch_packed_rows)),
          Int("limits.launch_requests", 1, 8192, "(sequence, row range) records of one launch.",
              "Sizes the plan's buffers.", MLA_SLOT(limits.launch_requests)),
          Int("limits.prefill_rows", 1, 1048576, "Rows of extend and prefill in one launch.",
              "Bounds staging memory in use; limits.launch_ms bounds the time.",
              MLA_SLOT(limits.prefill_rows)),
          Millis("limits.launch_ms", 1, 60'000, "Predicted time of one launch on the device.",
                 "Half of it while decodes come, so that one is computed within it. Longer suits "
                 "CPUs.",
                 MLA_SLOT(limits.launch_ms)),
          Int("limits.decode_rows", 1, 256,
              "A record with at most this many rows on a cache counts as decode.",
              "1 + the longest draft that is verified in one step.", MLA_SLOT(limits.decode_rows)),
      });
}

void AddLeaseKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Millis("limits.sequence_lease_ms", 100, kDayMs,
                 "A sequence is released after this time without use or renewal.",
                 "Too short and a paused worker loses its cache.",
                 MLA_SLOT(limits.sequence_lease_ms)),
          Millis("limits.max_lease_ms", 100, kDayMs, "Longest lease that a client may ask for.",
                 "A dead client's pages stay taken for this long.", MLA_SLOT(limits.max_lease_ms)),
          Millis("limits.model_lease_ms", 0, kDayMs,
                 "A model is unregistered after this time without a call or a sequence of it, "
                 "unless its client asked for another lease; 0: it stays.",
                 "Too short and workers must register and upload again after a pause.",
                 MLA_SLOT(limits.model_lease_ms)),
          Millis("limits.model_yield_ms", 0, kDayMs,
                 "A model that no call, sequence or stream has used for this time is unregistered "
                 "when another model needs its room; a tenth of it is enough if that is a model of "
                 "the same tenant; 0: never.",
                 "Without it, clients that have gone hold all models for ever.",
                 MLA_SLOT(limits.model_yield_ms)),
          Millis(
              "limits.max_step_lease_ms", 100, kDayMs,
              "Longest step lease that a client may ask for.",
              "A dead client's open steps, and the pages they reserve, stay taken for this long.",
              MLA_SLOT(limits.max_step_lease_ms)),
          Millis("limits.step_lease_ms", 100, kDayMs,
                 "An open step is aborted after this time without a message.",
                 "Must exceed the worker's time between two layers.",
                 MLA_SLOT(limits.step_lease_ms)),
          Int("limits.slice_wait_us", 0, 1000000,
              "How long the head slices of tensor-parallel ranks wait for each other, to be "
              "computed as one; microseconds.",
              "0: slices are computed as they come. A rank that is late delays its siblings by "
              "this much once a step, until it is in time again, and delays no other request.",
              MLA_SLOT(limits.slice_wait_us)),
          Int("limits.ahead_us", 0, 10000,
              "How long a launch waits on the GPU for a client's kernels at most; microseconds.",
              "0: never. Others wait as long: docs/shared_memory.md.", MLA_SLOT(limits.ahead_us)),
          Millis("limits.kv_wait_ms", 0, kDayMs,
                 "How long a request waits for KV rows that another one brings.",
                 "0: they must have arrived before.", MLA_SLOT(limits.kv_wait_ms)),
          Millis("limits.queue_ms", 1, kDayMs, "How long any request may wait for its launch.",
                 "After it the request fails with DEADLINE_EXCEEDED.", MLA_SLOT(limits.queue_ms)),
          Int("limits.max_name_bytes", 1, 4096, "Bytes of model, client, request and tenant names.",
              "Longer names are refused.", MLA_SLOT(limits.max_name_bytes)),
      });
}

void AddBackendKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Text("backend.name", "auto, or what must be used: gpu (any vendor's) or a backend.",
               "A name that cannot run here stops the start with the reasons.", MLA_SLOT(backend),
               "--backend"),
          Int("backend.threads", 0, 4096, "Worker threads of the CPU backend; 0: all usable cores.",
              "More threads than cores slow every launch down.", MLA_SLOT(backend_options.threads)),
          Bool("backend.pin_threads", "Bind CPU workers to cores.",
               "Turn off when other processes share the cores.",
               MLA_SLOT(backend_options.pin_threads)),
          Int("backend.spin_us", 0, 1000000,
              "Longest time that an idle CPU worker polls for the next launch before it sleeps.",
              "Waking a sleeping thread costs 10 to 400 us, polling costs a CPU.",
              MLA_SLOT(backend_options.spin_us)),
          Bool("backend.deterministic",
               "Results independent of what else is in the batch, on the CPU. GPUs refuse it.",
               "Costs balance between units.", MLA_SLOT(backend_options.deterministic),
               "--deterministic"),
          Choice("backend.cpu_isa", "|portable|avx2|avx512|avx512_bf16|amx",
                 "Highest CPU instruction set to use; empty: the best there is.",
                 "A lower one is for comparisons.", MLA_SLOT(backend_options.cpu_isa), "--cpu-isa"),
      });
}

}  // namespace

const std::vector<ConfigKey>& ConfigKeys() {
  static const std::vector<ConfigKey>* keys = [] {
    auto* const all = new std::vector<ConfigKey>();
    for (const auto add :
         {AddListenKeys, AddTlsAndOpsKeys, AddTracingKeys, AddCacheKeys, AddWireKeys,
          AddConnectionKeys, AddTenantKeys, AddShmKeys, AddUcxKeys, AddCapacityKeys,
          AddSchedulingKeys, AddLeaseKeys, AddBackendKeys, AddGpuKeys}) {
      add(all);
    }
    return all;
  }();
  return *keys;
}

}  // namespace mla::server
