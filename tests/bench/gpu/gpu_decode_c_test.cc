// Tests the C entry points on the fake runtimes of both vendors, as another process's harness calls
// them, and the flags of the benchmarks.
#include "tests/bench/gpu/gpu_decode_c.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/formats/dtype.h"
#include "tests/bench/gpu/gpu_programs.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::bench {
namespace {

using kernels::Bf16;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Harnesses of other libraries load these functions by name and exact signature.
static_assert(std::is_same_v<decltype(&mla_decode),
                             int (*)(const void*, const void*, const int*, const int*, void*,
                                     float*, int, int, int, int, int, float, void*)>);
static_assert(std::is_same_v<decltype(&mla_decode_plan), int (*)(const int*, int, int, int)>);

constexpr int kRowDim = 576;
constexpr int kPage = 16;

std::vector<Bf16> Values(size_t count, uint32_t seed) {
  std::vector<Bf16> values(count);
  for (Bf16& v : values) {
    seed = seed * 1664525u + 1013904223u;
    v = kernels::ToBf16(static_cast<float>(seed >> 8) / 16777216.0f - 0.5f);
  }
  return values;
}

// Three sequences whose blocks are out of order; memory of the fake device is host memory.
struct Problem {
  explicit Problem(int heads) : heads(heads) {
    q = Values(size_t{3} * heads * kRowDim, 1);
    kv = Values(size_t{kBlocks} * kPage * kRowDim, 2);
    out.assign(size_t{3} * heads * 512, kernels::ToBf16(NAN));
    lse.assign(size_t{3} * heads, NAN);
  }
  int Plan() const { return mla_decode_plan(lengths.data(), 3, heads, kPage); }
  int Decode() {
    // The device's copy of the lengths is not read.
    return mla_decode(q.data(), kv.data(), table.data(), nullptr, out.data(), lse.data(), 3, heads,
                      kMaxBlocks, kBlocks, kPage, kScale, stream);
  }
  double Worst() const {
    double worst = 0;
    for (int b = 0; b < 3; ++b) {
      for (int h = 0; h < heads; ++h) worst = std::max(worst, WorstOf(b, h));
    }
    return worst;
  }
  double WorstOf(int b, int h) const {
    const Bf16* of_q = &q[(size_t(b) * heads + h) * kRowDim];
    std::vector<double> sum(512, 0.0);
    double total = 0;
    for (int i = 0; i < lengths[b]; ++i) {
      const Bf16* row =
          &kv[(size_t(table[b * kMaxBlocks + i / kPage]) * kPage + i % kPage) * kRowDim];
      double dot = 0;
      for (int d = 0; d < kRowDim; ++d) {
        dot += double{kernels::ToFloat(of_q[d])} * kernels::ToFloat(row[d]);
      }
      const double weight = std::exp(dot * kScale);
      total += weight;
      for (int d = 0; d < 512; ++d) sum[d] += weight * kernels::ToFloat(row[d]);
    }
    const size_t packed = size_t(b) * heads + h;
    double worst = std::abs(lse[packed] - std::log(total));
    for (int d = 0; d < 512; ++d) {
      const double off = std::abs(kernels::ToFloat(out[packed * 512 + d]) - sum[d] / total);
      worst = std::isnan(off) ? INFINITY : std::max(worst, off);
    }
    return worst;
  }

