// Tests how a server process ends when a launch hangs, and when the machine has no more threads.
#include <dlfcn.h>
#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "client/cpp/shared_memory/shared_memory.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/faulty_backend.h"
#include "server/process/exit_guards.h"
#include "tests/integration/hand_over/weights_fixture.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace {

thread_local int threads_left = 1 << 20;
thread_local bool may_make_threads = false;
std::atomic<bool> others_may{true};
std::atomic<int> standard_left{1 << 20};

// Returns true for a thread of std::thread, and false for a thread of gRPC.
bool IsStandard(void* (*start)(void*)) {
  Dl_info from{};
  return dladdr(reinterpret_cast<void*>(start), &from) != 0 &&
         std::string_view(from.dli_fname).find("libstdc++") != std::string_view::npos;
}

}  // namespace

// Replaces the C library's function, so that threads of the test can run out of threads.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  const bool left = threads_left-- > 0 && (others_may || may_make_threads) &&
                    (!IsStandard(start) || standard_left-- > 0);
  return left ? real(thread, attributes, start, argument) : EAGAIN;
}

namespace mla::integration {
namespace {

using namespace std::chrono_literals;
using scheduler::testing::FaultyBackend;
using ::testing::ExitedWithCode;

class ProcessEndTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  server::ServerOptions Options() {
    server::ServerOptions options;
    options.config = SmallConfig();
    options.config.listen.unix_path = folder_.File("mla.sock");
    return options;
  }
  // Starts a server as main does, on a thread that can create only `threads` others.
  void StartWith(int threads) {
    std::thread([&] {
      const server::StartGuard guard;
      threads_left = threads;
      server::Server::Start(Options()).IgnoreError();
    }).join();
  }
  // Calls `then` with the server and its backend while the backend holds a launch.
  void WhileALaunchHangs(const std::function<void(server::Server&, FaultyBackend&)>& then) {
    server::ServerOptions options = Options();
    auto backend = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
    FaultyBackend* const device = backend.get();
    options.backend = std::move(backend);
    auto server = server::Server::Start(std::move(options));
    auto client = client::Client::Connect("unix:" + folder_.File("mla.sock"), {});
    Worker worker(client->get(), {}, "m", 1);
    Track track = *worker.Open();
    device->HoldLaunches();
    std::thread([&] { worker.Step({&track}, {1}, v1::PROFILE_ABSORBED).IgnoreError(); }).detach();
    while (!device->holds_launch()) std::this_thread::sleep_for(1ms);
    then(**server, *device);
  }
  void StopWhileALaunchHangs() {
    WhileALaunchHangs([](server::Server& server, FaultyBackend&) {
      const server::StopGuard guard(300ms);
      server.Shutdown(100ms);
    });
  }
  // Only the server's watchdog can stop it.
  void ServeWhileACallIsStuck() {
    WhileALaunchHangs([](server::Server&, FaultyBackend& device) {
      device.SetStuck();
      while (true) std::this_thread::sleep_for(1s);
    });
  }

  TempFolder folder_;
};

TEST_F(ProcessEndTest, AHungLaunchDoesNotKeepTheProcess) {
  EXPECT_EXIT(StopWhileALaunchHangs(), ExitedWithCode(server::kExitAborted), "stop_hangs");
}

TEST_F(ProcessEndTest, AStopInTimeIsLeftAlone) {
  const auto stop = [] {
    { const server::StopGuard guard(10s); }
    { const server::StopGuard guard(1ms * 60'000); }
    std::exit(server::kExitDrained);
  };
  EXPECT_EXIT(stop(), ExitedWithCode(server::kExitDrained), "");
}

TEST_F(ProcessEndTest, ACallThatNeverReturnsEndsTheProcessAndIsNamed) {
  EXPECT_EXIT(ServeWhileACallIsStuck(), ExitedWithCode(server::kExitAborted),
              "stuck.*a held launch has not returned");
}

// The first missing thread may be the engine's, the poller's or one that maintains streams; some
// threads run already then.
TEST_F(ProcessEndTest, NoThreadLeftIsAFailedStart) {
  for (const int threads : {0, 1, 3, 4}) {
    EXPECT_EXIT(StartWith(threads), ExitedWithCode(server::kExitNotStarted), "start_failed.*thread")
        << threads;
  }
}

// After the start, only requests that need a thread are refused.
TEST(ThreadShortageTest, ARingWithoutAThreadIsRefused) {
  const TestServer server;
  client::SharedMemoryOptions options;
  options.bytes = 4096;
  const std::string listener = server.folder().File("mla.sock") + ".shm";
  may_make_threads = true;
  others_may = false;
  const absl::Status refused = client::SharedMemory::Connect(listener, options).status();
  others_may = true;
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("no thread for the ring"));
  EXPECT_TRUE(client::SharedMemory::Connect(listener, options).ok());
}

class ThreadShortageInADrainTest : public WeightsTest {};

TEST_F(ThreadShortageInADrainTest, WithoutAThreadItIsRefusedAndTheServerServesOn) {
  Fill(1);
  const auto b = Serve();
  standard_left = 0;
  const absl::Status refused = Drain(Address(*b)).status();
  standard_left = 1 << 20;
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("no thread for the hand-over"));
  ExpectHere(&tracks_[0]);
  EXPECT_TRUE(red_->OpenSequence("m").ok());
}

TEST_F(ThreadShortageInADrainTest, OneThreadMovesAllSequencesAndWeights) {
  FillWithWeights();
  for (int i = 0; i < 3; ++i) {
    tracks_.push_back(*worker_->Open());
    ASSERT_EQ(worker_->Step({&tracks_.back()}, {5}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  const auto b = Serve();
  standard_left = 1;
  const auto reply = Drain(Address(*b));
  const int short_of = -standard_left.exchange(1 << 20);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_GE(short_of, 2) << "helpers for weights and for sequences";
  EXPECT_EQ(reply->handed_over_size(), 4);
  EXPECT_EQ(Outcomes(*a_, "moved"), 1);
  for (Track& track : tracks_) ExpectMoved(&track, *b, Address(*b));
}

}  // namespace
}  // namespace mla::integration
