// Memory in the steady state: client and server are two processes that run many steps over each
// path, and neither may grow. 100,000 steps a path with MLA_TEST_LONG=1.
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/testing/long_runs.h"
#include "mla/v1/sequence.grpc.pb.h"
#include "proto/wire/grpc_tuning.h"
#include "tests/bench/wire/wire_paths.h"
#include "tests/bench/wire/wire_server.h"

namespace mla::bench {
namespace {

constexpr uint32_t kFewLayers = 2;
constexpr Shape kShape = {"ABSORBED-1", v1::PROFILE_ABSORBED, 1};
constexpr int kRowsOfSequence = 500;  // then a new sequence replaces it
#if defined(MLA_SANITIZED)
constexpr int64_t kGrowthBytes = int64_t{64} << 20;  // freed memory is kept for a while
#else
constexpr int64_t kGrowthBytes = int64_t{2} << 20;
#endif

int Steps() { return IsLongRun() ? 100'000 : 1000; }

int64_t ResidentBytes(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

class Worker {
 public:
  Worker(const std::string& folder, const std::string& path) {
    channel_ = grpc::CreateChannel("unix:" + folder + "/s", grpc::InsecureChannelCredentials());
    if (path == "inline") {
      path_ = std::make_unique<ServiceStream>(channel_, kShape, kNoSpin, nullptr);
      return;
    }
    client::SharedMemoryOptions options;
    options.ring = path == "ring";
    options.bytes = kShape.in() + kShape.o() + (1 << 20);
    auto memory = SharedMemory::Connect(folder + "/s.shm", options);
    Check(memory.status());
    if (path == "ring") {
      path_ = std::make_unique<Ring>(kShape, *std::move(memory));
    } else {
      path_ = std::make_unique<ServiceStream>(channel_, kShape, kNoSpin, *std::move(memory));
    }
  }
  ~Worker() { Release(); }

  void Step() {
    if (sequence_.length() == kRowsOfSequence) Release();
    if (sequence_.sequence_id() == 0) Open();
    const uint64_t id = ++step_;
    v1::AttendStreamRequest request;
    v1::BeginStep* const begin = request.mutable_begin_step();
    begin->set_step_id(id);
    begin->set_model_id(kModel);
    v1::StepSequence* const rows = begin->add_sequences();
    rows->set_sequence_id(sequence_.sequence_id());
    rows->set_epoch(sequence_.epoch());
    rows->set_start_position(sequence_.length());
    rows->set_rows(1);
    path_->Call(std::move(request));
    for (uint32_t layer = 0; layer < kFewLayers; ++layer) path_->Attend(id, layer);
    v1::AttendStreamRequest end;
    end.mutable_end_step()->set_step_id(id);
    path_->Call(std::move(end));
    sequence_.set_length(sequence_.length() + 1);
  }

 private:
  void Open() {
    grpc::ClientContext context;
    v1::OpenRequest request;
    request.set_model_id(kModel);
    v1::OpenReply reply;
    const auto stub = v1::Sequences::NewStub(channel_);
    if (!stub->Open(&context, request, &reply).ok()) Die("a sequence cannot be opened");
    sequence_ = reply.sequence();
  }
  void Release() {
    if (sequence_.sequence_id() == 0) return;
    grpc::ClientContext context;
    v1::ReleaseRequest request;
    request.add_sequence_ids(sequence_.sequence_id());
    v1::ReleaseReply reply;
    v1::Sequences::NewStub(channel_)->Release(&context, request, &reply);
    sequence_.Clear();
  }

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<Path> path_;
  v1::SequenceInfo sequence_;
  uint64_t step_ = 0;
};

TEST(SteadyMemoryTest, StepsLeaveNothingBehind) {
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const shared = new (page) Shared;
  std::string folder = "/tmp/mla-steady-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  wire::KeepMessageMemory();
  // Forks before either side has a thread.
  const pid_t server = fork();
  if (server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Serve(folder, shared, kFewLayers);
    std::_Exit(0);
  }
  while (shared->ready.load() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const int steps = Steps();
  for (const char* path : {"inline", "shm", "ring"}) {
    Worker worker(folder, path);
    // Pools and heaps reach their size while several sequences are opened and closed.
    for (int i = 0; i < 2 * kRowsOfSequence; ++i) worker.Step();
    const int64_t server_before = ResidentBytes(server), client_before = ResidentBytes(getpid());
    for (int i = 0; i < steps; ++i) worker.Step();
    const int64_t server_after = ResidentBytes(server), client_after = ResidentBytes(getpid());
    std::printf("%-7s %d steps: server %ld KiB, grown by %ld; client %ld KiB, grown by %ld\n", path,
                steps, server_after >> 10, (server_after - server_before) >> 10, client_after >> 10,
                (client_after - client_before) >> 10);
    EXPECT_GT(server_before, 0);
    EXPECT_LT(server_after - server_before, kGrowthBytes) << path;
    EXPECT_LT(client_after - client_before, kGrowthBytes) << path;
  }
  shared->stop = 1;
  int status = 0;
  waitpid(server, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  unlink((folder + "/s").c_str());
  rmdir(folder.c_str());
}

}  // namespace
}  // namespace mla::bench
