#include "client/cpp/client.h"

#include <openssl/evp.h>

#include <limits>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/session.h"
#include "client/cpp/shared_memory/socket_owner.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "proto/wire/calls/stream_call.h"

namespace mla::client {

namespace {

// Returns the options with timeouts cut so that they can be added to a time; INVALID_ARGUMENT if
// one is below 0.
absl::StatusOr<ClientOptions> WithTimeouts(ClientOptions options) {
  for (const auto& [field, timeout] :
       {std::pair("call_timeout_ms", &options.call_timeout_ms),
        std::pair("request_timeout_ms", &options.request_timeout_ms)}) {
    if (*timeout < 0) {
      v1::ErrorDetail detail;
      detail.set_field(field);
      detail.set_got(absl::StrCat(*timeout));
      detail.set_limit("at least 0");
      return MakeStatus(static_cast<int32_t>(absl::StatusCode::kInvalidArgument),
                        absl::StrCat(field, ": got ", *timeout, ", must be at least 0"), detail);
    }
    *timeout = std::min(*timeout, kLongestTimeoutMs);
  }
  return options;
}

// No server has a longer deadline of its own for a drain (server.drain_deadline_ms).
constexpr Millis kMostDrainDeadline{86'400'000};
constexpr char kExport[] = "/mla.v1.Cache/Export";
constexpr char kImport[] = "/mla.v1.Cache/Import";
constexpr char kWatchEvents[] = "/mla.v1.Cache/WatchEvents";

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const ClientOptions& given) {
  MLA_ASSIGN_OR_RETURN(const ClientOptions options, WithTimeouts(given));
  // The wire carries 32 bits: a larger lease would be cut to a short one, which would not be
  // renewed in time.
  constexpr int64_t kMostLeaseMs = std::numeric_limits<uint32_t>::max();
  if (options.sequence_lease_ms < 0 || options.sequence_lease_ms > kMostLeaseMs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sequence_lease_ms: got ", options.sequence_lease_ms, ", limit 0..", kMostLeaseMs));
  }
  if (const std::string path = UnixPathOf(target); !path.empty()) {
    MLA_RETURN_IF_ERROR(CheckSocketFile(path, TrustedUsersWith(options.server_uid)));
  }
  if (GrpcIsBroken()) {
    v1::ErrorDetail detail;
    detail.set_reason("forked");
    return MakeStatus(static_cast<int32_t>(absl::StatusCode::kFailedPrecondition),
                      "this process was forked from one that had connected, and gRPC does not "
                      "survive that: connect after the fork only, or start a program",
                      detail);
  }
  MLA_ASSIGN_OR_RETURN(auto connections, Connections::Create(target, options));
  UseGrpc();
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->target = target;
  if (impl->options.client_id.empty()) {
    impl->options.client_id = absl::StrFormat("cpp-%016x", RandomNumber());
  }
  impl->connections = std::move(connections);
  grpc::ClientContext context;
  impl->Prepare(&context);
  context.set_wait_for_ready(false);
  const grpc::Status status = impl->Calls()->admin->GetServerInfo(&context, {}, &impl->info);
  if (!status.ok()) return FromGrpc(status, context);
  std::unique_ptr<Client> client(new Client(std::move(impl)));
  Impl& state = *client->impl_;
  const int64_t lease_ms = options.sequence_lease_ms != 0 ? options.sequence_lease_ms
                                                          : state.info.limits().sequence_lease_ms();
  if (options.renew_leases) {
    try {
      state.renewer = std::thread([impl = &state, lease_ms] { impl->RenewLoop(Millis(lease_ms)); });
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no thread to renew leases: ", error.what()));
    }
  }
  return client;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Client::~Client() {
  if (impl_->home.left()) {
    // Its thread, its connections and perhaps its locks belong to another process.
    static_cast<void>(impl_.release());
    return;
  }
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

std::string Client::Traceparent() const { return impl_->Traceparent(); }

absl::StatusOr<v1::GetServerInfoReply> Client::GetServerInfo() {
  return impl_->Unary<v1::GetServerInfoReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->admin->GetServerInfo(context, {}, reply);
  });
}

absl::StatusOr<v1::GetStatsReply> Client::GetStats() {
  return impl_->Unary<v1::GetStatsReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->admin->GetStats(context, {}, reply);
  });
}

