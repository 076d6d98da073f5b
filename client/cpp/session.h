// Steps and attention: one Attend stream of the server.
//
// Tensors are the caller's memory: requests are sent from it and replies are written into it
// without an intermediate copy on the way out and with one on the way in. It must stay valid and
// unchanged until the call has returned (blocking) or Wait has returned (asynchronous).
//
// Work is split by rows so that every message stays below the server's limits.message_bytes; the
// pieces are sent back to back. Calls whose tensors lie in shared memory (Session::Allocate) are
// not split.
//
// A session belongs to the process that opened it. In a child that fork makes, its calls are
// FAILED_PRECONDITION (reason "forked"), it has no memory, and destroying it ends nothing.
//
// Ownership: a Session outlives its steps; a Client outlives its sessions. Destroying a step that
// was not ended aborts it; destroying a session aborts all its steps. Threading: several threads
// may begin and use different steps of one session; one step is for one thread at a time.
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
  uint32_t rows = 0;  // added to it by the step
};

struct BeginOptions {
  uint64_t step_id = 0;       // 0: chosen by the session; participants must agree on one
  uint32_t participants = 1;  // streams that take part
  uint32_t lease_ms = 0;      // 0: the server's default
};

// Index lists of an AttendCall, for models with sparse attention: a row attends to the positions of
// its list alone, or of a model with a window to those entries. -1 is none, and a position that is
// repeated counts once.
struct IndexLists {
  const int32_t* entries = nullptr;  // null: no lists, a row attends to all that it sees
  // Entries of every row; 0: ragged. Lists of one width may lie behind q in shared memory, at the
  // next multiple of 64 bytes, and are then used where they lie (in a ring if they have the model's
  // top_k entries).
  uint32_t width = 0;
  // Ragged: [row_count + 1], from 0 on; list i ends at begin[i + 1].
  const int32_t* begin = nullptr;
};

// One layer of a step, or a part of it. Shapes as in attention.proto, row-major.
struct AttendCall {
  uint32_t layer = 0;
  uint32_t row_begin = 0;
  uint32_t row_count = 0;
  uint32_t head_offset = 0;
  uint32_t num_heads = 0;
  v1::Profile profile = v1::PROFILE_EXPANDED;
  // DTYPE_F8_E4M3: q is a tensor as EncodeFp8Queries writes it.
  v1::DType q_dtype = v1::DTYPE_BF16;
  // DTYPE_F8_E4M3: kv is a tensor as EncodeFp8Rows writes it. Unspecified: kv is of q_dtype, or
  // bf16 where that is DTYPE_F8_E4M3.
  v1::DType kv_row_dtype = v1::DTYPE_UNSPECIFIED;
  v1::DType o_dtype = v1::DTYPE_BF16;
  uint32_t timeout_us = 0;
  // With its index key behind each row, if the model has an indexer; with the entries that the rows
  // make whole behind all of them, if it has a window (Step::EntriesOf says how many). Null:
  // another head slice brings the rows.
  const void* kv = nullptr;
  const void* q = nullptr;  // unused by APPEND_ONLY
  void* o = nullptr;
  float* lse = nullptr;  // null: not wanted
  // Of tensors in device memory (Session::AllocateOnDevice): the CUstream or hipStream_t whose work
  // so far the server waits for before it reads them; null: the default stream.
  void* stream = nullptr;
  // What `stream` is given after AttendAsync has returned runs once the outputs are there, or the
  // call has failed: no thread need wait in between, and Wait may come layers later. Wait still
  // says whether the outputs are good. Where the server goes away, a thread of the session lets the
  // stream go on. All calls of the session that are under way are such calls of one stream, else
  // FAILED_PRECONDITION; steps may begin and end meanwhile.
  bool chained = false;
  IndexLists lists;
  // In place of `lists`, for models with an indexer: what it makes them from, a record a row of
  // index queries [index_heads, index_dim] of q_dtype, then head weights [index_heads], fp32.
  const void* index_inputs = nullptr;
  int32_t* chosen = nullptr;  // receives its lists, [row_count, top_k]; null: not wanted
};

// Tensors of 8-bit floats (DTYPE_F8_E4M3; capability "fp8_wire"): half the bytes of bf16, and a
// relative error of at most 2^-4 a value. Scales are powers of two, chosen for each part of a
// vector (attention.proto), so the server decodes them without rounding again. Infinities saturate.
// `values` are row-major, as of DTYPE_F32: q [rows, heads, q dim], kv [rows, row dim].
std::vector<std::byte> EncodeFp8Queries(const v1::ModelSpec& model, v1::Profile profile,
                                        std::span<const float> values);
std::vector<std::byte> EncodeFp8Rows(const v1::ModelSpec& model, std::span<const float> values);
// Bytes of such tensors.
uint64_t Fp8QueryBytes(const v1::ModelSpec& model, v1::Profile profile, uint64_t rows_heads);
uint64_t Fp8RowBytes(const v1::ModelSpec& model, uint64_t rows);

