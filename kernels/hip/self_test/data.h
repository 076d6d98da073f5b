// Makes the inputs of the self-test, and computes the expected results on the host.
#ifndef MLA_KERNELS_HIP_SELF_TEST_DATA_H_
#define MLA_KERNELS_HIP_SELF_TEST_DATA_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "kernels/formats/dtype.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/attention_params.h"
#include "kernels/types/round_info.h"

namespace mla::kernels::hip::self_test {

// kWideGeometry is tested in the expanded form, if there are kernels for it.
inline constexpr int32_t kHeads = 4;
inline constexpr Geometry kGeometry{kHeads, 512, 64, 128, 128};
inline constexpr Geometry kWideGeometry{kHeads, 512, 64, kDims256.nope, kDims256.value};
inline constexpr int32_t kRowDim = 576;
inline constexpr float kScale = 0.135f;
inline constexpr int64_t kRowBytes = kRowDim * sizeof(Bf16);
inline constexpr float kLayerScale = 0.0007f;  // scale of rows with a layer scale; chosen so that
                                               // nothing saturates
inline constexpr int32_t kMostUnits = 1024;    // most units that get work

// One launch with three kinds of segments: one whose queries are the last of its rows, one without
// any key, and short ones over the same rows. Each unit gets a piece of the first segment, the
// whole second one, and a short one.
struct Shape {
  int32_t kv_rows;
  int32_t page_size;
  int32_t cut;       // KV row where the first segment's tile is split
  int32_t absorbed;  // query rows in the absorbed form; 0: it is not used
  int32_t expanded;  // query rows in the expanded form
  bool all_units;    // as many units have work as the device has, otherwise two
  bool nan_row;      // the last KV row holds a NaN
  // The first segment is then one query row with the heads of all rows, and index lists name the KV
  // rows, permuted: all of them, or all except the row with the NaN, with -1 in between.
  bool lists = false;
  // KV rows of the segment without a key, whose list is empty. If there are many, no row of the
  // launch is read so often that rows are widened first (WidensLists).
  int32_t unlisted = 0;
  // If not 0, the launch has only the first segment in the absorbed form, cut into about this many
  // equal pieces: a launch of one tile, whose blocks may merge the parts themselves.
  int32_t pieces = 0;
  // Layers that pages have room for, and the layer that this launch appends to and attends to.
  int32_t layers = 1, layer = 0;
};
// The shapes in the order of the test, small ones first, because they find most faults of a kernel.
// Two query rows make a tile for one block of the smallest attention kernel; twenty make one for
// the largest, if all units are busy (ChooseAttend). Pages of 64 rows and of 24 are copied in boxes
// where an architecture has them (BoxArgs); the third shape has pages of three rows, which are not.
// Later shapes run loops for several iterations: at least 12 tiles of 64 KV rows in every piece,
// more query rows than a tile.
inline constexpr Shape kShapes[] = {
    {150, 64, 96, 2, 2, false, false}, {150, 64, 96, 20, 20, true, false},
    {150, 3, 96, 20, 0, true, false},  {1600, 3, 800, 2, 0, false, true},
    {1600, 3, 800, 20, 0, true, true}, {1600, 24, 800, 20, 0, true, true},
    {850, 3, 0, 0, 130, true, true}};
// These shapes are run at the dims of kWideGeometry, in the expanded form. In the second shape some
// rows see few keys.
inline constexpr Shape kWideShapes[] = {kShapes[0], {200, 3, 0, 0, 130, true, true}};
// The first shape is not widened. So its kernel cannot pass because of widened rows that an earlier
// kernel has left.
inline constexpr Shape kListShapes[] = {{150, 64, 96, 20, 0, true, false, true, 1 << 20},
                                        {150, 64, 96, 20, 0, true, false, true},
                                        {1600, 3, 800, 2, 0, false, true, true},
                                        {1600, 3, 800, 20, 0, true, true, true}};
// Returns a shape with as many pieces as units allow for tiles of few and of many packed rows, over
// rows that no other shape has.
inline Shape ShapeInPieces(int32_t queries, int32_t pieces) {
  Shape shape{600, 64, 0, queries, 0, false, false};
  shape.pieces = pieces;
  return shape;
}
inline constexpr int32_t kMostPieces = 64;
// Rows of formats other than bf16 are tested with the first shapes of each list only, because
// formats differ in every tile.
inline constexpr size_t kFp8Shapes = 3, kFp8ListShapes = 3;
inline constexpr int32_t kMostRows = 1600;
inline constexpr int32_t kMostQueries = 130;
inline constexpr int32_t kMostAbsorbed = 20;
inline constexpr int32_t kShortRows = 7;  // KV rows of a short segment
inline constexpr int32_t kMostPages = (kMostRows + 2) / 3;
inline constexpr int64_t kPoolBytes = int64_t{kMostPages} * 14 * kPageGranuleBytes;

// Bounds as in conformance: relative to the largest value and to the wanted output, cosine over all
// outputs, and of a log-sum-exp.
inline constexpr double kOfValue = 2e-3, kOfOutput = 0.016, kCosine = 1e-5, kLse = 1e-3;
// Bounds for 8-bit products, which round queries and probabilities to four bits each: by at most
// 1/16, queries by 1/39 in the root mean square. Logits have a deviation of 0.055 here, so they
// move by 1.4e-3 and by six times that at most; log-sum-exps move as much. Probabilities are nearly
// equal. Their mean square error is 1/768 if all mantissas are just above 1, and less elsewhere;
// the cosine difference is half of it.
inline constexpr double kOfValueProducts = 1.0 / 16, kCosineProducts = 0.5 / 768;
inline constexpr double kLseProducts = 6 * 0.055 / 39 + kLse;
// In the expanded form keys and values are rounded as well. Outputs move by as much again, but only
// by half as much in the mean square, because mantissas of values are mixed. Logits move 1.5 times
// as far.
inline constexpr double kOfValuePrefill = 2 * kOfValueProducts;
inline constexpr double kCosinePrefill = 1.5 * kCosineProducts, kLsePrefill = 1.5 * kLseProducts;
// Latent outputs that bf16 cannot tell from (1, -1). W_UV of up to 0.2 turns the difference into up
// to 2^-12, many times the error of sums in fp32.
inline constexpr float kNarrow[] = {1.0f + 0x1p-10f, -1.0f};
inline constexpr double kNarrowOff = 1e-5;

// Returns small pseudo-random values, the same on every machine.
inline std::vector<Bf16> Pattern(size_t count, uint32_t seed) {
  std::vector<Bf16> v(count);
  uint32_t state = seed;
  for (Bf16& x : v) {
    state = state * 1664525u + 1013904223u;
    x = ToBf16((static_cast<float>(state >> 8) / 8388608.0f - 1.0f) * 0.2f);
  }
  return v;
}

inline std::vector<float> Floats(const std::vector<Bf16>& from) {
  std::vector<float> to(from.size());
  std::transform(from.begin(), from.end(), to.begin(), ToFloat);
  return to;
}

// sum of a[i] * b[i], in lanes that the compiler can make a vector.
inline float Dot(const float* a, const float* b, int32_t count) {
  constexpr int32_t kLanes = 16;
  float lanes[kLanes] = {};
  for (int32_t i = 0; i < count; i += kLanes) {
    for (int32_t k = 0; k < kLanes; ++k) lanes[k] += a[i + k] * b[i + k];
  }
  double sum = 0.0;
  for (const float lane : lanes) sum += lane;
  return static_cast<float>(sum);
}

struct Weights {
  explicit Weights(const Geometry& of) : geometry(of) {}

