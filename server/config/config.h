// The configuration of the server, derived from one table of keys.
//
// Each row of the table (ConfigKeys) has a key's name, type, default, unit, range and meaning, and
// says what goes wrong at its edges. The YAML keys, the environment names, the flags, --help,
// docs/configuration.md and deploy/config/example.yaml are all derived from it, so they cannot
// disagree.
//
// Sources: built-in default, YAML file, environment, flags. Each overrides the ones before it.
// Loading reports all faults at once, each with its key and with the place from which the value
// came.
//
//   key `kv_cache.bytes`  ->  YAML  kv_cache: {bytes: 4GiB}
//                             env   MLA_KV_CACHE_BYTES=4GiB
//                             flag  --kv-cache-bytes=4GiB
//
// Threading: plain data, filled once before any thread starts.
#ifndef MLA_SERVER_CONFIG_CONFIG_H_
#define MLA_SERVER_CONFIG_CONFIG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "kernels/backend_registry.h"
#include "scheduler/limits.h"
#include "scheduler/tenant_table.h"

namespace mla::server {

struct Config {
  Config() {
    limits.kv_cache_bytes = 0;
    limits.weights_bytes = kChooseWeights;
  }

  // limits.weights_bytes: ChooseSizes decides.
  static constexpr int64_t kChooseWeights = -1;

  // If kv_cache_bytes is 0, the cache gets as much as the backend has room for, see ChooseSizes
  scheduler::Limits limits;
  std::string backend = "auto";  // "auto" or a name from the registry
  kernels::BackendOptions backend_options;

  struct Listen {
    std::string address = "127.0.0.1:50551";  // empty: no TCP listener; port 0: any free port
    std::string unix_path = "auto";           // empty: no unix socket; see UnixPath
    // Group whose members may connect; empty: see socket_files.h.
    std::string socket_group;
    std::string unix_tenant;  // of all callers on it; empty: see identity.h
    // true: sockets may lie in folders to which every user may write
    bool open_folder = false;
    bool insecure = false;            // allow plaintext beyond loopback
    std::string reflection = "auto";  // auto: on when every listener is local
    // Names of the tenants that are operators, separated by commas.
    std::string operators;
    std::string plain_operators = "host";  // which callers without TLS are operators
  } listen;

  struct Wire {
    int64_t message_bytes = int64_t{4} << 20;    // one request or reply
    int64_t inflight_bytes = int64_t{64} << 20;  // staged for one stream
    int64_t staging_bytes = int64_t{256} << 20;  // staging memory of all streams
    int64_t weight_chunk_bytes = int64_t{4} << 20;
    int32_t max_streams = 1024;
    int32_t max_connections = 4096;
    int32_t peer_connections = 1024;   // per address, or per user of the unix socket
    int32_t connection_streams = 128;  // concurrent RPCs of one connection
    int32_t control_threads = 64;      // threads for unary calls, uploads and watchers
    // Part of control_calls for leases and administration only.
    int32_t control_reserve = 8;
    int64_t control_bytes = int64_t{32} << 20;  // serialized requests of control calls
    int32_t max_uploads = 16;                   // UploadWeights calls at a time
    int64_t upload_idle_ms = 30000;  // an upload that sends nothing for this long is cancelled
    int32_t max_watchers = 16;
    int32_t max_health_calls = 1024;  // open calls of grpc.health.v1
    int64_t metadata_bytes = 16384;
    int64_t quota_bytes = int64_t{2} << 30;  // gRPC's own buffers
    int64_t connection_age_ms = 0;           // 0: unlimited
    int64_t connection_idle_ms = 0;          // 0: unlimited
    int64_t handshake_ms = 10000;            // between a connection and its first frame
    int64_t keepalive_ms = 20000;
    // A stream whose client does not take a reply for this long is disconnected.
    int64_t slow_reader_ms = 30000;
    int32_t poll_threads = 4;  // for the streams; one polls at a time
    int32_t copy_threads = 0;  // for one large message; 0: chosen by CPUs and backend
    // The poller spins this long after an event; -1: depends on CPUs and backend.
    int32_t spin_us = -1;
  } wire;