absl::StatusOr<bool> Client::IsServing(const std::string& service) {
  const auto stub = grpc::health::v1::Health::NewStub(impl_->Calls()->channel);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  const auto reply = impl_->Unary<grpc::health::v1::HealthCheckResponse>(
      [&](auto* context, auto* out) { return stub->Check(context, request, out); });
  if (!reply.ok()) return reply.status();
  return reply->status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

absl::Status Client::WatchStatus(uint32_t interval_ms,
                                 const std::function<bool(const v1::StatusUpdate&)>& update) {
  MLA_RETURN_IF_ERROR(impl_->Lost());
  grpc::ClientContext context;
  // A watch lasts as long as the caller wants, so it has no deadline.
  if (!impl_->options.tenant.empty()) context.AddMetadata("mla-tenant", impl_->options.tenant);
  v1::WatchStatusRequest request;
  request.set_interval_ms(interval_ms);
  wire::StreamCall call(impl_->Calls()->channel, &context, "/mla.v1.Admin/WatchStatus");
  call.Write(request);
  call.WritesDone();
  v1::StatusUpdate status;
  while (call.Read(&status)) {
    if (!update(status)) return absl::OkStatus();  // which cancels the call
  }
  return FromGrpc(call.Finish(), context);
}

absl::StatusOr<v1::DrainReply> Client::Drain(uint32_t deadline_ms, bool exit,
                                             const std::vector<std::string>& peers) {
  v1::DrainRequest request;
  request.set_deadline_ms(deadline_ms);
  request.set_exit(exit);
  if (!peers.empty()) {
    request.set_to(peers.front());
    request.mutable_also_to()->Assign(peers.begin() + 1, peers.end());
  }
  return impl_->Unary<v1::DrainReply>(
      [&](auto* context, auto* reply) {
        return impl_->Calls()->admin->Drain(context, request, reply);
      },
      deadline_ms > 0 ? Millis(deadline_ms) : kMostDrainDeadline);
}

absl::StatusOr<v1::CancelDrainReply> Client::CancelDrain() {
  return impl_->Unary<v1::CancelDrainReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->admin->CancelDrain(context, {}, reply);
  });
}

absl::StatusOr<v1::GetQuotaReply> Client::GetQuota(const v1::GetQuotaRequest& request) {
  return impl_->Unary<v1::GetQuotaReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->admin->GetQuota(context, request, reply);
  });
}

absl::StatusOr<v1::SetQuotaReply> Client::SetQuota(const v1::SetQuotaRequest& request) {
  return impl_->Unary<v1::SetQuotaReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->admin->SetQuota(context, request, reply);
  });
}

absl::StatusOr<v1::EvictSequencesReply> Client::EvictSequences(
    const v1::EvictSequencesRequest& request) {
  return impl_->Unary<v1::EvictSequencesReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->admin->EvictSequences(context, request, reply);
  });
}

absl::StatusOr<v1::EvictModelReply> Client::EvictModel(const std::string& tenant,
                                                       const std::string& model_id) {
  v1::EvictModelRequest request;
  request.set_tenant(tenant);
  request.set_model_id(model_id);
  return impl_->Unary<v1::EvictModelReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->admin->EvictModel(context, request, reply);
  });
}

absl::StatusOr<v1::RegisterReply> Client::RegisterModel(const v1::ModelSpec& model,
                                                        uint32_t lease_ms,
                                                        std::span<const float> kv_scales,
                                                        std::span<const float> sinks) {
  v1::RegisterRequest request;
  *request.mutable_model() = model;
  request.set_lease_ms(lease_ms);
  request.mutable_kv_scales()->Assign(kv_scales.begin(), kv_scales.end());
  request.mutable_sinks()->Assign(sinks.begin(), sinks.end());
  auto registered = impl_->Unary<v1::RegisterReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->models->Register(context, request, reply);
  });
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
  if (registered.ok() && registered->model().needs_sinks() != model.needs_sinks()) {
    return absl::UnimplementedError("model.needs_sinks: the server takes sinks with Register only");
  }
  if (!registered.ok()) return registered;
  {
    const MutexLock lock(impl_->mutex);
    impl_->registered[model.model_id()] = model;
  }
  v1::ModelSpec known = registered->model();
  known.set_model_id(model.model_id());
  MLA_RETURN_IF_ERROR(impl_->CheckModel(known));
  return registered;
}

