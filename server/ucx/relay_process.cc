#include "server/ucx/relay_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/process/process_usage.h"

extern char** environ;

namespace mla::server {
namespace {

// A relay that has been asked to end waits a second for its ring.
constexpr std::chrono::milliseconds kEndWait{1500};
constexpr std::chrono::milliseconds kLook{5};
// Descriptors are moved above the ones that the relay gets.
constexpr int kLeastDescriptor = 10;

class Descriptor final {
 public:
  explicit Descriptor(int value = -1) : value_(value) {}
  ~Descriptor() { Reset(-1); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  void Reset(int value) {
    if (value_ >= 0) close(value_);
    value_ = value;
  }
  int get() const { return value_; }
  int Release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

absl::Status Exhausted(const char* what, int error) {
  return absl::ResourceExhaustedError(absl::StrCat("UCX: ", what, ": ", std::strerror(error)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RelayProcess>> RelayProcess::Start(
    const std::string& program, const relay::RelaySetup& setup, int ring,
    std::chrono::milliseconds timeout) {
  std::unique_ptr<RelayProcess> relay(new RelayProcess());
  MLA_RETURN_IF_ERROR(relay->Spawn(program, ring));
  if (send(relay->control_, &setup, sizeof(setup), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(sizeof(setup))) {
    return absl::UnavailableError(absl::StrCat("UCX: the relay has ended: ", std::strerror(errno)));
  }
  if (relay->Receive(timeout) != Received::kReply) {
    return absl::DeadlineExceededError("UCX: the relay did not answer in time");
  }
  MLA_RETURN_IF_ERROR(relay->reply_->status());
  return relay;
}

absl::Status RelayProcess::Spawn(const std::string& program, int ring) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return Exhausted("no socket for a relay", errno);
  }
  control_ = pair[0];
  Descriptor theirs(pair[1]);
  if (InDescriptorReserve(control_)) return Exhausted("no socket for a relay", EMFILE);
  Descriptor control(fcntl(theirs.get(), F_DUPFD_CLOEXEC, kLeastDescriptor));
  Descriptor memory(ring < 0 ? -1 : fcntl(ring, F_DUPFD_CLOEXEC, kLeastDescriptor));
  if (control.get() < 0 || (ring >= 0 && memory.get() < 0)) {
    return Exhausted("no descriptor for a relay", errno);
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (memory.get() >= 0)
    posix_spawn_file_actions_adddup2(&actions, memory.get(), relay::kRelayRing);
  posix_spawn_file_actions_adddup2(&actions, control.get(), relay::kRelayControl);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);  // the server's threads block signals
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  std::string name = "mla-server", command = relay::kRelayCommand;
  char* const arguments[] = {name.data(), command.data(), nullptr};
  const int error = posix_spawn(&pid_, program.c_str(), &actions, &attributes, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error == 0) return absl::OkStatus();
  pid_ = -1;
  return Exhausted("no process for a relay", error);
}

RelayProcess::Received RelayProcess::Receive(std::chrono::milliseconds timeout) {
  pollfd ready{control_, POLLIN, 0};
  if (poll(&ready, 1, static_cast<int>(timeout.count())) <= 0) return Received::kNothing;
  const auto next = std::make_unique<relay::RelayReply>();
  const ssize_t bytes = recv(control_, next.get(), sizeof(*next), MSG_DONTWAIT);
  if (bytes == static_cast<ssize_t>(sizeof(counts_))) {
    std::memcpy(static_cast<void*>(&counts_), next.get(), sizeof(counts_));
    return Received::kCounts;
  }
  if (bytes == static_cast<ssize_t>(sizeof(*next))) {
    *reply_ = *next;
    return Received::kReply;
  }
  *reply_ = {};
  reply_->code = static_cast<int32_t>(absl::StatusCode::kUnavailable);
  reply_->text.Set("UCX: the relay has crashed");
  return Received::kReply;
}

std::optional<absl::Status> RelayProcess::EndedAfter(std::chrono::milliseconds pause) {
  if (Receive(pause) != Received::kReply) return std::nullopt;
  absl::Status status = reply_->status();
  return status.ok() ? absl::InternalError("UCX: the relay replied twice") : status;
}

void RelayProcess::Finish() {
  shutdown(control_, SHUT_WR);
  const auto end = std::chrono::steady_clock::now() + kEndWait;
  while (std::chrono::steady_clock::now() < end && Receive(kEndWait) == Received::kCounts) {
  }
}

bool RelayProcess::Gone(std::chrono::milliseconds wait) {
  const auto end = std::chrono::steady_clock::now() + wait;
  for (;;) {
    const pid_t gone = waitpid(pid_, nullptr, WNOHANG);
    if (gone == pid_ || (gone < 0 && errno == ECHILD)) return true;
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(kLook);
  }
}

RelayProcess::~RelayProcess() {
  if (control_ >= 0) close(control_);
  if (pid_ < 0 || Gone(kEndWait)) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

}  // namespace mla::server
