// Tests the products of rows with W_UQ and W_O against sums in fp64, on the reference backend and
// on every CPU level.
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/reference/reference_backend.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::Bf16;
using kernels::DType;
using kernels::ProjectedPart;
using kernels::RopeLayout;
using kernels::RowProjectionRecord;

// No dim is a multiple of a panel, of a level's k_align, or of the depth of converted operands.
constexpr kernels::Geometry kGeometry{3, 16, 10, 23, 20};
constexpr kernels::ProjectedShape kShape{701, 151};
constexpr int32_t kQueryDim = 33;  // nope_dim + rope_dim
constexpr int32_t kSlots = 2;
// Rows of each record, and its weights slot. Those of slot 0 are more than the rows of a block.
constexpr int32_t kRows[] = {1, 130, 3, 2};
constexpr int32_t kSlotOf[] = {0, 0, 0, 1};

struct Subject {
  std::string name;
  std::unique_ptr<AttentionBackend> backend;
};

kernels::BackendLimits Limits() {
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = 1 << 20;
  limits.page_table_entries = 16;
  limits.weights_bytes = 1 << 20;
  limits.weights_slots = kSlots;
  limits.launch_slots = 1;
  limits.launch_requests = 8;
  limits.launch_rows = 256;
  limits.launch_packed_rows = 1024;
  limits.partial_rows = 64;
  limits.max_o_dim = 64;
  limits.slot_workspace_bytes = 1 << 20;
  limits.work_items = 64;
  limits.reduce_tiles = 16;
  limits.reduce_partials = 64;
  limits.max_top_k = 1;
  limits.max_geometry = kGeometry;
  return limits;
}

void AddLevel(const kernels::cpu::KernelSet& level, int32_t threads,
              std::vector<Subject>* subjects) {
  kernels::BackendOptions options;
  options.threads = threads;
  options.pin_threads = false;
  options.spin_us = 0;
  auto made = kernels::CpuBackend::CreateWith(level, options);
  ASSERT_TRUE(made.ok());
  subjects->push_back({level.name, *std::move(made)});
}

std::vector<Subject> Subjects() {
  std::vector<Subject> subjects;
  subjects.push_back({"reference", std::make_unique<kernels::ReferenceBackend>()});
  int32_t threads = 1;
  for (const kernels::cpu::KernelSet* level : kernels::cpu::UsableLevels()) {
    AddLevel(*level, threads = threads % 3 + 1, &subjects);
  }
  AddLevel(kernels::cpu::kEmulatedAmxKernels, 2, &subjects);
  AddLevel(kernels::cpu::kEmulatedAvx512Bf16Kernels, 1, &subjects);
  for (Subject& subject : subjects) EXPECT_TRUE(subject.backend->Configure(Limits()).ok());
  return subjects;
}

std::vector<Bf16> Random(size_t count, std::mt19937_64* random) {
  std::uniform_real_distribution<float> value(-1.0f, 1.0f);
  std::vector<Bf16> values(count);
  for (Bf16& v : values) v = kernels::ToBf16(value(*random));
  return values;
}

// The weights of both slots and the rows of all records, with their results in fp64.
class Workload {
 public:
  Workload(ProjectedPart part, DType dtype) : part_(part), dtype_(dtype) {
    std::mt19937_64 random(static_cast<uint64_t>(part) + 7);
    const size_t head = static_cast<size_t>(columns_of_head()) * depth_of_head();
    for (auto& slot : weights_) {
      for (int32_t h = 0; h < kGeometry.num_heads; ++h) slot.push_back(Random(head, &random));
    }
    for (const int32_t rows : kRows) rows_ += rows;
    in_ = Random(static_cast<size_t>(rows_) * in_dim(), &random);
    for (const Bf16 v : in_) wide_in_.push_back(kernels::ToFloat(v));
    std::uniform_real_distribution<float> angle(0.0f, 6.28f);
    for (int32_t row = 0; row < rows_; ++row) {
      std::vector<float> sines;
      for (int32_t pair = 0; pair < kGeometry.rope_dim / 2; ++pair) {
        const float a = angle(random);
        rotations_.push_back(std::cos(a));
        sines.push_back(std::sin(a));
      }
      rotations_.insert(rotations_.end(), sines.begin(), sines.end());
    }
  }

