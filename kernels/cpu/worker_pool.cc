#include "kernels/cpu/worker_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

namespace mla::kernels::cpu {
namespace {

constexpr int32_t kPhaseSpins = 4000;  // polls of a thread that waits for the others of a phase

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// First CPU of the core that `cpu` is a hardware thread of; `cpu` itself when nothing is known.
int32_t FirstSibling(int32_t cpu) {
  std::ifstream siblings("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                         "/topology/thread_siblings_list");
  int32_t first = cpu;
  siblings >> first;
  return first;
}

// CPUs that the process may use: one hardware thread of every core first, then the others.
std::vector<int32_t> UsableCpus() {
  std::vector<int32_t> cores, siblings;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cores;
  for (int32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const int32_t first = FirstSibling(cpu);
    const bool taken = first != cpu && CPU_ISSET(first, &allowed);
    (taken ? siblings : cores).push_back(cpu);
  }
  cores.insert(cores.end(), siblings.begin(), siblings.end());
  return cores;
}

// The index-th of `threads` threads, spread evenly: virtual machines hide which CPUs share a core,
// and then neighbours usually do. Failure leaves the thread unpinned.
void PinToCpu(const std::vector<int32_t>& cpus, int32_t index, int32_t threads) {
  if (cpus.size() < 2) return;
  const size_t step = std::max<size_t>(1, cpus.size() / static_cast<size_t>(threads));
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpus[static_cast<size_t>(index) * step % cpus.size()], &one);
  pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

size_t PhaseOf(uint64_t ticket) { return static_cast<size_t>(ticket >> 32); }

}  // namespace

WorkerPool::WorkerPool(const Options& options, int32_t max_jobs, PlaceHook enter, PlaceHook leave)
    : options_(options), enter_(std::move(enter)), leave_(std::move(leave)) {
  options_.threads = std::max(1, options_.threads);
  queue_.resize(static_cast<size_t>(std::max(1, max_jobs)), nullptr);
  if (options_.pin_threads) cpus_ = UsableCpus();
  for (int32_t i = 0; i < options_.threads; ++i) {
    threads_.emplace_back([this, i] { ThreadMain(i); });
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    started_.fetch_add(1);
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::OpenPhase(Job& job, size_t phase) {
  while (phase < job.phase_items.size() && job.phase_items[phase] == 0) ++phase;
  if (phase < job.phase_items.size()) {
    job.unfinished.store(job.phase_items[phase], std::memory_order_relaxed);
  }
  job.ticket.store(static_cast<uint64_t>(phase) << 32, std::memory_order_release);
  job.ticket.notify_all();
}

void WorkerPool::Start(Job& job) {
  job.entered = 0;
  job.participants = 0;
  job.caller_waits = true;
  job.done.store(false, std::memory_order_relaxed);
  OpenPhase(job, 0);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_[(head_ + queued_) % queue_.size()] = &job;
    ++queued_;
  }
  started_.fetch_add(1, std::memory_order_release);
  if (options_.threads > 1) work_.notify_all();
}

bool WorkerPool::PlaceFree(const Job& job, bool is_caller) const {
  if (PhaseOf(job.ticket.load(std::memory_order_relaxed)) >= job.phase_items.size()) {
    return job.entered == 0;  // nothing to do at all, but it still has to be closed
  }
  const int32_t kept = job.caller_waits && !is_caller ? 1 : 0;
  return job.entered < options_.threads - kept;
}

bool WorkerPool::Done(Job& job) {
  if (job.done.load(std::memory_order_acquire)) return true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!job.caller_waits) return false;
    job.caller_waits = false;
  }
  started_.fetch_add(1, std::memory_order_release);
  work_.notify_all();
  return false;
}

int64_t WorkerPool::Wait(Job& job) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!job.done.load(std::memory_order_acquire)) {
    Job* head = Head();
    if (head != nullptr && PlaceFree(*head, /*is_caller=*/true)) {
      Participate(*head, lock);
    } else {
      done_.wait(lock);
    }
  }
  return job.nanoseconds;
}

void WorkerPool::Participate(Job& job, std::unique_lock<std::mutex>& lock) {
  if (job.entered == 0) job.begin = std::chrono::steady_clock::now();
  const int32_t place = std::min(job.entered++, options_.threads - 1);
  ++job.participants;
  lock.unlock();
  if (enter_) enter_();
  Work(job, place);
  if (leave_) leave_();
  lock.lock();
  if (--job.participants > 0) return;
  // The last one out closes the job; every item is finished by then.
  job.nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::steady_clock::now() - job.begin)
                        .count();
  ++head_;
  --queued_;
  job.done.store(true, std::memory_order_release);
  started_.fetch_add(1, std::memory_order_release);
  if (queued_ > 0) work_.notify_all();
  done_.notify_all();
}

void WorkerPool::Work(Job& job, int32_t place) {
  const size_t phases = job.phase_items.size();
  int32_t spins = 0;
  for (;;) {
    uint64_t ticket = job.ticket.load(std::memory_order_acquire);
    size_t phase = PhaseOf(ticket);
    if (phase >= phases) return;
    if (static_cast<int64_t>(ticket & 0xffffffffu) >= job.phase_items[phase]) {
      // Others still work on the last items of this phase.
      if (++spins < kPhaseSpins) {
        Pause();
      } else {
        job.ticket.wait(ticket, std::memory_order_acquire);
      }
      continue;
    }
    spins = 0;
    ticket = job.ticket.fetch_add(1, std::memory_order_acq_rel);
    phase = PhaseOf(ticket);
    const auto item = static_cast<int64_t>(ticket & 0xffffffffu);
    if (phase >= phases || item >= job.phase_items[phase]) continue;
    job.body(static_cast<int32_t>(phase), item, place);
    if (job.unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) OpenPhase(job, phase + 1);
  }
}

void WorkerPool::ThreadMain(int32_t index) {
  // The last thread works only when the caller does not, so it shares the first CPU.
  PinToCpu(cpus_, (index + 1) % options_.threads, options_.threads);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    Job* head = Head();
    if (head != nullptr && PlaceFree(*head, /*is_caller=*/false)) {
      Participate(*head, lock);
      continue;
    }
    const uint64_t seen = started_.load(std::memory_order_acquire);
    if (head == nullptr && options_.spin_us > 0) {
      lock.unlock();
      const auto until =
          std::chrono::steady_clock::now() + std::chrono::microseconds(options_.spin_us);
      while (started_.load(std::memory_order_acquire) == seen &&
             std::chrono::steady_clock::now() < until) {
        for (int32_t i = 0; i < 32; ++i) Pause();
      }
      lock.lock();
      if (stop_ || started_.load(std::memory_order_acquire) != seen) continue;
    }
    if (Head() == head && !stop_) work_.wait(lock);
  }
}

}  // namespace mla::kernels::cpu
