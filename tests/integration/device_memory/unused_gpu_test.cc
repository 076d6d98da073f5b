// A machine whose GPU cannot be used: an error if the GPU was asked for, otherwise a warning
// wherever an operator looks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "kernels/backend_registry.h"
#include "kernels/reference/reference_backend.h"
#include "server/logging/logging.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kHardware[] = "1 AMD GPU (gfx950)";
constexpr char kReason[] = "no GPU runtime: libamdhip64.so.7: not found";

class UnusedGpuTest : public ::testing::Test {
 protected:
  // Makes the registry of a machine with `hardware`, whose backend has no runtime.
  void MachineWith(const std::string& hardware) {
    ASSERT_TRUE(registry_
                    .Add({"hip", 100,
                          [](const kernels::BackendOptions&) {
                            return absl::StatusOr<std::unique_ptr<kernels::AttentionBackend>>(
                                absl::FailedPreconditionError(kReason));
                          },
                          [hardware] { return hardware; }})
                    .ok());
    ASSERT_TRUE(kernels::RegisterReference(registry_).ok());
  }
  // The log of the start goes to log_.
  absl::Status Start(const std::string& backend) {
    server::ServerOptions options;
    options.config = SmallConfig();
    options.config.backend = backend;
    options.config.listen.unix_path = folder_.File("mla.sock");
    options.registry = &registry_;
    server::ConfigureLogging("text", "info");
    ::testing::internal::CaptureStderr();
    auto started = server::Server::Start(std::move(options));
    server::FlushLog(std::chrono::seconds(10));
    log_ = ::testing::internal::GetCapturedStderr();
    server::ConfigureLogging("text", "error");
    if (started.ok()) server_ = *std::move(started);
    return started.status();
  }
  v1::Backend Candidate(const std::string& name) const {
    auto client = client::Client::Connect("unix:" + folder_.File("mla.sock"), {});
    EXPECT_TRUE(client.ok()) << client.status();
    if (!client.ok()) return {};
    for (const v1::Backend& backend : (*client)->info().backends()) {
      if (backend.name() == name) return backend;
    }
    ADD_FAILURE() << name;
    return {};
  }
  std::string Get(const std::string& path) const { return HttpGet(server_->ops_port(), path); }

  TempFolder folder_;
  kernels::BackendRegistry registry_;
  std::unique_ptr<server::Server> server_;
  std::string log_;
};

TEST_F(UnusedGpuTest, UnderAutoItIsSaidWhereverOperatorsLook) {
  ASSERT_NO_FATAL_FAILURE(MachineWith(kHardware));
  ASSERT_TRUE(Start("auto").ok());
  EXPECT_THAT(log_, HasSubstr("gpu_unused"));
  EXPECT_THAT(log_, HasSubstr(kHardware));
  EXPECT_THAT(Get("/metrics"), HasSubstr("mla_gpu_unused{backend=\"hip\"} 1\n"));
  const std::string ready = Get("/readyz?verbose");
  EXPECT_THAT(ready, HasSubstr("200 "));
  EXPECT_THAT(ready, HasSubstr(std::string("GPU not used: this machine has ") + kHardware +
                               "; backend hip: " + kReason + "\n"));
  EXPECT_THAT(Get("/readyz"), Not(HasSubstr("GPU")));
  const v1::Backend candidate = Candidate("hip");
  EXPECT_EQ(candidate.unused_hardware(), kHardware);
  EXPECT_EQ(candidate.reason(), kReason);
  EXPECT_EQ(Candidate("reference").unused_hardware(), "");
}

TEST_F(UnusedGpuTest, AskedForByNameItStopsTheStart) {
  ASSERT_NO_FATAL_FAILURE(MachineWith(kHardware));
  const absl::Status status = Start("hip");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr(kReason));
  EXPECT_THAT(status.message(), HasSubstr(std::string("this machine has ") + kHardware));
}

TEST_F(UnusedGpuTest, WhoAsksForAnotherBackendIsNotWarned) {
  ASSERT_NO_FATAL_FAILURE(MachineWith(kHardware));
  ASSERT_TRUE(Start("reference").ok());
  EXPECT_THAT(log_, Not(HasSubstr("gpu_unused")));
  EXPECT_THAT(Get("/metrics"), Not(HasSubstr("mla_gpu_unused{backend=\"hip\"} 1")));
  EXPECT_THAT(Get("/readyz?verbose"), Not(HasSubstr("GPU not used")));
}

TEST_F(UnusedGpuTest, AMachineWithoutOneIsNotWarnedAbout) {
  ASSERT_NO_FATAL_FAILURE(MachineWith(""));
  ASSERT_TRUE(Start("auto").ok());
  EXPECT_THAT(log_, Not(HasSubstr("gpu_unused")));
  EXPECT_THAT(Get("/metrics"), HasSubstr("mla_gpu_unused{backend=\"hip\"} 0\n"));
  EXPECT_THAT(Get("/readyz?verbose"), Not(HasSubstr("GPU not used")));
  EXPECT_EQ(Candidate("hip").unused_hardware(), "");
}

}  // namespace
}  // namespace mla::integration