  // Runs the products and returns the largest error, relative to the largest result.
  double Run(AttentionBackend& backend, RopeLayout rope) {
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      for (int32_t h = 0; h < kGeometry.num_heads; ++h) {
        EXPECT_TRUE(backend
                        .LoadProjected(slot, kGeometry, kShape, part_, h,
                                       weights_[slot][static_cast<size_t>(h)].data())
                        .ok());
      }
    }
    std::vector<float> out(static_cast<size_t>(rows_) * out_dim(), std::nanf(""));
    std::vector<Bf16> narrow_out(out.size());
    std::vector<RowProjectionRecord> records;
    int64_t row = 0;
    for (size_t i = 0; i < std::size(kRows); row += kRows[i++]) {
      RowProjectionRecord r{};
      const int64_t in = row * in_dim(), to = row * out_dim();
      r.in = dtype_ == DType::kF32 ? static_cast<const void*>(&wide_in_[in]) : &in_[in];
      r.out = dtype_ == DType::kF32 ? static_cast<void*>(&out[to]) : &narrow_out[to];
      r.in_row_stride = in_dim();
      r.out_row_stride = out_dim();
      r.rows = kRows[i];
      r.weights_slot = kSlotOf[i];
      r.rotations = queries() ? &rotations_[row * kGeometry.rope_dim] : nullptr;
      records.push_back(r);
    }
    kernels::Launch launch;
    (queries() ? launch.queries : launch.hiddens) = {kGeometry, rope, dtype_, dtype_, records};
    EXPECT_TRUE(backend.Submit(0, launch).ok());
    EXPECT_TRUE(backend.Wait(0).ok());
    if (dtype_ == DType::kBf16) {
      for (size_t i = 0; i < out.size(); ++i) out[i] = kernels::ToFloat(narrow_out[i]);
    }
    return Compare(out, rope);
  }

 private:
  bool queries() const { return part_ == ProjectedPart::kQueries; }
  int32_t in_dim() const {
    return queries() ? kShape.q_lora_rank : kGeometry.num_heads * kGeometry.v_dim;
  }
  int32_t out_dim() const {
    return queries() ? kGeometry.num_heads * kQueryDim : kShape.hidden_size;
  }
  int32_t columns_of_head() const { return queries() ? kQueryDim : kShape.hidden_size; }
  int32_t depth_of_head() const { return queries() ? kShape.q_lora_rank : kGeometry.v_dim; }

  std::vector<double> Expected(int32_t row, int32_t slot, RopeLayout rope) const {
    std::vector<double> result(static_cast<size_t>(out_dim()), 0.0);
    const float* const in = &wide_in_[static_cast<size_t>(row) * in_dim()];
    for (int32_t h = 0; h < kGeometry.num_heads; ++h) {
      const Bf16* const w = weights_[slot][static_cast<size_t>(h)].data();
      double* const out = result.data() + (queries() ? h * kQueryDim : 0);
      for (int32_t n = 0; n < columns_of_head(); ++n) {
        for (int32_t k = 0; k < depth_of_head(); ++k) {
          out[n] += double{in[queries() ? k : h * kGeometry.v_dim + k]} *
                    kernels::ToFloat(w[n * depth_of_head() + k]);
        }
      }
      if (!queries()) continue;
      constexpr int32_t kPairs = kGeometry.rope_dim / 2;
      for (int32_t pair = 0; pair < kPairs; ++pair) {
        const bool halves = rope == RopeLayout::kHalves;
        const int32_t first = kGeometry.nope_dim + (halves ? pair : 2 * pair);
        const int32_t second = first + (halves ? kPairs : 1);
        const float* const rotation = &rotations_[static_cast<size_t>(row) * kGeometry.rope_dim];
        const double x = out[first], y = out[second];
        out[first] = x * rotation[pair] - y * rotation[kPairs + pair];
        out[second] = x * rotation[kPairs + pair] + y * rotation[pair];
      }
    }
    return result;
  }

  double Compare(const std::vector<float>& out, RopeLayout rope) const {
    double most = 0.0, worst = 0.0;
    int32_t row = 0;
    for (size_t i = 0; i < std::size(kRows); ++i) {
      for (int32_t r = 0; r < kRows[i]; ++r, ++row) {
        const std::vector<double> expected = Expected(row, kSlotOf[i], rope);
        for (int32_t n = 0; n < out_dim(); ++n) {
          const double got = out[static_cast<size_t>(row) * out_dim() + n];
          if (std::isnan(got)) return got;
          most = std::max(most, std::abs(expected[n]));
          worst = std::max(worst, std::abs(expected[n] - got));
        }
      }
    }
    return worst / most;
  }

  const ProjectedPart part_;
  const DType dtype_;
  std::vector<std::vector<Bf16>> weights_[kSlots];
  int32_t rows_ = 0;
  std::vector<Bf16> in_;
  std::vector<float> wide_in_, rotations_;
};

