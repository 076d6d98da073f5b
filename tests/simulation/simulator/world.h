// The state that the parts of a simulation share: the engine and its clock and device, the oracle,
// values drawn from the seed, requests under way, and the trace.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_WORLD_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_WORLD_H_

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/splitmix.h"
#include "mla/v1/attention.pb.h"
#include "mla/v1/sequence.pb.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/tenant_table.h"
#include "server/grpc/request_validator.h"
#include "tests/simulation/device/fake_device.h"
#include "tests/simulation/oracle/oracle.h"
#include "tests/simulation/oracle/patterns.h"
#include "tests/simulation/tenants/tenant_calls.h"

namespace mla::simulation {

enum class Op : uint8_t {
  kRegister,
  kUnregister,
  kWeights,
  kOpen,
  kFork,
  kTruncate,
  kRelease,
  kRenew,
  kGet,
  kOpenStream,
  kCloseStream,
  kBegin,
  kJoin,
  kAttend,
  kQuery,
  kRanks,
  kRepeat,
  kFill,
  kRefusable,
  kMalformed,
  kEnd,
  kAbort,
  kLaunch,
  kTime,
  kFault,
  kDrain,
  kQuota,
  kEvict,
  kBranch,
  kResend,
  kTenantCall,
  kFlood,
  kMatch,
  kCopy,
  kDamage,
  kHint,
  kCount,
};
const char* Name(Op op);

struct SimulatorCounts {
  std::array<int64_t, static_cast<size_t>(Op::kCount)> operations = {};  // operations that had an
                                                                         // effect
  int64_t answers_checked = 0;  // outputs compared with the expected ones
  int64_t lists_checked = 0;    // of these, with index lists
  int64_t resent = 0;           // calls sent again
  int64_t refusals = 0, commits = 0, aborts = 0, expired = 0;
  int64_t launches = 0, commands = 0, faults = 0;
  int64_t most_passed_over = 0;   // launches that passed over a request that could run
  int64_t one_slot_launches = 0;  // of devices like a CPU
  int64_t scrubs = 0, copies = 0, slices_fused = 0;
  int64_t pages_of_equals = 0;                 // of the found ones, from another model of equal
                                               // contents
  int64_t pages_found = 0, pages_evicted = 0;  // of the prefix cache
  int64_t pages_demoted = 0, pages_restored = 0, pages_damaged = 0;  // of slower tiers
  int64_t pages_from_file = 0, pages_pinned = 0;
  int64_t rows_imported = 0;
  int64_t windows_checked = 0;  // answers of WindowSimulator
  int64_t late_checked = 0;     // launches of AheadSimulator that were late
  int64_t sequences_moved = 0;  // by drains of HandOverSimulator
  int64_t total() const;
  void Add(const SimulatorCounts& other);
};

// Bound of a list; more than the rows of a simulated sequence.
inline constexpr int kMostListed = 4096;

// Bound of a message of the simulated transport.
inline constexpr int64_t kMessageBytes = 1 << 20;

// Bytes that a tensor takes in a request's memory, followed by a guard of at least 64 bytes.
inline size_t Room(size_t bytes) { return (bytes + 63) / 64 * 64 + 64; }

// Elements of a row of q.
inline int QueryDim(const Shape& shape, Form form) {
  return form == Form::kExpanded ? shape.nope + shape.rope : shape.row_dim();
}

class Checks;
class Control;
class Copies;
class Fairness;
class Operators;
class Prefixes;
class Repeats;
class Simulator;
class Steps;
class Transport;

// A request as the simulated transport holds it: one block of memory for all its tensors.
class SimRequest final : public scheduler::StreamRequest {
 public:
  explicit SimRequest(Transport* transport) : transport_(transport) {}
  void Done(const absl::Status& answer) override;

  int answers = 0;
  absl::Status status;
  ErrorDetail detail;     // for an error
  int owner = 0;          // number of the tenant
  uint64_t step_key = 0;  // the oracle's key
  Reasons expect;         // for checks that are made on arrival
  bool immediate = false;
  OracleBegin wanted;  // for BeginStep
  bool joins = false;
  Form form = Form::kAbsorbed;
  uint64_t q_key = 0;
  uint64_t lists = 0;  // key of its index lists; 0: no lists
  bool repeat = false, differs = false;
  // Launches that began without it after it could run and had waited for everything that it may
  // wait for.
  int64_t passed_over = 0, counts_from = 0;
  bool running = false;  // in a launch
  bool bulk = false;     // extend or prefill
  int flood = 0;         // > 0: belongs to this queue of the flood; -1: the watched request
  int64_t arrival_ns = 0, deadline_ns = 0;
  uint64_t launch = 0;            // the last launch that it was staged for
  std::vector<std::byte> memory;  // kv, q, o, lse, lists, each followed by a guard
  size_t kv_bytes = 0, q_bytes = 0, o_bytes = 0, lse_bytes = 0, list_bytes = 0;

