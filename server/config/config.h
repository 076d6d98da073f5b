// Configuration of the server: one table of keys from which everything else follows.
//
// Each row of the table (ConfigKeys) gives a key's name, type, default, unit, range, meaning and
// what goes wrong at its edges. The YAML keys, the environment names, the flags, --help,
// docs/configuration.md and deploy/config/example.yaml are all derived from it, so they cannot
// disagree.
//
// Sources in rising order: built-in default < YAML file < environment < flags. Loading reports
// every fault at once, each with its key path and where the value came from.
//
//   key `kv_cache.bytes`  ->  YAML  kv_cache: {bytes: 4GiB}
//                             env   MLA_KV_CACHE_BYTES=4GiB
//                             flag  --kv-cache-bytes=4GiB
//
// Threading: plain data, built once before any thread starts.
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

  scheduler::Limits limits;      // kv_cache_bytes 0: as the backend has room, see ChooseSizes
  std::string backend = "auto";  // "auto" or a name of the registry
  kernels::BackendOptions backend_options;

  struct Listen {
    std::string address = "127.0.0.1:50551";  // empty: no TCP listener; port 0: any free port
    std::string unix_path = "auto";           // empty: no unix socket; see UnixPath
    std::string socket_group;              // whose members may connect; empty: see socket_files.h
    std::string unix_tenant;               // of all who call over it; empty: see identity.h
    bool open_folder = false;              // sockets in folders that every user may write to
    bool insecure = false;                 // allow plaintext beyond loopback
    std::string reflection = "auto";       // auto: on when every listener is local
    std::string operators;                 // tenants that are operators, comma separated
    std::string plain_operators = "host";  // callers without TLS that are operators
  } listen;

  struct Wire {
    int64_t message_bytes = int64_t{4} << 20;    // of one request or reply
    int64_t inflight_bytes = int64_t{64} << 20;  // staged for one stream
    int64_t staging_bytes = int64_t{256} << 20;  // staging memory of all streams
    int64_t weight_chunk_bytes = int64_t{4} << 20;
    int32_t max_streams = 1024;
    int32_t max_connections = 4096;
    int32_t peer_connections = 1024;            // of one address, or of one user of the unix socket
    int32_t connection_streams = 128;           // concurrent RPCs of one connection
    int32_t control_threads = 64;               // threads for unary calls, uploads and watchers
    int32_t control_reserve = 8;                // of these, for leases and administration alone
    int64_t control_bytes = int64_t{32} << 20;  // serialized requests of control calls
    int32_t max_uploads = 16;                   // UploadWeights calls at a time
    int64_t upload_idle_ms = 30000;  // an upload that sends nothing for this long is cancelled
    int32_t max_watchers = 16;
    int32_t max_health_calls = 1024;  // of grpc.health.v1, open at a time
    int64_t metadata_bytes = 16384;
    int64_t quota_bytes = int64_t{2} << 30;  // gRPC's own buffers
    int64_t connection_age_ms = 0;           // 0: unlimited
    int64_t connection_idle_ms = 0;          // 0: unlimited
    int64_t handshake_ms = 10000;            // from a connection to its first frame
    int64_t keepalive_ms = 20000;
    int64_t slow_reader_ms = 30000;  // a reply not taken for this long disconnects the stream
    int32_t poll_threads = 4;        // of the streams; one polls at a time
    int32_t copy_threads = 0;        // of one large message; 0: by CPUs and backend
    int32_t spin_us = -1;            // for this long after an event; -1: by CPUs and backend
  } wire;

  // What one tenant may use: scheduler/tenant_table.h.
  struct Tenants {
    scheduler::PerResource<int64_t> bounds;                // 0: its share of the server's bound
    std::map<std::string, scheduler::TenantQuota> quotas;  // of tenants by name
    int32_t metrics = 32;                                  // tenants with metrics of their own
  } tenants;

  // The same-host path: docs/shared_memory.md.
  struct Shm {
    bool enabled = true;
    std::string path = "auto";                  // of the listener; auto: the unix socket's + ".shm"
    int64_t region_bytes = int64_t{128} << 20;  // arena of one region
    int64_t total_bytes = int64_t{256} << 20;   // of all regions
    int32_t regions_max = 64;
    int32_t tenant_regions = 16;
    int32_t handshakes_max = 128;   // connections without a request, all users together
    int32_t user_handshakes = 32;   // of these, of one user
    int64_t handshake_ms = 2000;    // from a connection to its request
    int32_t ring_entries = 256;     // requests in flight on one ring; a power of two
    int32_t spin_us = 50;           // a ring's poller spins at most this long before it sleeps
    int64_t device_bytes = 0;       // device memory beside all regions; 0: none is offered
    int64_t device_wait_ms = 1000;  // for what a client's GPU has to complete before a request
  } shm;

  struct Tls {
    std::string cert, key, client_ca;  // PEM files
    std::string client_crl;            // PEM file of revocation lists; empty: none
    int64_t reload_ms = 10000;
  } tls;

  struct Checkpoint {
    std::string path;                   // folder; empty: none are kept
    int64_t bytes = int64_t{64} << 30;  // of all files
    int64_t tenant_bytes = 0;           // of one tenant's; 0: seven eighths of it
    int32_t tenant_files = 1024;        // of one tenant
  } checkpoint;

  struct Tiers {            // whose bounds are among the limits
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

  int64_t drain_deadline_ms = 30000;
  int64_t unhealthy_after_ms = 10000;  // engine silent for this long: NOT_SERVING
  int64_t restart_after_ms = 120000;   // and after this long beyond that: restart me; 0: never
};

