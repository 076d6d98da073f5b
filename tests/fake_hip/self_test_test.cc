// Tests the self-test that a GPU backend runs before it is offered, with a fake HIP runtime whose
// results can be made wrong.
#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_hip/runtime/wrong_kernels.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

class SelfTestTest : public BackendOnFakeTest {
 protected:
  static HipBackendOptions WithSelfTest() {
    HipBackendOptions options = Options();
    options.self_test = true;
    return options;
  }
};

TEST_F(SelfTestTest, AFailureIsNotOffered) {
  control_->wrong_results = true;
  const HipBackendOptions options = WithSelfTest();
  const absl::Status status = HipBackend::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("failed self-test on Fake Instinct"));
}

// These flaws show only in later iterations of loops, with pages of three rows, without keys, or
// with NaN.
TEST_F(SelfTestTest, NoticesWhatFewRowsDoNotShow) {
  using fake_hip::Flaw;
  const HipBackendOptions options = WithSelfTest();
  const std::vector<std::pair<Flaw, const char*>> flaws = {
      {Flaw::kThirdItem, "row "},
      {Flaw::kLateTile, "absorbed form, 1600 keys"},
      {Flaw::kOddPages, "absorbed form, 150 keys"},
      {Flaw::kNaNAsZero, "absorbed form, 1600 keys, row 1 of 4"},
      {Flaw::kNoKeys, "absorbed form, 150 keys, row 2 of 4"},
      {Flaw::kSecondTile, "expanded form, 850 keys, row 12"},
      {Flaw::kCarriedWrong, "expanded form"}};
  for (const auto& [flaw, where] : flaws) {
    control_->flaw = flaw;
    const absl::Status status = HipBackend::Create(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << static_cast<int>(flaw);
    EXPECT_THAT(status.message(), HasSubstr(where)) << static_cast<int>(flaw);
  }
}

// Rounding latent outputs an additional time changes results noticeably only where outputs nearly
// cancel.
TEST_F(SelfTestTest, NoticesRoundedLatentOutputs) {
  control_->rounded_inputs = true;
  const HipBackendOptions options = WithSelfTest();
  const absl::Status status = HipBackend::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("fp32 latent outputs, head 0: output column"));
}

std::vector<std::string> KernelsOf(const ArchTraits& arch) {
  std::vector<std::string> kernels = {kMoveKernel,    kDigestKernel,  kAppendKernel,
                                      kCombineKernel, kProjectKernel, kCopyTensorsKernel,
                                      kGateKernel,    kSignalKernel};
  if (arch.project_row_wide_shared_bytes > 0) {
    kernels.emplace_back(kProjectRowWideKernel);
    kernels.emplace_back(kProjectRowDeepKernel);
  }
  if (arch.widens_lists) kernels.emplace_back(kWidenKernel);
  if (arch.indexer) {
    kernels.emplace_back(kIndexLogitsKernel);
    kernels.emplace_back(kIndexSelectKernel);
  }
  for (const AttendVariant& v : arch.attend) kernels.push_back(v.kernel);
  for (const FormatVariant& v : arch.split) kernels.push_back(v.kernel);
  for (const FormatVariant& v : arch.boxes) kernels.push_back(v.kernel);
  for (const ExpandedVariant& v : arch.expanded) {
    if (v.products == DType::kBf16) kernels.push_back(v.kernel);
  }
  for (const ExpandVariant& v : arch.expand) {
    if (v.products == DType::kBf16)
      kernels.push_back(v.kernel);  // fall_back_test.cc tests the
                                    // others
  }
  return kernels;
}

// AMD devices are offered without these kernels; tensors are copied then.
bool OnlyForHostMemory(const std::string& kernel) {
  return kernel == kCopyTensorsKernel || kernel == kGateKernel || kernel == kSignalKernel;
}

class SelfTestKernelsTest : public SelfTestTest,
                            public ::testing::WithParamInterface<const ArchTraits*> {};

