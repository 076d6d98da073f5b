// Tests rows of 8-bit values on the kernels of every architecture: rows that no append has written,
// every scale that the format allows, bytes that encode NaN, and the bytes that appends write.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

constexpr int32_t kRows = 96, kPage = 16, kPages = kRows / kPage;
constexpr int32_t kQueries = 2;
constexpr int32_t kLora = 512, kDim = 576;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::string name;
  KvFormat format;
  std::vector<float> scales;  // cycled over rows and groups; or one scale of the layer
  float q;                    // magnitude of the queries
  bool nan_row;               // the last row holds only NaN encodings, or scales of nan_scales
  // In these rows each group has its own scale. In other rows all groups have the same scale.
  int32_t own_begin = 0, own_end = kRows;
  int32_t step = 3;                    // offset in `scales` from one row to the next
  std::vector<float> nan_scales = {};  // one of each group; codes of the row are numbers then
};

// Powers of two and other scales, zeros, denormals, and the smallest and largest scales.
const Case kCases[] = {
    {"powers", KvFormat::kFp8Row, {0x1p-6f, 0x1p-9f, 0x1p-2f}, 0.02f, true},
    {"thirds", KvFormat::kFp8Row, {0.013f, 0.3f, 0x1p-4f, 0.0071f, 0.11f}, 0.02f, true},
    {"zeros", KvFormat::kFp8Row, {0x1p-5f, 0.0f, 0x1p-6f, 0x1p-5f, 0x1p-7f}, 0.02f, false},
    {"denormal", KvFormat::kFp8Row, {0x1p-5f, 1e-40f, 0x1p-6f}, 0.02f, false},
    {"least", KvFormat::kFp8Row, {0x1p-100f}, 0x1p90f, false},
    {"largest", KvFormat::kFp8Row, {0x1p71f, 0x1p70f, 0x1p72f}, 0x1p-80f, false},
    {"a power a row", KvFormat::kFp8Row, {0x1p-6f, 0x1p-9f, 0x1p-2f}, 0.02f, false, 0, 0},
    {"a power a row, NaN", KvFormat::kFp8Row, {0x1p-6f, 0x1p-9f, 0x1p-2f}, 0.02f, true, 0, 0},
    {"one row of others", KvFormat::kFp8Row, {0x1p-6f, 0x1p-9f, 0x1p-2f}, 0.02f, false, 37, 38},
    {"a last group",
     KvFormat::kFp8Row,
     {0x1p-3f, 0x1p-3f, 0x1p-3f, 0x1p-6f},
     0.02f,
     false,
     0,
     kRows,
     4},
    {"a tile of others", KvFormat::kFp8Row, {0x1p-6f, 0x1p-9f, 0x1p-2f}, 0.02f, false, 0, 64},
    {"others behind a tile", KvFormat::kFp8Row, {0x1p-6f, 0x1p-2f, 0.3f}, 0.02f, true, 64, 96},
    {"a third a row", KvFormat::kFp8Row, {0.013f, 0.03f, 0x1p-4f, 0.0071f}, 0.02f, true, 0, 0},
    {"small powers a row", KvFormat::kFp8Row, {0x1p-66f, 0x1p-64f}, 0x1p57f, false, 0, 0},
    {"scales of NaN",
     KvFormat::kFp8Row,
     {0x1p-6f, 0x1p-9f, 0x1p-2f},
     0.02f,
     true,
     0,
     0,
     3,
     {0x1p80f, 0x1p-6f, 0x1p-6f, 0x1p-6f}},
    {"a negative scale",
     KvFormat::kFp8Row,
     {0x1p-6f, 0x1p-9f, 0x1p-2f},
     0.02f,
     true,
     0,
     0,
     3,
     {0x1p-6f, 0x1p-6f, 0x1p-6f, -1.0f}},
    {"layer", KvFormat::kFp8Tensor, {0.0123f}, 0.02f, true},
    {"least of a layer", KvFormat::kFp8Tensor, {0x1p-100f}, 0x1p90f, false},
    {"largest of a layer", KvFormat::kFp8Tensor, {0x1p72f}, 0x1p-80f, false},
};

