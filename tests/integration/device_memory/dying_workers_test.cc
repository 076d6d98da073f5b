// Workers that are killed or stopped at every point of a step in device memory. The server goes on,
// other workers are served during that time, and the worker's memory is released.
#include <signal.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/device_memory/device_server.h"
#include "tests/integration/processes.h"

namespace mla::integration {
namespace {

constexpr char kWorker[] = "tests/integration/device_memory/device_worker";
constexpr const char* kPoints[] = {"connected",    "mapped",     "opened",    "begun",
                                   "written",      "gpu_hangs",  "published", "answered",
                                   "second_layer", "before_end", "after_end", "closed"};

bool Becomes(const std::function<bool()>& holds) {
  for (int i = 0; i < 6000; ++i) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

class DyingWorkersTest : public testing::Test {
 protected:
  DyingWorkersTest()
      : other_client_(server_.server().Connect(DeviceServer::Options())),
        other_(other_client_.get(), DeviceDims(), "m", 3) {
    EXPECT_EQ(other_.session().DeviceStatus(), absl::OkStatus());
    other_.UseDevice();
    track_ = *other_.Open();
    base_ = server_.device_bytes();
  }

  // Starts a worker and returns once it waits at its point.
  std::unique_ptr<BackgroundCommand> WorkerAt(const std::string& point) {
    const std::string reached = server_.server().folder().File("reached");
    std::remove(reached.c_str());
    auto worker = std::make_unique<BackgroundCommand>(
        std::string(kWorker) + " " + server_.server().unix_target() + " " + kernels::hip::kLibrary +
        " " + point + " >" + reached);
    EXPECT_TRUE(Becomes([&] { return Shell("cat " + reached).output == "at " + point + "\n"; }))
        << point << ": " << Shell("cat " + reached).output;
    return worker;
  }
  // Requests of another worker are served as before.
  void ServesOthers(const std::string& point) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(other_.Step({&*track_}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus()) << point;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60)) << point;
  }
  bool MemoryReturns() {
    return Becomes([&] { return server_.device_bytes() == base_; });
  }

  DeviceServer server_;
  std::unique_ptr<client::Client> other_client_;
  Worker other_;
  std::optional<Track> track_;
  int64_t base_ = 0;
};

TEST_F(DyingWorkersTest, Killed) {
  for (const char* const point : kPoints) {
    const auto worker = WorkerAt(point);
    ServesOthers(point);
    worker->Signal(SIGKILL);
    ServesOthers(point);
    EXPECT_TRUE(MemoryReturns()) << point << ": " << server_.device_bytes() - base_;
  }
}

TEST_F(DyingWorkersTest, Stopped) {
  for (const char* const point : kPoints) {
    const auto worker = WorkerAt(point);
    worker->Signal(SIGSTOP);
    ServesOthers(point);
    // Longer than a request waits for the GPU of its worker.
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    ServesOthers(point);
    worker->Signal(SIGKILL);
    EXPECT_TRUE(MemoryReturns()) << point << ": " << server_.device_bytes() - base_;
  }
}

}  // namespace
}  // namespace mla::integration
