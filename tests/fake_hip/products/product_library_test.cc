// Tests products of PROJECTED by the vendor's library: hipBLASLt and cuBLASLt, both fakes that
// multiply. Launches must give right results with the library, and without it wherever it is
// absent, refuses or fails.
#include "kernels/hip/products/product_library.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/args/row_args.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/projected_weights.h"
#include "tests/conformance/projected/projected_workload.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using conformance::ProjectedCase;
using conformance::ProjectedWorkload;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr Geometry kGeometry{2, 512, 8, 24, 32};
constexpr ProjectedShape kShape{128, 96};

int64_t packed_rows = 0;  // launches of mla_pack_rows
void CountPacked(const char* kernel) {
  if (std::string_view(kernel) == kPackRowsKernel) ++packed_rows;
}

class ProductLibraryTest : public BackendOnFakeTest,
                           public ::testing::WithParamInterface<const ArchTraits*> {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    control_->arch = GetParam()->arch.data();
  }
  void TearDown() override {
    backend_.reset();
    EXPECT_EQ(control_->product_objects, 0);
    BackendOnFakeTest::TearDown();
  }
  bool nvidia() const { return GetParam() == &kSm90Traits; }
  HipBackendOptions WithLibrary() {
    HipBackendOptions options = Options();
    options.vendor = nvidia() ? Vendor::kNvidia : Vendor::kAmd;
    options.images.push_back(Image("sm_90", kImage90));
    options.watchdog_ms = 600000;
    options.graphs = GraphUse::kOn;
    options.product_library = true;
    options.product_libraries = {kLibrary};
    options.on_note = [this](std::string_view name, std::string_view text) {
      notes_.push_back(std::string(name) + ": " + std::string(text));
    };
    return options;
  }
  // Makes a backend and returns its note on the library.
  std::string Make(const HipBackendOptions& options) {
    backend_.reset();
    auto made = HipBackend::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    if (!made.ok()) return "";
    backend_ = *std::move(made);
    for (const BackendNote& note : backend_->Info().notes) {
      if (note.name == "product_library") return note.text;
    }
    return "no note";
  }
  static ProjectedCase Case(int32_t rows, ProjectedPart part = ProjectedPart::kOutputs) {
    ProjectedCase c{kGeometry, kShape, {{rows, 0}}};
    c.part = part;
    return c;
  }
  // Configures the backend for a case, loads its weights, and runs it.
  absl::Status Run(const ProjectedCase& c) {
    absl::Status s = backend_->Configure(conformance::ProjectedLimits({&c, 1}));
    ProjectedWorkload workload(c);
    if (s.ok()) s = workload.LoadWeights(*backend_);
    return s.ok() ? workload.Check(*backend_) : s;
  }

  std::unique_ptr<HipBackend> backend_;
  std::vector<std::string> notes_;
};

TEST_P(ProductLibraryTest, AgreesWithSumsInFp64) {
  const std::vector<ProjectedCase> cases = conformance::ProjectedCases();
  EXPECT_EQ(Make(WithLibrary()), std::string(kLibrary) +
                                     (nvidia() ? ", version 130100" : ", version 100202") +
                                     ", from 65 rows of PROJECTED on");
  ASSERT_TRUE(backend_->Configure(conformance::ProjectedLimits(cases)).ok());
  for (const ProjectedCase& c : cases) {
    ProjectedWorkload workload(c);
    absl::Status s = workload.LoadWeights(*backend_);
    if (s.ok()) s = workload.Check(*backend_);
    EXPECT_TRUE(s.ok()) << ToString(c) << ": " << s;
  }
  EXPECT_GT(control_->products, 20);
  EXPECT_THAT(notes_, ::testing::IsEmpty());
}

TEST_P(ProductLibraryTest, FewRowsAndRowsOfFp32AreLeftToTheKernels) {
  for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
    for (const int32_t rows : {kLibraryRows - 1, kLibraryRows, kRowProductMany}) {
      Make(WithLibrary());
      const int64_t before = control_->products;
      const absl::Status s = Run(Case(rows, part));
      EXPECT_TRUE(s.ok()) << s;
      // The case loads the weights of one product; one more is the trial of it, and one of the
      // other product if its weights were loaded too.
      const int64_t trials = control_->product_choices;
      EXPECT_EQ(control_->products - before, trials + (rows >= kLibraryRows ? 1 : 0)) << rows;
      control_->product_choices = 0;
    }
    ProjectedCase wide = Case(kRowProductMany, part);
    wide.dtype = DType::kF32;
    Make(WithLibrary());
    const int64_t before = control_->products;
    EXPECT_TRUE(Run(wide).ok());
    EXPECT_EQ(control_->products - before, control_->product_choices);
    control_->product_choices = 0;
  }
}