class Inputs {
 public:
  // If `coarse`, rounding to e4m3 does not change the queries, and `rows` are codes times scales,
  // as products of 8 bits take them. Other kernels round those to bf16, and so does the decoder:
  // with scales of "thirds" that moves logits by up to 0.03 and outputs by 5.1e-3 of the largest.
  Inputs(const Case& c, Fp8Kind of_pool, int32_t of_heads, bool coarse)
      : layout(MakeKvRowLayout(c.format, kLora, kDim - kLora)), kind(of_pool), heads(of_heads) {
    uint32_t state = 12345;
    const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 8; };
    // For the other fp8 kind, scales are twice as large.
    const float doubled = kind == Fp8Kind::kE4m3Fn ? 1.0f : 2.0f;
    for (int32_t row = 0; row < kRows; ++row) {
      std::byte* const bytes = &pool[static_cast<size_t>(row * layout.row_bytes)];
      for (int32_t i = 0; i < layout.row_bytes; ++i) {
        bytes[i] = static_cast<std::byte>(next() % 0x7fu | (next() % 2 != 0 ? 0x80u : 0u));
        if (bytes[i] == std::byte{0x80}) bytes[i] = std::byte{0};
      }
      if (c.format == KvFormat::kFp8Row) {
        for (int32_t g = 0; g < layout.groups; ++g) {
          const bool own = row >= c.own_begin && row < c.own_end;
          const float scale =
              c.scales[static_cast<size_t>(row * c.step + (own ? g : 0)) % c.scales.size()];
          Put(bytes + layout.scales_at + g * 4, scale * doubled);
        }
        for (int32_t i = 0; i < kDim - kLora; ++i) {
          const float x = (static_cast<float>(next() % 2001) / 1000.0f - 1.0f) * c.scales[0] * 64;
          Put(bytes + layout.rope_at + i * 2, ToBf16(x));
        }
      }
      if (c.nan_row && row == kRows - 1) Poison(bytes, c.nan_scales);
    }
    layer_scale = c.scales[0];
    const float unit = std::exp2(std::floor(std::log2(c.q / 7)));
    for (Bf16& x : q) {
      const float fine = (static_cast<float>(next() % 2001) / 1000.0f - 1.0f) * c.q;
      x = ToBf16(coarse ? std::round(fine / c.q * 7) * unit : fine);
    }
    Decode(c.format == KvFormat::kFp8Tensor ? layer_scale * doubled : 1.0f);
    if (coarse && c.format == KvFormat::kFp8Row) Multiply();
  }

  const KvRowLayout layout;
  const Fp8Kind kind;
  const int32_t heads, packed = kQueries * heads;
  float layer_scale = 1.0f;
  std::vector<std::byte> pool = std::vector<std::byte>(size_t{kRows} * 656);
  std::vector<float> rows = std::vector<float>(size_t{kRows} * kDim);
  std::vector<Bf16> q = std::vector<Bf16>(static_cast<size_t>(packed) * kDim);

 private:
  template <class T>
  static void Put(std::byte* at, T value) {
    std::memcpy(at, &value, sizeof value);
  }
  void Poison(std::byte* at, const std::vector<float>& scales) const {
    if (!scales.empty()) {
      for (size_t g = 0; g < scales.size(); ++g) {
        Put(at + layout.scales_at + static_cast<int32_t>(g) * 4, scales[g]);
      }
      return;
    }
    constexpr uint8_t kBytes[] = {0x7f, 0xff, 0x80};
    for (int32_t i = 0; i < kLora; ++i) at[i] = static_cast<std::byte>(kBytes[i % 3]);
    for (int32_t g = 0; g < layout.groups; ++g) Put(at + layout.scales_at + g * 4, kNaN);
  }
  void Decode(float scale) {
    for (int32_t row = 0; row < kRows; ++row) {
      const std::byte* const at = &pool[static_cast<size_t>(row * layout.row_bytes)];
      DecodeKvRow(layout, kind, scale, {at, at + layout.scales_at},
                  &rows[static_cast<size_t>(row) * kDim]);
    }
  }
  // The latent values of the rows, not rounded to bf16.
  void Multiply() {
    for (int32_t row = 0; row < kRows; ++row) {
      const std::byte* const at = &pool[static_cast<size_t>(row * layout.row_bytes)];
      for (int32_t i = 0; i < kLora; ++i) {
        float scale = 0.0f;
        std::memcpy(&scale, at + layout.scales_at + i / layout.traits.group * 4, sizeof scale);
        rows[static_cast<size_t>(row * kDim + i)] =
            DecodeFp8(std::to_integer<uint8_t>(at[i]), kind) * KvScale(scale, kind);
      }
    }
  }
};

