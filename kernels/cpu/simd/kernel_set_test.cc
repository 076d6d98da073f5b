// Tests the inner loops of every level that this machine can run, one function at a time, against
// naive loops. Sizes are odd throughout.
#include "kernels/cpu/simd/kernel_set.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/formats/dtype.h"
#include "kernels/formats/kv_format.h"

namespace mla::kernels::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class KernelSetTest : public testing::TestWithParam<const KernelSet*> {
 protected:
  void SetUp() override {
    if (kernels().enter_thread != nullptr) kernels().enter_thread();
  }
  void TearDown() override {
    if (kernels().leave_thread != nullptr) kernels().leave_thread();
  }
  const KernelSet& kernels() const { return *GetParam(); }

  // A value that both operand types hold exactly.
  float Draw() { return ToFloat(ToBf16(std::normal_distribution<float>(0.0f, 1.0f)(random_))); }

  // An operand row of `values`, followed by NaN.
  std::vector<uint8_t> Operands(const std::vector<float>& values) {
    std::vector<uint8_t> row(values.size() * 4 + 64, 0xff);
    for (size_t i = 0; i < values.size(); ++i) {
      if (kernels().bf16_operands) {
        const Bf16 narrow = ToBf16(values[i]);
        std::copy_n(reinterpret_cast<const uint8_t*>(&narrow), 2, row.data() + 2 * i);
      } else {
        std::copy_n(reinterpret_cast<const uint8_t*>(&values[i]), 4, row.data() + 4 * i);
      }
    }
    return row;
  }

  std::mt19937 random_{42};
};

TEST_P(KernelSetTest, GemmEqualsNaiveLoops) {
  for (const int32_t rows : {1, 2, 7, 16, 17, 25, 32, 61, 128}) {
    for (const int32_t columns : {1, 16, 40, 80, 128}) {
      for (const int32_t k : {1, 2, 15, 32, 33, 96, 1100}) {
        const int32_t panels = (columns + kPanel - 1) / kPanel;
        const int64_t panel_bytes = PanelBytes(kernels().bf16_operands, kernels().k_align, k);
        std::vector<std::vector<float>> a(rows, std::vector<float>(k));
        std::vector<float> b(static_cast<size_t>(k) * columns);
        std::vector<std::vector<uint8_t>> operands;
        std::vector<const void*> pointers;
        operands.reserve(a.size());
        pointers.reserve(a.size());
        for (auto& row : a) {
          for (float& value : row) value = Draw();
          operands.push_back(Operands(row));
        }
        for (const auto& row : operands) pointers.push_back(row.data());
        std::vector<uint8_t> packed(static_cast<size_t>(panels * panel_bytes) + 64);
        for (int32_t i = 0; i < k; ++i) {
          for (int32_t n = 0; n < columns; ++n) {
            const float value = b[static_cast<size_t>(i) * columns + n] = Draw();
            uint8_t* panel = packed.data() + n / kPanel * panel_bytes;
            uint8_t* element = panel + PanelOffset(kernels(), i, n % kPanel);
            const Bf16 narrow = ToBf16(value);
            if (kernels().bf16_operands) {
              std::memcpy(element, &narrow, sizeof narrow);
            } else {
              std::memcpy(element, &value, sizeof value);
            }
          }
        }
        const int64_t ldc = panels * kPanel;
        std::vector<float> c(static_cast<size_t>((rows + 15) / 16 * 16 * ldc), 1.0f);
        GemmArgs args{};
        args.a_rows = pointers.data();
        args.rows = rows;
        args.k = k;
        args.b = packed.data();
        args.panel_bytes = panel_bytes;
        args.panels = panels;
        args.c = c.data();
        args.ldc = ldc;
        args.next_rows = pointers.data();  // any memory may be fetched
        args.next_count = rows;
        args.next_bytes = k * 2;
        for (const bool accumulate : {true, false}) {
          args.accumulate = accumulate;
          kernels().gemm(args);
          for (int32_t r = 0; r < rows; r += std::max(1, rows / 5)) {
            for (int32_t n = 0; n < columns; ++n) {
              double want = accumulate ? 1.0 : 0.0;
              for (int32_t i = 0; i < k; ++i) {
                want += static_cast<double>(a[static_cast<size_t>(r)][static_cast<size_t>(i)]) *
                        b[static_cast<size_t>(i) * columns + n];
              }
              ASSERT_NEAR(c[static_cast<size_t>(r * ldc + n)], want, 2e-5 * k + 1e-5)
                  << "rows " << rows << " columns " << columns << " k " << k << " at " << r << ","
                  << n;
            }
          }
        }
      }
    }
  }
}