 private:
  Transport* const transport_;
};

// A stream of requests, and its tenant's number.
struct Stream {
  uint64_t id = 0;
  int tenant = 0;
};

// An operation, for the report of a violation.
struct TraceEntry {
  Op op = Op::kCount;
  int64_t at_us = 0;
  uint64_t a = 0, b = 0, c = 0;
};

// Names of pages for an Open: the names of an earlier sequence, changed at the end.
struct DrawnPrefix {
  std::vector<uint64_t> pages;
  std::string salt;
};

// Exported rows.
struct CopiedRows {
  int tenant = 0, model = -1;
  scheduler::MovingPages pages;
  std::vector<std::vector<std::byte>> payloads;  // by page group
  std::vector<std::vector<uint64_t>> keys;       // keys of the rows, by layer
};

// A part of a copy.
struct SimMove {
  scheduler::PageMove part;
  std::vector<std::byte> memory;
  std::span<std::byte> target;  // target of exported rows
  bool done = false;
  absl::Status answer;
};

// The wanted fields of an Attend.
struct AttendSpec {
  uint64_t stream = 0;
  int layer = 0, row = 0, rows = 0, head = 0, heads = 0;
  Form form = Form::kAbsorbed;
  bool kv = false, lse = false, differs = false;
  bool f32 = false, f32_out = false, sparse = false;
  int64_t timeout_us = 0;
  bool lists() const { return sparse && form != Form::kAppend; }
};

// Requests of one tenant that are sent again and again.
struct FloodQueue {
  AttendSpec spec;
  uint64_t step = 0;
  int tenant = 0, depth = 1;
  int64_t least_cost = 0;  // least cost of a launch that it leads
};

// Declared pages.
struct History {
  int model = -1;
  DrawnPrefix prefix;
};

// The parts are set before anything is drawn, and live as long as the world is used. Not
// thread-safe.
struct World {
  explicit World(uint64_t first) : seed(first), random(SplitMix(first)), clock(1'000'000'000) {}

  // --- Randomness
  uint64_t Pick(uint64_t below) { return (random = SplitMix(random)) % below; }
  bool Chance(int percent) { return Pick(100) < static_cast<uint64_t>(percent); }

  // --- Set-up
  void DrawConfig();
  void DrawShapes();
  scheduler::Limits EngineLimits() const;
  std::string TenantName(int tenant) const;
  int Tenants() const { return tenants + (floods ? 1 : 0); }

  // --- Choosing
  OracleSequence* AnySequence(int tenant, bool free);
  int AnyTenant() { return 1 + static_cast<int>(Pick(static_cast<uint64_t>(tenants))); }
  int AnyModel(int tenant);
  std::string NewRequestId();
  const Stream* AnyStream(int tenant);
  int64_t Now() const { return clock.Now(); }

  // --- Verdicts
  // Returns true for a predicted refusal, and for a granted call without predicted refusals.
  bool Foretold(const char* call, const absl::Status& status, const Reasons& expect);
  void Fail(const std::string& what);
  bool failed() const { return !violation.empty(); }
  void Trace(uint64_t a, uint64_t b = 0, uint64_t c = 0);
  void Hash(uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; }
  // The last operations, one a line.
  std::string Tail() const;

  // --- The parts
  Checks* checks = nullptr;
  Control* control = nullptr;
  Copies* copies = nullptr;
  Fairness* fairness = nullptr;
  Operators* operators = nullptr;
  Prefixes* prefixes = nullptr;
  Repeats* repeats = nullptr;
  Simulator* simulator = nullptr;
  Steps* steps = nullptr;
  Transport* transport = nullptr;

  const uint64_t seed;
  uint64_t random;
  // Drawn from the seed
  OracleLimits oracle_limits;
  FakeDeviceOptions device_options;
  std::vector<Shape> shapes;
  int tenants = 2;
  int fault_percent = 0;
  bool drains = false, loses_device = false, has_quotas = false, leases_models = false;
  int queue_requests = 0, launch_rows = 0, launch_packed_rows = 0, launch_requests = 0;
  bool floods = false;
  int light = 0;  // with floods: another tenant, which takes part in nothing else
  int64_t launch_ms = 10;
  int prefill_rows = 0, decode_rows = 0, most_tenants = 0;
  int tier_groups = 0;  // room of the host tier; 0: no tier
  int file_groups = 0;  // room of the tiers' file; 0: no file
  std::string tier_path;
  int tier_low_percent = 0, tier_high_percent = 0;
  int64_t slice_wait_us = 0, kv_wait_ms = 0, queue_ms = 0;
  scheduler::SimulatedClock clock;
  FakeDevice* device = nullptr;  // the engine's device
  std::unique_ptr<scheduler::Engine> engine;
  std::unique_ptr<Oracle> oracle;
  std::unique_ptr<TenantCalls> calls;      // on the engine's tenant table
  std::vector<scheduler::TenantRef> rows;  // by tenant, as a transport holds them
  std::vector<Stream> streams;
  std::list<std::unique_ptr<SimRequest>> requests;  // not answered
  std::vector<std::unique_ptr<SimRequest>> done;    // answered, not yet checked
  int flood = 0;                                    // SimRequest::flood of requests sent now
  uint64_t next_step_id = 1, next_key = 1, next_page = 1;
  // Copies in progress; they outlive the engine's part in them.
  std::vector<std::unique_ptr<SimMove>> moves;
  bool undrained = false;                // the engine has not taken all submitted requests
  uint64_t first_failed = ~uint64_t{0};  // launch, since the last check of the answers
  int64_t pinned = 0;                    // page groups held by page work alone, at the last check
  bool gave_up = false;                  // requests have waited too long, since the last call
  int64_t called_at = 0;                 // the last call of the engine
  bool late = false;                     // time has passed without a call of the engine
  Op op = Op::kCount;
  std::array<TraceEntry, 64> trace = {};
  size_t traced = 0;
  uint64_t hash = 0xcbf29ce484222325u;
  std::string violation;
  SimulatorCounts counts;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_WORLD_H_