// Softmax over the rows that packed row `p` attends to, in double.
struct Answer {
  Answer(const Inputs& in, int32_t p) {
    const int32_t visible = kRows - kQueries + p / in.heads + 1;
    std::vector<double> logits;
    double top = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (int32_t row = 0; row < visible; ++row) {
      double logit = 0.0;
      for (int32_t i = 0; i < kDim; ++i) {
        logit += double{ToFloat(in.q[static_cast<size_t>(p * kDim + i)])} *
                 in.rows[static_cast<size_t>(row * kDim + i)];
      }
      logits.push_back(logit);
      if (!(logit <= top)) top = logit;
    }
    for (int32_t row = 0; row < visible; ++row) {
      const double weight = std::exp(logits[static_cast<size_t>(row)] - top);
      sum += weight;
      for (int32_t i = 0; i < kLora; ++i) {
        o[static_cast<size_t>(i)] += weight * in.rows[static_cast<size_t>(row * kDim + i)];
        largest = std::max(largest, std::abs(double{in.rows[static_cast<size_t>(row * kDim + i)]}));
      }
    }
    for (double& x : o) x /= sum;
    lse = top + std::log(sum);
  }
  std::vector<double> o = std::vector<double>(kLora);
  double lse = 0.0, largest = 0.0;
};

class KvRowsTest : public BackendOnFakeTest {
 protected:
  HipBackendOptions OptionsOf(const ArchTraits& arch) {
    control_->arch = arch.arch.data();
    HipBackendOptions options = Options();
    options.images.push_back(Image("sm_90", kImage90));
    options.vendor = &arch == &kSm90Traits ? Vendor::kNvidia : Vendor::kAmd;
    options.watchdog_ms = 60000;
    return options;
  }
  // Runs one work item on one unit, without a split.
  static absl::Status Attend(HipBackend& backend, const Inputs& in, KvFormat format, DType products,
                             std::vector<float>& o, std::vector<float>& lse) {
    LaunchLayout layout(backend, 0);
    auto q = layout.Input(in.q.data(), static_cast<int64_t>(in.q.size() * sizeof(Bf16)));
    auto out = layout.Output(o.data(), static_cast<int64_t>(o.size() * sizeof(float)));
    auto sums = layout.Output(lse.data(), static_cast<int64_t>(lse.size() * sizeof(float)));
    if (!q.ok() || !out.ok() || !sums.ok()) return absl::InternalError("no room");
    SegmentRecord segment = {};
    segment.q = *q;
    segment.o = *out;
    segment.lse = static_cast<float*>(*sums);
    segment.q_row_stride = in.heads * kDim;
    segment.q_head_stride = kDim;
    segment.o_row_stride = in.heads * kLora;
    segment.o_head_stride = kLora;
    segment.lse_row_stride = in.heads;
    segment.lse_head_stride = 1;
    segment.page_table = 0;
    segment.layer_offset = 0;
    segment.row_stride = in.layout.row_bytes;
    segment.page_size = kPage;
    segment.q_rows = kQueries;
    segment.kv_rows = kRows;
    segment.num_heads = in.heads;
    segment.head_offset = 0;
    segment.weights_slot = -1;
    segment.softmax_scale = 1.0f;
    segment.causal = 1;
    segment.kv_scale = in.layer_scale;
    std::vector<uint32_t> pages;
    for (int32_t page = 0; page < kPages; ++page) {
      pages.push_back(
          static_cast<uint32_t>(page * kPage * in.layout.row_bytes / kPageGranuleBytes));
    }
    const TableRange table{0, kPages};
    const int32_t indptr[] = {0, 1}, reduce[] = {0};
    const WorkInfo work{0, kUnsplit, 0, kQueries, 0, kRows, 0, PackHeads(0, in.heads)};
    Launch launch;
    launch.inputs = layout.inputs();
    launch.outputs = layout.outputs();
    launch.page_tables = pages;
    launch.table_changes = {&table, 1};
    launch.absorbed.desc.geometry = {in.heads, kLora, kDim - kLora, 128, 128};
    launch.absorbed.desc.kv_format = format;
    launch.absorbed.desc.products = products;
    launch.absorbed.desc.o_dtype = DType::kF32;
    launch.absorbed.segments = {&segment, 1};
    launch.absorbed.plan = {indptr, {&work, 1}, reduce, {}, {}, 0, NextPlanGeneration(), {}};
    absl::Status s = backend.Submit(0, launch);
    return s.ok() ? backend.Wait(0).status() : s;
  }

