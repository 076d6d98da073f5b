#include "tests/conformance/projected/projected_workload.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/formats/fp8.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::Bf16;
using kernels::DType;
using kernels::ProjectedPart;
using kernels::RopeLayout;
using kernels::RowProjectionRecord;

constexpr std::byte kUntouched{0xa5};
constexpr double kMostProducts = 3e7;  // compared ones of a launch
constexpr int64_t kAlignment = 256;    // bytes, of tensors in shared memory

int64_t Align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// In [-1, 1), and exact in bf16.
float Drawn(uint64_t index) {
  uint64_t x = index * 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  return static_cast<float>(static_cast<int32_t>(x >> 40 & 0xff) - 128) / 128.0f;
}

// Returns any code except NaN and -0.
uint8_t DrawnCode(uint64_t index) {
  const auto code = static_cast<uint8_t>(static_cast<int32_t>(Drawn(index) * 128.0f) & 0xff);
  return (code & 0x7f) > kernels::kFp8LargestCode || code == 0x80 ? 0 : code;
}

// Returns a scale that is not a power of two, or 0.
float DrawnScale(int32_t slot, int32_t head, int64_t block) {
  const auto number = static_cast<uint64_t>((int64_t{slot} * 1000 + head) * 100000 + block);
  return number % 13 == 5 ? 0.0f : (Drawn(number) + 1.5f) * 0.0033f;
}

void Store(DType dtype, float value, std::byte* to) {
  const Bf16 narrow = kernels::ToBf16(value);
  dtype == DType::kF32 ? std::memcpy(to, &value, 4) : std::memcpy(to, &narrow, 2);
}

float Load(DType dtype, const std::byte* from) {
  float wide;
  Bf16 narrow;
  if (dtype == DType::kF32) {
    std::memcpy(&wide, from, 4);
    return wide;
  }
  std::memcpy(&narrow, from, 2);
  return kernels::ToFloat(narrow);
}

void AddVariants(const ProjectedCase& base, std::vector<ProjectedCase>& cases) {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    ProjectedCase c = base;
    c.dtype = dtype;
    for (const RopeLayout rope : {RopeLayout::kInterleaved, RopeLayout::kHalves}) {
      c.rope = rope;
      cases.push_back(c);
    }
    c.part = ProjectedPart::kOutputs;
    cases.push_back(c);
  }
}

// Adds every third case again, with tensors in shared device memory.
void AddShared(std::vector<ProjectedCase>& cases) {
  const size_t count = cases.size();
  for (size_t i = 0; i < count; i += 3) {
    ProjectedCase c = cases[i];
    c.shared = true;
    c.in_gap = i % 2 == 0 ? 8 : 3;
    c.out_gap = i % 2 == 0 ? 4 : 1;
    cases.push_back(c);
  }
}

}  // namespace

std::string ToString(const ProjectedCase& c) {
  const kernels::Geometry& g = c.geometry;
  std::vector<std::string> clients;
  for (const ProjectedRows& r : c.clients) {
    clients.push_back(absl::StrCat(r.rows, ":", r.weights_slot));
  }
  return absl::StrCat(c.part == ProjectedPart::kQueries ? "queries" : "hiddens", " ",
                      kernels::Name(c.dtype), c.rope == RopeLayout::kHalves ? " halves" : "",
                      " heads ", g.num_heads, " nope ", g.nope_dim, " rope ", g.rope_dim, " v ",
                      g.v_dim, " q_lora ", c.shape.q_lora_rank, " hidden ", c.shape.hidden_size,
                      c.shape.codes() ? " e4m3" : "", " rows ", absl::StrJoin(clients, ","),
                      " gaps ", c.in_gap, ",", c.out_gap, c.shared ? " shared" : "");
}