// The values that a product packs equal those of pack_values, byte by byte. NaN follows each row
// and fills the panels before.
TEST_P(KernelSetTest, GemmPacksTheValuesOfItsRows) {
  for (int32_t panels = 1; panels <= kernels().packs_in_gemm; ++panels) {
    for (const int32_t rows : {1, 2, 15, 16, 17, 31, 32, 33, 61, 95, 127, 128}) {
      for (const auto& [k, d] :
           std::vector<std::pair<int32_t, int32_t>>{{32, 32}, {75, 64}, {96, 96}}) {
        std::vector<std::vector<uint8_t>> operands;
        std::vector<const void*> pointers;
        std::vector<const uint16_t*> values;
        operands.reserve(static_cast<size_t>(rows));
        for (int32_t r = 0; r < rows; ++r) {
          std::vector<float> row(static_cast<size_t>(k));
          for (float& value : row) value = Draw();
          operands.push_back(Operands(row));
          pointers.push_back(operands.back().data());
          values.push_back(reinterpret_cast<const uint16_t*>(operands.back().data()));
        }
        const int64_t q_bytes = PanelBytes(true, kernels().k_align, k);
        std::vector<uint8_t> packed(static_cast<size_t>(panels * q_bytes) + 64);
        for (size_t i = 0; i < packed.size() / 2; ++i) {
          const Bf16 value = ToBf16(Draw());
          std::memcpy(packed.data() + 2 * i, &value, sizeof value);
        }
        const int64_t v_bytes = kTileRows / 2 * 64;
        const size_t size = static_cast<size_t>(v_bytes * (d / kPanel)) / 2;
        std::vector<uint16_t> want(size, 0xffff), got(size, 0xffff);
        kernels().pack_values(values.data(), rows, d, want.data(), v_bytes);
        const int64_t ldc = panels * kPanel;
        std::vector<float> c(static_cast<size_t>((rows + 15) / 16 * 16 * ldc)), plain = c;
        GemmArgs args{};
        args.a_rows = pointers.data();
        args.rows = rows;
        args.k = k;
        args.b = packed.data();
        args.panel_bytes = q_bytes;
        args.panels = panels;
        args.c = plain.data();
        args.ldc = ldc;
        kernels().gemm(args);
        args.c = c.data();
        args.value_panels = got.data();
        args.value_panel_bytes = v_bytes;
        args.value_dim = d;
        kernels().gemm(args);
        ASSERT_EQ(got, want) << "panels " << panels << " rows " << rows << " k " << k;
        ASSERT_EQ(c, plain) << "panels " << panels << " rows " << rows << " k " << k;
      }
    }
  }
}

// alpha = 2^(old maximum - new maximum) shows the exponential itself, in fp32 at every level.
TEST_P(KernelSetTest, Exp2IsAccurateOverTheWholeRange) {
  std::vector<float> p(kTileRows * kTileRows), s(kPanel, 0.0f), l(kPanel), norm(kPanel);
  double worst = 0.0;
  for (int32_t step = 0; step < 130000; step += kPanel) {
    std::vector<float> m(kPanel), alpha(kPanel);
    for (int32_t i = 0; i < kPanel; ++i) m[i] = -static_cast<float>(step + i) / 1024.0f;
    const std::vector<float> x = m;
    kernels().softmax({s.data(), kPanel, 1, kPanel, 1.0f, nullptr, m.data(), l.data(), norm.data(),
                       alpha.data(), p.data(), nullptr});
    for (int32_t i = 0; i < kPanel; ++i) {
      const double want = std::exp2(static_cast<double>(x[i]));
      if (x[i] > -126.0f) {
        worst = std::max(worst, std::abs(alpha[i] - want) / want);
      } else {
        ASSERT_LE(alpha[i], 1.2e-38f);
      }
    }
  }
  EXPECT_LT(worst, 2.5e-7);
}

