// One seed of the simulation: the real validator and engine (admission, queue, planner, cache,
// leases, launches) with a simulated transport, clock and device, in one thread. Each operation is
// drawn from the seed, predicted by the oracle, executed and checked:
//
// - Every request gets exactly one answer, with the outcome or one of the reasons predicted.
// - An OK answer equals dense attention over the rows that the contract makes visible.
// - Pages, sequences, steps, models and streams in use equal the oracle's books.
// - The device saw no word of another tenant, no invalid plan, and no launch past a deadline or
//   beyond its limits. Requests' memory is not touched after their answer.
// - When faults end, everything that can run is answered, and in the end nothing remains.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_SIMULATOR_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_SIMULATOR_H_

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
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

// Bytes that a tensor takes in a request's memory, followed by a guard of at least 64 bytes.
inline size_t Room(size_t bytes) { return (bytes + 63) / 64 * 64 + 64; }

class Simulator;

// A request as the simulated transport holds it: one block of memory for all its tensors.
class SimRequest final : public scheduler::StreamRequest {
 public:
  explicit SimRequest(Simulator* simulator) : simulator_(simulator) {}
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
  Simulator* const simulator_;
};

class Simulator final : public DeviceWatcher {
 public:
  explicit Simulator(uint64_t seed);
  ~Simulator() override;

  // Runs up to `operations` steps and the end phase. Returns "" or a violation.
  std::string Run(int operations);
  const SimulatorCounts& counts() const { return counts_; }
  uint64_t hash() const { return hash_; }
  // The last operations, one a line.
  std::string Tail() const;

  // --- DeviceWatcher
  void OnViolation(const std::string& what) override { Fail(what); }
  int OnStaged(const void* host, int64_t bytes, uint64_t serial) override;
  void OnSubmitted(uint64_t serial) override;
  void OnLaunchDone(uint64_t serial) override;
  void OnLaunchFailed(uint64_t serial) override;
  // --- Of requests
  void OnDone(SimRequest* request);

 private:
  struct Stream {
    uint64_t id = 0;
    int tenant = 0;
  };
  struct TraceEntry {
    Op op = Op::kCount;
    int64_t at_us = 0;
    uint64_t a = 0, b = 0, c = 0;
  };

  // --- Randomness
  uint64_t Pick(uint64_t below) { return (random_ = SplitMix(random_)) % below; }
  bool Chance(int percent) { return Pick(100) < static_cast<uint64_t>(percent); }

  // --- Set-up
  void DrawConfig();
  void DrawShapes();
  scheduler::Limits EngineLimits() const;
  std::string TenantName(int tenant) const;