// Weights of e4m3 have the dims of a shape that the library multiplies.
TEST_P(ProductLibraryTest, WeightsOfCodesAreLeftToTheKernels) {
  std::vector<ProjectedCase> cases(2, Case(kRowProductMany));
  for (ProjectedCase& c : cases) c.geometry.v_dim = kScaledValueStep;
  cases[1].shape.weights = DType::kFp8E4m3;
  Make(WithLibrary());
  ASSERT_TRUE(backend_->Configure(conformance::ProjectedLimits(cases)).ok());
  for (const ProjectedCase& c : cases) {
    const int64_t before = control_->products;
    ProjectedWorkload workload(c);
    absl::Status s = workload.LoadWeights(*backend_);
    if (s.ok()) s = workload.Check(*backend_);
    EXPECT_TRUE(s.ok()) << s;
    EXPECT_EQ(control_->products > before, !c.shape.codes());
  }
}

// Whole rows are multiplied where they lie; others are gathered first.
TEST_P(ProductLibraryTest, GathersRowsOnlyIfTheyAreNotWhole) {
  control_->on_launch = CountPacked;
  for (const auto& [clients, gathers] :
       std::vector<std::pair<std::vector<conformance::ProjectedRows>, int64_t>>{
           {{{kRowProductMany, 0}}, 0}, {{{kRowProductMany - 1, 0}}, 1}, {{{65, 0}, {40, 0}}, 1}}) {
    ProjectedCase c = Case(1);
    c.clients = clients;
    Make(WithLibrary());
    packed_rows = 0;
    EXPECT_TRUE(Run(c).ok());
    EXPECT_EQ(packed_rows, gathers);
  }
}

// Each product divides the sequence of kernels, whose parts are graphs.
TEST_P(ProductLibraryTest, LaunchesRepeatAsGraphsAndAllocateNothing) {
  const ProjectedCase c = Case(kRowProductMany - 1);
  Make(WithLibrary());
  ASSERT_TRUE(Run(c).ok());
  ProjectedWorkload workload(c);
  const int64_t allocations = control_->allocations, choices = control_->product_choices;
  const int64_t graphs = control_->graph_launches, products = control_->products;
  for (int i = 0; i < 5; ++i) {
    const absl::Status s = workload.Check(*backend_);
    EXPECT_TRUE(s.ok()) << s;
  }
  EXPECT_EQ(control_->allocations, allocations);
  EXPECT_EQ(control_->product_choices, choices);
  EXPECT_EQ(control_->products, products + 5);
  EXPECT_GE(control_->graph_launches, graphs + 4);
}

TEST_P(ProductLibraryTest, TheSelfTestReachesIt) {
  HipBackendOptions options = WithLibrary();
  options.self_test = true;
  options.self_test_options.parts = {"products"};
  EXPECT_THAT(Make(options), StartsWith(kLibrary));
  EXPECT_EQ(control_->products, 4);  // a trial and a launch for each of two weights
  control_->wrong_products = true;
  EXPECT_THAT(Make(options), ::testing::AllOf(StartsWith("off: "), HasSubstr("(part products)")));
  EXPECT_EQ(backend_->products(), nullptr);
  const int64_t before = control_->products;
  EXPECT_TRUE(Run(Case(kRowProductMany)).ok());
  EXPECT_EQ(control_->products, before);
}

TEST_P(ProductLibraryTest, TheSelfTestReachesItWhateverTheFewestRows) {
  constexpr int32_t kFewest = 100;  // the self-test has products of fewer rows
  ASSERT_GT(kFewest, kSelfTestProductRows);
  HipBackendOptions options = WithLibrary();
  options.self_test = true;
  options.self_test_options.parts = {"products"};
  options.library_rows = kFewest;
  EXPECT_THAT(Make(options), EndsWith(", from 100 rows of PROJECTED on"));
  EXPECT_EQ(control_->products, 4);
  for (const int32_t rows : {kFewest - 1, kFewest}) {
    Make(options);
    const int64_t before = control_->products;
    control_->product_choices = 0;
    const absl::Status s = Run(Case(rows));
    EXPECT_TRUE(s.ok()) << s;
    EXPECT_EQ(control_->products - before, control_->product_choices + (rows >= kFewest ? 1 : 0));
  }
}

TEST_P(ProductLibraryTest, ALibraryThatFindsNothingInTheSelfTestIsOff) {
  HipBackendOptions options = WithLibrary();
  options.self_test = true;
  options.self_test_options.parts = {"products"};
  control_->finds_products = false;
  EXPECT_THAT(Make(options), HasSubstr("off: the library multiplied 0 times, want 4"));
}

TEST_P(ProductLibraryTest, IsOffUnlessAskedFor) {
  HipBackendOptions options = WithLibrary();
  options.product_library = false;
  EXPECT_EQ(Make(options), "off: gpu.product_library");
  EXPECT_TRUE(Run(Case(kRowProductMany)).ok());
  EXPECT_EQ(control_->products, 0);
}

TEST_P(ProductLibraryTest, AbsentAndOldLibrariesLeaveItOff) {
  HipBackendOptions options = WithLibrary();
  const std::string library = nvidia() ? "cuBLASLt" : "hipBLASLt";
  const std::string prefix = nvidia() ? "cublasLt" : "hipblasLt";
  options.product_libraries = {"libnone_such.so.7"};
  EXPECT_THAT(Make(options), StartsWith("off: no " + library + ": libnone_such.so.7: "));
  options.product_libraries = {"libm.so.6"};  // has none of the entry points
  EXPECT_EQ(Make(options), "off: libm.so.6 has no entry point " + prefix + "Create");
  options.product_libraries = {kLibrary};
  control_->FailOnce("hipblasLtCreate", 0, 3);
  EXPECT_EQ(Make(options), "off: " + library + ": create failed with status 3");
  EXPECT_TRUE(Run(Case(kRowProductMany)).ok());
  EXPECT_EQ(control_->products, 0);
}