std::vector<ProjectedCase> ProjectedCases() {
  std::vector<ProjectedCase> cases;
  const std::vector<ProjectedRows> many(9, {1, 0});
  std::vector<ProjectedRows> joined = many;
  joined.push_back({24, 0});
  // No dim is a multiple of a tile; the rows of slot 0 are more than a block's.
  AddVariants({{3, 16, 10, 23, 20}, {701, 151}, {{1, 0}, {130, 0}, {3, 0}, {2, 1}}}, cases);
  AddVariants({{1, 512, 64, 128, 128}, {1536, 256}, {{1, 0}}}, cases);
  AddVariants({{16, 512, 0, 24, 16}, {100, 300}, {{33, 0}}}, cases);
  AddVariants({{128, 512, 4, 8, 8}, {64, 256}, {{5, 0}, {28, 0}, {31, 1}}}, cases);
  AddVariants({{3, 512, 64, 128, 128}, {192, 7168}, {{32, 0}}}, cases);
  AddVariants({{2, 512, 64, 128, 128}, {1536, 512}, joined}, cases);
  AddVariants({{4, 512, 16, 32, 32}, {128, 128}, {{200, 1}}}, cases);
  AddVariants({{2, 512, 6, 7, 9}, {1, 1}, {{2, 0}, {1, 1}}}, cases);
  AddShared(cases);
  return cases;
}

std::vector<ProjectedCase> ProjectedCodeCases() {
  std::vector<ProjectedCase> cases;
  constexpr DType kCodes = DType::kFp8E4m3;
  // Scales of 16 rows of W_UQ, and of 64 columns of W_O; depths that are padded.
  AddVariants({{3, 16, 16, 32, 64}, {701, 151, kCodes}, {{1, 0}, {130, 0}, {3, 0}, {2, 1}}}, cases);
  AddVariants({{2, 512, 64, 128, 128}, {1536, 512, kCodes}, {{1, 0}, {8, 0}, {24, 0}}}, cases);
  AddVariants({{3, 512, 64, 128, 128}, {192, 1900, kCodes}, {{32, 0}}}, cases);
  AddVariants({{17, 512, 8, 8, 64}, {64, 256, kCodes}, {{5, 0}, {28, 0}, {31, 1}}}, cases);
  AddVariants({{4, 512, 16, 48, 192}, {130, 128, kCodes}, {{100, 1}}}, cases);
  AddShared(cases);
  return cases;
}

std::vector<ProjectedCase> ProjectedModelCases() {
  std::vector<ProjectedCase> cases = ProjectedCases();
  const std::vector<ProjectedCase> of_codes = ProjectedCodeCases();
  cases.insert(cases.end(), of_codes.begin(), of_codes.end());
  for (const int32_t rows : {1, 32, 128}) {
    for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
      ProjectedCase c{{128, 512, 64, 128, 128}, {1536, 7168}, {{1, 0}}};
      if (rows > 1) c.clients.push_back({rows - 1, 0});
      c.part = part;
      ProjectedCase lite = c;
      lite.geometry.num_heads = 16;
      lite.shape = {2048, 2048};
      lite.rope = RopeLayout::kHalves;
      for (const DType weights : {DType::kBf16, DType::kFp8E4m3}) {
        c.shape.weights = lite.shape.weights = weights;
        cases.push_back(c);
        cases.push_back(lite);
      }
    }
  }
  return cases;
}

kernels::BackendLimits ProjectedLimits(std::span<const ProjectedCase> cases) {
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = 1 << 20;
  limits.page_table_entries = 16;
  limits.weights_slots = kProjectedSlots;
  limits.launch_slots = 1;
  limits.launch_requests = 16;
  limits.launch_packed_rows = 4096;
  limits.partial_rows = 64;
  limits.max_o_dim = 64;
  limits.work_items = limits.reduce_partials = 64;
  limits.reduce_tiles = 16;
  limits.max_top_k = 1;
  for (const ProjectedCase& c : cases) {
    const kernels::Geometry& g = c.geometry;
    // Rows of weights may be padded by less than 64 elements.
    const int64_t in = int64_t{g.num_heads} * g.v_dim + c.shape.q_lora_rank + 64 + c.in_gap;
    const int64_t out = int64_t{g.num_heads} * g.expanded_q_dim() + c.shape.hidden_size + c.out_gap;
    int32_t rows = 0;
    for (const ProjectedRows& r : c.clients) rows += r.rows;
    limits.launch_rows = std::max(limits.launch_rows, rows);
    const int64_t weights =
        kProjectedSlots * 2 *
        (int64_t{g.num_heads} * g.expanded_q_dim() * (c.shape.q_lora_rank + 64) +
         c.shape.hidden_size * (int64_t{g.num_heads} * g.v_dim + 64));
    limits.weights_bytes = std::max(limits.weights_bytes, weights);
    const int64_t staged = 4 * rows * (in + out + g.rope_dim) + (1 << 16);
    for (int64_t* bytes :
         {&limits.staging_in_bytes, &limits.staging_out_bytes, &limits.slot_workspace_bytes}) {
      *bytes = std::max(*bytes, staged);
    }
    kernels::Geometry& most = limits.max_geometry;
    most = {std::max(most.num_heads, g.num_heads), std::max(most.kv_lora_rank, g.kv_lora_rank),
            std::max(most.rope_dim, g.rope_dim), std::max(most.nope_dim, g.nope_dim),
            std::max(most.v_dim, g.v_dim)};
  }
  return limits;
}

