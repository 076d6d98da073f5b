#include "client/cpp/shared_memory/home.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::client {

// The guards of a process, and its forks. Never destroyed: a handler of a fork may come at any
// time.
class Guards final {
 public:
  static Guards& Get() {
    static Guards* const guards = new Guards();
    return *guards;
  }

  void Add(const ForkGuard* guard) {
    const MutexLock lock(mutex_);
    guards_.push_back(guard);
  }

  // In a child the guard is gone already.
  void Remove(const ForkGuard* guard) {
    const MutexLock lock(mutex_);
    guards_.erase(std::remove(guards_.begin(), guards_.end(), guard), guards_.end());
  }

  uint32_t forks() const { return forks_.load(std::memory_order_relaxed); }
  void UseGrpc() { grpc_used_.store(true, std::memory_order_relaxed); }
  bool GrpcIsBroken() const { return grpc_broken_.load(std::memory_order_relaxed); }

 private:
  Guards() { pthread_atfork(BeforeFork, AfterForkInParent, AfterForkInChild); }

  // The list must be whole in the child, so no thread may be in the middle of a change.
  static void BeforeFork() ABSL_NO_THREAD_SAFETY_ANALYSIS { Get().mutex_.Lock(); }
  static void AfterForkInParent() ABSL_NO_THREAD_SAFETY_ANALYSIS { Get().mutex_.Unlock(); }
  static void AfterForkInChild() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Guards& guards = Get();
    guards.forks_.fetch_add(1, std::memory_order_relaxed);
    guards.grpc_broken_.store(guards.grpc_used_.load(std::memory_order_relaxed),
                              std::memory_order_relaxed);
    for (const ForkGuard* const guard : guards.guards_) guard->LeaveInChild();
    guards.guards_.clear();
    guards.mutex_.Unlock();
  }

  Mutex mutex_;
  std::vector<const ForkGuard*> guards_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint32_t> forks_{0};  // in the line of processes that led to this one
  std::atomic<bool> grpc_used_{false}, grpc_broken_{false};
};

Home::Home() : pid_(getpid()), forks_(Guards::Get().forks()) {}

// A number of a process may come again; a bare clone calls no handler.
bool Home::left() const { return forks_ != Guards::Get().forks() || pid_ != getpid(); }

void UseGrpc() { Guards::Get().UseGrpc(); }
bool GrpcIsBroken() { return Guards::Get().GrpcIsBroken(); }

ForkGuard::ForkGuard(int* socket, std::span<std::byte> memory) : socket_(socket), memory_(memory) {
  Guards::Get().Add(this);
}

ForkGuard::~ForkGuard() { Guards::Get().Remove(this); }

// Calls nothing but what may be called in a child of a process with threads.
void ForkGuard::LeaveInChild() const {
  if (*socket_ >= 0) close(*socket_);
  *socket_ = -1;
  mmap(memory_.data(), memory_.size(), PROT_READ | PROT_WRITE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

}  // namespace mla::client