using ConfigSlot = std::variant<bool*, int32_t*, int64_t*, double*, std::string*>;

enum class ConfigType { kBool, kInt, kBytes, kMillis, kDouble, kString, kChoice };

struct ConfigKey {
  const char* name;  // "group.key"
  ConfigType type;
  double min, max;         // of numbers, inclusive; unused for strings
  const char* choices;     // of kChoice, separated by '|'
  const char* meaning;     // one sentence
  const char* edge;        // what goes wrong at the edges
  const char* short_flag;  // a second flag name, or ""
  ConfigSlot (*slot)(Config&);
};

// The table, grouped, in the order in which documents show it.
const std::vector<ConfigKey>& ConfigKeys();

std::string FlagName(const ConfigKey& key);         // "--kv-cache-bytes"
std::string EnvironmentName(const ConfigKey& key);  // "MLA_KV_CACHE_BYTES"
const char* TypeName(ConfigType type);
std::string RangeText(const ConfigKey& key);  // "1 .. 64", "true or false", "a, b"; "" for text
// The value now in `config`, as it would be written in a file.
std::string ValueText(const ConfigKey& key, const Config& config);

// What to do besides running.
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
  // Every fault found, each "key: what is wrong (where)". Empty: the config may be used.
  std::vector<std::string> faults;
  // Environment names that are ignored: links to services of Kubernetes, whose names are given by
  // others.
  std::vector<std::string> service_links;
};

// Reads flags, environment and the file that --config or MLA_CONFIG names, then checks the whole.
// `environment` holds all of it, so that a misspelt MLA_ name is found.
LoadedConfig LoadConfig(const std::vector<std::string>& arguments,
                        const std::map<std::string, std::string>& environment);

// The rules that involve more than one key. Appends to `faults`.
void CheckConfig(const Config& config, std::vector<std::string>* faults);

// The bounds by tenant that `config` stands for, shares resolved. REQUIRES: kv_cache.bytes is
// known.
scheduler::TenantTableOptions TenantOptionsOf(const Config& config);
// Threads of the control calls that only leases and administration may take.
int32_t ControlReserve(const Config& config);
// Sets a bound or the weight of one tenant from a key of the file, "tenants.quotas.NAME.RESOURCE".
// Returns what is wrong, or an empty string.
std::string SetTenantQuota(const std::string& key, const std::string& text, Config* config);
inline constexpr char kTenantQuotas[] = "tenants.quotas.";

// "4GiB" and the like, also for what is no key.
std::string BytesText(int64_t bytes);
bool ParseBytes(std::string text, int64_t* bytes);

// What differs between the configuration that a server runs by and one that was read since: keys,
// and "tenants.quotas" for the quotas by name.
struct ConfigChanges {
  std::vector<std::string> live;   // taken over while running
  std::vector<std::string> fixed;  // in force after a restart only
};
ConfigChanges ChangesOf(const Config& running, const Config& read);
// Returns true if a running server takes a new value of the key over.
bool IsLive(const ConfigKey& key);

// Writes `text` into the key's slot. Returns what is wrong, or an empty string.
std::string SetValue(const ConfigKey& key, const std::string& text, Config* config);

// --- Texts made from the table.
std::string PrintConfig(const LoadedConfig& loaded);  // key = value  # origin
std::string HelpText();
std::string ExampleYaml();
std::string ReferenceMarkdown();

// The path of the unix socket with "auto" resolved; empty: none. `runtime_folder` is that of
// socket_files.h.
std::string UnixPath(const Config::Listen& listen, const std::string& runtime_folder);

// The path of the shared-memory listener beside the unix socket at `unix_path`; empty: none.
std::string ShmSocketPath(const Config::Shm& shm, const std::string& unix_path);

// "host:port" is loopback: 127.0.0.0/8, ::1 or localhost.
bool IsLoopback(const std::string& address);

}  // namespace mla::server

#endif  // MLA_SERVER_CONFIG_CONFIG_H_