TEST_P(KernelSetTest, SoftmaxMasksAndKeepsSpecialsInTheirColumns) {
  constexpr int32_t kRows = 5, kColumns = 32;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> s(kRows * kColumns), p(kTileRows * kTileRows), m(kColumns, -kInf), l(kColumns),
      norm(kColumns), alpha(kColumns, 7.0f);
  std::vector<int32_t> visible(kColumns, kRows);
  for (float& value : s) value = Draw();
  visible[3] = 2;
  visible[4] = 0;
  visible[5] = -9;
  s[1 * kColumns + 7] = nan;
  s[2 * kColumns + 8] = kInf;
  s[2 * kColumns + 9] = -kInf;
  s[4 * kColumns + 3] = nan;  // masked there
  // Finite values whose logits overflow.
  s[3 * kColumns + 10] = 3e38f;
  s[3 * kColumns + 11] = -3e38f;
  for (int32_t r = 0; r < kRows; ++r) s[r * kColumns + 12] = -kInf;
  constexpr float kScale = 2.0f;
  const SoftmaxArgs args{s.data(), kColumns, kRows,       kColumns,     kScale,   visible.data(),
                         m.data(), l.data(), norm.data(), alpha.data(), p.data(), nullptr};
  kernels().softmax(args);
  for (int32_t n = 0; n < kColumns; ++n) {
    const int32_t row_count = std::max(0, visible[static_cast<size_t>(n)]);
    double maximum = -INFINITY, sum = 0.0;
    for (int32_t r = 0; r < row_count; ++r) {
      maximum = std::max<double>(maximum, kScale * s[static_cast<size_t>(r * kColumns + n)]);
    }
    if (n == 7 || n == 8 || n == 10) {
      EXPECT_TRUE(std::isnan(l[static_cast<size_t>(n)])) << n;
      EXPECT_TRUE(!kernels().bf16_operands || std::isnan(norm[static_cast<size_t>(n)])) << n;
      continue;
    }
    for (int32_t r = 0; r < kRows; ++r) {
      const double logit = kScale * s[static_cast<size_t>(r * kColumns + n)];
      const bool counts = r < row_count && logit != -INFINITY;
      const double want = counts ? std::exp2(logit - maximum) : 0.0;
      sum += want;
      EXPECT_NEAR(kernels().probability(args, r, n), want, 0.004 * want) << r << "," << n;
    }
    EXPECT_NEAR(l[static_cast<size_t>(n)], sum, 1e-5) << n;
    EXPECT_EQ(alpha[static_cast<size_t>(n)], 0.0f) << n;  // nothing was there before
    EXPECT_EQ(m[static_cast<size_t>(n)], static_cast<float>(maximum)) << n;
  }
}

