// State of a Client, shared by the files that implement its methods.
#ifndef MLA_CLIENT_CPP_CLIENT_IMPL_H_
#define MLA_CLIENT_CPP_CLIENT_IMPL_H_

#include <grpcpp/client_context.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "base/usable_cpus.h"
#include "client/cpp/channel.h"
#include "client/cpp/client.h"
#include "client/cpp/connections.h"
#include "client/cpp/shared_memory/home.h"
#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/streams/errors.h"
#include "client/cpp/streams/ring_stream.h"
#include "client/cpp/streams/shared_stream.h"
#include "client/cpp/streams/stream.h"
#include "client/cpp/ucx/ucx_session.h"
#include "proto/wire/grpc_tuning.h"

namespace mla::client {

using Millis = std::chrono::milliseconds;

// Size of a session's region if the caller names none, and the smallest size that is tried.
inline constexpr uint64_t kSharedBytes = uint64_t{64} << 20;
inline constexpr uint64_t kMiB = 1 << 20;
inline constexpr uint64_t kLeastSharedBytes = uint64_t{4} << 20;

// Pause between a failed renewal of the leases and the next one.
inline constexpr Millis kLeastRenewalPause(20);

// Spin time of helpers that copy: as long as the pause between two layers may last.
inline constexpr int32_t kCopySpinMicros = 1000;
inline constexpr int32_t kMostCopyThreads = 64;

// Bounds the time of the question which server answers. A server that has been up for less than the
// time since its last answer plus this counts as another one.
inline constexpr Millis kAskTime(1000);

// Timeouts are cut to ten years: a clock can still add ten times as much to its own time.
inline constexpr int64_t kLongestTimeoutMs = int64_t{10} * 366 * 24 * 3600 * 1000;

// A copy in another process must never be destroyed. gRPC would wait for threads that do not exist
// there, or write to the connection of the process that made the object.
inline std::shared_ptr<StepStream> Owned(StepStream* stream) {
  return {stream, [](StepStream* one) {
            if (!one->left()) delete one;
          }};
}

// Returns NOT_FOUND for the one sequence that `reply` does not have: "moved", with the server that
// has it now, or "sequence_not_found".
inline absl::Status NotOpen(const v1::GetReply& reply) {
  v1::ErrorDetail detail;
  detail.set_field("sequence_id");
  detail.set_reason(reply.moved_size() > 0 ? "moved" : "sequence_not_found");
  if (reply.moved_size() > 0) detail.set_peer(reply.moved(0).peer());
  return MakeStatus(static_cast<int32_t>(absl::StatusCode::kNotFound),
                    reply.moved_size() > 0
                        ? "the sequence has moved to the server at " + detail.peer()
                        : "the sequence is not open here",
                    detail);
}

struct Client::Impl {
  const Home home;
  std::string target;
  ClientOptions options;
  std::unique_ptr<Connections> connections;
  v1::GetServerInfoReply info;
  std::atomic<uint64_t> next_step{RandomNumber() >> 1};  // far from other clients' ids

  Mutex mutex;
  CondVar stopped;
  bool stop ABSL_GUARDED_BY(mutex) = false;
  absl::Status lost ABSL_GUARDED_BY(mutex);  // an error once another boot id was seen
  // When the process that was connected to has answered last.
  std::chrono::steady_clock::time_point answered ABSL_GUARDED_BY(mutex) =
      std::chrono::steady_clock::now();
  std::map<std::string, v1::ModelSpec> registered ABSL_GUARDED_BY(mutex);  // by this client
  std::thread renewer;

  void Prepare(grpc::ClientContext* context, Millis extra = Millis(0)) const {
    if (!options.tenant.empty()) context->AddMetadata("mla-tenant", options.tenant);
    const std::string header = Traceparent();
    if (!header.empty()) context->AddMetadata("traceparent", header);
    context->set_deadline(std::chrono::system_clock::now() + Millis(options.call_timeout_ms) +
                          extra);
  }

  // Returns the calling thread's header; "" if it has none.
  std::string Traceparent() const { return options.traceparent ? options.traceparent() : ""; }

