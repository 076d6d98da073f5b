// Steps and attention over one Attend stream of the server.
//
// Tensors are the caller's memory: requests are sent from it without an intermediate copy, and
// replies are written into it with one. It must stay valid and unchanged until the call has
// returned (blocking) or Wait has returned (asynchronous).
//
// A call is split by rows so that every message stays below the server's limits.message_bytes. The
// messages are sent without waiting between them. Calls whose tensors lie in shared memory
// (Session::Allocate) are not split.
//
// A session belongs to the process that opened it. In a child made by fork, its calls are
// FAILED_PRECONDITION (reason "forked"), it does not have memory, and destroying it ends nothing.
//
// Ownership: a Session must outlive its steps, and a Client its sessions. Destroying a step that
// was not ended aborts it; destroying a session aborts all its steps. Threading: several threads
// may begin and use different steps of a session; only one thread at a time may use a step.
#ifndef MLA_CLIENT_CPP_SESSION_H_
#define MLA_CLIENT_CPP_SESSION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/client.h"
#include "mla/v1/attention.pb.h"

namespace mla::client {

struct StepRows {
  Sequence* sequence = nullptr;
  uint32_t rows = 0;  // rows that the step adds to it
};

struct BeginOptions {
  uint64_t step_id = 0;       // 0: the session chooses one; all participants must use the same
  uint32_t participants = 1;  // streams that take part
  uint32_t lease_ms = 0;      // 0: the server's default
  // The header of W3C Trace Context that names the span to which the step belongs. A server that
  // records traces then records the step as its child. Empty: ClientOptions::traceparent says it.
  std::string traceparent = {};
  // For models with ROPE_OWNER_SERVER: the rotation of each row of the step, [rows, rope_dim],
  // cosines [rope_dim / 2] and then sines. Copied before Begin returns. Empty: none, as for streams
  // that join.
  std::span<const float> rotations = {};
  // Begin returns without the server's answer, and leaves with the step's first message where
  // entries travel together (over UCX). If the server refuses, the attends and the end of the step
  // fail with the reason. joined() is 0.
  bool pipelined = false;
};

// Index lists of an AttendCall, for models with sparse attention: a row attends only to the
// positions of its list, or in a model with a window to those entries. -1 is padding, and a
// repeated position counts once.
struct IndexLists {
  const int32_t* entries = nullptr;  // null: no lists; each row attends to all rows that it sees
  // The number of entries of every row; 0: rows have lists of different lengths. Lists of one width
  // may follow q in shared memory, at the next multiple of 64 bytes, and are then used in place (in
  // a ring, if they have the model's top_k entries).
  uint32_t width = 0;
  // If lists differ in length: [row_count + 1], beginning with 0; list i ends at begin[i + 1].
  const int32_t* begin = nullptr;
};

// One layer of a step, or a part of its rows or heads. Shapes are as in attention.proto, row-major.
struct AttendCall {
  uint32_t layer = 0;
  uint32_t row_begin = 0;
  uint32_t row_count = 0;
  uint32_t head_offset = 0;
  uint32_t num_heads = 0;
  v1::Profile profile = v1::PROFILE_EXPANDED;
  // DTYPE_F8_E4M3: q is a tensor in the form that EncodeFp8Queries writes.
  v1::DType q_dtype = v1::DTYPE_BF16;
  // DTYPE_F8_E4M3: kv is a tensor in the form that EncodeFp8Rows writes. Unspecified: kv has
  // q_dtype, or bf16 if that is DTYPE_F8_E4M3.
  v1::DType kv_row_dtype = v1::DTYPE_UNSPECIFIED;
  v1::DType o_dtype = v1::DTYPE_BF16;
  uint32_t timeout_us = 0;
  // If the model has an indexer, each row is followed by its index key. If it has a window, all
  // rows are followed by the entries that they complete (Step::EntriesOf has their number). Null:
  // another head slice brings the rows.
  const void* kv = nullptr;
  const void* q = nullptr;  // unused by APPEND_ONLY
  void* o = nullptr;
  float* lse = nullptr;  // null: not wanted
  // For tensors in device memory (Session::AllocateOnDevice): the CUstream or hipStream_t whose
  // earlier work the server waits for before it reads the tensors; null: the default stream.
  void* stream = nullptr;
  // Work submitted to `stream` after AttendAsync has returned runs once the outputs are complete,
  // or the call has failed: no thread need wait in between, and Wait may come layers later. Wait
  // still tells whether the outputs are valid. If the server goes away, a thread of the session
  // lets the stream go on. All attends of the session under way must be chained calls of one
  // stream, else FAILED_PRECONDITION; steps may begin and end in between.
  bool chained = false;
  // Another call of the session or the end of the step follows at once: over UCX they leave
  // together. Wait sends what was kept for that.
  bool more = false;
  IndexLists lists;
  // In place of `lists`, for models with an indexer: its inputs, one record a row with index
  // queries [index_heads, index_dim] of q_dtype, then head weights [index_heads], fp32.
  const void* index_inputs = nullptr;
  int32_t* chosen = nullptr;  // set to the chosen lists, [row_count, top_k]; null: not wanted
};

// Encode tensors as 8-bit floats (DTYPE_F8_E4M3; capability "fp8_wire"): half the bytes of bf16,
// and a relative error of at most 2^-4 a value. Scales are powers of two, chosen for each part of a
// vector (attention.proto), so the server decodes them without rounding again. Infinities saturate.
// `values` are row-major, as for DTYPE_F32: q [rows, heads, q dim], kv [rows, row dim].
std::vector<std::byte> EncodeFp8Queries(const v1::ModelSpec& model, v1::Profile profile,
                                        std::span<const float> values);
std::vector<std::byte> EncodeFp8Rows(const v1::ModelSpec& model, std::span<const float> values);
// Return the bytes of such tensors.
uint64_t Fp8QueryBytes(const v1::ModelSpec& model, v1::Profile profile, uint64_t rows_heads);
uint64_t Fp8RowBytes(const v1::ModelSpec& model, uint64_t rows);

// The tail of a sequence, for the length that the step commits (attention.proto, EndStep.tails).
struct SequenceTail {
  uint32_t sequence = 0;             // its place in the step
  std::span<const std::byte> bytes;  // exactly the model's tail_bytes
};

// The times of the slowest piece of a call.
struct AttendTimes {
  uint32_t queue_us = 0, plan_us = 0, kernel_us = 0, write_us = 0;
  uint32_t launch_requests = 0, launch_layers = 0, launch_clients = 0;
  uint32_t messages = 0;  // pieces
  bool plan_reused = false;
};

class StepStream;
struct PendingReply;

// An Attend that is under way. Call Wait at most once. The destructor waits too if Wait was not
// called, because the tensors are in use until then.
class PendingAttend final {
 public:
  PendingAttend(PendingAttend&&) = default;
  PendingAttend& operator=(PendingAttend&& other) noexcept;  // waits for the call that it replaces
  ~PendingAttend();
  // DEADLINE_EXCEEDED ends the whole session, because only then the transport stops using the
  // tensors. If the connection does not move, because a process is stopped or the network is
  // broken, Wait returns even later: after about 20 s over TCP; over a unix socket when the
  // server's process goes on or ends.
  absl::StatusOr<AttendTimes> Wait();
  // Returns true if Wait would not wait for the server any more. Takes replies that have come, and
  // waits for none: so one thread can keep a micro-batch under way at each of several servers, and
  // go on with the one that is ready. Has no timeout; Wait has.
  bool Ready();

