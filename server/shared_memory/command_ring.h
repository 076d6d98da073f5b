// The server's end of one command ring: an Attend stream whose messages travel through a
// shared-memory region (proto/wire/ring_layout.h) instead of gRPC.
//
// One thread polls the submissions: it copies an entry once, checks the copy with the code that
// also serves gRPC streams, and submits it. On an idle engine the launch then runs on this same
// thread. The completion is written by the thread that has the answer, and the client is woken only
// if its waiter flag is set. The region is not trusted: indexes are kept on this side, and entries
// and messages are copied before they are checked. A client that breaks the ring's rules (more
// requests in flight than entries, or an impossible count of taken completions) is disconnected.
//
// An entry with tensors in device memory is taken when its event says that the client's GPU is done
// with them. Until then it delays later entries of the same client. The event is only polled. A
// client whose GPU never gets there, stopped or dead, costs its own ring's thread some polling and
// no other client anything: after shm.device_wait_ms, or the entry's own timeout, the entry is
// answered with DEADLINE_EXCEEDED.
//
// Chained entries have a word in the region instead of the event. If launches can wait on the
// device (Limits::ahead_us), the engine gets chained entries before the word is set. The engine
// hands an entry back if others wait or the client's GPU took too long; it is then held here like
// any other entry. An unchained entry is taken once all of these are answered: it may end their
// step.
//
// Attends allocate nothing. Other messages allocate nothing either once their buffers have grown.
//
// Ending: Stop (or the destructor) ends the thread. It then closes the engine's stream, which
// aborts its steps and answers all requests in flight. Never called from the ring's own thread or
// from OnAnswered.
#ifndef MLA_SERVER_SHARED_MEMORY_COMMAND_RING_H_
#define MLA_SERVER_SHARED_MEMORY_COMMAND_RING_H_

#include <google/protobuf/arena.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "kernels/types/word.h"
#include "mla/v1/attention.pb.h"
#include "proto/wire/ring_layout.h"
#include "scheduler/engine.h"
#include "server/attend/attend_message.h"
#include "server/attend/attend_request_builder.h"
#include "server/memory/shared_region.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/chain_words.h"
#include "server/shared_memory/ring_replies.h"

namespace mla::server {

struct CommandRingOptions {
  scheduler::Engine* engine = nullptr;  // outlives the ring
  // Pool of its messages; its staging is used for index lists only.
  std::shared_ptr<AttendMessagePool> pool;
  wire::ThreadTeam* team = nullptr;  // for large index lists; outlives the ring
  Metrics* metrics = nullptr;        // outlives the ring
  Tracer* tracer = nullptr;          // outlives the ring; null: no traces
  std::string tenant;
  std::function<void()>
      on_disconnect;  // called once, from the ring's thread, when the client is disconnected
  uint64_t boot_id = 0;
  uint32_t entries = 0;  // in the region's ring
  uint32_t spin_us = 0;
  int64_t device_wait_ms = 0;  // for work of a client's GPU that an entry waits for
};

class CommandRing final : public AttendMessageOwner, private scheduler::Submitter {
 public:
  // Lays the ring out at the beginning of `region`. REQUIRES: region->arena_offset() ==
  // wire::RingBytes(options.entries), plus DevicePartBytes if the region has device memory, which
  // must then have one event for each entry.
  CommandRing(CommandRingOptions options, std::shared_ptr<SharedRegion> region);
  ~CommandRing() override { Stop(); }

  // Starts serving it; call it once. UNAVAILABLE if the machine has no thread left.
  absl::Status Start();
  void Stop();
  // Takes one submission, if there is any, on the calling thread; tests call it instead of Start.
  bool Poll() { return !cut_ && TakeSubmission(); }

  void OnAnswered(AttendMessage* message) override;

 private:
  void Run();
  bool TakeSubmission();
  absl::StatusOr<bool> HeldIsReady() const;
  bool ServeHeld();
  bool MayGoAhead() const;
  void HandOverAhead();
  void NoteReturned(AttendMessage* message);  // any thread
  void TakeReturned();
  bool Published() const;  // the next submission
  bool IsIdle() const override;
  bool AwaitsAhead() const;
  void RefuseUnready(AttendMessage* message);
  void AwaitDevice(int64_t now) const;
  bool WithinBounds();
  void Sleep();
  void Disconnect(const char* why);

  void LayOutDevice();
  bool OnDevice(const wire::SubmissionEntry& entry) const;
  static bool Chained(const wire::SubmissionEntry& entry);
  void Hold(const wire::SubmissionEntry& entry);
  void Prepare();  // what is held
  void Serve(const wire::SubmissionEntry& entry);
  AttendMessage* TakeMessage(const wire::SubmissionEntry& entry);
  // Hands the message to the engine, or answers it with the fault.
  void Submit(AttendMessage* message, absl::Status prepared);
  void Refuse(AttendMessage* message, absl::Status status);
  absl::Status PrepareAttend(const wire::SubmissionEntry& entry, AttendMessage* message);
  absl::Status PrepareMessage(const wire::SubmissionEntry& entry, AttendMessage* message);

  void Complete(const AttendMessage& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(completion_mutex_);
  void WakeClient();
  void WakeRing();  // wakes the ring's thread for work that another thread leaves to it

  const CommandRingOptions options_;
  const std::shared_ptr<SharedRegion> region_;
  const uint64_t mask_;
  wire::RingHeader* const header_;
  wire::SubmissionEntry* const submissions_;
  wire::CompletionEntry* const completions_;
  ChainWords words_;
  AttendRequestBuilder builder_;
  TenantCounters* const requests_;

  // Only the ring's thread uses these.
  uint64_t taken_ = 0;         // submissions
  uint64_t client_taken_ = 0;  // completions, as last read
  // The last submission taken, while it waits for the client's GPU; later submissions wait too.
  struct Held {
    bool any = false;
    AttendMessage* message = nullptr;
    wire::SubmissionEntry entry;
    bool unprepared = false;  // true until its tensors have arrived, if the host reads some
    absl::Status prepared;    // of the message; the engine gets the message if this is OK
    size_t event = 0;
    kernels::WordValue ready;  // for a chained entry, which does not have an event
    bool offered = false;      // submitted to the engine ahead of its tensors
    bool ahead = false;        // the engine has it
    int64_t since_ns = 0, until_ns = 0;
  } held_;
  const bool goes_ahead_;
  bool cut_ = false;
  v1::Attend attend_;
  std::string message_bytes_;
  std::vector<char> request_block_;
  google::protobuf::Arena request_arena_;

  Mutex completion_mutex_;  // completions come from the engine and from the ring's thread
  RingReplies replies_ ABSL_GUARDED_BY(completion_mutex_);
  std::atomic<uint64_t> completed_{0};
  std::atomic<int32_t> ahead_{0};  // entries that the engine has taken ahead of their tensors

  Mutex returned_mutex_;
  std::vector<AttendMessage*> returned_ ABSL_GUARDED_BY(returned_mutex_);  // handed back
  std::atomic<bool> any_returned_{false};

  std::atomic<bool> stop_{false};
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_SHARED_MEMORY_COMMAND_RING_H_
