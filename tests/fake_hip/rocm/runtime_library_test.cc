// Tests where the GPU's runtime is searched, and the reason that is given for each place without
// it.
#include "kernels/hip/runtime/runtime_library.h"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/reference/reference_backend.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RuntimeLibraryTest : public BackendOnFakeTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    unsetenv("ROCM_PATH");
  }
  void TearDown() override {
    unsetenv("ROCM_PATH");
    BackendOnFakeTest::TearDown();
  }
  // Returns a folder with the fake runtime under the file name of HIP's runtime.
  static std::string FolderWithRuntime(const std::string& name) {
    const std::string folder = ::testing::TempDir() + "/" + name;
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    std::filesystem::create_symlink(std::filesystem::absolute(kLibrary),
                                    folder + "/libamdhip64.so.6");
    return folder;
  }
  static absl::StatusOr<BackendChoice> Choose(const std::string& library) {
    HipBackendOptions base = Options();
    base.libraries.clear();
    BackendRegistry registry;
    EXPECT_TRUE(RegisterReference(registry).ok());
    EXPECT_TRUE(RegisterGpuBackends(registry, base).ok());
    BackendOptions options;
    options.gpu_runtime_library = library;
    return registry.Select("auto", options);
  }
};

TEST_F(RuntimeLibraryTest, NamesInTheOrderOfTheSearch) {
  EXPECT_THAT(RuntimeLibraries(Vendor::kAmd, ""),
              ElementsAre("libamdhip64.so.7", "libamdhip64.so.6", "/opt/rocm/lib/libamdhip64.so.7",
                          "/opt/rocm/lib/libamdhip64.so.6"));
  setenv("ROCM_PATH", "/elsewhere", 1);
  EXPECT_THAT(RuntimeLibraries(Vendor::kAmd, ""),
              ElementsAre("libamdhip64.so.7", "libamdhip64.so.6", "/elsewhere/lib/libamdhip64.so.7",
                          "/elsewhere/lib/libamdhip64.so.6", "/opt/rocm/lib/libamdhip64.so.7",
                          "/opt/rocm/lib/libamdhip64.so.6"));
  EXPECT_THAT(RuntimeLibraries(Vendor::kNvidia, ""), ElementsAre("libcuda.so.1"));
  EXPECT_THAT(RuntimeLibraries(Vendor::kAmd, "/some/lib.so"), ElementsAre("/some/lib.so"));
  EXPECT_THAT(RuntimeLibraries(Vendor::kNvidia, "/"), ElementsAre("//libcuda.so.1"));
}

TEST_F(RuntimeLibraryTest, AKeyNamesTheLibraryOrItsFolder) {
  const std::string folder = FolderWithRuntime("by_key");
  for (const std::string& path : {folder, folder + "/libamdhip64.so.6"}) {
    const auto choice = Choose(path);
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->backend->Info().name, "hip-gfx950") << path;
  }
}

TEST_F(RuntimeLibraryTest, RocmPathIsSearched) {
  const std::string folder = FolderWithRuntime("rocm/lib");
  setenv("ROCM_PATH", (::testing::TempDir() + "/rocm").c_str(), 1);
  const auto choice = Choose("");
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->backend->Info().name, "hip-gfx950");
}

TEST_F(RuntimeLibraryTest, EachMissHasItsReason) {
  const std::string folder = ::testing::TempDir() + "/no_library";
  std::filesystem::create_directories(folder);
  std::filesystem::remove(folder + "/libamdhip64.so.7");
  std::filesystem::create_symlink("/etc/passwd", folder + "/libamdhip64.so.7");
  const auto choice = Choose(folder);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->backend->Info().name, "reference");
  const std::string& reason = choice->candidates[0].reason;
  EXPECT_THAT(reason, HasSubstr("no GPU runtime: "));
  EXPECT_THAT(reason, HasSubstr(folder + "/libamdhip64.so.7: "));
  EXPECT_THAT(reason, HasSubstr("; " + folder + "/libamdhip64.so.6: cannot open shared object"));
}

}  // namespace
}  // namespace mla::kernels::hip