  // Bounds of one tenant: scheduler/tenant_table.h.
  struct Tenants {
    // 0: the tenant's share of the server's bound
    scheduler::PerResource<int64_t> bounds;
    std::map<std::string, scheduler::TenantQuota> quotas;  // by tenant name
    // Number of tenants that have their own metrics.
    int32_t metrics = 32;
  } tenants;

  // Shared memory with clients on the same host: docs/shared_memory.md.
  struct Shm {
    bool enabled = true;
    std::string path = "auto";                  // of the listener; auto: the unix socket's + ".shm"
    int64_t region_bytes = int64_t{128} << 20;  // arena of one region
    int64_t total_bytes = int64_t{256} << 20;   // all regions together
    int32_t regions_max = 64;
    int32_t tenant_regions = 16;
    int32_t handshakes_max = 128;   // connections that have not sent their request, of all users
    int32_t user_handshakes = 32;   // part of them for one user
    int64_t handshake_ms = 2000;    // between a connection and its request
    int32_t ring_entries = 256;     // requests in flight on one ring; a power of two
    int32_t spin_us = 50;           // a ring's poller spins at most this long before it sleeps
    int64_t device_bytes = 0;       // device memory in addition to all regions; 0: none is offered
    int64_t device_wait_ms = 1000;  // for work on a client's GPU that a request must wait for
  } shm;

  // Rings that travel over UCX: docs/rdma.md.
  struct Ucx {
    bool enabled = false;
    std::string library;              // empty: where the loader finds it
    std::string transports, devices;  // as of UCX_TLS and UCX_NET_DEVICES
    bool puts = false;
    bool device_memory = false;
    bool encrypted = false;
    int32_t sessions = 16;
    int64_t open_ms = 10000;
  } ucx;

  struct Tls {
    std::string cert, key, client_ca;  // PEM files
    std::string client_crl;            // PEM file of revocation lists; empty: none
    int64_t reload_ms = 10000;
  } tls;

  struct Checkpoint {
    std::string path;                   // folder; empty: no checkpoints are kept
    int64_t bytes = int64_t{64} << 30;  // all files together
    int64_t tenant_bytes = 0;           // per tenant; 0: seven eighths of `bytes`
    int32_t tenant_files = 1024;        // per tenant
  } checkpoint;

  struct Tiers {            // settings of the slower tiers; their bounds are among the limits
    std::string file_path;  // empty: no file
    int32_t threads = 2;
  } tiers;

  struct Ops {
    std::string address = "127.0.0.1:50552";  // empty: off
    int32_t connections = 8;
  } ops;

  struct Log {
    std::string format = "text";
    std::string level = "info";
  } log;

  struct Tracing {
    std::string otlp_target;  // empty: no collector
    std::string file;         // empty: no file
    int64_t file_bytes = int64_t{256} << 20;
    int32_t sample_every = 0;  // 0: traces of callers only
    int32_t traces_per_s = 100;
    int32_t tenant_traces_per_s = 50;
    int32_t queue_spans = 16384;
  } tracing;