TEST_P(KernelSetTest, AccumulateEqualsNaiveLoops) {
  for (const int32_t rows : {1, 2, 31, 33, 128}) {
    for (const int32_t packed : {1, 5, 16, 23, 128}) {
      for (const int32_t d : {3, 16, 50, 96}) {
        const int32_t columns = (packed + kPanel - 1) / kPanel * kPanel;
        const int32_t panels = (d + kPanel - 1) / kPanel;
        std::vector<float> s(static_cast<size_t>(rows * columns)), p(kTileRows * kTileRows),
            m(columns, -kInf), l(columns), norm(columns), alpha(columns);
        for (float& value : s) value = Draw();
        const SoftmaxArgs softmax{s.data(), columns,  rows,        columns,      1.0f,     nullptr,
                                  m.data(), l.data(), norm.data(), alpha.data(), p.data(), nullptr};
        kernels().softmax(softmax);
        std::vector<Bf16> values(static_cast<size_t>(rows * d));
        for (Bf16& value : values) value = ToBf16(Draw());
        std::vector<const uint16_t*> pointers;
        pointers.reserve(static_cast<size_t>(rows));
        for (int32_t r = 0; r < rows; ++r) pointers.push_back(values.data() + r * d);
        std::vector<float> v(static_cast<size_t>(kTileRows) * (panels + 1) * kPanel);
        AccumulateArgs args{};
        args.p = p.data();
        args.rows = rows;
        args.columns = columns;
        args.packed_rows = packed;
        args.v = v.data();
        args.panels = panels;
        if (kernels().bf16_operands) {
          args.ldv = kTileRows / 2 * 64;
          kernels().pack_values(pointers.data(), rows, d, reinterpret_cast<uint16_t*>(v.data()),
                                args.ldv);
        } else {
          args.ldv = panels * kPanel;
          kernels().widen(pointers.data(), rows, d, v.data(), args.ldv);
        }
        args.ldo = panels * kPanel;
        std::vector<float> o(static_cast<size_t>(columns * args.ldo), 2.0f);
        std::vector<float> scale(static_cast<size_t>(columns), 0.5f);
        scale[0] = 1.0f;
        args.o = o.data();
        for (const float* factor :
             {static_cast<const float*>(scale.data()), static_cast<const float*>(nullptr)}) {
          std::fill(o.begin(), o.end(), 2.0f);
          args.alpha = factor;
          kernels().accumulate(args);
          for (int32_t n = 0; n < packed; ++n) {
            for (int32_t i = 0; i < d; ++i) {
              double want = factor == nullptr ? 0.0 : 2.0 * factor[n];
              for (int32_t r = 0; r < rows; ++r) {
                want += static_cast<double>(kernels().probability(softmax, r, n)) *
                        ToFloat(values[static_cast<size_t>(r * d + i)]);
              }
              ASSERT_NEAR(o[static_cast<size_t>(n * args.ldo + i)], want, 1e-4)
                  << "rows " << rows << " packed " << packed << " d " << d;
            }
          }
        }
      }
    }
  }
}

TEST_P(KernelSetTest, NarrowRoundsLikeTheScalarConversion) {
  std::vector<float> in = {0.0f,   -0.0f, 1.0f, 1.00390625f, 1.01171875f, 3.3e38f,
                           kInf,   -kInf, NAN,  1e-40f,      5.5f,        -7.25f,
                           1e-10f, 2.0f,  3.0f, 4.0f,        123456.7f,   -0.1f};
  std::vector<uint16_t> out(in.size());
  kernels().narrow(in.data(), static_cast<int64_t>(in.size()), 1, static_cast<int32_t>(in.size()),
                   out.data(), static_cast<int64_t>(in.size()));
  for (size_t i = 0; i < in.size(); ++i) {
    if (std::isnan(in[i])) {
      EXPECT_TRUE(std::isnan(ToFloat(out[i])));
    } else if (std::isinf(ToFloat(ToBf16(in[i])))) {
      EXPECT_EQ(ToFloat(out[i]), ToFloat(ToBf16(in[i])));
    } else {
      // Hardware conversions flush denormals to zero.
      EXPECT_NEAR(ToFloat(out[i]), ToFloat(ToBf16(in[i])), std::abs(in[i]) < 1e-37f ? 1e-37 : 0.0)
          << in[i];
    }
  }
}

