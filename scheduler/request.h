// Requests of the stepping protocol as the engine sees them; they depend on no transport.
//
// A transport creates a StreamRequest, fills the fields of its kind and passes it to
// Engine::Submit. It may reuse requests. From then on the engine owns the request until it calls
// Done, exactly once, and does not touch it afterwards. The transport owns all memory that the
// request points to and keeps it valid until Done.
#ifndef MLA_SCHEDULER_REQUEST_H_
#define MLA_SCHEDULER_REQUEST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/formats/dtype.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/input_fragments.h"
#include "kernels/types/launch.h"
#include "kernels/types/select.h"
#include "kernels/types/word.h"

namespace mla::scheduler {

using StreamId = uint64_t;    // given by Engine::OpenStream
using StepId = uint64_t;      // chosen by the client, unique among its tenant's open steps
using SequenceId = uint64_t;  // random, never 0

enum class Profile : uint8_t { kAbsorbed, kExpanded, kAppendOnly, kProjected };

// Returns true for profiles whose queries are in the expanded form, as sent or as projected by the
// server.
constexpr bool IsExpanded(Profile profile) {
  return profile == Profile::kExpanded || profile == Profile::kProjected;
}

enum class RequestKind : uint8_t { kBeginStep, kAttend, kEndStep, kAbortStep };

struct StepSequenceArgs {
  SequenceId id = 0;
  uint64_t epoch = 0;
  int64_t start_position = 0;
  int32_t rows = 0;
};

inline int64_t StartOf(const StepSequenceArgs& sequence) { return sequence.start_position; }

// The positions of a step's rows in their sequences, as in its BeginStep. Shared, so that a request
// can refer to the positions for which its index lists were checked.
using StepPositions = std::shared_ptr<const std::vector<StepSequenceArgs>>;

struct Tail;  // scheduler/engine_types.h

struct BeginStepArgs {
  std::string model_id;
  std::vector<StepSequenceArgs> sequences;
  StepPositions positions;  // the same as `sequences`; null: the transport checks no lists
  int32_t participants = 1;
  int64_t lease_ms = 0;  // 0: Limits::step_lease_ms
  // The rotation of each row, fp32 [rows, rope_dim]; null: none.
  std::shared_ptr<const Tail> rotations = {};

  void Clear() {  // keeps the memory of its list
    model_id.clear();
    sequences.clear();
    positions.reset();
    participants = 1;
    lease_ms = 0;
    rotations.reset();
  }
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
  // The geometry by which the transport sized the memory below. If the step has another geometry,
  // because its id was reused before the end of the old step was answered, the request is refused.
  // num_heads 0: the caller guarantees the sizes. kUnsized: the transport knew no such step and
  // sized nothing.
  kernels::Geometry sized_for;
  kernels::IndexerShape sized_indexer;      // like sized_for
  kernels::ProjectedShape sized_projected;  // like sized_for
  int32_t sized_window = 0;                 // like sized_for
  int32_t sized_ratio = 0;                  // of the layer; like sized_for
  // True if kv, q, o and lse lie in memory from AttentionBackend::AllocateShared. The client has
  // finished writing its tensors there, unless `ready` names a word.
  bool on_device = false;
  // Without a word the tensors are complete. Otherwise they are complete once the word reaches the
  // value. Until then a launch may take the request ahead of its tensors, or the engine hands it
  // back (StreamRequest::handed_back).
  kernels::WordValue ready;
  // Empty, or a word that the launch may store as soon as the outputs are there, before Done. Once
  // the answer is known, the transport stores it in any case, whatever the answer is.
  kernels::WordValue done;
  // Row-major, host memory unless on_device; sizes follow from the model (the transport has checked
  // them). [row_count, ModelSpec::sent_row_dim] if has_kv. For models with a window the entries
  // that these rows complete (EntriesOf) follow; each is as wide as a row.
  const std::byte* kv = nullptr;
  // [row_count, num_heads, q dim] unless append-only; [row_count, q_lora_rank] if projected
  const std::byte* q = nullptr;
  // Alternatively q in pieces, if the backend reads_fragments and the request has all heads: the
  // tensor begins at byte q_fragments_offset of the joined fragments. q is null then.
  std::span<const kernels::InputFragment> q_fragments;
  int64_t q_fragments_offset = 0;
  // Index lists, or null. Row i attends to positions list[list_begin[i]] .. list[list_begin[i + 1]
  // - 1] of its sequence, which differ from each other and are all visible to it. The lists lie in
  // the server's own memory: a client could change its memory after the check.
  const int32_t* list = nullptr;
  const int32_t* list_begin = nullptr;  // [row_count + 1]; begins with 0, ascending
  // Alternatively the inputs from which the server's indexer makes the lists: [row_count] of
  // IndexerShape::input_bytes. `list_begin` then says how many positions each row gets.
  const std::byte* index_inputs = nullptr;
  // The positions of the step's rows for which the lists were checked. The request is refused if
  // the step has other positions, as with `sized_for`. Null: the caller guarantees the lists.
  StepPositions listed_for;
  // top_k of the model for which lists were checked and lists_out sized
  int32_t listed_top_k = 0;
  // [row_count, num_heads, o dim], or [row_count, hidden_size] if projected; written by the launch
  std::byte* o = nullptr;
  float* lse = nullptr;  // [row_count, num_heads] if want_lse
  // [row_count, top_k] for the indexer's lists, if the client wants them
  int32_t* lists_out = nullptr;
};

// Returns true if the launch writes log-sum-exps to the client's host memory.
inline bool WantsLseOnHost(const AttendArgs& args) { return args.want_lse && !args.on_device; }

// Returns true if the rows attend only to the positions of index lists.
inline bool IsSparse(const AttendArgs& args) { return args.list_begin != nullptr; }

// Returns true if the server's indexer makes the index lists.
inline bool Selects(const AttendArgs& args) { return args.index_inputs != nullptr; }

// Returns the number of compressed entries, of `ratio` positions each, that rows [begin, end) of a
// step complete; 0 if `ratio` is 0.
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

struct TailArgs {
  int32_t sequence = 0;  // its place in the step
  // Null: the transport knew no such step, and took no memory.
  std::shared_ptr<const Tail> tail;
};

struct EndStepArgs {
  std::vector<int32_t> committed_rows;  // empty: all
  // Tails for the committed lengths, in the order of the step's sequences, at most one for each.
  std::vector<TailArgs> tails;
  // The number of lengths for which the transport's reply has room. The EndStep of a step with more
  // sequences is refused; the step stays open.
  int32_t lengths_max = std::numeric_limits<int32_t>::max();