absl::StatusOr<int64_t> RunProjected(AttentionBackend& backend,
                                     std::span<const ProjectedCase> cases) {
  if (absl::Status s = backend.Configure(ProjectedLimits(cases)); !s.ok()) return s;
  int64_t failures = 0;
  for (const ProjectedCase& c : cases) {
    ProjectedWorkload workload(c);
    absl::Status s = workload.LoadWeights(backend);
    if (s.ok()) s = workload.Check(backend);
    if (s.ok()) continue;
    ++failures;
    std::printf("FAIL %s: %s\n", ToString(c).c_str(), std::string(s.message()).c_str());
  }
  std::printf("projected: %zu launches, %lld failures\n", cases.size(),
              static_cast<long long>(failures));
  return failures;
}

ProjectedWorkload::ProjectedWorkload(const ProjectedCase& c) : c_(c) {
  for (const ProjectedRows& r : c.clients) rows_ += r.rows;
  in_.resize(static_cast<size_t>(rows_ * in_pitch() * size()));
  out_.resize(static_cast<size_t>(rows_ * out_pitch() * size()), kUntouched);
  std::mt19937 random(11);
  std::uniform_real_distribution<float> value(-1.0f, 1.0f), angle(0.0f, 6.28f);
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t k = 0; k < depth(); ++k) {
      const float drawn = value(random);
      std::byte* const at = &in_[static_cast<size_t>((row * in_pitch() + k) * size())];
      Store(c.dtype, drawn, at);
      wide_in_.push_back(Load(c.dtype, at));
    }
    std::vector<float> sines;
    for (int32_t pair = 0; pair < c.geometry.rope_dim / 2; ++pair) {
      const float a = angle(random);
      rotations_.push_back(std::cos(a));
      sines.push_back(std::sin(a));
    }
    rotations_.insert(rotations_.end(), sines.begin(), sines.end());
  }
}

uint64_t ProjectedWorkload::FirstWeight(int32_t slot, int32_t head, int32_t column) const {
  const int64_t of_head = int64_t{columns_of_head()} * depth_of_head();
  return static_cast<uint64_t>((int64_t{slot} * heads() + head) * of_head +
                               int64_t{column} * depth_of_head() + 1);
}

float ProjectedWorkload::Weight(int32_t slot, int32_t head, int32_t column, int32_t k) const {
  const uint64_t index = FirstWeight(slot, head, column) + static_cast<uint64_t>(k);
  if (!c_.shape.codes()) return Drawn(index);
  const float scale = DrawnScale(slot, head, WindowOf(head).BlockOf(column, k));
  return kernels::ToFloat(kernels::WidenedWeight(DrawnCode(index), scale));
}

std::vector<std::byte> ProjectedWorkload::HeadBytes(int32_t slot, int32_t head,
                                                    bool widened) const {
  const kernels::WeightWindow window = WindowOf(head);
  const bool codes = c_.shape.codes() && !widened;
  std::vector<std::byte> bytes(
      static_cast<size_t>(window.Bytes(codes ? DType::kFp8E4m3 : DType::kBf16)));
  const uint64_t first = FirstWeight(slot, head, 0);
  for (int64_t i = 0; i < window.elements(); ++i) {
    if (codes) {
      bytes[static_cast<size_t>(i)] = std::byte{DrawnCode(first + static_cast<uint64_t>(i))};
      continue;
    }
    const Bf16 weight = kernels::ToBf16(Weight(slot, head, static_cast<int32_t>(i / window.columns),
                                               static_cast<int32_t>(i % window.columns)));
    std::memcpy(&bytes[static_cast<size_t>(i) * sizeof(weight)], &weight, sizeof(weight));
  }
  for (int64_t block = 0; codes && block < window.blocks(); ++block) {
    const float scale = DrawnScale(slot, head, block);
    std::memcpy(&bytes[static_cast<size_t>(window.elements()) + size_t(block) * sizeof(scale)],
                &scale, sizeof(scale));
  }
  return bytes;
}

