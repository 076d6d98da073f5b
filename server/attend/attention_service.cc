#include "server/attend/attention_service.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/grpc/grpc_status.h"
#include "server/grpc/identity.h"

namespace mla::server {
namespace {

using scheduler::Resource;

constexpr auto kPeriod = std::chrono::milliseconds(50);
constexpr auto kStalledPeriod = std::chrono::microseconds(500);

void Refuse(std::unique_ptr<StreamCall> call, const absl::Status& status) {
  const grpc::Status answer = ToGrpcStatus(status, &call->context());
  RefuseCall(std::move(call), answer);
}

}  // namespace

AttentionService::AttentionService(WireContext shared)
    : shared_(std::move(shared)),
      reads_in_place_(shared_.engine->backend_info().reads_fragments),
      maintenance_thread_([this] { Maintain(); }),
      open_close_thread_([this] { OpenAndClose(); }) {}

AttentionService::~AttentionService() { Stop(); }

void AttentionService::Serve(CompletionPoller* poller) {
  acceptor_.emplace(
      poller,
      [this](StreamCall* call, CompletionPoller* its_poller, void* tag) {
        RequestAttend(&call->context(), &call->stream(), its_poller->queue(), its_poller->queue(),
                      tag);
      },
      [this](std::unique_ptr<StreamCall> call) { Accept(std::move(call)); });
  acceptor_->Start();
}

void AttentionService::TakeSlot() {
  const MutexLock lock(mutex_);
  ++slots_taken_;
}

void AttentionService::Accept(std::unique_ptr<StreamCall> call) {
  const auto names = static_cast<size_t>(shared_.engine->limits().max_name_bytes);
  const absl::StatusOr<Identity> identity = Identify(call->context(), names, shared_.unix_tenant);
  if (!identity.ok()) return Refuse(std::move(call), identity.status());
  scheduler::TenantTable& tenants = *shared_.engine->tenants();
  absl::StatusOr<scheduler::TenantRef> tenant = tenants.Enter(identity->tenant);
  absl::Status admitted = tenant.status();
  if (tenant.ok()) admitted = tenants.Take(**tenant, Resource::kStreams, 1, "stream");
  if (!admitted.ok()) {
    shared_.metrics->CountRejected(DetailOf(admitted).reason);
    return Refuse(std::move(call), admitted);
  }
  TakeSlot();
  const MutexLock lock(mutex_);
  opening_.push_back({std::move(call), *std::move(tenant)});
  open_or_close_.NotifyOne();
}

void AttentionService::OpenAndClose() {
  MutexLock lock(mutex_);
  for (;;) {
    open_or_close_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stop_ || !ending_.empty() || !opening_.empty();
    });
    if (!ending_.empty()) {
      AttendStream* const stream = ending_.front();
      ending_.pop_front();
      lock.Unlock();
      stream->Close();
      lock.Lock();
    } else if (!opening_.empty()) {
      Opening opening = std::move(opening_.front());
      opening_.pop_front();
      lock.Unlock();
      auto* stream = new AttendStream(shared_, this, std::move(opening.call),
                                      std::move(opening.tenant), reads_in_place_);
      lock.Lock();
      streams_.insert(stream);
      lock.Unlock();
      stream->Start();
      lock.Lock();
    } else {
      return;
    }
  }
}

void AttentionService::OnStalled(AttendStream* stream) {
  const MutexLock lock(mutex_);
  stalled_.push_back(stream);
  changed_.NotifyAll();
}

void AttentionService::OnEnding(AttendStream* stream) {
  const MutexLock lock(mutex_);
  ending_.push_back(stream);
  open_or_close_.NotifyOne();
}

void AttentionService::OnGone(AttendStream* stream) {
  shared_.engine->tenants()->Return(*stream->tenant(), Resource::kStreams, 1);
  const MutexLock lock(mutex_);
  streams_.erase(stream);
  --slots_taken_;
  changed_.NotifyAll();
}

// Tries each stalled stream once, in the order in which they stalled.
void AttentionService::ResumeStalled() {
  std::deque<AttendStream*> waiting;
  {
    const MutexLock lock(mutex_);
    waiting.swap(stalled_);
  }
  // A stalled stream ends only through Resume, so the pointers are valid.
  for (AttendStream* stream : waiting) stream->Resume();
}

void AttentionService::Maintain() {
  uint64_t seen_releases = 0;
  auto next_check = std::chrono::steady_clock::now();
  MutexLock lock(mutex_);
  while (!stop_) {
    const auto period = stalled_.empty() ? std::chrono::nanoseconds(kPeriod)
                                         : std::chrono::nanoseconds(kStalledPeriod);
    changed_.WaitFor(lock, period);
    if (const auto now = std::chrono::steady_clock::now(); now >= next_check) {
      next_check = now + kPeriod;
      for (AttendStream* stream : streams_) stream->DisconnectIfSlow(SteadyNanos());
      // Try stalled streams now and then even if no memory came back: they may have been cancelled.
      seen_releases = 0;
    }
    const uint64_t releases = shared_.pool->staging().releases();
    if (stalled_.empty() || releases == seen_releases) continue;
    seen_releases = releases;
    lock.Unlock();
    ResumeStalled();
    lock.Lock();
  }
}

void AttentionService::Stop() {
  {
    MutexLock lock(mutex_);
    changed_.Wait(lock,
                  [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return slots_taken_ == 0; });
    stop_ = true;
    changed_.NotifyAll();
    open_or_close_.NotifyAll();
  }
  if (maintenance_thread_.joinable()) maintenance_thread_.join();
  if (open_close_thread_.joinable()) open_close_thread_.join();
}

}  // namespace mla::server