  void Clear() {  // keeps the memory of its lists
    committed_rows.clear();
    tails.clear();
    lengths_max = EndStepArgs().lengths_max;
  }
};

// Says where the request spent its time, in nanoseconds of the engine's clock.
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

// Says why the engine returned a request, whose tensors have not come yet, without computing it.
enum class HandedBack : uint8_t {
  kNo,
  kBusy,  // other requests wait, or another launch already waits for a client
  kLate,  // its launch waited on the device for Limits::ahead_us, and the word did not come
};

// Tracks the place of a request on its way through the engine. A step that no request takes ends
// the process: the request would be in two lists, or answered twice, and so write into the memory
// of another request.
class RequestState {
 public:
  enum Value : uint8_t {
    kOutside,   // the transport has it
    kAdmitted,  // submitted, in the inbox or on its way out of it
    kWaiting,   // an Attend that waits for a launch (WaitingRequests)
    kTaken,     // an Attend that a launch has taken, or that left the queue to be answered
    kEnding,    // an EndStep that waits for the other requests of its step
    kAnswered,  // answered or handed back, but not delivered
  };
  void Enter(Value next) {
    if ((kNext[value_] >> next & 1) == 0) [[unlikely]]
      Refuse(next);
    value_ = next;
  }
  void MustBe(Value value) const {
    if (value_ != value) [[unlikely]]
      Refuse(value);
  }
  friend bool operator==(const RequestState& state, Value value) { return state.value_ == value; }

 private:
  // Bits of the states that may follow each one.
  static constexpr uint8_t kNext[] = {
      1 << kAdmitted,                                 // kOutside
      1 << kWaiting | 1 << kEnding | 1 << kAnswered,  // kAdmitted
      1 << kTaken,                                    // kWaiting
      1 << kWaiting | 1 << kAnswered,                 // kTaken
      1 << kAnswered,                                 // kEnding
      1 << kOutside,                                  // kAnswered
  };
  [[noreturn]] void Refuse(Value next) const;