absl::Status Client::Impl::CheckModel(const v1::ModelSpec& model) {
  const auto shape = [](const v1::ModelSpec& spec) {
    const v1::Geometry& geometry = spec.geometry();
    return std::tuple(geometry.num_heads(), geometry.kv_lora_rank(), geometry.rope_dim(),
                      geometry.nope_dim(), geometry.v_dim(), spec.layers(), spec.top_k(),
                      spec.index_heads(), spec.index_dim(), spec.window(), spec.tail_bytes(),
                      spec.q_lora_rank(), spec.hidden_size(), spec.rope_layout(),
                      std::vector<uint32_t>(spec.ratios().begin(), spec.ratios().end()));
  };
  const MutexLock lock(mutex);
  const auto own = registered.find(model.model_id());
  if (own == registered.end() || shape(own->second) == shape(model)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the server has model ", model.model_id(),
                                          " in another shape than was registered"));
}

absl::StatusOr<v1::ModelSpec> Client::RegisteredModel(const std::string& model_id) const {
  const MutexLock lock(impl_->mutex);
  const auto own = impl_->registered.find(model_id);
  if (own != impl_->registered.end()) return own->second;
  return absl::FailedPreconditionError(
      absl::StrCat("model_id: this client has not registered model ", model_id));
}

absl::Status Client::UploadScales(const std::string& model_id, std::span<const float> scales) {
  v1::UploadScalesRequest request;
  request.set_model_id(model_id);
  request.mutable_scales()->Assign(scales.begin(), scales.end());
  return impl_
      ->Unary<v1::UploadScalesReply>([&](auto* context, auto* reply) {
        return impl_->Calls()->models->UploadScales(context, request, reply);
      })
      .status();
}

absl::StatusOr<v1::UploadSinksReply> Client::UploadSinks(const std::string& model_id,
                                                         std::span<const float> sinks,
                                                         const SinkSlice& slice) {
  v1::UploadSinksRequest request;
  request.set_model_id(model_id);
  request.set_layer_begin(slice.layer_begin);
  request.set_layer_count(slice.layer_count);
  request.set_head_begin(slice.head_begin);
  request.set_head_count(slice.head_count);
  request.mutable_sinks()->Assign(sinks.begin(), sinks.end());
  return impl_->Unary<v1::UploadSinksReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->models->UploadSinks(context, request, reply);
  });
}

absl::StatusOr<v1::UploadWeightsReply> Client::UploadWeights(
    const std::string& model_id, const std::function<std::optional<WeightsChunk>()>& next) {
  return impl_->Unary<v1::UploadWeightsReply>(
      [&](grpc::ClientContext* context, v1::UploadWeightsReply* reply) {
        const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> digest(EVP_MD_CTX_new(),
                                                                             EVP_MD_CTX_free);
        EVP_DigestInit_ex(digest.get(), EVP_sha256(), nullptr);
        wire::StreamCall call(impl_->Calls()->channel, context, "/mla.v1.Models/UploadWeights");
        v1::UploadWeightsRequest message;
        message.mutable_header()->set_model_id(model_id);
        bool open = call.Write(message);
        while (auto chunk = open ? next() : std::nullopt) {
          EVP_DigestUpdate(digest.get(), chunk->bytes.data(), chunk->bytes.size());
          v1::UploadWeightsRequest::Chunk* part = message.mutable_chunk();
          part->set_layer(chunk->layer);
          part->set_head_begin(chunk->head_begin);
          part->set_head_count(chunk->head_count);
          part->set_part(chunk->part);
          part->set_dtype(chunk->dtype);
          part->set_payload(std::move(chunk->bytes));
          open = call.Write(message);
        }
        std::string sha256(32, '\0');
        EVP_DigestFinal_ex(digest.get(), reinterpret_cast<unsigned char*>(sha256.data()), nullptr);
        message.mutable_trailer()->set_sha256(sha256);
        if (open) call.Write(message);
        return call.FinishWith(reply);
      },
      // for the whole upload, not for one message
      Millis(impl_->options.request_timeout_ms * 10));
}