 private:
  friend class Step;
  PendingAttend() = default;
  std::shared_ptr<StepStream> stream_;
  std::vector<std::shared_ptr<PendingReply>> pieces_;
  std::shared_ptr<PendingReply> begun_;  // as of Step
  absl::Status refused_;
};

class Step final {
 public:
  ~Step();
  uint64_t id() const { return id_; }
  uint32_t total_rows() const { return total_rows_; }
  uint32_t joined() const { return joined_; }

  // Returns the number of entries that rows [begin, end) of the step complete at a layer; for
  // models with a window.
  uint64_t EntriesOf(uint32_t layer, uint64_t begin, uint64_t end) const;

  // Sends the KV rows and queries of a call and returns without waiting for the outputs. A fault of
  // the call is the result of Wait.
  PendingAttend AttendAsync(const AttendCall& call);
  absl::StatusOr<AttendTimes> Attend(const AttendCall& call) { return AttendAsync(call).Wait(); }
  // Sends a call with index lists, like AttendAsync.
  PendingAttend AttendSparseAsync(AttendCall call, const IndexLists& lists) {
    call.lists = lists;
    return AttendAsync(call);
  }
  absl::StatusOr<AttendTimes> AttendSparse(const AttendCall& call, const IndexLists& lists) {
    return AttendSparseAsync(call, lists).Wait();
  }
  // Commits all rows. Updates the lengths of the sequences and returns them. `tails`, in the order
  // of the sequences, are copied. If the server has no room for them, RESOURCE_EXHAUSTED leaves the
  // step open.
  absl::StatusOr<std::vector<uint64_t>> End(std::span<const SequenceTail> tails = {});
  // Ends the step, with the first committed_rows[i] rows of each sequence. INVALID_ARGUMENT unless
  // there is a number for each sequence.
  absl::StatusOr<std::vector<uint64_t>> End(const std::vector<uint32_t>& committed_rows,
                                            std::span<const SequenceTail> tails = {});
  // Drops the step: the sequences are as they were before it.
  absl::Status Abort();