// Weights that the library cannot multiply by, for any reason, are left to the kernels. The reason
// is noted once a shape.
TEST_P(ProductLibraryTest, RefusedShapesAreLeftToTheKernels) {
  ProjectedCase c = Case(1);
  c.clients = {{kRowProductMany, 0}, {kRowProductMany, 1}};
  const auto refused = [&] {
    notes_.clear();
    control_->products = 0;
    const absl::Status s = Run(c);
    EXPECT_TRUE(s.ok()) << s;
    EXPECT_EQ(control_->products, 0);
    std::vector<std::string> notes = notes_;
    return notes.size() == 1 ? notes[0] : "notes: " + std::to_string(notes.size());
  };
  Make(WithLibrary());
  control_->finds_products = false;
  EXPECT_THAT(refused(), HasSubstr("product_library: kernels multiply by weights slot 0: "));
  Make(WithLibrary());
  EXPECT_THAT(refused(), HasSubstr("LASLt has no algorithm for 128 rows, 96 columns, depth 64"));
  control_->finds_products = true;
  Make(WithLibrary());
  control_->product_workspace = ProductLibrary::kWorkspaceBytes + 1;
  EXPECT_THAT(refused(), HasSubstr("and 33554432 bytes of workspace"));
  control_->product_workspace = 1;
  for (const char* call : {"hipblasLtMatmulDescCreate", "hipblasLtMatmulDescSetAttribute",
                           "hipblasLtMatrixLayoutCreate", "hipblasLtMatmulPreferenceCreate",
                           "hipblasLtMatmulPreferenceSetAttribute",
                           "hipblasLtMatmulAlgoGetHeuristic", "hipblasLtMatmul"}) {
    Make(WithLibrary());
    control_->FailOnce(call, 0, 7);
    EXPECT_THAT(refused(), HasSubstr("failed with status 7")) << call;
  }
}

// A product that is refused in a launch ends that launch alone.
TEST_P(ProductLibraryTest, AProductThatFailsInALaunchFailsTheLaunch) {
  const ProjectedCase c = Case(kRowProductMany);
  Make(WithLibrary());
  ASSERT_TRUE(Run(c).ok());
  ProjectedWorkload workload(c);
  control_->FailOnce("hipblasLtMatmul", 0, 13);
  const absl::Status s = workload.Check(*backend_);
  EXPECT_EQ(s.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(s.message(), HasSubstr("LASLt: a matrix product failed with status 13"));
  EXPECT_TRUE(backend_->Healthy().ok());
  EXPECT_TRUE(workload.Check(*backend_).ok());
}

// The shape that was used least recently makes room for another.
TEST_P(ProductLibraryTest, RemembersSoManyShapes) {
  const std::vector<std::string> names = {kLibrary};
  auto runtime = GpuRuntime::Open(nvidia() ? Vendor::kNvidia : Vendor::kAmd, 0, names).value();
  {
    auto library = ProductLibrary::Open(runtime.get(), names).value();
    const Stream stream = runtime->CreateStream().value();
    constexpr int64_t kBytes = 1 << 16;
    auto operands = DeviceBuffer::Create(runtime.get(), "operands", kBytes).value();
    auto workspace =
        DeviceBuffer::Create(runtime.get(), "workspace", ProductLibrary::kWorkspaceBytes).value();
    const LibraryProduct trial{.library = library.get(),
                               .plan = nullptr,
                               .weights = operands.at(),
                               .rows = operands.at(),
                               .sums = operands.at() + kBytes / 2,
                               .workspace = workspace.at()};
    const auto shape = [](size_t i) { return ProductShape{2, static_cast<int32_t>(i) + 1, 8, 80}; };
    for (size_t i = 0; i < ProductLibrary::kMostPlans; ++i) {
      ASSERT_TRUE(library->Choose(shape(i), trial, stream).ok());
    }
    const int64_t objects = control_->product_objects;
    EXPECT_NE(library->Find(shape(0)), nullptr);
    ASSERT_TRUE(library->Choose(shape(ProductLibrary::kMostPlans), trial, stream).ok());
    EXPECT_NE(library->Find(shape(ProductLibrary::kMostPlans)), nullptr);
    EXPECT_NE(library->Find(shape(0)), nullptr);
    EXPECT_EQ(library->Find(shape(1)), nullptr);
    EXPECT_EQ(control_->product_objects, objects);
    runtime->Destroy(stream);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, ProductLibraryTest,
                         ::testing::Values(&kGfx950Traits, &kGfx942Traits, &kSm90Traits),
                         [](const auto& arch) { return std::string(arch.param->arch); });

}  // namespace
}  // namespace mla::kernels::hip