absl::StatusOr<v1::ListModelsReply> Client::ListModels() {
  auto listed = impl_->Unary<v1::ListModelsReply>(
      [&](auto* context, auto* reply) { return impl_->Calls()->models->List(context, {}, reply); });
  if (!listed.ok()) return listed;
  for (const v1::ModelInfo& info : listed->models()) {
    MLA_RETURN_IF_ERROR(impl_->CheckModel(info.model()));
  }
  return listed;
}

absl::Status Client::UnregisterModel(const std::string& model_id) {
  v1::UnregisterRequest request;
  request.set_model_id(model_id);
  {
    const MutexLock lock(impl_->mutex);
    impl_->registered.erase(model_id);
  }
  return impl_
      ->Unary<v1::UnregisterReply>([&](auto* context, auto* reply) {
        return impl_->Calls()->models->Unregister(context, request, reply);
      })
      .status();
}

absl::StatusOr<Sequence> Client::OpenSequence(const std::string& model_id,
                                              const std::string& request_id,
                                              const v1::Prefix& prefix, v1::PrefixMatch* match) {
  v1::OpenRequest request;
  *request.mutable_prefix() = prefix;
  request.set_model_id(model_id);
  request.set_request_id(request_id.empty() ? absl::StrFormat("open-%016x", RandomNumber())
                                            : request_id);
  request.set_client_id(client_id());
  request.set_lease_ms(static_cast<uint32_t>(impl_->options.sequence_lease_ms));
  const auto open = [&](auto* context, auto* reply) {
    return impl_->Calls()->sequences->Open(context, request, reply);
  };
  auto reply = impl_->Unary<v1::OpenReply>(open);
  // The request id makes this safe: the second call finds the sequence that the first one may have
  // opened.
  if (absl::IsUnavailable(reply.status()) && !DetailOf(reply.status())) {
    reply = impl_->Unary<v1::OpenReply>(open);
  }
  if (!reply.ok()) return reply.status();
  if (match != nullptr) *match = reply->match();
  return Sequence(this, reply->sequence());
}

absl::StatusOr<v1::ProbeReply> Client::Probe(const std::string& model_id, const v1::Prefix& prefix,
                                             int64_t timeout_ms) {
  v1::ProbeRequest request;
  request.set_model_id(model_id);
  *request.mutable_prefix() = prefix;
  return impl_->Unary<v1::ProbeReply>(
      [&](auto* context, auto* reply) {
        return impl_->Calls()->sequences->Probe(context, request, reply);
      },
      Millis(timeout_ms > 0 ? timeout_ms - impl_->options.call_timeout_ms : 0));
}

absl::StatusOr<v1::MatchReply> Client::MatchSequence(const v1::MatchRequest& request) {
  return impl_->Unary<v1::MatchReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->sequences->Match(context, request, reply);
  });
}

absl::StatusOr<v1::GetReply> Client::GetSequences(const std::vector<uint64_t>& ids, bool own_only) {
  v1::GetRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  if (own_only) request.set_client_id(client_id());
  return impl_->Unary<v1::GetReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->sequences->Get(context, request, reply);
  });
}

