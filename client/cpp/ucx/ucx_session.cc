#include "client/cpp/ucx/ucx_session.h"

#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/streams/errors.h"
#include "mla/v1/transport.grpc.pb.h"

namespace mla::client {
namespace {

// The gRPC call to which a ring belongs. Its thread reads until the call ends.
class UcxCall final {
 public:
  // `memory` outlives the call.
  UcxCall(std::shared_ptr<grpc::Channel> channel, UcxMemory* memory)
      : channel_(std::move(channel)), stub_(v1::Transports::NewStub(channel_)), memory_(memory) {}
  ~UcxCall() {
    context_.TryCancel();
    if (thread_.joinable()) thread_.join();
  }

  // Returns the server's reply.
  absl::StatusOr<v1::OpenUcxReply> Start(const UcxSessionOptions& options) {
    if (!options.tenant.empty()) context_.AddMetadata("mla-tenant", options.tenant);
    v1::OpenUcxRequest request;
    request.set_version(wire::kUcxVersion);
    request.set_worker_address(memory_->address());
    request.set_bytes(options.bytes);
    request.set_handles_losses(memory_->handles_losses());
    request.set_encrypts(true);
    request.set_batches(true);
    request.set_puts(memory_->wants_puts());
    request.set_device_memory(memory_->wants_device_memory());
    request.set_spin_us(static_cast<uint32_t>(options.memory.spin.count()));
    reader_ = stub_->OpenUcx(&context_, request);
    try {
      thread_ = std::thread([this] { Read(); });
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(absl::StrCat("UCX ring: no thread: ", error.what()));
    }
    MutexLock lock(mutex_);
    const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return reply_.has_value() || end_.has_value();
    };
    if (!changed_.WaitFor(lock, options.timeout, answered)) {
      return absl::DeadlineExceededError("UCX ring: the server did not open it in time");
    }
    if (reply_.has_value()) return *reply_;
    return end_->ok() ? absl::DataLossError("UCX ring: the server has described none") : *end_;
  }

  void Cancel() { context_.TryCancel(); }

 private:
  void Read() {
    v1::OpenUcxReply reply;
    while (reader_->Read(&reply)) {
      const MutexLock lock(mutex_);
      if (!reply_.has_value()) reply_ = reply;
      changed_.NotifyAll();
    }
    const absl::Status end = FromGrpc(reader_->Finish(), context_);
    {
      const MutexLock lock(mutex_);
      end_ = end;
      changed_.NotifyAll();
    }
    memory_->SetEnded(end);
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Transports::Stub> stub_;
  UcxMemory* const memory_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::OpenUcxReply>> reader_;
  Mutex mutex_;
  CondVar changed_;
  std::optional<v1::OpenUcxReply> reply_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<UcxMemory>> OpenUcxRing(std::shared_ptr<grpc::Channel> channel,
                                                       const UcxSessionOptions& options) {
  MLA_ASSIGN_OR_RETURN(auto memory, UcxMemory::Open(options.memory));
  auto call = std::make_shared<UcxCall>(std::move(channel), memory.get());
  memory->OnGivenUp([call] { call->Cancel(); });
  MLA_ASSIGN_OR_RETURN(const v1::OpenUcxReply reply, call->Start(options));
  if (reply.boot_id() != options.boot_id) {
    return RestartedError(options.boot_id, reply.boot_id());
  }
  UcxRing ring;
  ring.worker_address = reply.worker_address();
  ring.token = reply.token();
  ring.region_bytes = reply.region_bytes();
  ring.arena_offset = reply.arena_offset();
  ring.entries = reply.ring_entries();
  ring.arena_bytes = options.bytes;
  ring.arena_key = reply.arena_key();
  ring.arena_address = reply.arena_address();
  ring.device_key = reply.device_key();
  ring.device_address = reply.device_address();
  ring.device_bytes = reply.device_bytes();
  ring.secret = reply.secret();
  ring.batches = reply.batches();
  MLA_RETURN_IF_ERROR(memory->Connect(ring));
  return memory;
}

}  // namespace mla::client
