#include "client/cpp/client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <openssl/evp.h>
#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/mutex.h"
#include "base/usable_cpus.h"
#include "client/cpp/channel.h"
#include "client/cpp/session.h"
#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/shared_memory/socket_owner.h"
#include "client/cpp/streams/errors.h"
#include "client/cpp/streams/ring_stream.h"
#include "client/cpp/streams/shared_stream.h"
#include "client/cpp/streams/stream.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/model.grpc.pb.h"
#include "mla/v1/sequence.grpc.pb.h"
#include "proto/wire/grpc_tuning.h"

namespace mla::client {
namespace {

using Millis = std::chrono::milliseconds;

// Of a session's region when the caller names no size, and the least that is worth having.
constexpr uint64_t kSharedBytes = uint64_t{64} << 20;
constexpr uint64_t kLeastSharedBytes = uint64_t{4} << 20;

uint64_t Random64() {
  uint64_t value = 0;
  while (getrandom(&value, sizeof(value), 0) != static_cast<ssize_t>(sizeof(value)) || value == 0) {
  }
  return value;
}

// Between a renewal of the leases that failed and the next.
constexpr Millis kLeastRenewalPause(20);

// Of helpers that copy, as long as the pause between two layers may take.
constexpr int32_t kCopySpinMicros = 1000;
constexpr int32_t kMostCopyThreads = 64;

}  // namespace

struct Client::Impl {
  std::string target;
  ClientOptions options;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Admin::Stub> admin;
  std::unique_ptr<v1::Models::Stub> models;
  std::unique_ptr<v1::Sequences::Stub> sequences;
  v1::GetServerInfoReply info;
  std::atomic<uint64_t> next_step{Random64() >> 1};  // far from other clients' ids

  Mutex mutex;
  CondVar stopped;
  bool stop ABSL_GUARDED_BY(mutex) = false;
  absl::Status lost ABSL_GUARDED_BY(mutex);  // not OK once another boot id was seen
  std::thread renewer;

  void Prepare(grpc::ClientContext* context, Millis extra = Millis(0)) const {
    if (!options.tenant.empty()) context->AddMetadata("mla-tenant", options.tenant);
    context->set_deadline(std::chrono::system_clock::now() + Millis(options.call_timeout_ms) +
                          extra);
  }

  absl::Status CheckBoot(uint64_t boot_id) {
    const MutexLock lock(mutex);
    if (lost.ok() && boot_id != info.boot_id()) lost = RestartedError(info.boot_id(), boot_id);
    return lost;
  }

  absl::Status Lost() {
    const MutexLock lock(mutex);
    return lost;
  }

  // One unary call with deadline, tenant and boot check. `call(context, reply)` performs it.
  template <typename Reply, typename Call>
  absl::StatusOr<Reply> Unary(Call call, Millis extra = Millis(0)) {
    if (absl::Status status = Lost(); !status.ok()) return status;
    grpc::ClientContext context;
    Prepare(&context, extra);
    Reply reply;
    if (absl::Status status = FromGrpc(call(&context, &reply), context); !status.ok()) {
      return status;
    }
    if constexpr (requires { reply.boot_id(); }) {
      if (absl::Status status = CheckBoot(reply.boot_id()); !status.ok()) return status;
    }
    return reply;
  }

  std::shared_ptr<StepStream> OpenStream() const {
    StreamOptions wanted;
    wanted.tenant = options.tenant;
    wanted.boot_id = info.boot_id();
    wanted.message_bytes = info.limits().message_bytes();
    wanted.timeout = Millis(options.request_timeout_ms);
    wanted.spin = options.stream_spin_us >= 0 ? std::chrono::microseconds(options.stream_spin_us)
                                              : DefaultStreamSpin(base::UsableCpuCount());
    return std::make_shared<Stream>(channel, wanted);
  }

