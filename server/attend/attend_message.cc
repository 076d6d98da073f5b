#include "server/attend/attend_message.h"

#include <chrono>
#include <limits>
#include <utility>

namespace mla::server {

int64_t SteadyNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void AttendMessage::Done(const absl::Status& status) {
  answer = status;
  owner->OnAnswered(this);
}

void AttendMessage::Unref() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  Recycle();
  // This may be the last reference to the pool, which must survive Return.
  const std::shared_ptr<AttendMessagePool> home = std::move(home_);
  home->Return(this);
}

void AttendMessage::Recycle() {
  owner = nullptr;
  tag = 0;
  // The count is returned before the memory, because waiting streams try again when memory comes
  // back.
  if (staged > 0) home_->tenants().Return(*tenant, scheduler::Resource::kStagedBytes, staged);
  staged = 0;
  tenant = nullptr;
  input.Reset();
  output.Reset();
  slices.clear();
  fragments.clear();
  region.reset();
  reply_area = {};
  sizes = {};
  sent_lists = nullptr;
  answer = absl::OkStatus();
  reserved_bytes = 0;
  ring_index = 0;
  begin_order = 0;
  answered_ns = 0;
  trace = {};
  next = nullptr;
  stream = 0;
  step_id = 0;
  begin.sequences.clear();
  begin.positions.reset();
  begin.rotations.reset();
  attend = {};
  end.committed_rows.clear();
  end.tails.clear();
  end.lengths_max = std::numeric_limits<int32_t>::max();
  total_rows = 0;
  lease_ms = 0;
  joined = 0;
  lengths.clear();
  timings = {};
  step_aborted = false;
  leave_launch = false;
  submitter = nullptr;
  handed_back = scheduler::HandedBack::kNo;
  signalled = false;
}

AttendMessage* AttendMessagePool::Take() {
  const MutexLock lock(mutex_);
  AttendMessage* message = free_;
  if (message != nullptr) {
    free_ = std::exchange(message->next, nullptr);
  } else {
    all_.push_back(std::make_unique<AttendMessage>());
    message = all_.back().get();
  }
  message->references_.store(1, std::memory_order_relaxed);
  message->home_ = shared_from_this();
  return message;
}

absl::Status AttendMessagePool::TakeStaging(size_t in, size_t out, AttendMessage* message,
                                            bool* stalled) {
  using scheduler::Resource;
  scheduler::Tenant& tenant = *message->tenant;
  const auto staged =
      static_cast<int64_t>(StagingPool::BlockBytes(in) + StagingPool::BlockBytes(out));
  if (staged > tenant.bound(Resource::kStagedBytes)) {  // waiting would not help
    return tenants_->Refusal(tenant, Resource::kStagedBytes, staged, "payload");
  }
  *stalled = !tenants_->TryTake(tenant, Resource::kStagedBytes, staged);
  if (*stalled) return absl::OkStatus();
  message->staged = staged;
  message->input = staging_.Take(in);
  message->output = staging_.Take(out);
  *stalled = !message->input || (out > 0 && !message->output);
  return absl::OkStatus();
}

void AttendMessagePool::Return(AttendMessage* message) {
  const MutexLock lock(mutex_);
  message->next = free_;
  free_ = message;
}

}  // namespace mla::server
