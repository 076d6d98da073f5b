// Conformance cases, and how they are drawn from a seed.
//
// A case is one launch: a ragged batch of requests of one attention shape. Every property that a
// kernel could get wrong is drawn at random from the axes below. The same seed and index always
// give the same case, so its index reproduces a failure.
#ifndef MLA_TESTS_CONFORMANCE_CASES_CASE_SPEC_H_
#define MLA_TESTS_CONFORMANCE_CASES_CASE_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/types/attention_desc.h"

namespace mla::conformance {

// Says which parts of a launch (kernels/types/launch.h) compute the case.
enum class Route : uint8_t {
  kAbsorbed,       // latent queries: `absorbed`
  kExpanded,       // expanded queries: `expanded`
  kAbsorbProject,  // expanded queries: `absorb`, `absorbed`, `project`
};

enum class InputKind : uint8_t {
  kNormal,        // N(0,1)/10 everywhere
  kDominantKey,   // one visible key carries nearly all weight
  kCancellation,  // values come in pairs that cancel; logits have large terms that cancel
  kHostile,       // NaN, Inf and denormals in some rows, which must stay in their own outputs
  kSpread,        // N(0,1)/10 rows; queries such that logits are N(0, logit_deviation^2)
  kSink,          // the first key's logit is 10 above the others; many keys outweigh it together
  kLastKey,       // the last key's logit is 10 above the others
  kSmallEnd,      // the second half of every other row's latent part is 2^-7 of the first half
  // Wide inputs, judged against the expanded form in bf16: see CheckWide.
  kUnit,              // N(0,1)
  kLarge,             // N(0,9)
  kDominantLatent,    // one key carries nearly all weight by its latent part
  kTrueCancellation,  // values come in pairs whose sum is zero
};
constexpr bool IsWide(InputKind kind) { return kind >= InputKind::kUnit; }

// Contents of the index lists of a request. If lists have a common length, -1 pads them to it.
enum class ListKind : uint8_t {
  kRandom,   // positions that the row sees, in any order
  kSorted,   // the same, ascending
  kHoles,    // -1 before, between and after positions
  kOutside,  // positions that the row does not see, in between
  kOne,      // one position each
  kEmpty,    // -1 alone, or nothing
  kTwice,    // each position at two places, where it counts twice
};
inline constexpr int kListKinds = 6;  // that are drawn: all but kTwice

struct RequestSpec {
  int32_t q_rows = 0;
  int32_t cached_rows = 0;
  int32_t num_heads = 1;
  int32_t head_offset = 0;
  int32_t page_size = 64;
  int32_t layer = 0;
  bool causal = true;
  ListKind lists = ListKind::kRandom;  // for sparse cases
  // Above 1, the page table names the same pages this many times, so the request sees kv_rows() *
  // repeats keys. Its results equal those for kv_rows() keys, except that log-sum-exps are larger
  // by ln(repeats). Needs one query row and whole pages.
  int32_t repeats = 1;

  int32_t kv_rows() const { return cached_rows + q_rows; }
  int32_t seen_rows() const { return kv_rows() * repeats; }
};

struct CaseSpec {
  uint64_t seed = 0;
  kernels::Geometry geometry;
  Route route = Route::kAbsorbed;
  InputKind inputs = InputKind::kNormal;
  kernels::DType q_dtype = kernels::DType::kBf16;
  kernels::DType o_dtype = kernels::DType::kBf16;
  kernels::DType kv_source = kernels::DType::kBf16;        // dtype of the rows appended
  kernels::KvFormat kv_format = kernels::KvFormat::kBf16;  // format of the pages
  float kv_scales[2] = {1.0f, 1.0f};                       // scales of the two layers, see
                                                           // SegmentRecord
  // Dtypes between absorb and attention, and between attention and project.
  kernels::DType latent_q_dtype = kernels::DType::kBf16;
  kernels::DType latent_o_dtype = kernels::DType::kF32;
  // With kFp8E4m3, queries of kAbsorbed are values that rounding keeps, unless rounds_queries.
  kernels::DType products = kernels::DType::kBf16;
  bool rounds_queries = false;
  float logit_deviation = 0.0f;  // for kSpread
  float softmax_scale = 1.0f;
  int32_t units = 1;      // units of the plan
  bool streamed = false;  // AttentionDesc::streamed; for kAbsorbed, tensors without gaps
  bool own_rows = false;  // if streamed: the launch that attends also appends the queries' KV rows
  bool other_scales = false;  // rows of kFp8Row have scales that are no powers of two
  bool sparse = false;        // every query row has an index list, and rows in no list are NaN
  std::vector<RequestSpec> requests;