// The self-test launches every kernel and notices if any single kernel is wrong.
TEST_P(SelfTestKernelsTest, NoticesAnyKernel) {
  const ArchTraits& arch = *GetParam();
  control_->arch = arch.arch.data();
  HipBackendOptions options = WithSelfTest();
  options.images.push_back(Image("sm_90", kImage90));
  options.vendor = &arch == &kSm90Traits ? Vendor::kNvidia : Vendor::kAmd;
  std::vector<std::string> parts;
  options.self_test_options.on_part = [&parts](std::string_view part, std::chrono::milliseconds) {
    parts.emplace_back(part);
  };
  WrongKernels wrong(control_);
  const auto backend = HipBackend::Create(options);
  const absl::Status status = backend.status();
  wrong.EndForked([&] {
    if (options.vendor == Vendor::kAmd && OnlyForHostMemory(control_->wrong_kernel)) {
      return status.ok() && (*backend)->Info().in_place_bytes == 0;
    }
    return status.code() == absl::StatusCode::kInternal &&
           absl::StrContains(status.message(), "failed self-test on Fake Instinct: ");
  });
  EXPECT_TRUE(status.ok()) << status;
  std::vector<std::string> named(SelfTestParts().begin(), SelfTestParts().end());
  if (arch.expanded_products_keys == 0) std::erase(named, "prefill");
  // Graphs are off on AMD devices. On NVIDIA devices the driver reports whether kernels reach host
  // memory.
  std::erase(named, options.vendor == Vendor::kAmd ? "replays" : "host_memory");
  EXPECT_EQ(parts, named);
  for (const std::string& kernel : KernelsOf(arch)) {
    const auto tried = wrong.noticed().find(kernel);
    EXPECT_TRUE(tried != wrong.noticed().end() && tried->second) << kernel;
  }
}

std::vector<std::string> launched;

// Each kernel of row products finishes the rows of one product itself, and leaves the sums of
// another, which is split, to mla_finish_rows. On more units than the fake's eight it does the
// same: one product has too few steps for a second split, and the other already has the splits
// that its steps allow.
TEST_P(SelfTestKernelsTest, RowProductsAreFinishedInEachWay) {
  const ArchTraits& arch = *GetParam();
  control_->arch = arch.arch.data();
  HipBackendOptions options = WithSelfTest();
  options.images.push_back(Image("sm_90", kImage90));
  options.vendor = &arch == &kSm90Traits ? Vendor::kNvidia : Vendor::kAmd;
  options.self_test_options.parts = {"projected"};
  launched.clear();
  control_->on_launch = [](const char* kernel) { launched.emplace_back(kernel); };
  const absl::Status status = HipBackend::Create(options).status();
  control_->on_launch = nullptr;
  ASSERT_TRUE(status.ok()) << status;
  for (const std::string kernel :
       {kFewRowsKernel, kManyRowsKernel, kFewRowsOfCodesKernel, kManyRowsOfCodesKernel}) {
    int finished = 0, split = 0;
    for (size_t i = 0; i < launched.size(); ++i) {
      if (launched[i] != kernel) continue;
      const bool next = i + 1 < launched.size() && launched[i + 1] == kFinishRowsKernel;
      ++(next ? split : finished);
    }
    const bool few = kernel == kFewRowsKernel || kernel == kFewRowsOfCodesKernel;
    // Two launches are of W_UQ, one is of W_O.
    const int whole = (few ? arch.few_rows : arch.many_rows).finishes ? 2 : 0;
    EXPECT_EQ(finished, whole) << kernel;
    EXPECT_EQ(split, 3 - whole) << kernel;
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, SelfTestKernelsTest,
                         ::testing::Values(&kGfx950Traits, &kGfx942Traits, &kSm90Traits),
                         [](const auto& arch) { return std::string(arch.param->arch); });

}  // namespace
}  // namespace mla::kernels::hip