  const Geometry geometry;
  std::vector<Bf16> uk = Pattern(size_t{kHeads} * static_cast<size_t>(geometry.nope_dim) * 512, 3);
  std::vector<Bf16> uv = Pattern(size_t{kHeads} * 512 * static_cast<size_t>(geometry.v_dim), 4);
  std::vector<float> uk_floats = Floats(uk), uv_floats = Floats(uv);
};

struct Data {
  Data(const Geometry& of_model, const Shape& s, KvFormat rows_format,
       DType of_products = DType::kBf16)
      : geometry(of_model),
        shape(s),
        format(rows_format),
        products(of_products),
        queries(std::max(s.absorbed, s.expanded)),
        rows(queries + 2),
        o(size_t(rows) * kHeads * size_t(o_dim), 0.5f),
        lse(size_t(rows) * kHeads, 0.5f) {
    if (TraitsOf(format).shares_scale) SetApart();
    if (s.nan_row) kv[size_t(s.kv_rows - 1) * kRowDim + 5] = 0x7fc0;
    for (const int32_t row : {0, queries, queries + 1}) {
      const std::vector<int32_t> list = List(Visible(row));
      list_starts.push_back(lists.size());
      lists.insert(lists.end(), list.begin(), list.end());
      list_ends.insert(list_ends.end(), {0, static_cast<int32_t>(list.size())});
    }
    Store();
    std::copy(std::begin(kNarrow), std::end(kNarrow), narrow.begin());
  }