  // The desc of the attention that this route launches.
  kernels::AttentionDesc Desc() const;
  // Returns true if Absorb narrows the rotated part of the queries: for fp32 queries of backends
  // whose absorbed queries are bf16. This is not an error of the kernels, so such cases have
  // queries whose rotated part bf16 holds exactly.
  bool RoundsRotated() const {
    return route == Route::kAbsorbProject && q_dtype == kernels::DType::kF32 &&
           latent_q_dtype == kernels::DType::kBf16;
  }
  // Returns true if the case is judged by the error of rounding probabilities to e4m3.
  bool RoundsProbabilities() const { return products == kernels::DType::kFp8E4m3; }
  int32_t q_dim() const;  // of the queries a client sends
  int32_t o_dim() const;  // of the outputs a client gets
  // Attention FLOP of the oracle (latent form, whole square).
  double Flop() const;
  int64_t PackedRows() const;
};

// Turns it into a case with products in e4m3. Returns false if that is not possible: over bf16
// rows, with wide inputs, and with projections, because a case cannot choose their latent queries.
bool ComputeInFp8(CaseSpec& spec);

// Turns it into a case whose queries arrive during the launch, planned for as many units as there
// are; `own_rows` as in CaseSpec. Returns false if no kernel would stream it: such kernels take
// more than 16 packed rows of the absorbed form over bf16 rows.
bool Stream(CaseSpec& spec, bool own_rows);

std::string ToString(const CaseSpec& spec);

struct SamplerOptions {
  uint64_t seed = 1;
  std::vector<kernels::Geometry>
      geometries;  // num_heads is set per case; empty: ReleasedGeometries
  kernels::Geometry full = {0, 512, 64, 128, 128};  // for cases that are not drawn from the list
  std::vector<int32_t> heads = {1, 3, 8, 12, 16, 24, 64, 128};
  std::vector<int32_t> page_sizes = {1, 3, 16, 64};
  std::vector<int32_t> units = {1, 2, 7, 256};
  // Drawn from a random sequence of their own, so that the rest of a case does not depend on the
  // list.
  std::vector<kernels::KvFormat> kv_formats = {kernels::KvFormat::kBf16};
  bool expanded = true;       // draw the kExpanded route too
  double max_flop = 2e9;      // bound of sampled cases
  double typical_flop = 8e6;  // bound of nine in ten
};

// The dims every backend must pass: 512/64/128, 32/16/16, 96/32/64 (lora / rope / nope and v).
std::vector<kernels::Geometry> ReleasedGeometries();
// Dims that are multiples of nothing, for backends that claim any shape.
std::vector<kernels::Geometry> OddGeometries();

// Case `index` of the sample.
CaseSpec SampleCase(const SamplerOptions& options, uint64_t index);

// `count` (at most 20) large cases: full dims and heads, long caches, all stages.
std::vector<CaseSpec> LargeCases(const SamplerOptions& options, int32_t count);

// `count` cases of wide inputs, from index `first` on: absorb, attention and projection; every
// fourth case is of the expanded form. `latent_q` is the dtype of absorbed queries.
std::vector<CaseSpec> WideCases(const SamplerOptions& options, int32_t first, int32_t count,
                                kernels::DType latent_q);

// `count` small cases from index `first` on around the edges of tiles: packed rows and cache rows
// next to multiples of 16, 32, 64 and 128, one to 128 heads, every route, pages of one row to 64,
// and an additional empty request. Full dims, but so few products that even an emulated GPU
// computes each case within seconds.
std::vector<CaseSpec> EdgeCases(const SamplerOptions& options, int32_t first, int32_t count);

// `count` (at most 16) cases of the expanded form with more query rows than a tile of any backend:
// full dims, few heads, several requests.
std::vector<CaseSpec> PrefillCases(const SamplerOptions& options, int32_t count);

// `count` cases of kSpread from index `first` on, absorbed: drafts of 1, 2, 3, 6 and 7 rows, 20, 64
// and 128 heads among others. Every third case has queries that products in e4m3 round. In every
// fourth case a row sees a repeated sequence of 64k or 1M keys, in turn, at most `most_keys`. Its
// values have one sign, so that a sum that drops bits as it grows shows.
std::vector<CaseSpec> SpreadCases(const SamplerOptions& options, int32_t first, int32_t count,
                                  int32_t most_keys);

// Two cases of kSink with 16k keys, absorbed: 20 heads and a draft of 2 rows, 128 heads and one.
std::vector<CaseSpec> SinkCases(const SamplerOptions& options);

// Small absorbed cases in every format of 8 bits that `options` name, whose last part counts. The
// last of 96 keys outweighs all others, with products in e4m3; it lies in a tile after the first,
// so sums must follow it. Where groups have their own scales, the last two of every other row are
// smaller: 129 heads with both products, 8 heads.
std::vector<CaseSpec> LateCases(const SamplerOptions& options);

// `count` sparse cases from index `first` on: lists of every kind, drafts of 2, 3, 6 and 7 rows,
// 8, 20 and 64 heads among others, every format of rows and size of pages that `options` name.
std::vector<CaseSpec> SparseCases(const SamplerOptions& options, uint64_t first, int64_t count);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_CASES_CASE_SPEC_H_
