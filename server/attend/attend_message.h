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
#include "scheduler/request.h"
#include "scheduler/tenant_table.h"
#include "server/grpc/request_validator.h"
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
  // Called once for each answer, one at a time and in their order (StreamRequest::Done). Must not
  // block for long and must not call the engine.
  virtual void OnAnswered(AttendMessage* message) = 0;
};

class AttendMessage final : public scheduler::StreamRequest {
 public:
  void Done(const absl::Status& status) override;
  void Unref();
  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }

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
  // For a ring: room for a reply that is too large for a slot.
  std::span<std::byte> reply_area;
  size_t reserved_bytes = 0;  // bytes counted against the stream
  int64_t staged = 0;         // bytes of input and output, counted against the tenant
  uint64_t ring_index = 0;    // for a ring: number of its submission
  // For a BeginStep: its number in the stream; 0: not listed there.
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
  // `tenants`: counts staged bytes.
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