  static constexpr int kBlocks = 40, kMaxBlocks = 16;
  static constexpr float kScale = 0.07f;
  int heads;
  std::vector<int> lengths = {1, 200, 37};
  std::vector<int> table = [] {
    std::vector<int> t(size_t{3} * kMaxBlocks);
    for (size_t i = 0; i < t.size(); ++i) t[i] = static_cast<int>(i * 7 % kBlocks);
    return t;
  }();
  std::vector<Bf16> q, kv, out;
  std::vector<float> lse;
  void* stream = nullptr;
};

// The library opens its GPU once a process, so each run of the test program has one: the CUDA
// driver here.
class DecodeCTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    control_ = kernels::hip::FakeControl();
    ASSERT_NE(control_, nullptr);
    control_->arch = "sm_90";
    DecodeOptions().libraries = {kernels::hip::kLibrary};
    DecodeOptions().images = {kernels::hip::Image("sm_90", kernels::hip::kImage90)};
    DecodeOptions().self_test = false;  // its tests are in tests/fake_hip
    kernels::hip::HipBackendOptions options = DecodeOptions();
    options.vendor = kernels::hip::Vendor::kNvidia;
    auto runtime = kernels::hip::GpuRuntime::Open(options.vendor, 0, options.libraries);
    ASSERT_TRUE(runtime.ok()) << runtime.status();
    runtime_ = runtime->release();
    auto stream = runtime_->CreateStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *stream;
  }
  static void TearDownTestSuite() {
    runtime_->Destroy(stream_);
    delete runtime_;
  }
  void SetUp() override { problem_.stream = stream_; }
  // The call only launches, so the test waits for the kernels here.
  static void Synchronize() { ASSERT_TRUE(runtime_->Synchronize(stream_).ok()); }
  std::string Refused(int code) {
    EXPECT_EQ(code, 1);
    return ::testing::internal::GetCapturedStderr();
  }

  static fake_hip::Control* control_;
  static kernels::hip::GpuRuntime* runtime_;
  static kernels::hip::Stream stream_;
  Problem problem_{16};
};
fake_hip::Control* DecodeCTest::control_ = nullptr;
kernels::hip::GpuRuntime* DecodeCTest::runtime_ = nullptr;
kernels::hip::Stream DecodeCTest::stream_ = nullptr;

TEST_F(DecodeCTest, EqualsDenseAttention) {
  for (const int heads : {16, 5, 128}) {
    Problem problem(heads);
    problem.stream = stream_;
    ASSERT_EQ(problem.Plan(), 0);
    ASSERT_EQ(problem.Decode(), 0);
    Synchronize();
    EXPECT_LT(problem.Worst(), 4e-3) << heads;
  }
}

TEST_F(DecodeCTest, FollowsItsPointersFromCallToCall) {
  ASSERT_EQ(problem_.Plan(), 0);
  ASSERT_EQ(problem_.Decode(), 0);
  Synchronize();
  const int64_t copies = control_->copies_in;
  ASSERT_EQ(problem_.Decode(), 0);
  EXPECT_EQ(control_->copies_in, copies) << "nothing is uploaded again";
  Synchronize();
  // Different queries and a different output address.
  const std::vector<Bf16> before = problem_.out;
  problem_.q = Values(problem_.q.size(), 9);
  std::vector<Bf16> elsewhere(problem_.out.size());
  problem_.out.swap(elsewhere);
  ASSERT_EQ(problem_.Decode(), 0);
  Synchronize();
  EXPECT_LT(problem_.Worst(), 4e-3);
  EXPECT_EQ(elsewhere, before);
}

