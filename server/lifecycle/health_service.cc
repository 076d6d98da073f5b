#include "server/lifecycle/health_service.h"

#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "server/grpc/grpc_status.h"
#include "server/grpc/identity.h"

namespace mla::server {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using ServingStatus = HealthCheckResponse::ServingStatus;

// The notifier looks for overdue requests and for a stop at this interval.
constexpr auto kPeriod = std::chrono::milliseconds(200);

// Size limit of a request, which has one name. Unknown fields take a hundred times their bytes once
// parsed.
constexpr size_t kMostRequestBytes = 4096;

bool Parse(const grpc::ByteBuffer& bytes, HealthCheckRequest* request) {
  if (bytes.Length() > kMostRequestBytes) return false;
  // The reader takes a pointer to non-const but changes nothing.
  grpc::ProtoBufferReader reader(const_cast<grpc::ByteBuffer*>(&bytes));
  return reader.status().ok() && request->ParseFromZeroCopyStream(&reader);
}

grpc::ByteBuffer ReplyOf(ServingStatus status) {
  HealthCheckResponse reply;
  reply.set_status(status);
  const grpc::Slice slice(reply.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

// Handles a Check or a Watch call. Deletes itself when the call is done.
class HealthService::Call final : public StreamHandler {
 public:
  Call(HealthService* service, Method method, std::string tenant, std::unique_ptr<StreamCall> call)
      : service_(service), method_(method), tenant_(std::move(tenant)), call_(std::move(call)) {}

  void Start() {
    call_->Serve(this);
    call_->StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    HealthCheckRequest request;
    if (!ok || !Parse(request_, &request)) {
      return End(Invalid("request", "a HealthCheckRequest", ok ? "other bytes" : "nothing"));
    }
    if (method_ == Method::kCheck) return AnswerCheck(request.service());
    {
      const MutexLock lock(mutex_);
      watched_ = request.service();
      requested_ = true;
    }
    Update();
  }

  void OnWriteDone(bool ok) override {
    {
      const MutexLock lock(mutex_);
      writing_ = false;
    }
    if (!ok) return End(grpc::Status(grpc::StatusCode::CANCELLED, "the client has gone"));
    Update();
  }

  void OnCancel() override {
    bool idle = false;
    {
      const MutexLock lock(mutex_);
      cancelled_ = true;
      idle = requested_ && !writing_;
    }
    // Otherwise the read or write under way ends with a failure.
    if (idle) End(grpc::Status(grpc::StatusCode::CANCELLED, "the client has gone"));
  }

  void OnDone() override {
    HealthService* const service = service_;
    const std::string tenant = tenant_;
    delete this;
    service->OnGone(tenant);
  }

  // Sends the present status to a watcher unless it has that status already. May be called by any
  // thread that keeps the call alive.
  void Update() {
    ServingStatus status{};
    bool over = false;
    {
      const MutexLock lock(mutex_);
      if (!requested_ || writing_ || finished_) return;
      // Read here and not earlier: otherwise another thread could send a newer status first, and
      // this one an older status after it.
      const ServerState::Snapshot now = service_->state_->Get();
      status = service_->StatusOf(watched_, now).value_or(HealthCheckResponse::SERVICE_UNKNOWN);
      over = cancelled_ || (sent_ == status && now.phase == Phase::kStopped);
      if (!over) {
        if (sent_ == status) return;
        writing_ = true;
        sent_ = status;
      }
    }
    if (over) return End(grpc::Status::OK);
    call_->StartWrite(ReplyOf(status));
  }

  // Cancels a call whose request is overdue.
  void CancelIfLate(std::chrono::steady_clock::time_point now) {
    {
      const MutexLock lock(mutex_);
      if (requested_ || finished_ || now - begun_ < kRequestTimeout) return;
    }
    call_->context().TryCancel();
  }

  StreamCall& call() { return *call_; }

 private:
  grpc::Status Invalid(const char* field, const char* limit, const char* got) {
    const absl::Status status = RefuseField(field, got, limit, "malformed");
    return ToGrpcStatus(status, &call_->context());
  }

  void AnswerCheck(const std::string& name) {
    const std::optional<ServingStatus> status = service_->StatusOf(name, service_->state_->Get());
    if (!status.has_value()) {
      return End(ToGrpcStatus(RefuseField("service", "another name", "a service of this server",
                                          "service_not_found", absl::StatusCode::kNotFound),
                              &call_->context()));
    }
    if (!Finishes()) return;
    service_->Forget(this);
    call_->WriteAndFinish(ReplyOf(*status), grpc::Status::OK);
  }

  bool Finishes() {
    const MutexLock lock(mutex_);
    return !std::exchange(finished_, true);
  }

  void End(const grpc::Status& status) {
    if (!Finishes()) return;
    service_->Forget(this);
    call_->Finish(status);
  }

  HealthService* const service_;
  const Method method_;
  const std::string tenant_;
  const std::unique_ptr<StreamCall> call_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  grpc::ByteBuffer request_;

  Mutex mutex_;
  std::string watched_ ABSL_GUARDED_BY(mutex_);  // name of the service that is watched
  bool requested_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<ServingStatus> sent_ ABSL_GUARDED_BY(mutex_);
};

HealthService::HealthService(const ServerState* state, HealthOptions options)
    : state_(state), options_(std::move(options)) {
  options_.services.insert("");
  using grpc::internal::RpcMethod;
  using grpc::internal::RpcServiceMethod;
  // Both are registered as streams of raw messages in both directions, which look the same on the
  // wire.
  for (const char* name : {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}) {
    AddMethod(new RpcServiceMethod(name, RpcMethod::BIDI_STREAMING, nullptr));
  }
  MarkMethodRaw(static_cast<int>(Method::kCheck));
  MarkMethodRaw(static_cast<int>(Method::kWatch));
}

HealthService::~HealthService() { Stop(); }

void HealthService::Serve(CompletionPoller* poller) {
  // The version is read here and not in the thread, which on a busy machine may begin only after a
  // change that watchers must hear of.
  notifier_ = std::thread([this, seen = state_->Get().version] { Notify(seen); });
  const auto serve = [&](Method method, std::optional<StreamAcceptor>* acceptor) {
    acceptor->emplace(
        poller,
        [this, method](StreamCall* call, CompletionPoller* its_poller, void* tag) {
          RequestAsyncBidiStreaming(static_cast<int>(method), &call->context(), &call->stream(),
                                    its_poller->queue(), its_poller->queue(), tag);
        },
        [this, method](std::unique_ptr<StreamCall> call) { Accept(method, std::move(call)); });
    (*acceptor)->Start();
  };
  serve(Method::kCheck, &check_);
  serve(Method::kWatch, &watch_);
}

void HealthService::Stop() {
  {
    MutexLock lock(mutex_);
    changed_.Wait(lock,
                  [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_calls_ == 0; });
    stop_ = true;
  }
  if (notifier_.joinable()) notifier_.join();
}

bool HealthService::Admit(const std::string& tenant) {
  const MutexLock lock(mutex_);
  int32_t& of_tenant = open_[tenant];
  if (open_calls_ >= options_.max_watchers || of_tenant >= (options_.max_watchers + 1) / 2) {
    if (of_tenant == 0) open_.erase(tenant);
    return false;
  }
  ++of_tenant;
  ++open_calls_;
  return true;
}

void HealthService::Accept(Method method, std::unique_ptr<StreamCall> call) {
  // Many probers send no name, so callers without a valid one are served, too.
  const auto identity = Identify(call->context(), options_.max_name_bytes, options_.unix_tenant);
  const std::string tenant = identity.ok() ? identity->tenant : "";
  if (!Admit(tenant)) {
    const absl::Status status =
        RefuseField({.field = "call",
                     .got = "one more open call of grpc.health.v1",
                     .limit = absl::StrCat("at most ", options_.max_watchers,
                                           " of all tenants, half of them of one"),
                     .reason = "too_many_watchers",
                     .retry_after_ms = 1000},
                    absl::StatusCode::kResourceExhausted);
    const grpc::Status answer = ToGrpcStatus(status, &call->context());
    return RefuseCall(std::move(call), answer);
  }
  auto* new_call = new Call(this, method, tenant, std::move(call));
  {
    const MutexLock lock(mutex_);
    calls_.insert(new_call);
  }
  new_call->Start();
}

void HealthService::Forget(Call* call) {
  const MutexLock lock(mutex_);
  calls_.erase(call);
}

void HealthService::OnGone(const std::string& tenant) {
  const MutexLock lock(mutex_);
  const auto found = open_.find(tenant);
  if (--found->second == 0) open_.erase(found);
  --open_calls_;
  changed_.NotifyAll();
}

std::optional<ServingStatus> HealthService::StatusOf(const std::string& service,
                                                     const ServerState::Snapshot& now) const {
  if (options_.services.count(service) == 0) return std::nullopt;
  return now.serving() ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

void HealthService::Notify(uint64_t seen) {
  std::vector<Call*> held;
  for (;;) {
    const ServerState::Snapshot now = state_->WaitForChange(seen, kPeriod);
    {
      const MutexLock lock(mutex_);
      if (stop_) return;
      // A call in the list is not finished, so Hold is allowed.
      held.assign(calls_.begin(), calls_.end());
      for (Call* call : held) call->call().Hold();
    }
    const auto time = std::chrono::steady_clock::now();
    for (Call* call : held) {
      if (now.version != seen) call->Update();
      call->CancelIfLate(time);
      call->call().Release();  // may delete it
    }
    seen = now.version;
  }
}

}  // namespace mla::server
