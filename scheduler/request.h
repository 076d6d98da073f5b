// Requests of the stepping protocol as the engine sees them, free of any transport.
//
// A transport creates a StreamRequest (and may pool them), fills the fields of its kind, and hands
// it to Engine::Submit. The engine owns it until it calls Done exactly once; from then on it never
// touches it. All memory the request points to is the transport's and must stay valid until
// Done.
#ifndef MLA_SCHEDULER_REQUEST_H_
#define MLA_SCHEDULER_REQUEST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/formats/dtype.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/input_fragments.h"
#include "kernels/types/select.h"
#include "kernels/types/word.h"

namespace mla::scheduler {

using StreamId = uint64_t;    // given by Engine::OpenStream
using StepId = uint64_t;      // chosen by the client, unique among its tenant's open steps
using SequenceId = uint64_t;  // random, never 0

enum class Profile : uint8_t { kAbsorbed, kExpanded, kAppendOnly };

enum class RequestKind : uint8_t { kBeginStep, kAttend, kEndStep, kAbortStep };

struct StepSequenceArgs {
  SequenceId id = 0;
  uint64_t epoch = 0;
  int64_t start_position = 0;
  int32_t rows = 0;
};

inline int64_t StartOf(const StepSequenceArgs& sequence) { return sequence.start_position; }

// Positions of a step's rows in their sequences, as in its BeginStep. Shared, so that a request can
// refer to the positions for which its index lists were checked.
using StepPositions = std::shared_ptr<const std::vector<StepSequenceArgs>>;

struct BeginStepArgs {
  std::string model_id;
  std::vector<StepSequenceArgs> sequences;
  StepPositions positions;  // equal to `sequences`; null: the transport checks no lists
  int32_t participants = 1;
  int64_t lease_ms = 0;  // 0: Limits::step_lease_ms
};

struct AttendArgs {
  static constexpr int32_t kUnsized = -1;
  int32_t layer = 0;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t head_offset = 0;
  int32_t num_heads = 0;
  Profile profile = Profile::kAbsorbed;
  bool has_kv = false;
  bool want_lse = false;
  kernels::DType q_dtype = kernels::DType::kBf16;  // q and kv
  kernels::DType o_dtype = kernels::DType::kBf16;
  int64_t timeout_us = 0;  // 0: Limits::queue_ms
  // Geometry by which the transport sized the memory below. A request that meets a step of another
  // geometry (its id was reused before the old step's end was answered) is refused. num_heads 0:
  // the caller vouches for the sizes; kUnsized: the transport knows no such step and sized nothing.
  kernels::Geometry sized_for;
  kernels::IndexerShape sized_indexer;  // like sized_for
  int32_t sized_window = 0;             // like sized_for
  int32_t sized_ratio = 0;              // of the layer; like sized_for
  // True if kv, q, o and lse lie in memory from AttentionBackend::AllocateShared. The client has
  // finished writing its tensors there, unless `ready` names a word.
  bool on_device = false;
  // Without a word the tensors are complete. Otherwise they are complete once the word reaches the
  // value. Until then a launch may take the request ahead of its tensors, or the engine hands it
  // back (StreamRequest::handed_back).
  kernels::WordValue ready;
  // No word, or one that the launch may store as soon as the outputs are there, before Done. The
  // transport stores it then in any case, whatever the answer.
  kernels::WordValue done;
  // Row-major, host memory unless on_device; sizes follow from the model (the transport has checked
  // them). [row_count, ModelSpec::sent_row_dim] if has_kv. For models with a window the entries
  // that these rows complete (EntriesOf) follow; each is as wide as a row.
  const std::byte* kv = nullptr;
  const std::byte* q = nullptr;  // [row_count, num_heads, q dim] unless append-only
  // Alternatively q in pieces, if the backend reads_fragments and the request has all heads: the
  // tensor begins at byte q_fragments_offset of the joined fragments. q is null then.
  std::span<const kernels::InputFragment> q_fragments;
  int64_t q_fragments_offset = 0;
  // Index lists, or null. Row i attends to positions list[list_begin[i]] .. list[list_begin[i + 1]
  // - 1] of its sequence, which differ from each other and are all visible to it. The lists lie in
  // the server's own memory: a client could change its memory after the check.
  const int32_t* list = nullptr;
  const int32_t* list_begin = nullptr;  // [row_count + 1], from 0 on, ascending
  // Alternatively the inputs from which the server's indexer makes the lists: [row_count] of
  // IndexerShape::input_bytes. `list_begin` then says how many positions each row gets.
  const std::byte* index_inputs = nullptr;
  // For which positions of the step's rows the lists were checked. A request that meets a step of
  // other ones is refused, as by `sized_for`. Null: the caller vouches for them.
  StepPositions listed_for;
  // top_k of the model for which lists were checked and lists_out sized
  int32_t listed_top_k = 0;
  std::byte* o = nullptr;        // [row_count, num_heads, o dim], written by the launch
  float* lse = nullptr;          // [row_count, num_heads] if want_lse
  int32_t* lists_out = nullptr;  // [row_count, top_k] of the indexer's lists, if they are wanted
};

// True if the launch writes log-sum-exps to the client's host memory.
inline bool WantsLseOnHost(const AttendArgs& args) { return args.want_lse && !args.on_device; }

// True if the rows attend to the positions of index lists only.
inline bool IsSparse(const AttendArgs& args) { return args.list_begin != nullptr; }

// True if the server's indexer makes the index lists.
inline bool Selects(const AttendArgs& args) { return args.index_inputs != nullptr; }

// Compressed entries of `ratio` positions each that rows [begin, end) of a step make whole; with
// `ratio` 0, none.
template <typename Sequences>
int64_t EntriesOf(const Sequences& sequences, int32_t ratio, int64_t begin, int64_t end) {
  int64_t entries = 0, offset = 0;
  for (const auto& sequence : sequences) {
    if (offset >= end) break;
    const int64_t first = std::clamp<int64_t>(begin - offset, 0, sequence.rows);
    const int64_t last = std::clamp<int64_t>(end - offset, 0, sequence.rows);
    const int64_t start = StartOf(sequence);
    if (ratio > 0 && first < last) entries += (start + last) / ratio - (start + first) / ratio;
    offset += sequence.rows;
  }
  return entries;
}

struct Tail;  // scheduler/engine.h

struct TailArgs {
  int32_t sequence = 0;  // its place in the step
  // Null: the transport knew no such step, and took nothing.
  std::shared_ptr<const Tail> tail;
};

struct EndStepArgs {
  std::vector<int32_t> committed_rows;  // empty: all
  // Tails for the committed lengths, in the order of the step's sequences, at most one for each.
  std::vector<TailArgs> tails;
  // Lengths that the transport has room for in its reply. The end of a step of more sequences is
  // refused, and the step stays open.
  int32_t lengths_max = std::numeric_limits<int32_t>::max();
};

// Where the request spent its time, in nanoseconds of the engine's clock.
struct RequestTimings {
  int64_t queue_ns = 0;
  int64_t plan_ns = 0;
  int64_t kernel_ns = 0;
  int32_t launch_requests = 0;
  int32_t launch_layers = 0;
  int32_t launch_clients = 0;
  bool plan_reused = false;
};

class Tenant;
struct Limits;
struct ModelSpec;
struct RequestQueue;
struct SliceGroup;
struct Step;

// Why a request whose tensors are not there yet has not been computed.
enum class HandedBack : uint8_t {
  kNo,
  kBusy,  // others wait, or a launch waits for a client already
  kLate,  // its launch waited on the device for Limits::ahead_us
};

// A source of requests that one thread hands over. Outlives them.
class Submitter {
 public:
  virtual ~Submitter() = default;
  // Returns true if the submitting thread has nothing else to do now. Called by that thread only,
  // inside Engine::Submit.
  virtual bool IsIdle() const = 0;
};

class StreamRequest {
 public:
  virtual ~StreamRequest() = default;
  // Called once for each request, without the engine role: one call at a time, in the order in
  // which the engine answered. Must not block for long, and may call nothing of the engine except
  // Submit. An error has an ErrorDetail (base/error.h).
  virtual void Done(const absl::Status& status) = 0;