  // A region behind the unix socket of the target, with a command ring or for tensors alone.
  absl::StatusOr<std::shared_ptr<StepStream>> OpenShared(bool ring) const {
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
    const Millis timeout(options.request_timeout_ms);
    const int32_t cpus = base::UsableCpuCount();
    const wire::ParallelCopierOptions copies{
        std::clamp(options.copy_threads, 1, std::min(cpus, kMostCopyThreads)),
        DefaultStreamSpin(cpus).count() == 0 ? 0 : kCopySpinMicros};
    if (!ring) {
      return std::make_shared<SharedStream>(*std::move(memory), OpenStream(), timeout, copies);
    }
    return std::make_shared<RingStream>(*std::move(memory), info.boot_id(), timeout,
                                        info.limits().message_bytes(), copies);
  }

  absl::StatusOr<v1::RenewLeaseReply> RenewLeases(Millis timeout) {
    v1::RenewLeaseRequest request;
    request.set_client_id(options.client_id);
    return Unary<v1::RenewLeaseReply>(
        [&](auto* context, auto* reply) { return sequences->RenewLease(context, request, reply); },
        timeout - Millis(options.call_timeout_ms));
  }

  // Renews at a third of the lease. A renewal may take that long and no longer, and one that
  // failed is repeated soon: a lost message must not cost the lease.
  void RenewLoop(Millis lease) {
    const Millis period = std::max(lease / 3, Millis(1));
    const Millis timeout = std::clamp(Millis(options.call_timeout_ms), Millis(1), period);
    Millis pause = period;
    MutexLock lock(mutex);
    while (!stopped.WaitFor(lock, pause,
                            [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return stop; })) {
      lock.Unlock();
      // A failure is seen by the next call that matters; a restart is remembered by CheckBoot.
      pause = RenewLeases(timeout).ok() ? period : std::max(period / 4, kLeastRenewalPause);
      lock.Lock();
    }
  }
};

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const ClientOptions& options) {
  // The wire carries 32 bits: a larger lease would be asked for as a short one and not be renewed
  // in time.
  constexpr int64_t kMostLeaseMs = std::numeric_limits<uint32_t>::max();
  if (options.sequence_lease_ms < 0 || options.sequence_lease_ms > kMostLeaseMs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sequence_lease_ms: got ", options.sequence_lease_ms, ", limit 0..", kMostLeaseMs));
  }
  if (const std::string path = UnixPathOf(target); !path.empty()) {
    const absl::Status owned = CheckSocketFile(path, TrustedUsersWith(options.server_uid));
    if (!owned.ok()) return owned;
  }
  auto channel = MakeChannel(target, options);
  if (!channel.ok()) return channel.status();
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->target = target;
  if (impl->options.client_id.empty()) {
    impl->options.client_id = absl::StrFormat("cpp-%016x", Random64());
  }
  impl->channel = *std::move(channel);
  impl->admin = v1::Admin::NewStub(impl->channel);
  impl->models = v1::Models::NewStub(impl->channel);
  impl->sequences = v1::Sequences::NewStub(impl->channel);
  grpc::ClientContext context;
  impl->Prepare(&context);
  context.set_wait_for_ready(false);
  const grpc::Status status = impl->admin->GetServerInfo(&context, {}, &impl->info);
  if (!status.ok()) return FromGrpc(status, context);
  std::unique_ptr<Client> client(new Client(std::move(impl)));
  Impl& made = *client->impl_;
  const int64_t lease_ms = options.sequence_lease_ms != 0 ? options.sequence_lease_ms
                                                          : made.info.limits().sequence_lease_ms();
  if (options.renew_leases) {
    try {
      made.renewer = std::thread([impl = &made, lease_ms] { impl->RenewLoop(Millis(lease_ms)); });
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no thread to renew leases: ", error.what()));
    }
  }
  return client;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Client::~Client() {
  {
    const MutexLock lock(impl_->mutex);
    impl_->stop = true;
    impl_->stopped.NotifyAll();
  }
  if (impl_->renewer.joinable()) impl_->renewer.join();
}

const v1::GetServerInfoReply& Client::info() const { return impl_->info; }
const std::string& Client::client_id() const { return impl_->options.client_id; }
uint64_t Client::NewStepId() { return impl_->next_step.fetch_add(1); }

absl::StatusOr<v1::GetServerInfoReply> Client::GetServerInfo() {
  return impl_->Unary<v1::GetServerInfoReply>(
      [&](auto* context, auto* reply) { return impl_->admin->GetServerInfo(context, {}, reply); });
}

absl::StatusOr<v1::GetStatsReply> Client::GetStats() {
  return impl_->Unary<v1::GetStatsReply>(
      [&](auto* context, auto* reply) { return impl_->admin->GetStats(context, {}, reply); });
}

absl::StatusOr<bool> Client::IsServing(const std::string& service) {
  const auto stub = grpc::health::v1::Health::NewStub(impl_->channel);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  const auto reply = impl_->Unary<grpc::health::v1::HealthCheckResponse>(
      [&](auto* context, auto* out) { return stub->Check(context, request, out); });
  if (!reply.ok()) return reply.status();
  return reply->status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

absl::Status Client::WatchStatus(uint32_t interval_ms,
                                 const std::function<bool(const v1::StatusUpdate&)>& update) {
  if (absl::Status status = impl_->Lost(); !status.ok()) return status;
  grpc::ClientContext context;
  // A watch has no end of its own, so no deadline either.
  if (!impl_->options.tenant.empty()) context.AddMetadata("mla-tenant", impl_->options.tenant);
  v1::WatchStatusRequest request;
  request.set_interval_ms(interval_ms);
  const auto reader = impl_->admin->WatchStatus(&context, request);
  v1::StatusUpdate status;
  while (reader->Read(&status)) {
    if (update(status)) continue;
    context.TryCancel();
    reader->Finish();  // CANCELLED, as asked for
    return absl::OkStatus();
  }
  return FromGrpc(reader->Finish(), context);
}

absl::StatusOr<v1::DrainReply> Client::Drain(uint32_t deadline_ms, bool exit) {
  v1::DrainRequest request;
  request.set_deadline_ms(deadline_ms);
  request.set_exit(exit);
  return impl_->Unary<v1::DrainReply>(
      [&](auto* context, auto* reply) { return impl_->admin->Drain(context, request, reply); },
      Millis(deadline_ms));
}

absl::StatusOr<v1::CancelDrainReply> Client::CancelDrain() {
  return impl_->Unary<v1::CancelDrainReply>(
      [&](auto* context, auto* reply) { return impl_->admin->CancelDrain(context, {}, reply); });
}

absl::StatusOr<v1::GetQuotaReply> Client::GetQuota(const v1::GetQuotaRequest& request) {
  return impl_->Unary<v1::GetQuotaReply>(
      [&](auto* context, auto* reply) { return impl_->admin->GetQuota(context, request, reply); });
}

absl::StatusOr<v1::SetQuotaReply> Client::SetQuota(const v1::SetQuotaRequest& request) {
  return impl_->Unary<v1::SetQuotaReply>(
      [&](auto* context, auto* reply) { return impl_->admin->SetQuota(context, request, reply); });
}

absl::StatusOr<v1::EvictSequencesReply> Client::EvictSequences(
    const v1::EvictSequencesRequest& request) {
  return impl_->Unary<v1::EvictSequencesReply>([&](auto* context, auto* reply) {
    return impl_->admin->EvictSequences(context, request, reply);
  });
}

absl::StatusOr<v1::EvictModelReply> Client::EvictModel(const std::string& tenant,
                                                       const std::string& model_id) {
  v1::EvictModelRequest request;
  request.set_tenant(tenant);
  request.set_model_id(model_id);
  return impl_->Unary<v1::EvictModelReply>([&](auto* context, auto* reply) {
    return impl_->admin->EvictModel(context, request, reply);
  });
}

absl::StatusOr<v1::RegisterReply> Client::RegisterModel(const v1::ModelSpec& model,
                                                        uint32_t lease_ms,
                                                        std::span<const float> kv_scales) {
  v1::RegisterRequest request;
  *request.mutable_model() = model;
  request.set_lease_ms(lease_ms);
  request.mutable_kv_scales()->Assign(kv_scales.begin(), kv_scales.end());
  auto registered = impl_->Unary<v1::RegisterReply>(
      [&](auto* context, auto* reply) { return impl_->models->Register(context, request, reply); });
  if (registered.ok() && model.kv_format() > v1::KV_FORMAT_BF16 &&
      registered->model().kv_format() != model.kv_format()) {
    return absl::UnimplementedError(absl::StrCat("model.kv_format: the server does not know ",
                                                 v1::KvFormat_Name(model.kv_format()),
                                                 " and keeps rows as bf16"));
  }
  if (registered.ok() && model.attention() > v1::ATTENTION_KIND_DENSE &&
      registered->model().attention() != model.attention()) {
    return absl::UnimplementedError("model.attention: the server does not know sparse attention");
  }
  if (registered.ok() && registered->model().index_heads() != model.index_heads()) {
    return absl::UnimplementedError("model.index_heads: the server has no indexer");
  }
  return registered;
}

absl::Status Client::UploadScales(const std::string& model_id, std::span<const float> scales) {
  v1::UploadScalesRequest request;
  request.set_model_id(model_id);
  request.mutable_scales()->Assign(scales.begin(), scales.end());
  return impl_
      ->Unary<v1::UploadScalesReply>([&](auto* context, auto* reply) {
        return impl_->models->UploadScales(context, request, reply);
      })
      .status();
}

absl::StatusOr<v1::UploadWeightsReply> Client::UploadWeights(
    const std::string& model_id, const std::function<std::optional<WeightsChunk>()>& next) {
  return impl_->Unary<v1::UploadWeightsReply>(
      [&](grpc::ClientContext* context, v1::UploadWeightsReply* reply) {
        const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> digest(EVP_MD_CTX_new(),
                                                                             EVP_MD_CTX_free);
        EVP_DigestInit_ex(digest.get(), EVP_sha256(), nullptr);
        const auto writer = impl_->models->UploadWeights(context, reply);
        v1::UploadWeightsRequest message;
        message.mutable_header()->set_model_id(model_id);
        bool open = writer->Write(message);
        while (auto chunk = open ? next() : std::nullopt) {
          EVP_DigestUpdate(digest.get(), chunk->bytes.data(), chunk->bytes.size());
          v1::UploadWeightsRequest::Chunk* part = message.mutable_chunk();
          part->set_layer(chunk->layer);
          part->set_head_begin(chunk->head_begin);
          part->set_head_count(chunk->head_count);
          part->set_payload(std::move(chunk->bytes));
          open = writer->Write(message);
        }
        std::string sha256(32, '\0');
        EVP_DigestFinal_ex(digest.get(), reinterpret_cast<unsigned char*>(sha256.data()), nullptr);
        message.mutable_trailer()->set_sha256(sha256);
        if (open) writer->Write(message);
        writer->WritesDone();
        return writer->Finish();
      },
      // The whole upload, not one message.
      Millis(impl_->options.request_timeout_ms * 10));
}

absl::StatusOr<v1::ListModelsReply> Client::ListModels() {
  return impl_->Unary<v1::ListModelsReply>(
      [&](auto* context, auto* reply) { return impl_->models->List(context, {}, reply); });
}

absl::Status Client::UnregisterModel(const std::string& model_id) {
  v1::UnregisterRequest request;
  request.set_model_id(model_id);
  return impl_
      ->Unary<v1::UnregisterReply>([&](auto* context, auto* reply) {
        return impl_->models->Unregister(context, request, reply);
      })
      .status();
}

absl::StatusOr<Sequence> Client::OpenSequence(const std::string& model_id,
                                              const std::string& request_id,
                                              const v1::Prefix& prefix) {
  v1::OpenRequest request;
  *request.mutable_prefix() = prefix;
  request.set_model_id(model_id);
  request.set_request_id(request_id.empty() ? absl::StrFormat("open-%016x", Random64())
                                            : request_id);
  request.set_client_id(client_id());
  request.set_lease_ms(static_cast<uint32_t>(impl_->options.sequence_lease_ms));
  const auto open = [&](auto* context, auto* reply) {
    return impl_->sequences->Open(context, request, reply);
  };
  auto reply = impl_->Unary<v1::OpenReply>(open);
  // The request id makes this safe: the second call finds what the first may have opened.
  if (absl::IsUnavailable(reply.status()) && !DetailOf(reply.status())) {
    reply = impl_->Unary<v1::OpenReply>(open);
  }
  if (!reply.ok()) return reply.status();
  return Sequence(this, reply->sequence());
}

absl::StatusOr<v1::MatchReply> Client::MatchSequence(const v1::MatchRequest& request) {
  return impl_->Unary<v1::MatchReply>(
      [&](auto* context, auto* reply) { return impl_->sequences->Match(context, request, reply); });
}

absl::StatusOr<v1::GetReply> Client::GetSequences(const std::vector<uint64_t>& ids, bool own_only) {
  v1::GetRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  if (own_only) request.set_client_id(client_id());
  return impl_->Unary<v1::GetReply>(
      [&](auto* context, auto* reply) { return impl_->sequences->Get(context, request, reply); });
}

absl::StatusOr<v1::ReleaseReply> Client::ReleaseSequences(const std::vector<uint64_t>& ids) {
  v1::ReleaseRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return impl_->Unary<v1::ReleaseReply>([&](auto* context, auto* reply) {
    return impl_->sequences->Release(context, request, reply);
  });
}

absl::StatusOr<v1::RenewLeaseReply> Client::RenewLeases() {
  return impl_->RenewLeases(Millis(impl_->options.call_timeout_ms));
}

absl::StatusOr<std::unique_ptr<Session>> Client::OpenSession() {
  if (absl::Status status = impl_->Lost(); !status.ok()) return status;
  std::unique_ptr<Session> session(new Session());
  session->client_ = this;
  using Transport = ClientOptions::Transport;
  const Transport wanted = impl_->options.transport;
  if (wanted != Transport::kInline) {
    auto shared = impl_->OpenShared(wanted != Transport::kShm);
    if (!shared.ok() && wanted != Transport::kAuto) return shared.status();
    if (shared.ok()) session->stream_ = *std::move(shared);
  }
  if (session->stream_ == nullptr) session->stream_ = impl_->OpenStream();
  return session;
}

absl::StatusOr<v1::ForkReply> Client::ForkSequence(uint64_t id, uint64_t epoch,
                                                   std::optional<uint64_t> length) {
  v1::ForkRequest request;
  request.set_sequence_id(id);
  request.set_expected_epoch(epoch);
  if (length) request.set_length(*length);
  request.set_request_id(absl::StrFormat("fork-%016x", Random64()));
  request.set_client_id(client_id());
  request.set_lease_ms(static_cast<uint32_t>(impl_->options.sequence_lease_ms));
  return impl_->Unary<v1::ForkReply>(
      [&](auto* context, auto* reply) { return impl_->sequences->Fork(context, request, reply); });
}

absl::StatusOr<v1::TruncateReply> Client::TruncateSequence(uint64_t id, uint64_t epoch,
                                                           uint64_t length) {
  v1::TruncateRequest request;
  request.set_sequence_id(id);
  request.set_expected_epoch(epoch);
  request.set_length(length);
  return impl_->Unary<v1::TruncateReply>([&](auto* context, auto* reply) {
    return impl_->sequences->Truncate(context, request, reply);
  });
}

}  // namespace mla::client
