#include "kernels/cpu/workers/worker_pool.h"

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

// Returns the first CPU of the core that `cpu` is a hardware thread of, or `cpu` itself if the
// system does not say.
int32_t FirstSibling(int32_t cpu) {
  std::ifstream siblings("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                         "/topology/thread_siblings_list");
  int32_t first = cpu;
  siblings >> first;
  return first;
}

// Returns the CPUs that the process may use: one hardware thread of every core first, then the
// others.
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

// Pins the index-th of `threads` threads, spread evenly: virtual machines hide which CPUs share a
// core, and neighbours usually do. The first CPU is left to the caller, which is not pinned. Every
// thread may also run on the first CPU, in case the caller occupies the thread's own. On failure
// the thread stays unpinned.
void PinToCpu(const std::vector<int32_t>& cpus, int32_t index, int32_t threads) {
  if (cpus.size() < 2) return;
  const size_t step = std::max<size_t>(1, cpus.size() / static_cast<size_t>(threads));
  cpu_set_t two;
  CPU_ZERO(&two);
  CPU_SET(cpus[static_cast<size_t>(index) * step % cpus.size()], &two);
  CPU_SET(cpus[0], &two);
  pthread_setaffinity_np(pthread_self(), sizeof two, &two);
}

size_t PhaseOf(uint64_t ticket) { return static_cast<size_t>(ticket >> 32); }

}  // namespace

void Relax(int32_t polls) {
  if (polls < kPhaseSpins) {
    Pause();
  } else {
    std::this_thread::yield();
  }
}

WorkerPool::WorkerPool(const Options& options, int32_t max_jobs, PlaceHook enter, PlaceHook leave)
    : options_(options), enter_(std::move(enter)), leave_(std::move(leave)) {
  options_.threads = std::clamp(options_.threads, 1, 4096);
  queue_.resize(static_cast<size_t>(std::max(1, max_jobs)), nullptr);
  if (options_.pin_threads) cpus_ = UsableCpus();
  for (int32_t i = 0; i < options_.threads; ++i) {
    threads_.emplace_back([this, i] { ThreadMain(i); });
  }
}

WorkerPool::~WorkerPool() {
  stop_.store(true, std::memory_order_release);
  WakeThreads();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::WakeThreads() {
  news_.fetch_add(1, std::memory_order_release);
  news_.notify_all();
}

void WorkerPool::OpenPhase(Job& job, size_t phase) {
  while (phase < job.phase_items.size() && job.phase_items[phase] == 0) ++phase;
  if (phase < job.phase_items.size()) {
    job.unfinished.store(job.phase_items[phase], std::memory_order_relaxed);
  }
  job.ticket.store(static_cast<uint64_t>(phase) << 32, std::memory_order_release);
}

void WorkerPool::OpenGate(Job& job) {
  head_job_.store(&job, std::memory_order_relaxed);
  job.begin = std::chrono::steady_clock::now();
  const uint64_t run = (gate_.load(std::memory_order_relaxed) >> 32) + 1;
  gate_.store(run << 32 | kOpen | (caller_polls_ ? 0 : kKept), std::memory_order_release);
}

void WorkerPool::Start(Job& job) {
  job.done.store(false, std::memory_order_relaxed);
  job.last_phase = 0;
  for (size_t phase = 0; phase < job.phase_items.size(); ++phase) {
    if (job.phase_items[phase] > 0) job.last_phase = phase;
  }
  OpenPhase(job, 0);
  bool wake = options_.threads > 1;
  {
    const MutexLock lock(mutex_);
    queue_[(head_ + queued_) % queue_.size()] = &job;
    if (++queued_ == 1) OpenGate(job);
    wake |= caller_polls_;  // with one thread in all, the caller's place is the only one
  }
  if (wake) WakeThreads();
}

bool WorkerPool::CanEnter(uint64_t gate, bool is_caller) const {
  const auto entered = static_cast<int32_t>(gate >> 16 & 0x3fff);
  const int32_t kept = (gate & kKept) != 0 && !is_caller ? 1 : 0;
  return (gate & kOpen) != 0 && entered < options_.threads - kept;
}

bool WorkerPool::Participate(bool is_caller) {
  uint64_t gate = gate_.load(std::memory_order_acquire);
  uint64_t inside;
  do {
    if (!CanEnter(gate, is_caller)) return false;
    inside = gate + kPlace + 1;
    if (is_caller) inside &= ~kKept;
  } while (!gate_.compare_exchange_weak(gate, inside, std::memory_order_acq_rel,
                                        std::memory_order_acquire));
  if (enter_) enter_();
  // While this thread is inside, the gate stays open and the job stays at the head.
  Work(*head_job_.load(std::memory_order_relaxed), static_cast<int32_t>(gate >> 16 & 0x3fff));
  if (leave_) leave_();
  Leave();
  return true;
}

void WorkerPool::Leave() {
  Job& job = *head_job_.load(std::memory_order_relaxed);
  uint64_t gate = gate_.fetch_sub(1, std::memory_order_acq_rel) - 1;
  // No thread leaves before all items are taken, so if no thread is inside, all items are finished.
  // A thread may still enter before the gate is shut; it then becomes the last one to leave.
  const uint64_t run = gate >> 32;
  while ((gate & kOpen) != 0 && (gate & 0xffff) == 0 && gate >> 32 == run) {
    if (gate_.compare_exchange_weak(gate, gate & ~kOpen, std::memory_order_acq_rel,
                                    std::memory_order_acquire)) {
      Close(job);
      return;
    }
  }
}

void WorkerPool::Close(Job& job) {
  bool more = false;
  {
    const MutexLock lock(mutex_);
    job.nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::steady_clock::now() - job.begin)
                          .count();
    ++head_;
    more = --queued_ > 0;
    if (more) OpenGate(*queue_[head_ % queue_.size()]);
    job.done.store(true, std::memory_order_release);
  }
  done_.NotifyAll();
  if (more) WakeThreads();
}