TEST_F(DecodeCTest, RefusesWhatWasNotPlanned) {
  ASSERT_EQ(problem_.Plan(), 0);
  ::testing::internal::CaptureStderr();
  int code =
      mla_decode(problem_.q.data(), problem_.kv.data(), problem_.table.data(), nullptr,
                 problem_.out.data(), problem_.lse.data(), 2, 16, 16, 40, kPage, 1.0f, stream_);
  EXPECT_THAT(Refused(code), HasSubstr("batch 2, heads 16, page 16; planned: 3, 16, 16"));
  ::testing::internal::CaptureStderr();
  code = mla_decode(nullptr, problem_.kv.data(), problem_.table.data(), nullptr,
                    problem_.out.data(), problem_.lse.data(), 3, 16, 16, 40, kPage, 1.0f, stream_);
  EXPECT_THAT(Refused(code), HasSubstr("got null"));
  const int negative[] = {1, -2, 3};
  for (const auto& [lengths, batch, heads, page, text] :
       {std::tuple((const int*)nullptr, 3, 16, 16, "host_lengths: got null"),
        std::tuple(negative, 3, 16, 16, "host_lengths[1]: got -2"),
        std::tuple(negative, 0, 16, 16, "batch: got 0, must be 1..100000"),
        std::tuple(negative, 3, 0, 16, "heads: got 0"),
        std::tuple(negative, 3, 16, 0, "page: got 0")}) {
    ::testing::internal::CaptureStderr();
    code = mla_decode_plan(lengths, batch, heads, page);
    EXPECT_THAT(Refused(code), HasSubstr(text));
  }
  // A refused plan leaves no plan.
  ::testing::internal::CaptureStderr();
  code = problem_.Decode();
  EXPECT_THAT(Refused(code), HasSubstr("mla_decode_plan comes first"));
}

TEST_F(DecodeCTest, ReportsTheApisErrorsAndGoesOn) {
  ASSERT_EQ(problem_.Plan(), 0);
  control_->FailOnce("hipModuleLaunchKernel");
  ::testing::internal::CaptureStderr();
  const int code = problem_.Decode();
  EXPECT_THAT(Refused(code), HasSubstr("GPU launch: invalid argument (1)"));
  ASSERT_EQ(problem_.Decode(), 0);
  Synchronize();
  EXPECT_LT(problem_.Worst(), 4e-3);
}

TEST(GpuFlags, AreReadByType) {
  int32_t count = 1;
  int64_t bytes = 2;
  double share = 3;
  bool on = false;
  std::string text;
  std::vector<int32_t> list = {9};
  const Flag flags[] = {{"--count", &count}, {"--bytes", &bytes}, {"--share", &share},
                        {"--on", &on},       {"--text", &text},   {"--list", &list}};
  const char* const good[] = {"--count", "7", "--bytes", "5000000000", "--share", "0.5",
                              "--on",    "1", "--text",  "a,b",        "--list",  "4,16"};
  ASSERT_TRUE(ReadFlags(good, flags).ok());
  EXPECT_EQ(count, 7);
  EXPECT_EQ(bytes, 5000000000);
  EXPECT_EQ(share, 0.5);
  EXPECT_TRUE(on);
  EXPECT_EQ(text, "a,b");
  EXPECT_THAT(list, ElementsAre(4, 16));
  for (const auto& [name, value] :
       {std::pair("--count", "x"), std::pair("--count", "-1"), std::pair("--count", "3000000000"),
        std::pair("--on", "yes"), std::pair("--list", "1,,2"), std::pair("--share", "")}) {
    const char* const bad[] = {name, value};
    EXPECT_THAT(ReadFlags(bad, flags).message(), HasSubstr(std::string(name) + ": got")) << value;
  }
  const char* const unknown[] = {"--size", "1"};
  EXPECT_EQ(ReadFlags(unknown, flags).message(), "unknown flag --size");
  const char* const last[] = {"--count"};
  EXPECT_EQ(ReadFlags(last, flags).message(), "--count needs a value");
}

TEST(AnyGpu, TakesTheVendorThatIsThere) {
  fake_hip::Control* const control = kernels::hip::FakeControl();
  ASSERT_NE(control, nullptr);
  kernels::hip::HipBackendOptions options;
  options.libraries = {kernels::hip::kLibrary};
  options.images = {kernels::hip::Image("gfx950", kernels::hip::kImage950),
                    kernels::hip::Image("sm_90", kernels::hip::kImage90)};
  options.self_test = false;
  for (const char* arch : {"gfx950", "sm_90"}) {
    control->arch = arch;
    const auto backend = AnyGpu(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_EQ((*backend)->Info().arch, arch);
  }
}

}  // namespace
}  // namespace mla::bench
