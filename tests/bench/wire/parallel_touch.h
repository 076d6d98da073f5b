// Threads that write or read memory together. A benchmark can thus measure tensors that are
// produced and consumed by several cores of a worker or a backend, instead of one.
//
// All of a team's threads share the work while its word is more than 1; helpers then spin for their
// part. Otherwise the caller does all of it and the helpers sleep. Threading: Fill, Sum and
// SumPieces from any thread, one at a time.
#ifndef MLA_TESTS_BENCH_WIRE_PARALLEL_TOUCH_H_
#define MLA_TESTS_BENCH_WIRE_PARALLEL_TOUCH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::bench {

class ParallelTouch final {
 public:
  using Piece = std::span<const std::byte>;

  // `threads` includes the caller of Fill and Sum. `word` outlives the team. It may change while no
  // thread is in a call, and helpers notice within a millisecond.
  ParallelTouch(int32_t threads, const std::atomic<int32_t>* word);
  ~ParallelTouch();

  // Writes every byte once.
  void Fill(void* data, uint64_t bytes, int value);
  // Reads every byte once. Returns the sum of its words, so that the compiler cannot drop the
  // reads.
  uint64_t Sum(const void* data, uint64_t bytes);
  uint64_t SumPieces(std::span<const Piece> pieces);

 private:
  // Cuts [0, bytes) at cache lines and gives every part to one thread.
  void Share(uint64_t bytes, const std::function<void(uint64_t begin, uint64_t end)>& body);
  void Help(int32_t place);
  // A round lasts until all parts are done. During it the thread that holds the lock changes
  // nothing, so parts need no lock.
  void DoPart(int32_t place) ABSL_NO_THREAD_SAFETY_ANALYSIS;

  const std::atomic<int32_t>* const word_;
  const int32_t threads_;
  Mutex mutex_;
  const std::function<void(uint64_t, uint64_t)>* body_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  alignas(64) std::atomic<uint64_t> round_{0};
  alignas(64) std::atomic<int32_t> busy_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_PARALLEL_TOUCH_H_
