// One request of an Attend stream, from its arrival until its reply has left, and the pool that
// reuses such objects.
//
// Ownership: AttendMessage is reference-counted. The stream holds one reference while the message
// is being served. Each payload slice that gRPC still has to send holds another, because the
// transport may release it after the stream is gone. The last reference returns the object, and its
// staging memory, to the pool. The pool is shared by the streams and by every message that is out.
//
// Threading: a message belongs to one thread at a time (reader, then engine, then writer); only
// Unref and the pool itself may be called concurrently.
#ifndef MLA_SERVER_ATTEND_ATTEND_MESSAGE_H_
#define MLA_SERVER_ATTEND_ATTEND_MESSAGE_H_

#include <grpcpp/support/slice.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "mla/v1/attention.pb.h"
#include "proto/wire/attend_layout.h"
#include "scheduler/request.h"
#include "scheduler/tenant_table.h"
#include "server/grpc/request_validator.h"
#include "server/index_lists/list_checker.h"
#include "server/memory/shared_region.h"
#include "server/memory/staging_pool.h"
#include "server/tracing/step_traces.h"

namespace mla::server {

class AttendMessage;
class AttendMessagePool;

// The owner of a message gets it back here when the engine has answered it.
class AttendMessageOwner {
 public:
  virtual ~AttendMessageOwner() = default;
  // Called once for each answer, in the order of the answers and never twice at a time
  // (StreamRequest::Done). Must not block for long and must not call the engine.
  virtual void OnAnswered(AttendMessage* message) = 0;
};

// Memory of a client in which tensors must lie: offsets [begin, end) from `base`.
struct TensorMemory {
  std::byte* base = nullptr;
  uint64_t begin = 0, end = 0;
  static TensorMemory Of(const SharedRegion& region) {
    return {region.data(), region.arena_offset(), region.size()};
  }
  // Checks that these bytes are aligned and lie in the memory. INVALID_ARGUMENT names prefix +
  // field.
  absl::Status Check(uint64_t offset, uint64_t length, const char* prefix,
                     const char* field) const {
    if (length == 0) return absl::OkStatus();
    const bool inside = offset >= begin && offset <= end && length <= end - offset;
    if (inside && offset % wire::kSharedAlignment == 0) return absl::OkStatus();
    return Refusal(offset, length, prefix, field);
  }

 private:
  absl::Status Refusal(uint64_t offset, uint64_t length, const char* prefix,
                       const char* field) const;
};

// Places of an attend's tensors in staging memory. There kv and q have their decoded sizes, and
// lists have the room that their check needs.
struct StagedLayout {
  wire::AttendLayout tensors;
  uint64_t index_inputs = 0;  // inputs of the indexer, as sent
  uint64_t sent_fp8 = 0;      // one tensor of 8 bits at a time, as sent
};

class AttendMessage final : public scheduler::StreamRequest {
 public:
  void Done(const absl::Status& status) override;
  void Unref();
  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }

  // --- The tensors of an attend that AttendRequestBuilder has prepared.
  // Returns true if their sizes are known: the step is open, or about to be.
  bool IsSized() const { return attend.sized_for.num_heads != scheduler::AttendArgs::kUnsized; }
  SentLists Lists() const;
  // Returns where the tensors lie in memory of the client: as they are sent.
  wire::AttendLayout SentLayout() const;
  StagedLayout Staged() const;
  // Points the attend at its tensors in `memory`, which must stay mapped until the attend is
  // answered. `layout` is SentLayout(). INVALID_ARGUMENT if a tensor is not aligned or not inside.
  // Errors name the field with `prefix` in front.
  absl::Status PointInto(const TensorMemory& memory, const wire::AttendLayout& layout,
                         uint64_t in_offset, uint64_t out_offset, const char* prefix);
  // Does what PointInto does, for tensors in a region's device memory, which the client has
  // finished writing. Also returns INVALID_ARGUMENT for index lists and 8-bit floats, which the
  // server has to read itself.
  absl::Status PointIntoDevice(const kernels::SharedDeviceMemory& memory,
                               const wire::AttendLayout& layout, uint64_t in_offset,
                               uint64_t out_offset);
  void PointOutputs(std::byte* memory, const wire::AttendLayout& layout);
  // Decode KV rows and queries of 8 bits from `sent` to `target`, as the attend's q_dtype says.
  // INVALID_ARGUMENT names the first invalid scale.
  absl::Status DecodeKv(const std::byte* sent, std::byte* target);
  absl::Status DecodeQueries(const std::byte* sent, std::byte* target);

  // Replaces the contents of `reply` by the header of the reply: everything except its tensors.
  // REQUIRES: answered. Sets Timings.write_us to the time between the answer and this call.
  void FillReply(uint64_t boot_id, v1::AttendStreamReply* reply) const;

  AttendMessageOwner* owner = nullptr;
  uint64_t tag = 0;
  StagingPool::Block input, output;
  // The received message, in which the queries are read in place; kept until the message is
  // answered.
  std::vector<grpc::Slice> slices;
  std::vector<kernels::InputFragment> fragments;  // views of those slices
  AttendSizes sizes;
  const std::byte* sent_lists = nullptr;  // in `region`, where the client may still change them
  absl::Status answer;
  std::shared_ptr<SharedRegion> region;  // if set, holds the tensors instead of input and output
  // For a ring: memory for a reply that is too large for a slot.
  std::span<std::byte> reply_area;
  size_t reserved_bytes = 0;  // bytes counted against the stream
  int64_t staged = 0;         // bytes of input and output, counted against the tenant
  uint64_t ring_index = 0;    // for a ring: number of its submission
  // For a BeginStep: its number in the stream; 0 if it is not listed there.
  uint64_t begin_order = 0;
  int64_t answered_ns = 0;  // steady clock; of streams alone
  MessageTrace trace;
  AttendMessage* next = nullptr;

 private:
  friend class AttendMessagePool;
  void Recycle();

  std::atomic<int32_t> references_{0};
  std::shared_ptr<AttendMessagePool> home_;  // set while the message is taken from the pool
};

class AttendMessagePool final : public std::enable_shared_from_this<AttendMessagePool> {
 public:
  // `tenants` counts staged bytes.
  AttendMessagePool(std::unique_ptr<kernels::HostBuffer> memory,
                    std::shared_ptr<scheduler::TenantTable> tenants)
      : staging_(std::move(memory)), tenants_(std::move(tenants)) {}
  // Takes a message, with one reference. The pool grows to the largest number of messages ever
  // taken at the same time.
  AttendMessage* Take();
  // Takes input and output memory of a message together and counts it against message->tenant, so
  // that no request waits while it holds half of its memory. `*stalled`: too little is free at
  // present, and the message holds nothing. RESOURCE_EXHAUSTED if the tenant's bound could never
  // allow it.
  absl::Status TakeStaging(size_t in, size_t out, AttendMessage* message, bool* stalled);
  StagingPool& staging() { return staging_; }
  scheduler::TenantTable& tenants() { return *tenants_; }

 private:
  friend class AttendMessage;
  void Return(AttendMessage* message);

  StagingPool staging_;
  const std::shared_ptr<scheduler::TenantTable> tenants_;
  Mutex mutex_;
  std::vector<std::unique_ptr<AttendMessage>> all_ ABSL_GUARDED_BY(mutex_);
  AttendMessage* free_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace mla::server

#endif  // MLA_SERVER_ATTEND_ATTEND_MESSAGE_H_