  // Outputs may be off by `bound` times the largest value that is seen.
  void Run(const ArchTraits& arch, const Case& c, int32_t heads, DType products,
           double bound = 6e-3) {
    SCOPED_TRACE(std::string(arch.arch) + " " + c.name);
    const Inputs in(c, arch.fp8, heads, products != DType::kBf16);
    BackendLimits limits = Limits();
    limits.launch_packed_rows = in.packed;
    limits.staging_in_bytes = limits.staging_out_bytes = 1 << 19;
    auto backend = HipBackend::Create(OptionsOf(arch));
    ASSERT_TRUE(backend.ok()) << backend.status();
    ASSERT_TRUE((*backend)->Configure(limits).ok());
    GpuRuntime& runtime = (*backend)->runtime();
    const auto stream = (*backend)->compute_stream();
    const auto bytes = static_cast<int64_t>(in.pool.size());
    ASSERT_TRUE(runtime.CopyIn((*backend)->pool(), in.pool.data(), bytes, stream).ok());
    ASSERT_TRUE(runtime.Synchronize(stream).ok());
    std::vector<float> o(static_cast<size_t>(in.packed) * kLora, 0.5f);
    std::vector<float> lse(static_cast<size_t>(in.packed), 0.5f);
    const absl::Status ran = Attend(**backend, in, c.format, products, o, lse);
    ASSERT_TRUE(ran.ok()) << ran;
    Check(c, in, o, lse, bound);
  }

  static void Check(const Case& c, const Inputs& in, std::span<const float> o,
                    std::span<const float> lse, double bound) {
    for (int32_t p = 0; p < in.packed; ++p) {
      const std::string where = c.name + ", packed row " + std::to_string(p);
      const Answer want(in, p);
      const std::span<const float> got = o.subspan(static_cast<size_t>(p) * kLora, kLora);
      if (c.nan_row && p >= in.heads) {
        EXPECT_TRUE(std::isnan(lse[static_cast<size_t>(p)])) << where;
        for (const float x : got) ASSERT_TRUE(std::isnan(x)) << where;
        continue;
      }
      EXPECT_NEAR(lse[static_cast<size_t>(p)], want.lse, 2e-3 * (1.0 + std::abs(want.lse)))
          << where;
      for (size_t i = 0; i < kLora; ++i) {
        ASSERT_NEAR(got[i], want.o[i], bound * want.largest) << where << ", column " << i;
      }
    }
  }
};

TEST_F(KvRowsTest, AnyBytesMeanWhatTheFormatSays) {
  for (const ArchTraits* arch : {&kGfx950Traits, &kGfx942Traits, &kSm90Traits}) {
    for (const Case& c : kCases) Run(*arch, c, 4, DType::kBf16);
  }
}

// This number of heads selects the kernel of 64 packed rows on the device's 8 units. That kernel
// has one path for tiles of 64 rows with one scale each and another for other tiles.
TEST_F(KvRowsTest, ProductsOfEightBitsMeanTheSameOnSm90) {
  for (const Case& c : kCases) {
    if (c.format != KvFormat::kFp8Row || c.scales[0] < 0x1p-70f) continue;  // taken as zeros
    Run(kSm90Traits, c, 66, DType::kFp8E4m3);
  }
}

// Two query rows of 64 heads select the kernel of 128 packed rows. It also rounds probabilities
// times scales.
TEST_F(KvRowsTest, ProductsOfEightBitsMeanTheSameOnGfx950) {
  // Keys, and codes of values, are multiplied as they are. A probability is rounded to bf16, and
  // again when the scale of its row's group has been multiplied: by at most 2^-8 of itself each
  // time, so outputs are off by less than 7.9e-3 of the largest value, and by half of that here.
  for (const Case& c : kCases) {
    if (c.format != KvFormat::kFp8Row || c.scales[0] < 0x1p-70f) continue;  // taken as zeros
    Run(kGfx950Traits, c, 64, DType::kFp8E4m3);
  }
}