// The tail of a sequence (attention.proto, EndStep.tails), for the length that the step commits.
struct SequenceTail {
  uint32_t sequence = 0;             // its place in the step
  std::span<const std::byte> bytes;  // as many as the model's tail_bytes
};

// Of the slowest piece of a call.
struct AttendTimes {
  uint32_t queue_us = 0, plan_us = 0, kernel_us = 0, write_us = 0;
  uint32_t launch_requests = 0, launch_layers = 0, launch_clients = 0;
  uint32_t messages = 0;  // pieces
  bool plan_reused = false;
};

class StepStream;
struct PendingReply;

// An Attend under way. Wait at most once; dropping it without Wait waits too, because the tensors
// are in use until then.
class PendingAttend final {
 public:
  PendingAttend(PendingAttend&&) = default;
  PendingAttend& operator=(PendingAttend&& other) noexcept;  // waits for the one it replaces
  ~PendingAttend();
  // DEADLINE_EXCEEDED ends the whole session: only then the transport stops using the tensors.
  // While the connection does not move (a stopped process, a broken network), Wait returns later
  // still: after about 20 s over TCP, over a unix socket once the server's process goes on or ends.
  absl::StatusOr<AttendTimes> Wait();

 private:
  friend class Step;
  PendingAttend() = default;
  std::shared_ptr<StepStream> stream_;
  std::vector<std::shared_ptr<PendingReply>> pieces_;
  absl::Status refused_;
};

class Step final {
 public:
  ~Step();
  uint64_t id() const { return id_; }
  uint32_t total_rows() const { return total_rows_; }
  uint32_t joined() const { return joined_; }

  // Entries that rows [begin, end) of the step make whole at a layer, of models with a window.
  uint64_t EntriesOf(uint32_t layer, uint64_t begin, uint64_t end) const;

  PendingAttend AttendAsync(const AttendCall& call);
  absl::StatusOr<AttendTimes> Attend(const AttendCall& call) { return AttendAsync(call).Wait(); }
  // The same with index lists.
  PendingAttend AttendSparseAsync(AttendCall call, const IndexLists& lists) {
    call.lists = lists;
    return AttendAsync(call);
  }
  absl::StatusOr<AttendTimes> AttendSparse(const AttendCall& call, const IndexLists& lists) {
    return AttendSparseAsync(call, lists).Wait();
  }
  // Commits all rows. Updates the lengths of the sequences and returns them. `tails`, in the order
  // of the sequences, are copied. RESOURCE_EXHAUSTED, where the server has no room for them, leaves
  // the step open.
  absl::StatusOr<std::vector<uint64_t>> End(std::span<const SequenceTail> tails = {});
  // The same of the first committed_rows[i] rows of each sequence. INVALID_ARGUMENT unless there is
  // a number for each.
  absl::StatusOr<std::vector<uint64_t>> End(const std::vector<uint32_t>& committed_rows,
                                            std::span<const SequenceTail> tails = {});
  absl::Status Abort();

 private:
  friend class Session;
  Step() = default;
  absl::StatusOr<std::vector<uint64_t>> EndWith(const std::vector<uint32_t>* committed_rows,
                                                std::span<const SequenceTail> tails);
  std::span<const std::byte> KvOf(const AttendCall& call, uint64_t row_bytes, uint32_t first,
                                  uint32_t count, std::vector<std::byte>* gathered) const;

  std::shared_ptr<StepStream> stream_;
  v1::ModelSpec model_;
  std::vector<StepRows> rows_;
  uint64_t id_ = 0;
  uint32_t total_rows_ = 0, joined_ = 0;
  bool open_ = false;
};

class Session final {
 public:
  ~Session();
  absl::StatusOr<std::unique_ptr<Step>> Begin(const std::string& model_id,
                                              const std::vector<StepRows>& rows,
                                              const BeginOptions& options = {});
  // What carries it: "inline", "shm" or "ring" (ClientOptions::Transport).
  std::string_view transport() const;
  // Memory of the shared region in which tensors are used where they lie instead of being copied:
  // put kv and q into one block and o and lse into another, the second tensor of each at the next
  // multiple of 64 bytes. A call whose tensors all lie so is one message, whatever its size. Empty
  // when the session is inline, or has no room. Lives as long as the session.
  std::span<std::byte> Allocate(uint64_t bytes);
  void Free(std::span<std::byte> block);
  // The same in the memory of a GPU (ClientOptions::device_bytes), for tensors that kernels write
  // and read: nothing is copied. A call's tensors lie there all or none, and it has no index lists.
  // When it has returned, the outputs are there. Empty when there is no such memory, as
  // DeviceStatus says, or no room. DeviceWarning: what makes it slow here, in words for people, or
  // nothing.
  std::span<std::byte> AllocateOnDevice(uint64_t bytes);
  void FreeOnDevice(std::span<std::byte> block);
  absl::Status DeviceStatus() const;
  std::string DeviceWarning() const;
  // Ends the stream; open steps are aborted. The status of the stream.
  absl::Status Close();

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