TEST(ProjectedTest, AgreesWithSumsInFp64) {
  std::vector<Subject> subjects = Subjects();
  ASSERT_GT(subjects.size(), 3u);
  for (Subject& subject : subjects) {
    ASSERT_TRUE(subject.backend->Info().projects) << subject.name;
    for (const DType dtype : {DType::kBf16, DType::kF32}) {
      // Half a unit in the last place of bf16; at bf16 levels fp32 rows keep 16 bits.
      const double bound = dtype == DType::kBf16 ? 0x1p-8 : 0x1p-15;
      for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
        Workload workload(part, dtype);
        for (const RopeLayout rope : {RopeLayout::kInterleaved, RopeLayout::kHalves}) {
          const double error = workload.Run(*subject.backend, rope);
          EXPECT_LE(error, bound) << subject.name << " part " << static_cast<int>(part)
                                  << " layout " << static_cast<int>(rope);
        }
      }
    }
  }
}

TEST(ProjectedTest, WeightsAreChargedAndNeededWhole) {
  std::vector<Subject> subjects;
  AddLevel(*kernels::cpu::UsableLevels().front(), 1, &subjects);
  AttentionBackend& backend = *subjects[0].backend;
  kernels::BackendLimits limits = Limits();
  limits.weights_bytes = kGeometry.num_heads * kQueryDim * kShape.q_lora_rank * 2;
  ASSERT_TRUE(backend.Configure(limits).ok());
  const std::vector<Bf16> head(static_cast<size_t>(kQueryDim) * kShape.q_lora_rank);
  const auto load = [&](ProjectedPart part, int32_t h) {
    return backend.LoadProjected(0, kGeometry, kShape, part, h, head.data()).code();
  };
  std::vector<float> rows(static_cast<size_t>(kShape.q_lora_rank));
  std::vector<float> out(static_cast<size_t>(kGeometry.num_heads) * kQueryDim);
  const std::vector<float> rotations(kGeometry.rope_dim);
  const RowProjectionRecord record{rows.data(), out.data(), 0, 0, 1, 0, rotations.data()};
  kernels::Launch launch;
  launch.queries = {kGeometry, RopeLayout::kHalves, DType::kF32, DType::kF32, {&record, 1}};
  for (int32_t h = 0; h < kGeometry.num_heads; ++h) {
    EXPECT_EQ(backend.Submit(0, launch).code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(load(ProjectedPart::kQueries, h), absl::StatusCode::kOk);
    EXPECT_EQ(load(ProjectedPart::kQueries, h), absl::StatusCode::kOk);  // again, at no charge
  }
  ASSERT_TRUE(backend.Submit(0, launch).ok());
  EXPECT_TRUE(backend.Wait(0).ok());
  EXPECT_EQ(load(ProjectedPart::kOutputs, 0), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(load(ProjectedPart::kQueries, kGeometry.num_heads), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(backend.FreeWeights(0).ok());
  EXPECT_EQ(load(ProjectedPart::kOutputs, 0), absl::StatusCode::kOk);
  EXPECT_EQ(backend.Submit(0, launch).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace mla::conformance
