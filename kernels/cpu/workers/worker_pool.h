// The CPU backend's threads: they execute jobs, one after the other, in the order of Start.
//
// A job is a list of phases, each with a number of items; all items of a phase finish before the
// next phase begins. Items are handed out one at a time by an atomic counter, so a slow thread
// takes fewer of them. At most `threads` threads work at a time. One of these places is kept for
// the caller, because Wait executes items too. A caller that polls Done instead gives its place to
// a thread of the pool. A thread that ran out of work polls for `spin_us` before it sleeps, so
// back-to-back launches make no system call.
//
// Threading: Start, Done and Wait are called by one thread at a time. No call allocates.
#ifndef MLA_KERNELS_CPU_WORKERS_WORKER_POOL_H_
#define MLA_KERNELS_CPU_WORKERS_WORKER_POOL_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::kernels::cpu {

// Makes one poll of a thread that waits for another thread's progress. It pauses, and after many
// polls yields, so that the other thread runs even if threads outnumber CPUs.
void Relax(int32_t polls);

class WorkerPool {
 public:
  struct Options {
    int32_t threads = 1;      // working at a time, the waiting caller included
    bool pin_threads = true;  // to CPUs that the process may use, on different cores first
    int32_t spin_us = 20;
  };

  // Executes item `item` of phase `phase`; `place` is in [0, threads) and no two threads have the
  // same place at a time.
  using Body = std::function<void(int32_t phase, int64_t item, int32_t place)>;
  using PlaceHook = std::function<void()>;

  // The items of a job. Owned by the caller; unchanged between Start and the end of Wait.
  struct Job {
    std::vector<int64_t> phase_items;  // reserve capacity up front
    Body body;

   private:
    friend class WorkerPool;
    std::atomic<uint64_t> ticket{0};     // phase << 32 | next item
    std::atomic<int64_t> unfinished{0};  // items of the current phase
    std::atomic<bool> done{true};
    size_t last_phase = 0;  // last one with items
    std::chrono::steady_clock::time_point begin;
    int64_t nanoseconds = 0;
  };

  // `enter` and `leave` (may be empty) run on a thread around its part of each job.
  WorkerPool(const Options& options, int32_t max_jobs, PlaceHook enter, PlaceHook leave);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void Start(Job& job);
  bool Done(Job& job);
  // Works on `job` (and helps to finish the jobs before it), then returns its time in nanoseconds.
  int64_t Wait(Job& job);

  int32_t threads() const { return options_.threads; }

 private:
  // The gate of the job at the head of the queue. It is one word, so that threads enter and leave
  // without a lock: run number << 32 | flags | places given out << 16 | threads inside. The thread
  // that leaves last shuts the gate and closes the job.
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  static constexpr uint64_t kKept = uint64_t{1} << 30;  // one place is kept for the caller
  static constexpr uint64_t kPlace = uint64_t{1} << 16;

  void ThreadMain(int32_t index);
  // REQUIRES: the gate is shut.
  void OpenGate(Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool CanEnter(uint64_t gate, bool is_caller) const;
  // Enters, works until the job has no more items and leaves. Returns false if there was no place.
  bool Participate(bool is_caller);
  void Leave();
  void Close(Job& job);
  void WakeThreads();
  static void Work(Job& job, int32_t place);
  static void OpenPhase(Job& job, size_t phase);

  Options options_;
  PlaceHook enter_, leave_;
  std::vector<int32_t> cpus_;  // to pin to, in this order; if empty, nothing is pinned
  std::atomic<uint64_t> gate_{0};
  std::atomic<Job*> head_job_{nullptr};
  std::atomic<int32_t> news_{0};  // changes when a sleeping thread should look again
  std::atomic<bool> stop_{false};
  Mutex mutex_;
  CondVar done_;                                     // a job is done, or the next one open
  std::vector<Job*> queue_ ABSL_GUARDED_BY(mutex_);  // ring
  size_t head_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t queued_ ABSL_GUARDED_BY(mutex_) = 0;
  bool caller_polls_ ABSL_GUARDED_BY(mutex_) = false;  // the caller's place goes to the pool
  std::vector<std::thread> threads_;
};

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_WORKERS_WORKER_POOL_H_
