// The server's end of one command ring: an Attend stream whose messages travel through a
// shared-memory region (proto/wire/ring_layout.h) instead of gRPC.
//
// One thread polls the submissions: it copies an entry once, checks the copy with the same code
// that serves gRPC streams, and submits it; on an idle engine the launch then runs on this very
// thread. The completion is written by the thread that has the answer, and the client is woken only
// if its waiter flag is set. Nothing in the region is trusted: indexes are kept on this side,
// entries and messages are copied before they are looked at, and a client that breaks the ring's
// rules (more requests in flight than entries, a count of taken completions that cannot be) is
// disconnected.
//
// An entry with tensors in device memory is taken when its event says that the client's GPU is done
// with them; until then it holds up those behind it, of the same client. The event is only looked
// at, so a client whose GPU never gets there, stopped or dead, costs its own ring's thread some
// polling and nothing else: after shm.device_wait_ms, or the entry's own timeout, the entry is
// answered with DEADLINE_EXCEEDED.
//
// Of chained entries a word in the region says so in the event's place, and the engine gets them
// ahead of it where launches can wait on the device (Limits::ahead_us). What the engine hands back,
// because others wait or the client's GPU took too long, is held here like any other entry. An
// entry that is not chained is taken once all those are answered: it may end their step.
//
// Every attend allocates nothing; nor do the other messages once their buffers have grown.
//
// Ending: Stop (or the destructor) ends the thread, then closes the engine's stream, which aborts
// its steps and answers what was in flight. Never called from the ring's own thread or from
// OnAnswered.
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
#include "kernels/launch/word.h"
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
  scheduler::Engine* engine = nullptr;      // outlives the ring
  std::shared_ptr<AttendMessagePool> pool;  // its messages; staging is for index lists alone
  wire::ThreadTeam* team = nullptr;         // for large index lists; outlives the ring
  Metrics* metrics = nullptr;               // outlives the ring
  std::string tenant;
  std::function<void()>
      on_disconnect;  // called once, from the ring's thread, when the client is disconnected
  uint64_t boot_id = 0;
  uint32_t entries = 0;  // of the region's ring
  uint32_t spin_us = 0;
  int64_t device_wait_ms = 0;  // for what a client's GPU has to complete before an entry
};

class CommandRing final : public AttendMessageOwner, private scheduler::Submitter {
 public:
  // Lays the ring out at the front of `region`.
  // REQUIRES: region->arena_offset() == wire::RingBytes(options.entries), and DevicePartBytes more
  // where it has device memory, which has an event for each entry then.
  CommandRing(CommandRingOptions options, std::shared_ptr<SharedRegion> region);
  ~CommandRing() override { Stop(); }

  // Starts serving it, once. UNAVAILABLE when the machine has no thread left for that.
  absl::Status Start();
  void Stop();
  // Takes one submission, if there is one, on the calling thread; for tests, in place of Start.
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
  static bool HostReads(const wire::SubmissionEntry& entry);
  void Hold(const wire::SubmissionEntry& entry);
  void Prepare();  // what is held
  void Serve(const wire::SubmissionEntry& entry);
  AttendMessage* TakeMessage(const wire::SubmissionEntry& entry);
  // Hands it to the engine, or answers what was wrong with it.
  void Submit(AttendMessage* message, absl::Status prepared);
  void Refuse(AttendMessage* message, absl::Status status);
  absl::Status PrepareAttend(const wire::SubmissionEntry& entry, AttendMessage* message);
  absl::Status PrepareMessage(const wire::SubmissionEntry& entry, AttendMessage* message);

  void Complete(const AttendMessage& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(completion_mutex_);
  void WakeClient();
  void WakeRing();  // its thread, for what another one has left to it

  const CommandRingOptions options_;
  const std::shared_ptr<SharedRegion> region_;
  const uint64_t mask_;
  wire::RingHeader* const header_;
  wire::SubmissionEntry* const submissions_;
  wire::CompletionEntry* const completions_;
  ChainWords words_;
  AttendRequestBuilder builder_;
  TenantCounters* const requests_;

  // Used by the ring's thread alone.
  uint64_t taken_ = 0;         // submissions
  uint64_t client_taken_ = 0;  // completions, as last read
  // The last submission taken, while it waits for the client's GPU; those behind it wait with it.
  struct Held {
    bool any = false;
    AttendMessage* message = nullptr;
    wire::SubmissionEntry entry;
    bool unprepared = false;  // until its tensors are there, as the host reads some
    absl::Status prepared;    // of the message; the engine gets it if this is OK
    size_t event = 0;
    kernels::WordValue ready;  // of a chained entry, which has no event
    bool offered = false;      // to the engine, ahead of its tensors
    bool ahead = false;        // the engine has it
    int64_t since_ns = 0, until_ns = 0;
  } held_;
  const bool goes_ahead_;
  bool cut_ = false;
  v1::Attend attend_;
  std::string message_bytes_;
  std::vector<char> request_block_;
  google::protobuf::Arena request_arena_;

  Mutex completion_mutex_;  // completions come from the engine and from the thread
  RingReplies replies_ ABSL_GUARDED_BY(completion_mutex_);
  std::atomic<uint64_t> completed_{0};
  std::atomic<int32_t> ahead_{0};  // entries that the engine has ahead of their tensors

  Mutex returned_mutex_;
  std::vector<AttendMessage*> returned_ ABSL_GUARDED_BY(returned_mutex_);  // handed back
  std::atomic<bool> any_returned_{false};

  std::atomic<bool> stop_{false};
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_SHARED_MEMORY_COMMAND_RING_H_
