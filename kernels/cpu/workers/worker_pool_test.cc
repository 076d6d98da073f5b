#include "kernels/cpu/workers/worker_pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels::cpu {
namespace {

WorkerPool::Options Threads(int32_t threads, int32_t spin_us = 0) {
  WorkerPool::Options options;
  options.threads = threads;
  options.pin_threads = false;
  options.spin_us = spin_us;
  return options;
}

TEST(WorkerPoolTest, EveryItemRunsOnceAndPhasesKeepTheirOrder) {
  for (const int32_t threads : {1, 2, 5}) {
    WorkerPool pool(Threads(threads), 1, nullptr, nullptr);
    WorkerPool::Job job;
    job.phase_items = {7, 0, 1, 300, 0};
    std::vector<std::atomic<int32_t>> counts(5 * 300);
    std::atomic<int64_t> finished{0};
    std::atomic<int32_t> faults{0};
    const int64_t before[] = {0, 7, 7, 8, 308};
    job.body = [&](int32_t phase, int64_t item, int32_t place) {
      if (place < 0 || place >= threads) ++faults;
      if (finished.load() < before[phase]) ++faults;  // an earlier phase was not complete
      ++counts[static_cast<size_t>(phase * 300 + item)];
      ++finished;
    };
    for (int32_t repeat = 1; repeat <= 50; ++repeat) {
      finished = 0;
      pool.Start(job);
      EXPECT_GE(pool.Wait(job), 0);
      EXPECT_EQ(finished.load(), 308);
    }
    EXPECT_EQ(faults.load(), 0);
    for (int32_t phase = 0; phase < 5; ++phase) {
      for (int64_t item = 0; item < 300; ++item) {
        EXPECT_EQ(counts[static_cast<size_t>(phase * 300 + item)].load(),
                  item < job.phase_items[static_cast<size_t>(phase)] ? 50 : 0);
      }
    }
  }
}

TEST(WorkerPoolTest, PlacesAreNotSharedAtATime) {
  constexpr int32_t kThreads = 4;
  WorkerPool pool(Threads(kThreads), 1, nullptr, nullptr);
  std::vector<std::atomic<int32_t>> inside(kThreads);
  std::atomic<int32_t> clashes{0};
  WorkerPool::Job job;
  job.phase_items = {200, 200};
  job.body = [&](int32_t, int64_t, int32_t place) {
    if (inside[static_cast<size_t>(place)].fetch_add(1) != 0) ++clashes;
    std::this_thread::yield();
    inside[static_cast<size_t>(place)].fetch_sub(1);
  };
  for (int32_t repeat = 0; repeat < 20; ++repeat) {
    pool.Start(job);
    pool.Wait(job);
  }
  EXPECT_EQ(clashes.load(), 0);
}

TEST(WorkerPoolTest, PollingDoneFinishesWithoutWait) {
  for (const int32_t threads : {1, 3}) {
    for (const int64_t items : {0, 1, 40}) {
      WorkerPool pool(Threads(threads), 1, nullptr, nullptr);
      WorkerPool::Job job;
      job.phase_items = {items};
      std::atomic<int64_t> ran{0};
      job.body = [&](int32_t, int64_t, int32_t) { ++ran; };
      pool.Start(job);
      while (!pool.Done(job)) std::this_thread::sleep_for(std::chrono::microseconds(50));
      EXPECT_EQ(ran.load(), items);
      EXPECT_GE(pool.Wait(job), 0);  // nothing left to do
    }
  }
}

TEST(WorkerPoolTest, JobsRunInTheOrderOfStart) {
  for (const int32_t threads : {1, 3}) {
    WorkerPool pool(Threads(threads, /*spin_us=*/50), 3, nullptr, nullptr);
    std::atomic<int32_t> faults{0};
    std::vector<std::unique_ptr<WorkerPool::Job>> jobs;
    std::atomic<int64_t> done[3] = {};
    for (int32_t i = 0; i < 3; ++i) {
      jobs.push_back(std::make_unique<WorkerPool::Job>());
      jobs.back()->phase_items = {i == 1 ? 0 : 20, 3};
      jobs.back()->body = [&, i](int32_t, int64_t, int32_t) {
        if (i > 0 && done[i - 1].load() != (i - 1 == 1 ? 3 : 23)) ++faults;
        ++done[i];
      };
    }
    for (int32_t repeat = 0; repeat < 100; ++repeat) {
      for (auto& count : done) count = 0;
      for (const auto& job : jobs) pool.Start(*job);
      for (const auto& job : jobs) pool.Wait(*job);
      EXPECT_EQ(done[2].load(), 23);
    }
    EXPECT_EQ(faults.load(), 0);
  }
}

TEST(WorkerPoolTest, HooksSurroundWorkOnTheSameThread) {
  static thread_local int32_t depth = 0;
  std::atomic<int32_t> faults{0};
  WorkerPool pool(
      Threads(3), 1, [&] { faults += depth++ != 0; }, [&] { faults += --depth != 0; });
  WorkerPool::Job job;
  job.phase_items = {30, 30};
  job.body = [&](int32_t, int64_t, int32_t) { faults += depth != 1; };
  for (int32_t repeat = 0; repeat < 20; ++repeat) {
    pool.Start(job);
    pool.Wait(job);
  }
  EXPECT_EQ(faults.load(), 0);
}

}  // namespace
}  // namespace mla::kernels::cpu