  const Geometry geometry;
  const int32_t q_dim = geometry.expanded_q_dim(), o_dim = geometry.v_dim;
  const Shape shape;
  const KvFormat format;
  const DType products;  // products of the absorbed form
  const KvRowLayout row = MakeKvRowLayout(format, 512, 64);
  const int32_t queries;  // query rows of the first segment
  const int32_t rows;     // rows of q: the first segment's, one of the empty segment, one of the
                          // short segments
  std::vector<Bf16> kv = Pattern(size_t(shape.kv_rows) * kRowDim, 1);
  std::vector<Bf16> q = Pattern(size_t(rows) * kHeads * size_t(q_dim), 2);
  // The index lists of the three kinds of segments, one after the other, and each list's two ends.
  std::vector<int32_t> lists, list_ends;
  std::vector<size_t> list_starts;
  std::vector<float> kv_floats;  // rows after encoding and decoding
  std::vector<float> narrow = std::vector<float>(512, 0.0f);
  std::vector<float> narrow_o = std::vector<float>(size_t{kHeads} * size_t(o_dim), NAN);
  std::vector<float> o, lse;
  // The results of the expanded form.
  std::vector<float> expanded_o = o, expanded_lse = lse;

  // Makes tiles of 64 rows whose groups share a scale alternate with tiles that have rows with
  // several scales.
  void SetApart() {
    for (int32_t row = 0; row < shape.kv_rows; ++row) {
      if (row % 128 >= 64 || row % 3 != 0) continue;
      for (int32_t i = 128; i < 256; ++i) {
        Bf16& x = kv[size_t(row) * kRowDim + size_t(i)];
        x = ToBf16(ToFloat(x) * 0x1p-6f);
      }
    }
  }

  void Store() {
    constexpr auto kKind = Fp8Kind::kE4m3Fn;  // the numbers are the same in both kinds
    std::vector<std::byte> stored(static_cast<size_t>(row.row_bytes));
    kv_floats.resize(kv.size());
    for (size_t i = 0; i < kv.size(); i += kRowDim) {
      EncodeKvRow(row, kKind, &kv[i], DType::kBf16, kLayerScale,
                  {stored.data(), stored.data() + row.scales_at});
      DecodeKvRow(row, kKind, kLayerScale, {stored.data(), stored.data() + row.scales_at},
                  &kv_floats[i]);
    }
  }

  // Makes a list in which every eighth place names no row.
  static std::vector<int32_t> List(int32_t positions) {
    std::vector<int32_t> list;
    for (int32_t i = 0; i < positions; ++i) {
      if (i % 7 == 3) list.push_back(-1);
      list.push_back((i * 37 + 1) % positions);  // 37 divides no such count
    }
    return list;
  }

  // Returns how many KV rows row `row` of q sees.
  int32_t Visible(int32_t row) const {
    if (row < queries && shape.lists) return shape.kv_rows - (shape.nan_row ? 1 : 0);
    if (row < queries) return shape.kv_rows - queries + row + 1;
    return row == queries ? 0 : kShortRows;
  }
};

struct Answer {
  std::vector<double> o;
  double lse = -INFINITY;
};

// Computes the expected output. `rounded`: absorbed queries are bf16.
inline Answer Expected(const Data& d, const Weights& w, int32_t row, int32_t head, bool rounded) {
  std::vector<float> latent(kRowDim, 0.0f);
  const int32_t nope = d.geometry.nope_dim, o_dim = d.o_dim;
  const Bf16* q = &d.q[(static_cast<size_t>(row) * kHeads + head) * d.q_dim];
  const float* uk = &w.uk_floats[static_cast<size_t>(head) * nope * 512];
  const float* uv = &w.uv_floats[static_cast<size_t>(head) * 512 * o_dim];
  for (int k = 0; k < nope; ++k) {
    for (int c = 0; c < 512; ++c) latent[c] += ToFloat(q[k]) * uk[k * 512 + c];
  }
  for (int c = 0; c < 512 && rounded; ++c) latent[c] = ToFloat(ToBf16(latent[c]));
  for (int c = 0; c < 64; ++c) latent[512 + c] = ToFloat(q[nope + c]);
  Answer answer{.o = std::vector<double>(static_cast<size_t>(o_dim), 0.0)};
  const int32_t visible = d.Visible(row);
  if (visible == 0) return answer;
  std::vector<float> sum(512, 0.0f);
  double total = 0.0;
  for (int32_t j = 0; j < visible; ++j) {
    const float* kv = &d.kv_floats[static_cast<size_t>(j) * kRowDim];
    const auto weight = static_cast<float>(std::exp(Dot(latent.data(), kv, kRowDim) * kScale));
    total += weight;
    for (int c = 0; c < 512; ++c) sum[c] += weight * kv[c];
  }
  answer.lse = std::log(total);
  for (int c = 0; c < 512; ++c) {
    for (int v = 0; v < o_dim; ++v) answer.o[v] += sum[c] / total * uv[c * o_dim + v];
  }
  return answer;
}

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_DATA_H_