  // Takes note of the process that has answered. Returns why it is not the one that was connected
  // to, also for later calls; the first time it may ask for up to kAskTime.
  absl::Status CheckBoot(uint64_t boot_id) {
    std::chrono::steady_clock::time_point last;
    {
      const MutexLock lock(mutex);
      if (!lost.ok()) return lost;
      last = answered;
      if (boot_id == info.boot_id()) {
        answered = std::chrono::steady_clock::now();
        return lost;
      }
    }
    const absl::Status why = WhyReplaced(boot_id, last);
    const MutexLock lock(mutex);
    if (lost.ok()) lost = why;
    return lost;
  }

  // A process that ran already when the first one answered last is another server, and the address
  // is a balancer's. So it is if the first one still answers. One that says nothing has just
  // started.
  absl::Status WhyReplaced(uint64_t boot_id, std::chrono::steady_clock::time_point last) {
    const auto since = std::chrono::steady_clock::now() - last;
    grpc::ClientContext context;
    Prepare(&context);
    context.set_deadline(std::chrono::system_clock::now() + kAskTime);
    v1::GetServerInfoReply now;
    const grpc::Status asked = Calls()->admin->GetServerInfo(&context, {}, &now);
    const bool another = asked.ok() && (now.boot_id() == info.boot_id() ||
                                        Millis(now.uptime_ms()) > since + kAskTime);
    return another ? AnotherServerError(info.boot_id(), boot_id)
                   : RestartedError(info.boot_id(), boot_id);
  }

  // Returns DATA_LOSS if the server reports another shape for a model that this client has
  // registered: tensors could then be longer than the caller's memory.
  absl::Status CheckModel(const v1::ModelSpec& model);

  // Returns the reason why no call can succeed any more; "forked" in a process forked from the
  // client's.
  absl::Status Lost() {
    if (home.left()) return ForkedError(home.pid());
    const MutexLock lock(mutex);
    return lost;
  }

  // Makes one unary call with deadline and tenant, and checks the boot id. `call(context, reply)`
  // performs it.
  template <typename Reply, typename Call>
  absl::StatusOr<Reply> Unary(Call call, Millis extra = Millis(0)) {
    MLA_RETURN_IF_ERROR(Lost());
    grpc::ClientContext context;
    Prepare(&context, extra);
    Reply reply;
    MLA_RETURN_IF_ERROR(FromGrpc(call(&context, &reply), context));
    if constexpr (requires { reply.boot_id(); }) {
      MLA_RETURN_IF_ERROR(CheckBoot(reply.boot_id()));
    }
    return reply;
  }

  // Returns the connection for a unary call that begins now.
  std::shared_ptr<const CallConnection> Calls() const { return connections->ForCall(); }

  std::shared_ptr<StepStream> OpenStream() {
    StreamOptions wanted;
    wanted.tenant = options.tenant;
    wanted.boot_id = info.boot_id();
    wanted.why_replaced = [this](uint64_t boot_id) { return CheckBoot(boot_id); };
    wanted.message_bytes = info.limits().message_bytes();
    wanted.timeout = Millis(options.request_timeout_ms);
    wanted.spin = options.stream_spin_us >= 0 ? std::chrono::microseconds(options.stream_spin_us)
                                              : DefaultStreamSpin(base::UsableCpuCount());
    const std::shared_ptr<StreamCarrier> carrier = connections->ForStream();
    return {new Stream(carrier->channel, wanted), [carrier](StepStream* stream) {
              if (stream->left()) return;
              delete stream;
              --carrier->streams;
            }};
  }

  // Opens a region through the target's unix socket, with a command ring or for tensors only.
  absl::StatusOr<std::shared_ptr<StepStream>> OpenShared(bool ring) {
    const std::string shm_path = ShmPathOf(target);
    if (shm_path.empty()) {
      return absl::UnimplementedError("shared memory needs a target of the form unix:PATH");
    }
    if (info.limits().shm_ring_entries() == 0) {
      return absl::UnimplementedError("the server offers no shared memory");
    }
    SharedMemoryOptions wanted;
    wanted.tenant = options.tenant;
    wanted.ring = ring;
    wanted.bytes = std::min(options.shared_bytes > 0 ? options.shared_bytes : kSharedBytes,
                            info.limits().shm_region_bytes());
    wanted.spin_us = wanted.server_spin_us = options.spin_us;
    wanted.server_uid = options.server_uid;
    wanted.device_mib = static_cast<uint32_t>(
        std::min<uint64_t>((options.device_bytes + kMiB - 1) / kMiB, UINT32_MAX));
    wanted.device = {options.device, options.device_library};
    wanted.connect_timeout_ms =
        static_cast<int32_t>(std::clamp<int64_t>(options.call_timeout_ms, 0, INT32_MAX));
    auto memory = SharedMemory::Connect(shm_path, wanted);
    while (options.shared_bytes == 0 && absl::IsResourceExhausted(memory.status()) &&
           wanted.bytes / 2 >= kLeastSharedBytes) {
      wanted.bytes /= 2;
      memory = SharedMemory::Connect(shm_path, wanted);
    }
    if (!memory.ok()) return memory.status();
    if ((*memory)->boot_id() != info.boot_id()) {
      return RestartedError(info.boot_id(), (*memory)->boot_id());
    }
    if (ring) return RingOver(*std::move(memory));
    return Owned(new SharedStream(*std::move(memory), OpenStream(),
                                  Millis(options.request_timeout_ms), Copies()));
  }