// Decodes arbitrary bytes as kernels/formats does: all codes, under scales that encoders write and
// under others, in rows of odd sizes at odd addresses.
TEST_P(KernelSetTest, WidenedRowsAreWhatTheirFormatSays) {
  const std::vector<float> scales = {1.0f, 0x1p-100f, 0x1p72f,   0x1p-7f, 0x1p31f, 0.3f,
                                     0.0f, 1e-40f,    0x1p-101f, 0x1p73f, -1.0f,   -0.0f,
                                     kInf, NAN,       0x1p-3f,   3e-39f};
  std::uniform_int_distribution<int> byte(0, 255);
  for (const KvFormat format : {KvFormat::kFp8Tensor, KvFormat::kFp8Row, KvFormat::kFp8Page}) {
    for (const int32_t latent : {1, 7, 32, 33, 127, 128, 130, 512}) {
      for (const int32_t rope : {0, 1, 64}) {
        const KvRowLayout layout = MakeKvRowLayout(format, latent, rope);
        constexpr int32_t kRows = 37;
        const int32_t dim = latent + rope;
        const int64_t ld = (dim + 31) / 32 * 32;
        std::vector<std::vector<uint8_t>> rows(kRows);
        std::vector<const uint8_t*> pointers, exponents;
        size_t next_scale = 0;
        for (std::vector<uint8_t>& row : rows) {
          const bool in_page = layout.traits.scales == KvScales::kInPage;
          row.resize(static_cast<size_t>(layout.row_bytes + layout.page_scales_bytes) + 1);
          for (uint8_t& code : row) code = static_cast<uint8_t>(byte(random_));
          exponents.push_back(row.data() + 1 + layout.row_bytes);
          for (int32_t group = 0; !in_page && group < layout.groups; ++group) {
            const float scale = scales[next_scale++ % scales.size()];
            std::memcpy(row.data() + 1 + layout.scales_at + 4 * group, &scale, sizeof scale);
          }
          pointers.push_back(row.data() + 1);
        }
        std::vector<uint16_t> out(static_cast<size_t>(kRows * ld), 0x5a5a);
        kernels().widen_fp8({pointers.data(), kRows, latent, rope, layout.traits.group,
                             layout.scales_at,
                             layout.traits.scales == KvScales::kInPage ? exponents.data() : nullptr,
                             layout.rope_at, out.data(), ld});
        std::vector<float> want(static_cast<size_t>(dim));
        for (int32_t r = 0; r < kRows; ++r) {
          const auto* row = reinterpret_cast<const std::byte*>(pointers[static_cast<size_t>(r)]);
          DecodeKvRow(layout, Fp8Kind::kE4m3Fn, 1.0f, KvRowIn(layout, row, layout.row_bytes, 1, 0),
                      want.data());
          for (int32_t i = 0; i < dim; ++i) {
            const Bf16 got = out[static_cast<size_t>(r * ld + i)];
            if (std::isnan(want[static_cast<size_t>(i)])) {
              ASSERT_TRUE(std::isnan(ToFloat(got))) << latent << "+" << rope << " row " << r;
            } else {
              ASSERT_EQ(got, ToBf16(want[static_cast<size_t>(i)]))
                  << latent << "+" << rope << " row " << r << " at " << i << ": " << want[i];
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, KernelSetTest, testing::ValuesIn(UsableLevels()),
                         [](const auto& info) { return std::string(info.param->name); });

INSTANTIATE_TEST_SUITE_P(EmulatedLevels, KernelSetTest,
                         testing::Values(&kEmulatedAmxKernels, &kEmulatedAvx512Bf16Kernels),
                         [](const auto& info) { return std::string(info.param->name); });

TEST(DispatchTest, LevelsAreOrderedAndUnknownNamesRefused) {
  EXPECT_STREQ(UsableLevels().back()->name, "portable");
  EXPECT_EQ(*SelectLevel("", true), UsableLevels().front());
  EXPECT_STREQ((*SelectLevel("portable", true))->name, "portable");
  EXPECT_EQ(SelectLevel("sse9", true).status().code(), absl::StatusCode::kInvalidArgument);
  for (const char* name : {"amx", "avx512_bf16", "avx512", "avx2"}) {
    const auto exact = SelectLevel(name, true);
    if (exact.ok()) {
      EXPECT_STREQ((*exact)->name, name);
    } else {
      EXPECT_EQ(exact.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_TRUE(SelectLevel(name, false).ok());
    }
  }
}

}  // namespace
}  // namespace mla::kernels::cpu