absl::StatusOr<v1::GetReply> Client::GetAllSequences() {
  constexpr char kCapability[] = "all_sequences";
  const auto& capabilities = info().capabilities();
  // An older server does not know the field: it would list the caller's own sequences as all.
  if (std::find(capabilities.begin(), capabilities.end(), kCapability) == capabilities.end()) {
    return absl::UnimplementedError("all_tenants: the server lists only the caller's sequences");
  }
  v1::GetRequest request;
  request.set_all_tenants(true);
  v1::GetReply all;
  for (bool more = true; more;) {
    MLA_ASSIGN_OR_RETURN(v1::GetReply part,
                         impl_->Unary<v1::GetReply>([&](auto* context, auto* reply) {
                           return impl_->Calls()->sequences->Get(context, request, reply);
                         }));
    const uint64_t last =
        part.sequences_size() == 0 ? 0 : part.sequences(part.sequences_size() - 1).sequence_id();
    // A part that does not go on would be asked for again and again.
    more = part.more() && last > request.after();
    request.set_after(last);
    if (all.sequences_size() == 0) {
      all.Swap(&part);
    } else {
      all.mutable_sequences()->MergeFrom(part.sequences());
    }
  }
  all.set_more(false);
  return all;
}

absl::StatusOr<v1::ReleaseReply> Client::ReleaseSequences(const std::vector<uint64_t>& ids) {
  v1::ReleaseRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return impl_->Unary<v1::ReleaseReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->sequences->Release(context, request, reply);
  });
}

absl::StatusOr<v1::RenewLeaseReply> Client::RenewLeases() {
  return impl_->RenewLeases(Millis(impl_->options.call_timeout_ms));
}

absl::StatusOr<std::unique_ptr<Session>> Client::OpenSession() {
  MLA_RETURN_IF_ERROR(impl_->Lost());
  std::unique_ptr<Session> session(new Session());
  session->client_ = this;
  using Transport = ClientOptions::Transport;
  const Transport wanted = impl_->options.transport;
  if (wanted != Transport::kInline) {
    const bool ucx = wanted >= Transport::kUcx;
    auto shared = ucx ? impl_->OpenUcx() : impl_->OpenShared(wanted != Transport::kShm);
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
  request.set_request_id(absl::StrFormat("fork-%016x", RandomNumber()));
  request.set_client_id(client_id());
  request.set_lease_ms(static_cast<uint32_t>(impl_->options.sequence_lease_ms));
  return impl_->Unary<v1::ForkReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->sequences->Fork(context, request, reply);
  });
}

absl::StatusOr<v1::TruncateReply> Client::TruncateSequence(uint64_t id, uint64_t epoch,
                                                           uint64_t length) {
  v1::TruncateRequest request;
  request.set_sequence_id(id);
  request.set_expected_epoch(epoch);
  request.set_length(length);
  return impl_->Unary<v1::TruncateReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->sequences->Truncate(context, request, reply);
  });
}

absl::StatusOr<v1::ReadTailReply> Client::ReadTail(uint64_t id, uint64_t epoch, uint64_t offset) {
  v1::ReadTailRequest request;
  request.set_sequence_id(id);
  request.set_expected_epoch(epoch);
  request.set_offset(offset);
  return impl_->Unary<v1::ReadTailReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->sequences->ReadTail(context, request, reply);
  });
}

absl::StatusOr<Sequence> Client::Attach(uint64_t id) {
  MLA_ASSIGN_OR_RETURN(const auto reply, GetSequences({id}, false));
  if (reply.sequences_size() == 1) {
    MLA_RETURN_IF_ERROR(CheckSame("sequence_id", reply.sequences(0).sequence_id(), id));
    return Sequence(this, reply.sequences(0));
  }
  return NotOpen(reply);
}

// ------------------------------------------------------------------------------------- Cached rows

absl::Status Client::ExportPages(const v1::ExportRequest& request,
                                 const std::function<absl::Status(const v1::PagesPart&)>& take) {
  MLA_RETURN_IF_ERROR(impl_->Lost());
  grpc::ClientContext context;
  impl_->Prepare(&context, Millis(impl_->options.request_timeout_ms * 10));
  wire::StreamCall call(impl_->Calls()->channel, &context, kExport);
  call.Write(request);
  call.WritesDone();
  v1::PagesPart part;
  while (call.Read(&part)) {
    absl::Status taken = take(part);
    if (!taken.ok()) return taken;  // which cancels the call
  }
  return FromGrpc(call.Finish(), context);
}

