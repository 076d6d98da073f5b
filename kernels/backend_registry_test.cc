#include "kernels/backend_registry.h"

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/reference_backend.h"

namespace mla::kernels {
namespace {

BackendRow Missing(const std::string& name, int32_t rank) {
  return {name, rank,
          [](const BackendOptions&) -> absl::StatusOr<std::unique_ptr<AttentionBackend>> {
            return absl::UnimplementedError("no such device here");
          }};
}

BackendRow Reference(const std::string& name, int32_t rank) {
  return {name, rank,
          [](const BackendOptions&) -> absl::StatusOr<std::unique_ptr<AttentionBackend>> {
            return std::make_unique<ReferenceBackend>();
          }};
}

TEST(BackendRegistryTest, BestThatRunsWinsAndTheLadderSaysWhy) {
  BackendRegistry registry;
  ASSERT_TRUE(registry.Add(Reference("slow", 1)).ok());
  ASSERT_TRUE(registry.Add(Missing("gpu", 100)).ok());
  ASSERT_TRUE(registry.Add(Reference("fast", 10)).ok());
  auto choice = registry.Select("auto", {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  ASSERT_NE(choice->backend, nullptr);
  ASSERT_EQ(choice->candidates.size(), 3u);
  EXPECT_EQ(choice->candidates[0].name, "gpu");
  EXPECT_EQ(choice->candidates[0].reason, "no such device here");
  EXPECT_TRUE(choice->candidates[1].chosen);
  EXPECT_EQ(choice->candidates[1].name, "fast");
  EXPECT_EQ(choice->candidates[1].reason, "");
  EXPECT_FALSE(choice->candidates[2].chosen);
  EXPECT_NE(choice->candidates[2].reason, "");
}

TEST(BackendRegistryTest, HardwareThatCouldNotBeUsedIsNamed) {
  BackendRegistry registry;
  BackendRow gpu = Missing("gpu", 100), none = Missing("other", 90);
  int asked = 0;
  gpu.hardware = [&asked] { return ++asked, std::string("8 GPUs"); };
  none.hardware = [] { return std::string(); };
  ASSERT_TRUE(registry.Add(gpu).ok());
  ASSERT_TRUE(registry.Add(none).ok());
  ASSERT_TRUE(registry.Add(Reference("slow", 1)).ok());
  const auto choice = registry.Select("auto", {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->candidates[0].unused_hardware, "8 GPUs");
  EXPECT_EQ(choice->candidates[1].unused_hardware, "");
  EXPECT_EQ(choice->candidates[2].unused_hardware, "");
  EXPECT_EQ(asked, 1);
  const auto forced = registry.Select("slow", {});
  ASSERT_TRUE(forced.ok());
  EXPECT_EQ(forced->candidates[0].unused_hardware, "");
  EXPECT_EQ(asked, 1);
  const absl::Status missing = registry.Select("gpu", {}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(missing.message()).find("no such device here (this machine has 8 GPUs)"),
            std::string::npos)
      << missing;
}

TEST(BackendRegistryTest, ANameForcesAndAMissIsExplained) {
  BackendRegistry registry;
  ASSERT_TRUE(registry.Add(Reference("slow", 1)).ok());
  ASSERT_TRUE(registry.Add(Missing("gpu", 100)).ok());
  auto forced = registry.Select("slow", {});
  ASSERT_TRUE(forced.ok());
  EXPECT_FALSE(forced->candidates[0].chosen);
  const absl::Status missing = registry.Select("gpu", {}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(missing.message()).find("no such device here"), std::string::npos);
  const absl::Status unknown = registry.Select("tpu", {}).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(unknown.message()).find("gpu, slow"), std::string::npos) << unknown;
}

TEST(BackendRegistryTest, AGpuOfEitherVendorCanBeAskedFor) {
  const auto with = [](BackendRow row) {
    row.hardware = [] { return std::string("1 GPU"); };
    return row;
  };
  BackendRegistry registry;
  ASSERT_TRUE(registry.Add(with(Missing("hip", 100))).ok());
  ASSERT_TRUE(registry.Add(Reference("slow", 99)).ok());
  const absl::Status none = registry.Select("gpu", {}).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(none.message(),
            "no backend can run here (wanted gpu); hip: no such device here (this machine has 1 "
            "GPU); slow: --backend=gpu forces another");
  ASSERT_TRUE(registry.Add(with(Reference("cuda", 90))).ok());
  const auto choice = registry.Select("gpu", {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_TRUE(choice->candidates[2].chosen);
  EXPECT_EQ(choice->candidates[2].name, "cuda");
  EXPECT_EQ(registry.Select("abacus", {}).status().message(),
            "no backend named abacus; there are auto, gpu, hip, slow, cuda");
}

TEST(BackendRegistryTest, NamesAreUnique) {
  BackendRegistry registry;
  ASSERT_TRUE(registry.Add(Reference("a", 1)).ok());
  EXPECT_EQ(registry.Add(Reference("a", 2)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(registry.Names(), std::vector<std::string>{"a"});
}

TEST(BackendRegistryTest, TheCpuIsPreferredOverTheOracle) {
  BackendRegistry registry;
  ASSERT_TRUE(RegisterReference(registry).ok());
  ASSERT_TRUE(RegisterCpu(registry).ok());
  auto choice = registry.Select("auto", {});
  ASSERT_TRUE(choice.ok());
  EXPECT_EQ(choice->backend->Info().name, "cpu");
  BackendOptions options;
  options.cpu_isa = "no such level";
  choice = registry.Select("auto", options);
  ASSERT_TRUE(choice.ok());
  EXPECT_EQ(choice->backend->Info().name, "reference");
  EXPECT_NE(choice->candidates[0].reason.find("no such level"), std::string::npos);
}

}  // namespace
}  // namespace mla::kernels