  Value value_ = kOutside;
};

// A source of requests that one thread submits. It outlives its requests.
class Submitter {
 public:
  virtual ~Submitter() = default;
  // Returns true if the submitting thread has nothing else to do now. Called by that thread only,
  // inside Engine::Submit.
  virtual bool IsIdle() const = 0;
};

// The fields that the transport fills for every kind of request.
struct RequestHeader {
  RequestKind kind = RequestKind::kAttend;
  StreamId stream = 0;
  // The tenant of the stream; lives until Done. If null, only the server's bound of queued requests
  // holds.
  Tenant* tenant = nullptr;
  StepId step_id = 0;
  // The submitting thread has other work, so the engine's thread must run the launch.
  bool leave_launch = false;
  const Submitter* submitter = nullptr;  // null: never idle
};

// The results that are valid in Done when the status is OK.
struct RequestResults {
  int32_t total_rows = 0;  // BeginStep
  int64_t lease_ms = 0;    // BeginStep
  int32_t joined = 0;      // BeginStep
  RequestTimings timings;  // Attend
  bool signalled = false;  // Attend: the device has stored attend.done
  // Unless kNo, the request was not carried out and the status has no meaning. It may be submitted
  // again unchanged when its tensors have come.
  HandedBack handed_back = HandedBack::kNo;
  // The step no longer exists; also valid if the status is an error.
  bool step_aborted = false;
};

class StreamRequest : public RequestHeader, public RequestResults {
 public:
  virtual ~StreamRequest() = default;
  // Called once for each request, without the engine role: one call at a time, in the order in
  // which the engine answered. Must not block for long, and may call nothing of the engine except
  // Submit. An error has an ErrorDetail (base/error.h).
  virtual void Done(const absl::Status& status) = 0;

  // Forgets all of a request that the engine does not own, so that the object can be used again.
  // Keeps the memory of its lists.
  void Reset() {
    engine.state.MustBe(RequestState::kOutside);
    if (kind != RequestKind::kAttend) {  // an Attend leaves these as they are
      begin.Clear();
      end.Clear();
      lengths.clear();
    }
    static_cast<RequestHeader&>(*this) = {};
    static_cast<RequestResults&>(*this) = {};
    attend = {};
  }

  // --- Filled by the transport, in addition to the header.
  BeginStepArgs begin;
  AttendArgs attend;
  EndStepArgs end;

  // --- A result like RequestResults.
  std::vector<int64_t> lengths;  // EndStep

  // --- State of the engine.
  struct EngineFields {
    RequestState state;
    // Links of the inbox, the pending list and the answers, so that queueing allocates nothing.
    StreamRequest* next = nullptr;
    StreamRequest* prev = nullptr;
    StreamRequest* queue_next = nullptr;  // waiting_requests.h: same tenant and key
    StreamRequest* queue_prev = nullptr;
    RequestQueue* queue = nullptr;  // in which the request waits
    uint64_t order = 0;             // of arrival
    Step* step = nullptr;
    int64_t first_arrival_ns = 0;  // of a request that was handed back: its first arrival
    int64_t arrival_ns = 0;
    int64_t deadline_ns = 0;
    // Its arrival, or the last time at which a part of it was computed.
    int64_t blocked_since_ns = 0;
    // Rows that earlier launches have computed, if the request is launched in parts.
    int32_t rows_done = 0;
    int32_t rows_launched = 0;         // in the launch now running
    int32_t batch_index = 0;           // position in that launch's batch
    SliceGroup* group = nullptr;       // waiting head slices of the same rows, including this one
    StreamRequest* sibling = nullptr;  // next member of the group
    // Its KV rows were accepted before, so they are compared and not appended.
    bool repeat = false;
    absl::Status status = absl::OkStatus();  // the answer, until it is delivered
    int64_t total_ns = 0;                    // from the first arrival to the answer
    // The first row, among all rows of the request, and the head whose result is not finite
    // although the inputs are. Also set if the inputs are not finite but the result can no longer
    // say so. -1: none so far.
    int32_t bad_row = -1;
    int32_t bad_head = -1;
    bool bad_inputs = false;  // the inputs are not finite either
    // of a repeat: its first row that differs from the stored one; -1: none
    int32_t other_row = -1;
    bool ahead = false;  // its tensors had not come when a launch was last chosen
    bool apart = false;  // it goes ahead with slices of its rows that have not come

    // Call it when the request is submitted. All that an earlier use of the object left is gone,
    // except for the first arrival of a request that was handed back.
    void Begin(int64_t now, bool was_handed_back) {
      state.Enter(RequestState::kAdmitted);
      const RequestState admitted = state;
      const int64_t first = was_handed_back ? first_arrival_ns : now;
      // Constructed in place: a temporary would be written and read once for each request.
      std::destroy_at(this);
      ::new (this) EngineFields{.state = admitted, .first_arrival_ns = first, .arrival_ns = now};
    }
  };
  EngineFields engine;
};

// --- Rules that need only the request. The validator of messages applies them before it sizes
// memory by these numbers, and the engine applies them again. Errors name the field, the value and
// the limit.

// Checks how much a step may hold. `participants`: after its default of 1 was applied.
absl::Status CheckStepBounds(int64_t sequences, int64_t participants, int64_t lease_ms,
                             const Limits& limits);
// `rows` counts all rows of a step together.
absl::Status CheckStepRows(int64_t rows, const Limits& limits);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_REQUEST_H_