  // --- Operations; each returns true if it had an effect
  bool Do(Op op);
  Op DrawOp();
  // Runs the operation, unless it does not apply now, and checks the books.
  void Operate(Op op);
  bool Register(int tenant);
  bool RegisterAny() { return Register(AnyTenant()); }
  bool Unregister();
  bool LoadWeights();
  bool Open(int tenant);
  bool OpenAny() { return Open(AnyTenant()); }
  bool Fork();
  bool Branch();
  bool Match();
  // Names of pages for an Open: the names of an earlier sequence, changed at the end.
  struct DrawnPrefix {
    std::vector<uint64_t> pages;
    std::string salt;
  };
  DrawnPrefix DrawPrefix(int model);
  size_t MostPages(int model) const;  // most pages that a sequence may declare
  static void FillPrefix(const DrawnPrefix& drawn, v1::Prefix* message);
  // Checks that the found pages may be found. Notes them, and returns their number.
  size_t CheckFound(const scheduler::SequenceInfo& info, const DrawnPrefix& drawn);
  // Pages that were not found will hold different rows, so they get new names.
  void RenameFrom(uint64_t id, size_t found, DrawnPrefix drawn);
  // Exports rows of one sequence and imports them into another.
  bool Copy();
  // Changes bytes of the host tier, or of the tiers' file.
  bool Damage();
  void DamageFile();
  // Sends a hint about declared pages, and waits for its moves.
  bool Hint();
  void CountPinned(const scheduler::EngineStats& stats);
  void SendHint(scheduler::HintKind kind, int model, const DrawnPrefix& drawn);
  // Waits until requested rows of slower tiers are back.
  void AwaitTiers();
  struct CopiedRows {
    int tenant = 0, model = -1;
    scheduler::MovingPages pages;
    std::vector<std::vector<std::byte>> payloads;  // by page group
    std::vector<std::vector<uint64_t>> keys;       // keys of the rows, by layer
  };
  bool ExportRows(const OracleSequence& source, int64_t first, int64_t end, CopiedRows* rows);
  // `restored` is the id that the new sequence had before; 0: it gets a new id.
  void ImportRows(const CopiedRows& rows, uint64_t behind, uint64_t restored);
  bool ReserveImport(const CopiedRows& rows, int model, uint64_t behind, uint64_t restored,
                     scheduler::MovingPages* to);
  void ReleaseOne(int tenant, uint64_t id);
  // Moves every part of all groups; returns false if one fails.
  bool MoveParts(int tenant, const scheduler::MovingPages& pages, bool in,
                 std::vector<std::vector<std::byte>>* payloads);
  struct SimMove {
    scheduler::PageMove part;
    std::vector<std::byte> memory;
    std::span<std::byte> target;  // target of exported rows
    bool done = false;
    absl::Status answer;
  };
  // Other operations, usually.
  void Interlude();
  bool HasRows(const OracleSequence* sequence, const scheduler::PageMove& part) const;
  // Returns false if the engine has refused it, as predicted.
  bool HandOver(int tenant, const scheduler::PageMove& part, std::vector<SimMove*>* moves);
  // Waits until all have been moved; returns false if one was not.
  bool AwaitMoves(std::vector<SimMove*>* moves);
  bool Truncate();
  bool Release();
  bool Renew();
  bool Get();
  bool OpenStream();
  bool CloseStream();
  bool Begin();
  bool Join();
  bool Attend();
  bool Query();
  bool Ranks();
  bool Repeat();
  bool FillStep();
  bool Refusable();
  bool Malformed();
  bool End();
  bool Abort();
  bool Launch();
  bool Time();
  bool ArmFault();
  bool Drain();
  bool SetQuota();
  bool CallAsTenant();
  bool Flood();
  bool Evict();
  bool EvictModel();
  bool Resend();
  bool ResendCreation();
  bool ResendOpen(int tenant, const OracleSequence& known, bool changed);
  bool ResendFork(int tenant, const OracleSequence& known, bool changed);
  bool ResendTruncate();
  bool ResendToClosedStep();
  static scheduler::TenantQuota QuotaOf(const OracleQuota& quota);
  OracleQuota DrawQuota();
  void TouchModels();
  void CheckLists(int tenant);

  // --- Choosing
  OracleSequence* AnySequence(int tenant, bool free);
  OracleStep* AnyStep();
  int AnyTenant() { return 1 + static_cast<int>(Pick(static_cast<uint64_t>(tenants_))); }
  int AnyModel(int tenant);
  std::string NewRequestId();
  const Stream* AnyStream(int tenant);
  int64_t Now() const { return clock_.Now(); }