  // --- Filled by the transport.
  RequestKind kind = RequestKind::kAttend;
  StreamId stream = 0;
  // The tenant of the stream; lives until Done. If null, only the server's bound of queued requests
  // holds.
  Tenant* tenant = nullptr;
  StepId step_id = 0;
  BeginStepArgs begin;
  AttendArgs attend;
  EndStepArgs end;
  // The thread that hands it over has more to do than to run its launch.
  bool leave_launch = false;
  const Submitter* submitter = nullptr;  // null: never idle

  // --- Results, valid in Done when the status is OK.
  int32_t total_rows = 0;        // BeginStep
  int64_t lease_ms = 0;          // BeginStep
  int32_t joined = 0;            // BeginStep
  std::vector<int64_t> lengths;  // EndStep
  RequestTimings timings;        // Attend
  bool signalled = false;        // Attend: the device has stored attend.done
  // Unless kNo, the status says nothing, and nothing has come of the request: it may be handed over
  // again, as it is, when its tensors are there.
  HandedBack handed_back = HandedBack::kNo;
  // The step no longer exists (valid for errors too).
  bool step_aborted = false;

  // --- State of the engine.
  struct EngineFields {
    // Links of the inbox, the pending list and the answers: queueing allocates nothing.
    StreamRequest* next = nullptr;
    StreamRequest* prev = nullptr;
    StreamRequest* queue_next = nullptr;  // waiting_requests.h: same tenant and key
    StreamRequest* queue_prev = nullptr;
    RequestQueue* queue = nullptr;  // null unless the request waits
    uint64_t order = 0;             // of arrival
    Step* step = nullptr;
    int64_t first_arrival_ns = 0;  // of a request that was handed back: its first arrival
    int64_t arrival_ns = 0;
    int64_t deadline_ns = 0;
    int64_t blocked_since_ns = 0;      // arrival, or when a part of it was last computed
    int32_t rows_done = 0;             // computed by earlier launches of a request that is cut up
    int32_t rows_launched = 0;         // in the launch now running
    int32_t batch_index = 0;           // position in that launch's batch
    SliceGroup* group = nullptr;       // head slices of the same rows that wait with it
    StreamRequest* sibling = nullptr;  // next member of the group
    bool repeat = false;               // its KV rows were accepted before: compare, do not append
    absl::Status status;               // the answer, until it is delivered
    int64_t total_ns = 0;              // from the first arrival to the answer
    // The first row, among all rows of the request, and the head whose result is not finite
    // although the inputs are. Also set if the inputs are not finite but the result can no longer
    // say so. -1: none so far.
    int32_t bad_row = -1;
    int32_t bad_head = -1;
    bool bad_inputs = false;  // the inputs are not finite either
    // of a repeat: its first row that differs from the stored one; -1: none
    int32_t other_row = -1;
    bool counted = false;  // among the tenant's queued requests
    bool ahead = false;    // its tensors were not there when a launch was last chosen
  };
  EngineFields engine;
};

// --- Rules that need only the request and its step's model. The validator of messages applies them
// before it sizes memory by these numbers. The engine applies them again, because the step id may
// name another step by then. Errors name the field, the value and the limit.

// How much a step may hold. `participants`: with its default of 1.
absl::Status CheckStepBounds(int64_t sequences, int64_t participants, int64_t lease_ms,
                             const Limits& limits);
// All rows of a step together.
absl::Status CheckStepRows(int64_t rows, const Limits& limits);

// The range that an Attend asks for, before its numbers are narrowed.
struct AttendRange {
  int64_t layer = 0;
  int64_t row_begin = 0, row_count = 0;
  int64_t head_offset = 0, num_heads = 0;
};
// Inside a step of `total_rows` >= 1 rows of the model; append-only needs no heads.
absl::Status CheckAttendRange(const AttendRange& range, Profile profile, const ModelSpec& model,
                              int32_t total_rows);
// Checks that the model allows requests of this profile.
absl::Status CheckAttendProfile(Profile profile, bool has_kv, const ModelSpec& model);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_REQUEST_H_