  // Returns the threads that copy tensors into memory of a session and out of it.
  wire::ThreadTeamOptions Copies() const {
    const int32_t cpus = base::UsableCpuCount();
    return {std::clamp(options.copy_threads, 1, std::min(cpus, kMostCopyThreads)),
            DefaultStreamSpin(cpus).count() == 0 ? 0 : kCopySpinMicros};
  }

  std::shared_ptr<StepStream> RingOver(std::unique_ptr<RingMemory> memory) const {
    return Owned(new RingStream(std::move(memory), info.boot_id(),
                                Millis(options.request_timeout_ms), info.limits().message_bytes(),
                                Copies()));
  }

  // Opens a ring that travels over UCX.
  absl::StatusOr<std::shared_ptr<StepStream>> OpenUcx() {
    UcxSessionOptions wanted;
    wanted.tenant = options.tenant;
    wanted.boot_id = info.boot_id();
    wanted.bytes = std::min(options.shared_bytes > 0 ? options.shared_bytes : kSharedBytes,
                            info.limits().shm_region_bytes());
    wanted.timeout = Millis(std::clamp<int64_t>(options.call_timeout_ms, 0, INT32_MAX));
    wanted.memory.library = options.ucx_library;
    using Transport = ClientOptions::Transport;
    wanted.memory.link = {options.ucx_transports, options.ucx_devices,
                          options.transport >= Transport::kUcxPuts};
    wanted.memory.device_memory = options.transport == Transport::kUcxDevice;
    wanted.memory.spin = std::chrono::microseconds(options.spin_us);
    const std::shared_ptr<StreamCarrier> carrier = connections->ForStream();
    auto memory = OpenUcxRing(carrier->channel, wanted);
    while (options.shared_bytes == 0 && absl::IsResourceExhausted(memory.status()) &&
           wanted.bytes / 2 >= kLeastSharedBytes) {
      wanted.bytes /= 2;
      memory = OpenUcxRing(carrier->channel, wanted);
    }
    if (!memory.ok()) {
      --carrier->streams;
      return memory.status();
    }
    std::shared_ptr<StepStream> stream = RingOver(*std::move(memory));
    // The connection has room for another stream once this one is gone.
    return std::shared_ptr<StepStream>(stream.get(), [carrier, stream](StepStream*) mutable {
      const bool left = stream->left();
      stream.reset();
      if (!left) --carrier->streams;
    });
  }

  absl::StatusOr<v1::RenewLeaseReply> RenewLeases(Millis timeout) {
    v1::RenewLeaseRequest request;
    request.set_client_id(options.client_id);
    return Unary<v1::RenewLeaseReply>(
        [&](auto* context, auto* reply) {
          return Calls()->sequences->RenewLease(context, request, reply);
        },
        timeout - Millis(options.call_timeout_ms));
  }

  // Renews the leases after each third of their length. A renewal may take as long, but no longer,
  // and is repeated soon if it failed, so that a lost message does not cost the lease.
  void RenewLoop(Millis lease) {
    const Millis period = std::max(lease / 3, Millis(1));
    const Millis timeout = std::clamp(Millis(options.call_timeout_ms), Millis(1), period);
    Millis pause = period;
    MutexLock lock(mutex);
    while (!stopped.WaitFor(lock, pause,
                            [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return stop; })) {
      lock.Unlock();
      // A failure shows at the next call of the user; CheckBoot remembers a restart.
      pause = RenewLeases(timeout).ok() ? period : std::max(period / 4, kLeastRenewalPause);
      lock.Lock();
    }
  }
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLIENT_IMPL_H_