  // --- The transport
  // Returns the child's id, or 0 if it was refused.
  uint64_t SendFork(int tenant, const OracleSequence& parent, uint64_t epoch, int64_t length);
  bool SendRows(uint64_t step_id, int tenant);
  OracleBegin DrawBegin(int tenant);
  void SpoilBegin(OracleBegin* begin);
  bool SendBegin(const OracleBegin& begin, bool joins);
  struct AttendSpec {
    uint64_t stream = 0;
    int layer = 0, row = 0, rows = 0, head = 0, heads = 0;
    Form form = Form::kAbsorbed;
    bool kv = false, lse = false, differs = false;
    bool f32 = false, f32_out = false, sparse = false;
    int64_t timeout_us = 0;
    bool lists() const { return sparse && form != Form::kAppend; }
  };
  struct FloodQueue {
    AttendSpec spec;
    uint64_t step = 0;
    int tenant = 0, depth = 1;
    int64_t least_cost = 0;  // least cost of a launch that it leads
  };
  int64_t LeastCost(const Shape& shape, int rows, int heads, int cached) const;
  int64_t MostCost(const Shape& shape, int rows, int heads, int cached) const;
  void NotePages(const OracleStep& step);
  void NoteTaken(SimRequest* request, int64_t offset, int64_t bytes);
  bool DrawStored(int tenant, bool of_tenant, AttendSpec* spec, uint64_t* key);
  bool IsBulk(const OracleStep& step, const AttendSpec& spec) const;
  void Prepare(int tenant);
  bool DrawFlood(bool bulk, std::vector<FloodQueue>* flood);
  bool FloodRound(const std::vector<FloodQueue>& flood);
  bool WarmUp(const std::vector<FloodQueue>& flood);
  int64_t MostPassedOver(const std::vector<FloodQueue>& flood) const;
  void SendVictim(uint64_t key, const AttendSpec& spec, const std::vector<FloodQueue>& flood);
  void WaitsFrom(SimRequest* request) const;
  AttendSpec DrawAttend(const OracleStep& step);
  v1::Attend MessageOf(const OracleStep& step, const AttendSpec& spec) const;
  // Adds the KV rows to the oracle's step and submits the request.
  bool SendAttend(OracleStep* step, const AttendSpec& spec);
  // Parses through the validator; sets the request's arguments and the sizes of its tensors.
  absl::Status ParseRows(const scheduler::ModelSpec& known, const OracleStep& step,
                         const AttendSpec& spec, SimRequest* request);
  Reasons CheckAttend(const OracleStep& step, const AttendSpec& spec, bool* repeat) const;
  void FillTensors(SimRequest* request, const OracleStep& step, const AttendSpec& spec);
  void FillLists(SimRequest* request, const OracleStep& step, const AttendSpec& spec,
                 std::byte* at) const;
  static std::vector<int32_t> ListsOf(uint64_t key, const OracleStep& step, const AttendSpec& spec);
  // Submits the request; returns false if the queue is full, as predicted.
  bool Submit(std::unique_ptr<SimRequest> request);
  // Lets the engine take submitted requests, and checks the answers.
  bool Poll();
  void BeforeCall();
  void AfterCall();
  void RenewAfterSteps();

  // --- Checks
  void CheckAnswers();
  void CheckAnswer(SimRequest* request);
  void CheckBeginAnswer(SimRequest* request);
  void CheckAttendAnswer(SimRequest* request);
  void CheckAttendFailure(const SimRequest& request, OracleStep* step);
  void CheckEndAnswer(SimRequest* request);
  void CheckOutput(const SimRequest& request, const OracleStep& step);
  // For a call that was sent again. `repeats` is null if it opened a sequence for the first time.
  void CheckRepeated(const scheduler::SequenceInfo& info, const OracleSequence* repeats);
  void CheckGuards(const SimRequest& request);
  void CheckBooks();
  void CheckQuotas();
  static int64_t PagesOnTheBooks(const scheduler::EngineStats& stats);
  int64_t OpenAttends() const;
  // Returns true for a predicted refusal, and for a granted call without predicted refusals.
  bool Foretold(const char* call, const absl::Status& status, const Reasons& expect);
  bool MayWait(const SimRequest& request);
  void FinishAborts();
  void Settle();
  void ReleaseAll(int tenant);
  void Finish();
  void Fail(const std::string& what);
  int Tenants() const { return tenants_ + (floods_ ? 1 : 0); }
  bool failed() const { return !violation_.empty(); }
  void Trace(uint64_t a, uint64_t b = 0, uint64_t c = 0);
  void Hash(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3u; }