absl::Status ProjectedWorkload::LoadWeights(AttentionBackend& backend, bool widened) const {
  kernels::ProjectedShape shape = c_.shape;
  if (widened) shape.weights = DType::kBf16;
  for (int32_t slot = 0; slot < kProjectedSlots; ++slot) {
    if (absl::Status s = backend.FreeWeights(slot); !s.ok()) return s;
    if (std::none_of(c_.clients.begin(), c_.clients.end(),
                     [slot](const ProjectedRows& r) { return r.weights_slot == slot; })) {
      continue;
    }
    // Backwards, so that no head is where it would be if heads were appended.
    for (int32_t head = heads() - 1; head >= 0; --head) {
      const std::vector<std::byte> weights = HeadBytes(slot, head, widened);
      absl::Status s =
          backend.LoadProjected(slot, c_.geometry, shape, c_.part, head, weights.data());
      if (!s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

absl::Status ProjectedWorkload::Submit(AttentionBackend& backend, kernels::LaunchLayout& layout,
                                       const void* in, void* out, const void* rotations) {
  std::vector<RowProjectionRecord> records;
  int64_t row = 0;
  for (const ProjectedRows& client : c_.clients) {
    RowProjectionRecord r{};
    r.in = static_cast<const std::byte*>(in) + row * in_pitch() * size();
    r.out = static_cast<std::byte*>(out) + row * out_pitch() * size();
    r.in_row_stride = in_pitch();
    r.out_row_stride = out_pitch();
    r.rows = client.rows;
    r.weights_slot = client.weights_slot;
    if (rotations != nullptr) {
      r.rotations = static_cast<const float*>(rotations) + row * c_.geometry.rope_dim;
    }
    records.push_back(r);
    row += client.rows;
  }
  kernels::Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  (queries() ? launch.queries : launch.hiddens) = {c_.geometry, c_.rope, c_.dtype, c_.dtype,
                                                   records};
  const absl::Status s = backend.Submit(0, launch);
  return s.ok() ? backend.Wait(0).status() : s;
}

absl::Status ProjectedWorkload::Launch(AttentionBackend& backend) {
  kernels::LaunchLayout layout(backend, 0);
  const auto in = layout.Input(in_.data(), static_cast<int64_t>(in_.size()));
  const auto out = layout.Output(out_.data(), static_cast<int64_t>(out_.size()));
  const bool rotates = queries() && !rotations_.empty();
  const absl::StatusOr<const void*> rotations =
      rotates
          ? layout.Input(rotations_.data(), static_cast<int64_t>(rotations_.size() * sizeof(float)))
          : nullptr;
  for (const absl::Status& s : {in.status(), out.status(), rotations.status()}) {
    if (!s.ok()) return s;
  }
  return Submit(backend, layout, *in, *out, *rotations);
}

absl::Status ProjectedWorkload::LaunchShared(AttentionBackend& backend, std::byte* memory) {
  kernels::LaunchLayout layout(backend, 0);
  const auto in_bytes = static_cast<int64_t>(in_.size());
  const auto out_bytes = static_cast<int64_t>(out_.size());
  std::byte* const out = memory + Align(in_bytes);
  absl::Status s = backend.WriteShared(memory, in_.data(), in_bytes);
  if (s.ok()) s = backend.WriteShared(out, out_.data(), out_bytes);
  if (!s.ok()) return s;
  absl::StatusOr<const void*> rotations = nullptr;
  if (queries() && !rotations_.empty()) {
    rotations =
        layout.Input(rotations_.data(), static_cast<int64_t>(rotations_.size() * sizeof(float)));
  }
  if (!rotations.ok()) return rotations.status();
  s = Submit(backend, layout, layout.SharedInput(memory, in_bytes),
             layout.SharedOutput(out, out_bytes), *rotations);
  if (s.ok()) s = backend.ReadShared(out_.data(), out, out_bytes);
  return s.ok() ? CheckGaps() : s;
}

absl::Status ProjectedWorkload::CheckGaps() const {
  const int64_t row_bytes = columns() * size(), pitch = out_pitch() * size();
  for (int64_t row = 0; row < rows_; ++row) {
    const auto begin = out_.begin() + row * pitch + row_bytes;
    if (std::all_of(begin, begin + (pitch - row_bytes),
                    [](std::byte b) { return b == kUntouched; })) {
      continue;
    }
    return absl::InternalError(absl::StrCat("row ", row, ": bytes after it were written"));
  }
  return absl::OkStatus();
}

double ProjectedWorkload::Sum(int32_t row, int32_t slot, int32_t column) const {
  const float* in = &wide_in_[static_cast<size_t>(row) * depth()];
  const size_t count = static_cast<size_t>(depth_of_head());
  double sum = 0.0;
  const auto add = [&](int32_t head, int32_t of_head) {
    const uint64_t first = FirstWeight(slot, head, of_head);
    for (size_t k = 0; k < count; ++k) {
      sum +=
          double{in[k]} * (c_.shape.codes() ? Weight(slot, head, of_head, static_cast<int32_t>(k))
                                            : Drawn(first + k));
    }
    in += count;
  };
  if (queries()) {
    add(column / query_dim(), column % query_dim());
  } else {
    for (int32_t head = 0; head < heads(); ++head) add(head, column);
  }
  return sum;
}

double ProjectedWorkload::Expected(int32_t row, int32_t slot, int32_t column) const {
  const double x = Sum(row, slot, column);
  const int32_t place = queries() ? column % query_dim() - c_.geometry.nope_dim : -1;
  if (place < 0) return x;
  const int32_t pairs = c_.geometry.rope_dim / 2;
  const bool halves = c_.rope == RopeLayout::kHalves;
  const int32_t pair = halves ? place % pairs : place / 2;
  const bool second = halves ? place >= pairs : place % 2 == 1;
  const int32_t apart = halves ? pairs : 1;
  const double y = Sum(row, slot, second ? column - apart : column + apart);
  const double cosine = rotation(row)[pair], sine = rotation(row)[pairs + pair];
  return second ? y * sine + x * cosine : x * cosine - y * sine;
}

double ProjectedWorkload::Result(int32_t row, int32_t column) const {
  return Load(c_.dtype, &out_[static_cast<size_t>((row * out_pitch() + column) * size())]);
}

// Compares every column, or as many as take kMostProducts.
absl::Status ProjectedWorkload::Compare() const {
  const double products = double{1} * rows_ * columns() * depth();
  const auto stride = static_cast<int32_t>(std::max(1.0, std::ceil(products / kMostProducts)));
  const bool wide = c_.dtype == DType::kF32;
  double largest = 0.0, worst = 0.0;
  int32_t row = 0;
  for (const ProjectedRows& client : c_.clients) {
    for (int32_t r = 0; r < client.rows; ++r, ++row) {
      double both = 0.0, got_norm = 0.0, want_norm = 0.0;
      for (int32_t n = row % stride; n < columns(); n += stride) {
        const double want = Expected(row, client.weights_slot, n), got = Result(row, n);
        if (std::isnan(got)) return absl::InternalError(absl::StrCat("row ", row, ": NaN at ", n));
        both += want * got;
        got_norm += got * got;
        want_norm += want * want;
        largest = std::max(largest, std::abs(want));
        worst = std::max(worst, std::abs(want - got));
      }
      const double distance = 1.0 - both / std::sqrt(got_norm * want_norm);
      if (want_norm > 0.0 && !(distance <= (wide ? 1e-9 : 1e-5))) {
        return absl::InternalError(absl::StrCat("row ", row, ": cosine distance ", distance));
      }
    }
  }
  if (worst <= largest * (wide ? 0x1p-15 : 0x1p-8)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("an element is off by ", worst, " of ", largest));
}

absl::Status ProjectedWorkload::Run(AttentionBackend& backend) {
  std::fill(out_.begin(), out_.end(), kUntouched);
  auto memory = c_.shared ? backend.AllocateShared(Align(static_cast<int64_t>(in_.size())) +
                                                       Align(static_cast<int64_t>(out_.size())),
                                                   0)
                          : absl::UnimplementedError("not wanted");
  return memory.ok() ? LaunchShared(backend, (*memory)->bytes().data()) : Launch(backend);
}

absl::Status ProjectedWorkload::Check(AttentionBackend& backend) {
  const absl::Status s = Run(backend);
  return s.ok() ? Compare() : s;
}

}  // namespace mla::conformance