absl::StatusOr<Sequence> Client::ImportPages(
    const v1::ImportTarget& target,
    const std::function<absl::StatusOr<std::optional<v1::PagesPart>>()>& next) {
  v1::ImportRequest message;
  *message.mutable_target() = target;
  if (target.client_id().empty()) message.mutable_target()->set_client_id(client_id());
  absl::Status failed;
  const auto reply = impl_->Unary<v1::ImportReply>(
      [&](grpc::ClientContext* context, v1::ImportReply* out) {
        wire::StreamCall call(impl_->Calls()->channel, context, kImport);
        bool open = call.Write(message);
        while (open) {
          absl::StatusOr<std::optional<v1::PagesPart>> part = next();
          failed = part.status();
          if (!failed.ok()) context->TryCancel();
          if (!failed.ok() || !part->has_value()) break;
          *message.mutable_part() = **std::move(part);
          open = call.Write(message);
        }
        return call.FinishWith(out);
      },
      Millis(impl_->options.request_timeout_ms * 10));
  if (!failed.ok()) return failed;
  if (!reply.ok()) return reply.status();
  return Sequence(this, reply->sequence());
}

absl::Status Client::WatchEvents(std::optional<uint64_t> after,
                                 const std::function<bool(const v1::WatchEventsReply&)>& take,
                                 bool all_tenants) {
  MLA_RETURN_IF_ERROR(impl_->Lost());
  grpc::ClientContext context;
  // A watch has no natural end, so it has no deadline either.
  if (!impl_->options.tenant.empty()) context.AddMetadata("mla-tenant", impl_->options.tenant);
  v1::WatchEventsRequest request;
  if (after) request.set_after(*after);
  request.set_all_tenants(all_tenants);
  wire::StreamCall call(impl_->Calls()->channel, &context, kWatchEvents);
  call.Write(request);
  call.WritesDone();
  v1::WatchEventsReply reply;
  while (call.Read(&reply)) {
    if (!take(reply)) return absl::OkStatus();  // which cancels the call
  }
  return FromGrpc(call.Finish(), context);
}

absl::StatusOr<v1::ExplainReply> Client::Explain(uint32_t most, bool all_tenants) {
  v1::ExplainRequest request;
  request.set_most(most);
  request.set_all_tenants(all_tenants);
  return impl_->Unary<v1::ExplainReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->cache->Explain(context, request, reply);
  });
}

absl::StatusOr<v1::HintReply> Client::Hint(const v1::HintRequest& request) {
  return impl_->Unary<v1::HintReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->cache->Hint(context, request, reply);
  });
}

absl::StatusOr<v1::CheckpointReply> Client::Checkpoint(const std::vector<uint64_t>& ids) {
  v1::CheckpointRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return impl_->Unary<v1::CheckpointReply>(
      [&](auto* context, auto* reply) {
        return impl_->Calls()->cache->Checkpoint(context, request, reply);
      },
      Millis(impl_->options.request_timeout_ms * 10));
}

absl::StatusOr<std::vector<Sequence>> Client::Restore(const std::vector<uint64_t>& ids) {
  v1::RestoreRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  request.set_client_id(client_id());
  request.set_lease_ms(static_cast<uint32_t>(impl_->options.sequence_lease_ms));
  const auto reply = impl_->Unary<v1::RestoreReply>(
      [&](auto* context, auto* out) {
        return impl_->Calls()->cache->Restore(context, request, out);
      },
      Millis(impl_->options.request_timeout_ms * 10));
  if (!reply.ok()) return reply.status();
  std::vector<Sequence> sequences;
  for (const v1::SequenceInfo& info : reply->sequences()) {
    sequences.push_back(Sequence(this, info));
  }
  return sequences;
}

absl::StatusOr<v1::ListCheckpointsReply> Client::ListCheckpoints() {
  return impl_->Unary<v1::ListCheckpointsReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->cache->ListCheckpoints(context, {}, reply);
  });
}

absl::StatusOr<v1::DropCheckpointsReply> Client::DropCheckpoints(const std::vector<uint64_t>& ids) {
  v1::DropCheckpointsRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return impl_->Unary<v1::DropCheckpointsReply>([&](auto* context, auto* reply) {
    return impl_->Calls()->cache->DropCheckpoints(context, request, reply);
  });
}

}  // namespace mla::client