 private:
  friend class Session;
  Step() = default;
  absl::StatusOr<std::vector<uint64_t>> EndWith(const std::vector<uint32_t>* committed_rows,
                                                std::span<const SequenceTail> tails);
  // Waits for the answer to a pipelined begin.
  absl::Status AwaitBegin();
  std::span<const std::byte> KvOf(const AttendCall& call, uint64_t row_bytes, uint32_t first,
                                  uint32_t count, std::vector<std::byte>* gathered) const;

  std::shared_ptr<StepStream> stream_;
  v1::ModelSpec model_;
  std::vector<StepRows> rows_;
  uint64_t id_ = 0;
  uint32_t total_rows_ = 0, joined_ = 0;
  bool open_ = false;
  std::shared_ptr<PendingReply> begun_;  // of a pipelined begin
};

class Session final {
 public:
  ~Session();
  // Begins a step that adds rows to sequences of one model: the server reserves pages for all rows
  // at all layers, or refuses the whole step (RESOURCE_EXHAUSTED). Waits for the answer, unless
  // BeginOptions::pipelined. The sequences must outlive the step.
  absl::StatusOr<std::unique_ptr<Step>> Begin(const std::string& model_id,
                                              const std::vector<StepRows>& rows,
                                              const BeginOptions& options = {});
  // Returns the transport of the session: "inline", "shm", "ring" or "ucx"
  // (ClientOptions::Transport).
  std::string_view transport() const;
  // Memory of the shared region, whose tensors are used in place instead of being copied: put kv
  // and q into one block and o and lse into another, the second tensor of each at the next multiple
  // of 64 bytes. A call whose tensors are all placed like this is one message, whatever its size.
  // Empty if the session is inline, or without room. Lives as long as the session.
  std::span<std::byte> Allocate(uint64_t bytes);
  // Gives a block back. REQUIRES: no call that uses it is under way.
  void Free(std::span<std::byte> block);
  // Returns memory of a GPU (ClientOptions::device_bytes) for tensors that kernels write and read,
  // so that no tensor is copied. All tensors of a call lie there or none, and the call has no index
  // lists. When the call has returned, the outputs are complete. Empty without such memory
  // (DeviceStatus has the reason), or if it is full. DeviceWarning: a reason for slowness here, in
  // words for people, or empty.
  std::span<std::byte> AllocateOnDevice(uint64_t bytes);
  // Gives a block back. REQUIRES: no call that uses it is under way.
  void FreeOnDevice(std::span<std::byte> block);
  absl::Status DeviceStatus() const;
  std::string DeviceWarning() const;
  // Ends the stream and aborts open steps. Returns the stream's status.
  absl::Status Close();
  // Ends what waits for the server over gRPC, now and later, with `why`, which is an error. Rings
  // notice by themselves that their server has ended.
  void Cancel(const absl::Status& why);

 private:
  friend class Client;
  Session() = default;

  absl::StatusOr<v1::ModelSpec> FindModel(const std::string& id);

  Client* client_ = nullptr;
  std::shared_ptr<StepStream> stream_;
  Mutex models_mutex_;
  // As the server has them.
  std::map<std::string, v1::ModelSpec> models_ ABSL_GUARDED_BY(models_mutex_);
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SESSION_H_