// Each row has factors for its four groups. The largest magnitude of a group is 1.75 times its
// factor, so groups whose factors differ by at most 2^4 share a scale.
std::vector<float> RowsToAppend() {
  constexpr float kFactors[][4] = {
      {1, 1, 1, 1},
      {1, 0x1p-4f, 0.5f, 1},
      {0x1p-4f, 1, 1, 0x1p-3f},
      {1, 0x1p-5f, 1, 1},
      {1, 1, 1, 0x1p5f},
      {0, 1, 0x1p-4f, 0},
      {0, 0, 0, 0},
      {1e-37f, 1, 1, 1},
      {kNaN, 1, 0.5f, 1},
      {0x1p70f, 1, 0x1p-9f, 0},
      {1, 0x1p-4f, 1, 0x1p-5f},
      {3e-33f, 1e-34f, 0, 0},
  };
  std::vector<float> rows;
  uint32_t state = 99;
  for (const auto& factors : kFactors) {
    for (int32_t i = 0; i < kDim; ++i) {
      state = state * 1664525u + 1013904223u;
      const float part = static_cast<float>(static_cast<int32_t>(state) >> 8) * 0x1p-23f;
      rows.push_back((i % 128 == 77 ? -1.75f : part) * (i < kLora ? factors[i / 128] : 1.0f));
    }
  }
  return rows;
}

TEST_F(KvRowsTest, AppendsStoreWhatTheEncoderOfTheHostDoes) {
  const std::vector<float> rows = RowsToAppend();
  std::vector<Bf16> narrow(rows.size());
  std::transform(rows.begin(), rows.end(), narrow.begin(), ToBf16);
  const auto count = static_cast<int32_t>(rows.size()) / kDim;
  const KvRowLayout at = MakeKvRowLayout(KvFormat::kFp8Row, kLora, kDim - kLora);
  for (const ArchTraits* arch : {&kGfx950Traits, &kGfx942Traits, &kSm90Traits}) {
    SCOPED_TRACE(std::string(arch->arch));
    auto backend = HipBackend::Create(OptionsOf(*arch));
    ASSERT_TRUE(backend.ok()) << backend.status();
    ASSERT_TRUE((*backend)->Configure(Limits()).ok());
    for (const DType dtype : {DType::kBf16, DType::kF32}) {
      const void* const sent = dtype == DType::kF32 ? static_cast<const void*>(rows.data())
                                                    : static_cast<const void*>(narrow.data());
      LaunchLayout layout(**backend, 0);
      const auto element = static_cast<int64_t>(ElementSize(dtype));
      auto kv = layout.Input(sent, static_cast<int64_t>(rows.size()) * element);
      ASSERT_TRUE(kv.ok()) << kv.status();
      const AppendRecord record{*kv,   dtype,        kDim,         0,
                                0,     at.row_bytes, 64,           0,
                                count, kDim,         kDim - kLora, KvFormat::kFp8Row};
      const uint32_t page = 0;
      const TableRange table{0, 1};
      Launch launch;
      launch.inputs = layout.inputs();
      launch.page_tables = {&page, 1};
      launch.table_changes = {&table, 1};
      launch.appends = {&record, 1};
      ASSERT_TRUE((*backend)->Submit(0, launch).ok());
      ASSERT_TRUE((*backend)->Wait(0).ok());
      std::vector<std::byte> got(static_cast<size_t>(count * at.row_bytes)), want = got;
      GpuRuntime& runtime = (*backend)->runtime();
      const auto stream = (*backend)->compute_stream();
      const auto bytes = static_cast<int64_t>(got.size());
      ASSERT_TRUE(runtime.CopyOut(got.data(), (*backend)->pool(), bytes, stream).ok());
      ASSERT_TRUE(runtime.Synchronize(stream).ok());
      for (int32_t row = 0; row < count; ++row) {
        const auto first = static_cast<size_t>(row) * kDim;
        EncodeKvRow(at, arch->fp8, static_cast<const std::byte*>(sent) + first * element, dtype,
                    1.0f, KvRowIn(at, want.data(), at.row_bytes, count, row));
        for (int32_t i = row * at.row_bytes; i < (row + 1) * at.row_bytes; ++i) {
          ASSERT_EQ(got[static_cast<size_t>(i)], want[static_cast<size_t>(i)])
              << "row " << row << ", byte " << i - row * at.row_bytes << ", " << Name(dtype);
        }
      }
    }
  }
}

}  // namespace
}  // namespace mla::kernels::hip