  const uint64_t seed_;
  uint64_t random_;
  // Drawn from the seed
  OracleLimits oracle_limits_;
  FakeDeviceOptions device_options_;
  std::vector<Shape> shapes_;
  int tenants_ = 2;
  int fault_percent_ = 0;
  bool drains_ = false, loses_device_ = false, has_quotas_ = false, leases_models_ = false;
  int queue_requests_ = 0, launch_rows_ = 0, launch_packed_rows_ = 0, launch_requests_ = 0;
  bool floods_ = false;
  int light_ = 0;  // with floods: another tenant, which takes part in nothing else
  int64_t launch_ms_ = 10;
  int prefill_rows_ = 0, decode_rows_ = 0, most_tenants_ = 0;
  int tier_groups_ = 0;  // room of the host tier; 0: no tier
  int file_groups_ = 0;  // room of the tiers' file; 0: no file
  std::string tier_path_;
  int tier_low_percent_ = 0, tier_high_percent_ = 0;
  int64_t slice_wait_us_ = 0, kv_wait_ms_ = 0, queue_ms_ = 0;

  scheduler::SimulatedClock clock_;
  FakeDevice* device_ = nullptr;  // the engine's device
  std::unique_ptr<scheduler::Engine> engine_;
  std::unique_ptr<Oracle> oracle_;
  std::unique_ptr<TenantCalls> calls_;      // on the engine's tenant table
  std::vector<scheduler::TenantRef> rows_;  // by tenant, as a transport holds them
  std::vector<Stream> streams_;
  std::list<std::unique_ptr<SimRequest>> requests_;    // not answered
  std::vector<std::unique_ptr<SimRequest>> done_;      // answered, not yet checked
  std::map<const std::byte*, SimRequest*> memory_;     // memory of unanswered requests
  std::vector<std::unique_ptr<SimRequest>> answered_;  // the last checked ones
  size_t next_answered_ = 0;
  int flood_ = 0;  // SimRequest::flood of requests sent now
  // KV bytes of service by tenant: lower and upper bound.
  std::array<int64_t, kTenantNumbers> least_served_ = {}, most_served_ = {};
  uint64_t next_step_id_ = 1, next_key_ = 1, next_page_ = 1;
  struct History {
    int model = -1;
    DrawnPrefix prefix;
  };
  // Draws a name of an existing model, with at least one page, which usually was published. Returns
  // false if there is none.
  bool DrawHinted(History* hinted);
  // Releases sequences whose rows begin with these pages, except those in a step.
  void ReleaseHolders(const History& hinted);
  std::vector<History> histories_;               // declared pages of sequences
  History hinted_;                               // of the last hint; without a model: used up
  std::vector<std::unique_ptr<SimMove>> moves_;  // in progress; they outlive the engine's part in
                                                 // them
  int inside_ = 0;                               // copies that surround this operation
  int64_t bytes_cached_ = 0;                     // held by the prefix cache alone, at the last
                                                 // check
  bool undrained_ = false;                       // the engine has not taken all submitted requests
  uint64_t first_failed_ = ~uint64_t{0};         // launch, since the last check of the answers
  int64_t pinned_ = 0;     // page groups held by page work alone, at the last check
  bool gave_up_ = false;   // requests have waited too long, since the last call
  int64_t called_at_ = 0;  // the last call of the engine
  bool late_ = false;      // time has passed without a call of the engine

  Op op_ = Op::kCount;
  std::array<TraceEntry, 64> trace_ = {};
  size_t traced_ = 0;
  uint64_t hash_ = 0xcbf29ce484222325u;
  std::string violation_;
  SimulatorCounts counts_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_SIMULATOR_H_
