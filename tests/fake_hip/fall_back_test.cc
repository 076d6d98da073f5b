// Tests what the registry does and reports when a GPU cannot serve. Every fault is tried with both
// vendors' runtimes.
#include <algorithm>
#include <memory>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/reference/reference_backend.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_hip/runtime/wrong_kernels.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

struct Machine {
  const char* row;   // name in the registry
  const char* arch;  // of its device; an image for it exists
  Vendor vendor;
};

class FallBackTest : public ::testing::TestWithParam<Machine> {
 protected:
  void SetUp() override {
    control_ = FakeControl();
    ASSERT_NE(control_, nullptr);
    control_->arch = GetParam().arch;
    options_.libraries = {kLibrary};
    options_.images = {Image("gfx950", kImage950), Image("sm_90", kImage90)};
    options_.vendor = GetParam().vendor;
  }
  void TearDown() override { EXPECT_EQ(control_->live_bytes, 0); }

  BackendRegistry Registry() const {
    BackendRegistry registry;
    EXPECT_TRUE(RegisterReference(registry).ok());
    EXPECT_TRUE(RegisterGpuBackends(registry, options_).ok());
    return registry;
  }

  // "auto" selects the reference and reports why. Selecting the row's own name fails with the same
  // reason.
  void ExpectFallBack(const std::string& reason) const {
    const BackendRegistry registry = Registry();
    auto choice = registry.Select("auto", {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->backend->Info().name, "reference");
    bool found = false;
    for (const BackendCandidate& candidate : choice->candidates) {
      if (candidate.name != GetParam().row) continue;
      found = true;
      EXPECT_FALSE(candidate.chosen);
      EXPECT_THAT(candidate.reason, HasSubstr(reason));
    }
    EXPECT_TRUE(found);
    const absl::Status forced = registry.Select(GetParam().row, {}).status();
    EXPECT_EQ(forced.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(forced.message(), HasSubstr(reason));
  }

  fake_hip::Control* control_ = nullptr;
  HipBackendOptions options_;
};

// PrefillFallBackTest runs the self-test on these devices.
TEST_P(FallBackTest, AWorkingDeviceIsChosen) {
  options_.self_test = false;
  auto choice = Registry().Select("auto", {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->backend->Info().name, std::string(GetParam().row) + "-" + GetParam().arch);
  EXPECT_EQ(choice->backend->Info().units, 8);
}

TEST_P(FallBackTest, NoRuntime) {
  options_.libraries = {"libnot_there.so.1"};
  ExpectFallBack("no GPU runtime: libnot_there.so.1");
}

TEST_P(FallBackTest, NoDevice) {
  control_->devices = 0;
  ExpectFallBack("no GPU device (tests/fake_hip/libfake_hip.so)");
}

TEST_P(FallBackTest, WrongArchitecture) {
  control_->arch = GetParam().vendor == Vendor::kAmd ? "gfx90a" : "sm_80";
  ExpectFallBack(std::string("no code object for ") + control_->arch);
  ExpectFallBack("built in: gfx950, sm_90; kernels exist for gfx950, gfx942, sm_90");
}

TEST_P(FallBackTest, FailedSelfTest) {
  control_->wrong_results = true;
  ExpectFallBack("failed self-test on Fake Instinct: ");
}

TEST_P(FallBackTest, UnsupportedShape) {
  options_.self_test = false;
  auto choice = Registry().Select(GetParam().row, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  AttentionDesc desc;
  desc.geometry = {16, 512, 32, 128, 128};
  const absl::Status status = choice->backend->CanRun(desc);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  for (const std::string& part : {std::string("wanted: absorbed heads=16 lora=512 rope=32"),
                                  std::string("supported: "), std::string("missing: this rope_dim"),
                                  std::string("device: Fake Instinct (") + GetParam().arch + ")"}) {
    EXPECT_THAT(status.message(), HasSubstr(part));
  }
}

// If a call fails while the backend is created, the error has the API's own text.
TEST_P(FallBackTest, AFailingCallIsNamed) {
  control_->fail_call = "hipModuleLoadData";
  control_->fail_after = 0;
  control_->fail_code = 200;
  ExpectFallBack("GPU module load: device kernel image is invalid (200)");
}

// If only the kernels of prefill with 8-bit products fail, the backend serves without them and
// reports why.
class PrefillFallBackTest : public ::testing::TestWithParam<Machine> {
 protected:
  void SetUp() override {
    control_ = FakeControl();
    ASSERT_NE(control_, nullptr);
    control_->arch = GetParam().arch;
    options_.libraries = {kLibrary};
    options_.images = {Image("gfx950", kImage950), Image("sm_90", kImage90)};
    options_.vendor = GetParam().vendor;
  }
  void TearDown() override { EXPECT_EQ(control_->live_bytes, 0); }

  void Expect(bool prefill, const std::string& reason) const {
    Expect(HipBackend::Create(options_), prefill, reason);
  }
  static void Expect(const absl::StatusOr<std::unique_ptr<HipBackend>>& backend, bool prefill,
                     const std::string& reason) {
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_EQ((*backend)->Info().fp8_prefill_keys > 0, prefill);
    EXPECT_THAT((*backend)->Info().fp8_compute, HasSubstr(reason));
    AttentionDesc desc;
    desc.geometry = {16, 512, 64, 128, 128};
    desc.products = DType::kFp8E4m3;
    desc.kv_format = KvFormat::kFp8Tensor;
    EXPECT_TRUE((*backend)->CanRun(desc).ok());
    desc.kv_format = KvFormat::kFp8Row;
    EXPECT_TRUE((*backend)->CanRun(desc).ok());
    desc.form = AttentionForm::kExpanded;
    EXPECT_EQ((*backend)->CanRun(desc).ok(), prefill);
    desc.products = DType::kBf16;
    EXPECT_TRUE((*backend)->CanRun(desc).ok());
  }

  fake_hip::Control* control_ = nullptr;
  HipBackendOptions options_;
};

TEST_P(PrefillFallBackTest, AWorkingDeviceHasIt) {
  options_.self_test = false;
  Expect(true, "; 8-bit products in prefill");
}

TEST_P(PrefillFallBackTest, ImageWithoutItsKernels) {
  options_.self_test = false;
  // Create looks up the kernels of 8-bit prefill last.
  const auto of = FindArchTraits(GetParam().arch)->expand;
  const auto own = 1 + std::count_if(of.begin(), of.end(),
                                     [](const auto& v) { return v.products != DType::kBf16; });
  control_->FailOnce("hipModuleGetFunction", 1 << 20);
  Expect(true, "; 8-bit products in prefill");
  const int others = control_->fail_seen - static_cast<int>(own);
  control_->FailOnce("hipModuleGetFunction", others, 500);
  Expect(false, "; bf16 products in prefill: GPU module function: ");
}

// The kernels of wider heads have bf16 products only, so a request for 8-bit products is refused.
TEST_P(PrefillFallBackTest, WiderHeadsHaveNoProductsOf8BitsInPrefill) {
  options_.self_test = false;
  const bool wider = HasExpandedForm(*FindArchTraits(GetParam().arch), kDims256);
  auto backend = HipBackend::Create(options_);
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_THAT((*backend)->Info().fp8_compute, HasSubstr("in prefill with nope_dim/v_dim 128/128"));
  EXPECT_THAT((*backend)->Info().supported,
              HasSubstr(wider ? "nope_dim/v_dim 128/128 or 192/256;" : "nope_dim/v_dim 128/128;"));
  AttentionDesc desc;
  desc.geometry = {16, 512, 64, 192, 256};
  desc.kv_format = KvFormat::kFp8Row;
  desc.form = AttentionForm::kExpanded;
  EXPECT_EQ((*backend)->CanRun(desc).ok(), wider);
  desc.products = DType::kFp8E4m3;
  EXPECT_THAT((*backend)->CanRun(desc).message(),
              HasSubstr(wider ? "missing: these products in the expanded form"
                              : "missing: this nope_dim with this v_dim in the expanded form"));
  desc.products = DType::kBf16;
  desc.geometry.nope_dim = 128;
  EXPECT_THAT((*backend)->CanRun(desc).message(),
              HasSubstr("missing: this nope_dim with this v_dim in the expanded form"));
}

TEST_P(PrefillFallBackTest, WrongAnswersOfItsKernels) {
  options_.self_test = true;
  const std::set<std::string> kernels = {"mla_attend_expanded_products",
                                         "mla_expand_fp8_row_products"};
  WrongKernels wrong(control_, kernels);
  auto backend = HipBackend::Create(options_);
  wrong.EndForked([&] {
    Expect(backend, false, "; bf16 products in prefill: expanded form, 150 keys, fp8_");
    return true;
  });
  Expect(backend, true, "; 8-bit products in prefill");
  for (const std::string& kernel : kernels) {
    const auto tried = wrong.noticed().find(kernel);
    EXPECT_TRUE(tried != wrong.noticed().end() && tried->second) << kernel;
  }
}

std::string NameOf(const ::testing::TestParamInfo<Machine>& machine) { return machine.param.row; }
const auto kMachines = ::testing::Values(Machine{"hip", "gfx950", Vendor::kAmd},
                                         Machine{"cuda", "sm_90", Vendor::kNvidia});
INSTANTIATE_TEST_SUITE_P(Vendors, FallBackTest, kMachines, NameOf);
INSTANTIATE_TEST_SUITE_P(Vendors, PrefillFallBackTest, kMachines, NameOf);

}  // namespace
}  // namespace mla::kernels::hip