  int64_t drain_deadline_ms = 30000;
  int32_t hand_over_streams = 4;  // connections to the peer of a hand-over
  // An engine silent for this long makes the server NOT_SERVING.
  int64_t unhealthy_after_ms = 10000;
  // After this much longer the server asks to be restarted; 0: never.
  int64_t restart_after_ms = 120000;
};

using ConfigSlot = std::variant<bool*, int32_t*, int64_t*, double*, std::string*>;

enum class ConfigType { kBool, kInt, kBytes, kMillis, kDouble, kString, kChoice };

struct ConfigKey {
  const char* name;  // "group.key"
  ConfigType type;
  double min, max;         // range of numbers, inclusive; unused for strings
  const char* choices;     // for kChoice, separated by '|'
  const char* meaning;     // one sentence
  const char* edge;        // what goes wrong beyond the edges
  const char* short_flag;  // another name of the flag, or ""
  ConfigSlot (*slot)(Config&);
};

// Returns the table, by groups and in the order in which documents show it.
const std::vector<ConfigKey>& ConfigKeys();

std::string FlagName(const ConfigKey& key);         // "--kv-cache-bytes"
std::string EnvironmentName(const ConfigKey& key);  // "MLA_KV_CACHE_BYTES"
const char* TypeName(ConfigType type);
std::string RangeText(const ConfigKey& key);  // "1 .. 64", "true or false", "a, b"; "" for text
// Returns the key's value in `config`, as a file would give it.
std::string ValueText(const ConfigKey& key, const Config& config);

// The modes of the command line other than running.
struct CommandLine {
  bool check_config = false;
  bool print_config = false;
  bool print_example = false;    // deploy/config/example.yaml
  bool print_reference = false;  // the table of docs/configuration.md
  bool help = false;
  bool version = false;
};

struct LoadedConfig {
  Config config;
  CommandLine command;
  std::string file;                           // that was read; empty: none
  std::map<std::string, std::string> origin;  // key -> "default", "file a.yaml:3", "env X", "flag"
  // Every fault that was found, each as "key: the fault (where)". Empty: the config may be used.
  std::vector<std::string> faults;
  // Names of environment variables that are ignored, because Kubernetes chose them as links to
  // services.
  std::vector<std::string> service_links;
};

// Reads flags, environment and the file named by --config or MLA_CONFIG, then checks the result.
// `environment` is the complete environment, so that a misspelt MLA_ name is found.
LoadedConfig LoadConfig(const std::vector<std::string>& arguments,
                        const std::map<std::string, std::string>& environment);

// Checks the rules that involve more than one key. Appends to `faults`.
void CheckConfig(const Config& config, std::vector<std::string>* faults);

// Returns the bounds of tenants that `config` leads to, with shares turned into numbers. REQUIRES:
// kv_cache.bytes is known.
scheduler::TenantTableOptions TenantOptionsOf(const Config& config);
// Returns how many of the threads for control calls only leases and administration may use.
int32_t ControlReserve(const Config& config);
// Sets a bound or the weight of one tenant from a key of the file, "tenants.quotas.NAME.RESOURCE".
// Returns the fault, or an empty string.
std::string SetTenantQuota(const std::string& key, const std::string& text, Config* config);
inline constexpr char kTenantQuotas[] = "tenants.quotas.";

// Returns the size as text, like "4GiB". Sizes that are not keys use it, too.
std::string BytesText(int64_t bytes);
bool ParseBytes(std::string text, int64_t* bytes);

// Counts reloads of files while serving: of the configuration, or of TLS.
struct ReloadStats {
  uint64_t reloads = 0;  // how often newer contents were taken into use
  uint64_t refused = 0;  // how often newer contents could not be used
  std::string why;       // why the files on disk are not in use; empty: they are
};

// The keys that differ between the configuration of a running server and one that was read later;
// "tenants.quotas" stands for the quotas by name.
struct ConfigChanges {
  std::vector<std::string> live;   // taken over while running
  std::vector<std::string> fixed;  // in force after a restart only
};
ConfigChanges ChangesOf(const Config& running, const Config& read);
// Returns true if a running server takes a new value of the key over.
bool IsLive(const ConfigKey& key);

// Writes `text` into the key's slot. Returns the fault, or an empty string.
std::string SetValue(const ConfigKey& key, const std::string& text, Config* config);

// --- Texts made from the table.
std::string PrintConfig(const LoadedConfig& loaded);  // key = value  # origin
std::string HelpText();
std::string ExampleYaml();
std::string ReferenceMarkdown();

// Returns the path of the unix socket with "auto" resolved, or empty without a socket.
// `runtime_folder` comes from socket_files.h.
std::string UnixPath(const Config::Listen& listen, const std::string& runtime_folder);

// Returns the path of the shared-memory listener that goes with the unix socket at `unix_path`, or
// empty without a listener.
std::string ShmSocketPath(const Config::Shm& shm, const std::string& unix_path);

// Returns true if "host:port" is loopback: 127.0.0.0/8, ::1 or localhost.
bool IsLoopback(const std::string& address);

}  // namespace mla::server

#endif  // MLA_SERVER_CONFIG_CONFIG_H_