bool WorkerPool::Done(Job& job) {
  if (job.done.load(std::memory_order_acquire)) return true;
  {
    const MutexLock lock(mutex_);
    if (caller_polls_) return false;
    caller_polls_ = true;
    gate_.fetch_and(~kKept, std::memory_order_acq_rel);
  }
  WakeThreads();
  return false;
}

int64_t WorkerPool::Wait(Job& job) {
  if (!job.done.load(std::memory_order_acquire)) {
    const MutexLock lock(mutex_);
    caller_polls_ = false;  // from the next job on, the caller's place is kept again
  }
  // Waits for the other threads' last items, which rarely take longer than a wake-up would.
  constexpr auto kLeastSpin = std::chrono::microseconds(100);
  std::chrono::steady_clock::time_point until;
  bool polling = false;
  while (!job.done.load(std::memory_order_acquire)) {
    if (Participate(/*is_caller=*/true)) continue;
    const auto now = std::chrono::steady_clock::now();
    if (!polling) {
      polling = true;
      until = now + std::max<std::chrono::microseconds>(
                        kLeastSpin, std::chrono::microseconds(options_.spin_us));
    }
    if (now < until) {
      for (int32_t i = 0; i < 32; ++i) Pause();
      continue;
    }
    MutexLock lock(mutex_);
    done_.Wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return job.done.load(std::memory_order_acquire) ||
             CanEnter(gate_.load(std::memory_order_acquire), /*is_caller=*/true);
    });
  }
  return job.nanoseconds;
}

void WorkerPool::Work(Job& job, int32_t place) {
  const size_t phases = job.phase_items.size();
  int32_t spins = 0;
  for (;;) {
    uint64_t ticket = job.ticket.load(std::memory_order_acquire);
    size_t phase = PhaseOf(ticket);
    if (phase >= phases) return;
    if (static_cast<int64_t>(ticket & 0xffffffffu) >= job.phase_items[phase]) {
      if (phase == job.last_phase) return;  // the others finish what they have
      // Other threads still work on the last items of this phase.
      Relax(spins++);
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
  // The last thread works only while the caller does not, so it shares the first CPU.
  PinToCpu(cpus_, (index + 1) % options_.threads, options_.threads);
  while (!stop_.load(std::memory_order_acquire)) {
    const int32_t last_news = news_.load(std::memory_order_acquire);
    if (Participate(/*is_caller=*/false)) continue;
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::microseconds(options_.spin_us);
    while (options_.spin_us > 0 && news_.load(std::memory_order_acquire) == last_news &&
           std::chrono::steady_clock::now() < until) {
      for (int32_t i = 0; i < 32; ++i) Pause();
    }
    if (stop_.load(std::memory_order_acquire)) return;
    news_.wait(last_news, std::memory_order_acquire);
  }
}

}  // namespace mla::kernels::cpu
