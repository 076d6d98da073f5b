#include "kernels/cpu/items/item_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/items/kv_operands.h"
#include "kernels/cpu/items/row_io.h"

namespace mla::kernels::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634f;
constexpr double kLn2 = 0.6931471805599453;

// One group of packed rows of an item. Packed row n is query row q_begin + n / heads, head
// head_begin + n % heads, of the segment.
struct Group {
  int32_t q_begin, heads, head_begin;
  int32_t rows;        // packed rows of the group
  int32_t first;       // packed row of the item at packed row 0 of the group, before mapping
  int32_t item_heads;  // heads of the item: partial rows are q-major over these
  int32_t item_head;   // head_begin within the item

  int32_t query_row(int32_t n) const { return q_begin + (first + n) / heads; }
  int32_t head(int32_t n) const { return head_begin + (first + n) % heads; }
  // Returns the row within the item's partial tile.
  int64_t partial(int32_t n, int32_t item_q_begin) const {
    return static_cast<int64_t>(query_row(n) - item_q_begin) * item_heads + item_head +
           (first + n) % heads;
  }
};

// Gives the scratch memory of a thread as typed parts.
class ItemState {
 public:
  ItemState(const RunContext& context, const WorkInfo& work, const PackedWeights& weights,
            std::byte* scratch)
      : context_(context),
        kernels_(*context.kernels),
        layout_(context.layout),
        segment_(context.params->segments[static_cast<size_t>(work.segment)]),
        work_(work),
        scratch_(scratch),
        kv_(context, work, weights, scratch) {}

  void RunGroup(const Group& group);
  void SelectHead(int32_t head) { kv_.SelectHead(segment_.head_offset + head); }

 private:
  template <typename T>
  T* As(int64_t at) const {
    return reinterpret_cast<T*>(scratch_ + at);
  }
  bool bf16() const { return kernels_.bf16_operands; }

  void PackQueries(const Group& group);
  void PackQueryBlock(const Group& group, int32_t first, int32_t rows, std::byte* out);
  void PackSplitQueries(const Group& group, int32_t first, int32_t rows, std::byte* out);
  const void* QueryRow(const Group& group, int32_t n, int32_t place) const;
  int32_t SetVisible(const Group& group);
  void RunBlock(int32_t block, int32_t packed_rows, int32_t chunk_begin, int32_t chunk_rows,
                bool first_chunk);
  void RunTile(int32_t block, int32_t packed_rows, int32_t row, int32_t rows, int32_t position,
               bool masked, bool few_keys, bool first);
  void AddLowTerm(GemmArgs gemm, const std::byte* low_queries);
  void AccumulateCarefully(const SoftmaxArgs& softmax, int32_t packed_rows, int32_t row,
                           int32_t rows, float* o, bool first);
  bool FetchesAhead() const;
  void Finish(const Group& group);

  const RunContext& context_;
  const KernelSet& kernels_;
  const RunLayout& layout_;
  const SegmentRecord& segment_;
  const WorkInfo& work_;
  std::byte* scratch_;
  KvOperands kv_;
  bool whole_tiles_ = false;       // one call does all stages of the group's tiles
  bool packs_in_product_ = false;  // the group's products, or these calls, pack values
  bool few_keys_ = false;          // some row of the group sees at most kTileRows keys
};

// Returns packed row n as the client sent it. A row in pieces is copied first, to `place` of the
// panel's rows if need be.
const void* ItemState::QueryRow(const Group& group, int32_t n, int32_t place) const {
  const auto size = static_cast<int64_t>(ElementSize(context_.params->desc.q_dtype));
  const int64_t begin =
      size * (group.query_row(n) * segment_.q_row_stride + group.head(n) * segment_.q_head_stride);
  const auto* const pieces = FragmentsOf(context_.params->q_fragments, work_.segment);
  if (pieces == nullptr) return static_cast<const std::byte*>(segment_.q) + begin;
  return ReadFragments(*pieces, begin, layout_.key_dim * size,
                       scratch_ + layout_.query_rows + place * layout_.query_row_bytes);
}

void ItemState::PackQueryBlock(const Group& group, int32_t first, int32_t rows, std::byte* out) {
  const AttentionParams& params = *context_.params;
  if (bf16() && layout_.q_terms == 1) {
    for (int32_t n = 0; n < rows; n += kPanel, out += layout_.q_panel_bytes) {
      const uint16_t* columns[kPanel] = {};
      const int32_t count = std::min(kPanel, rows - n);
      for (int32_t i = 0; i < count; ++i) {
        columns[i] = static_cast<const uint16_t*>(QueryRow(group, first + n + i, i));
      }
      kernels_.pack_rows(columns, count, layout_.key_dim, reinterpret_cast<uint16_t*>(out));
    }
    return;
  }
  if (bf16()) {
    PackSplitQueries(group, first, rows, out);
    return;
  }
  const int32_t panels = (rows + kPanel - 1) / kPanel;
  std::memset(out, 0, static_cast<size_t>(panels * layout_.q_panel_bytes));
  for (int32_t n = 0; n < rows; ++n) {
    const void* const row = QueryRow(group, first + n, 0);
    auto* to = reinterpret_cast<float*>(out + n / kPanel * layout_.q_panel_bytes) + n % kPanel;
    for (int32_t i = 0; i < layout_.key_dim; ++i) {
      to[static_cast<int64_t>(i) * kPanel] = LoadElement(row, params.desc.q_dtype, i);
    }
  }
}

// bf16 levels split fp32 queries: a block of high parts is followed by a block of low parts.
void ItemState::PackSplitQueries(const Group& group, int32_t first, int32_t rows, std::byte* out) {
  auto* high = As<uint16_t>(layout_.split_rows);
  uint16_t* low = high + kPanel * layout_.split_ld;
  for (int32_t n = 0; n < rows; n += kPanel, out += layout_.q_panel_bytes) {
    const uint16_t *high_rows[kPanel] = {}, *low_rows[kPanel] = {};
    const int32_t count = std::min(kPanel, rows - n);
    for (int32_t i = 0; i < count; ++i) {
      kernels_.split(static_cast<const float*>(QueryRow(group, first + n + i, i)), layout_.key_dim,
                     high + i * layout_.split_ld, low + i * layout_.split_ld);
      high_rows[i] = high + i * layout_.split_ld;
      low_rows[i] = low + i * layout_.split_ld;
    }
    kernels_.pack_rows(high_rows, count, layout_.key_dim, reinterpret_cast<uint16_t*>(out));
    kernels_.pack_rows(low_rows, count, layout_.key_dim,
                       reinterpret_cast<uint16_t*>(out + layout_.q_block_bytes));
  }
}

void ItemState::PackQueries(const Group& group) {
  std::byte* out = As<std::byte>(layout_.queries);
  for (int32_t first = 0; first < group.rows; first += kTileRows) {
    PackQueryBlock(group, first, std::min(kTileRows, group.rows - first), out);
    out += layout_.q_terms * layout_.q_block_bytes;
  }
}

// Sets visible[n] so that packed row n sees KV rows [0, visible[n]) of the segment, or this many
// places of its index list or window; cut at the item's end. Returns the largest.
int32_t ItemState::SetVisible(const Group& group) {
  int32_t* visible = As<int32_t>(layout_.visible);
  int32_t largest = 0;
  few_keys_ = false;
  for (int32_t n = 0; n < group.rows; ++n) {
    const int32_t seen = PlacesOf(*context_.params, work_.segment, group.query_row(n));
    visible[n] = std::min(seen, work_.kv_end);
    largest = std::max(largest, visible[n]);
    few_keys_ = few_keys_ || visible[n] <= kTileRows;
  }
  return largest;
}

// The product sums over all rows of a tile, and 0 x NaN is NaN. In a masked tile that holds values
// that are not finite, each packed row therefore sums only over the rows it sees.
void ItemState::AccumulateCarefully(const SoftmaxArgs& softmax, int32_t packed_rows, int32_t row,
                                    int32_t rows, float* o, bool first) {
  const bool with_rest = softmax.p_rest != nullptr;
  SoftmaxArgs of_rest = softmax;
  of_rest.p = softmax.p_rest;
  for (int32_t n = 0; n < packed_rows; ++n, o += layout_.o_ld) {
    for (int32_t d = 0; d < layout_.value_dim; ++d) {
      float sum = first ? 0.0f : o[d] * softmax.alpha[n];
      for (int32_t r = 0; r < std::min(rows, softmax.visible[n]); ++r) {
        float p = kernels_.probability(softmax, r, n);
        if (with_rest) p += kernels_.probability(of_rest, r, n);
        sum += p * kv_.Value(row + r, d, with_rest);
      }
      o[d] = sum;
    }
  }
}

// Adds the products with the queries' low parts. An infinite key correctly makes the high part's
// product infinite. The low part's product could turn it into NaN, so it is left out there.
void ItemState::AddLowTerm(GemmArgs gemm, const std::byte* low_queries) {
  float* logits = gemm.c;
  const int64_t count = static_cast<int64_t>(gemm.rows) * gemm.ldc;
  gemm.b = low_queries;
  gemm.next_count = 0;
  gemm.value_panels = nullptr;
  gemm.c = As<float>(layout_.probabilities);
  kernels_.gemm(gemm);
  for (int64_t i = 0; i < count; ++i) {
    const float sum = logits[i] + gemm.c[i];
    logits[i] = sum == sum ? sum : logits[i];
  }
}

// `few_keys`: some row sees so few keys that the roundings of weights and of up-projected values do
// not average out. Both are then used together with their rounding remainders.
void ItemState::RunTile(int32_t block, int32_t packed_rows, int32_t row, int32_t rows,
                        int32_t position, bool masked, bool few_keys, bool first) {
  const int32_t columns = (packed_rows + kPanel - 1) / kPanel * kPanel;
  const std::byte* queries =
      As<std::byte>(layout_.queries + block * layout_.q_terms * layout_.q_block_bytes);
  GemmArgs gemm{};
  gemm.a_rows = kv_.keys() + row;
  gemm.rows = rows;
  gemm.k = layout_.key_dim;
  gemm.panel_bytes = layout_.q_panel_bytes;
  gemm.panels = columns / kPanel;
  gemm.c = As<float>(layout_.logits);
  gemm.ldc = columns + kPanel;  // see MakeRunLayout on strides
  gemm.b = queries;
  gemm.next_rows = kv_.next_rows();
  gemm.next_count = kv_.next_count();
  gemm.next_bytes = layout_.kv.row_bytes;
  const bool careful = masked && !kv_.ValuesFinite(row, rows);
  if (packs_in_product_ && !careful) {
    gemm.value_panels = kv_.value_panels(row);
    gemm.value_panel_bytes = layout_.v_panel_bytes;
    gemm.value_dim = layout_.value_dim;
  }
  SoftmaxArgs softmax{};
  softmax.s = gemm.c;
  softmax.lds = gemm.ldc;
  softmax.rows = rows;
  softmax.columns = columns;
  softmax.scale2 = segment_.softmax_scale * kv_.scale() * kLog2E;
  softmax.m = As<float>(layout_.m) + block * kTileRows;
  softmax.l = As<float>(layout_.l) + block * kTileRows;
  if (bf16()) softmax.norm = As<float>(layout_.norm) + block * kTileRows;
  softmax.alpha = As<float>(layout_.alpha);
  softmax.p = As<float>(layout_.probabilities);
  if (few_keys && bf16() && layout_.expanded) softmax.p_rest = As<float>(layout_.rests);
  if (masked) {
    int32_t* visible = As<int32_t>(layout_.tile_visible);
    const int32_t* seen = As<int32_t>(layout_.visible) + block * kTileRows;
    for (int32_t n = 0; n < columns; ++n) visible[n] = n < packed_rows ? seen[n] - position : 0;
    softmax.visible = visible;
  }
  AccumulateArgs accumulate{};
  accumulate.p = softmax.p;
  accumulate.rows = rows;
  accumulate.columns = columns;
  accumulate.packed_rows = packed_rows;
  accumulate.v = kv_.values(row);
  accumulate.ldv = kv_.values_ld();
  accumulate.panels = layout_.value_panels;
  accumulate.o = As<float>(layout_.o) + static_cast<int64_t>(block) * kTileRows * layout_.o_ld;
  accumulate.ldo = layout_.o_ld;
  accumulate.alpha = first ? nullptr : softmax.alpha;
  if (whole_tiles_ && !careful) {
    kernels_.attend({gemm, softmax, accumulate});
    return;
  }
  kernels_.gemm(gemm);
  if (layout_.q_terms == 2) AddLowTerm(gemm, queries + layout_.q_block_bytes);
  kernels_.softmax(softmax);
  if (careful) {
    AccumulateCarefully(softmax, packed_rows, row, rows, accumulate.o, first);
    return;
  }
  kernels_.accumulate(accumulate);
  if (softmax.p_rest == nullptr) return;
  std::fill_n(softmax.alpha, columns, 1.0f);
  accumulate.alpha = softmax.alpha;
  accumulate.p = softmax.p_rest;
  kernels_.accumulate(accumulate);
  accumulate.p = softmax.p;
  accumulate.v = kv_.value_rests(row);
  kernels_.accumulate(accumulate);
}

// Runs the chunk's tiles that some row of the block sees.
void ItemState::RunBlock(int32_t block, int32_t packed_rows, int32_t chunk_begin,
                         int32_t chunk_rows, bool first_chunk) {
  const int32_t* seen = As<int32_t>(layout_.visible) + block * kTileRows;
  const auto [least, largest] = std::minmax_element(seen, seen + packed_rows);
  for (int32_t row = 0; row < chunk_rows; row += layout_.tile_rows) {
    const int32_t position = chunk_begin + row;
    const bool first = first_chunk && row == 0;
    // The first tile is run even if no query sees it, because it initialises O.
    if (*largest <= position && !first) return;
    const int32_t rows = std::min(layout_.tile_rows, chunk_rows - row);
    RunTile(block, packed_rows, row, rows, position, *least < position + rows,
            *least <= kTileRows && position < 2 * kTileRows, first);
  }
}

void ItemState::Finish(const Group& group) {
  const AttentionParams& params = *context_.params;
  const float* o = As<float>(layout_.o);
  const float* m = As<float>(layout_.m);
  const float* l = As<float>(layout_.l);
  const float* norm = bf16() ? As<float>(layout_.norm) : l;
  for (int32_t n = 0; n < group.rows; ++n, o += layout_.o_ld) {
    const bool empty = l[n] == 0.0f;
    const float inverse = empty ? 0.0f : kv_.scale() / norm[n];
    const float lse =
        empty ? -kInfinity
              : static_cast<float>((static_cast<double>(m[n]) + std::log2(l[n])) * kLn2);
    const int64_t query_row = group.query_row(n), head = group.head(n);
    if (work_.partial_row == kUnsplit) {
      StoreRow(kernels_, o, layout_.value_dim, inverse * kv_.SinkFactorOf(head, lse),
               params.desc.o_dtype, segment_.o,
               query_row * segment_.o_row_stride + head * segment_.o_head_stride);
      if (segment_.lse != nullptr) {
        segment_.lse[query_row * segment_.lse_row_stride + head * segment_.lse_head_stride] = lse;
      }
      continue;
    }
    const int64_t partial = work_.partial_row + group.partial(n, work_.q_begin);
    StoreRow(kernels_, o, layout_.value_dim, inverse, DType::kF32, context_.partials.o,
             partial * context_.partials.o_ld);
    context_.partials.lse[partial] = lse;
  }
}

// Absorbed chunks are single tiles that are read in place, so the next one can be fetched during
// the products.
bool ItemState::FetchesAhead() const {
  const bool listed = context_.params->desc.attention == AttentionKind::kSparse;
  return !layout_.expanded && (!listed || layout_.widens || kernels_.fetches_listed_rows);
}

void ItemState::RunGroup(const Group& group) {
  const int32_t end = SetVisible(group);
  // Columns that pad the last panel are computed as well, so their state is initialised.
  const int32_t padded = (group.rows + kPanel - 1) / kPanel * kPanel;
  std::fill_n(As<float>(layout_.m), padded, -kInfinity);
  std::fill_n(As<float>(layout_.l), padded, 0.0f);
  std::fill_n(As<float>(layout_.norm), padded, 0.0f);
  if (end > work_.kv_begin) PackQueries(group);
  const int32_t panels = padded / kPanel;
  whole_tiles_ = kernels_.attend != nullptr && panels > kernels_.packs_in_gemm &&
                 !layout_.expanded && layout_.q_terms == 1;
  packs_in_product_ = whole_tiles_ ? !layout_.widens : kv_.PacksInProduct(panels);
  bool first = true;
  for (int32_t begin = work_.kv_begin; begin < end; begin += layout_.chunk_rows) {
    const int32_t entries = std::min(layout_.chunk_rows, end - begin);
    // A tile with few_keys lies within this bound: its rows are of one head, so they see at most
    // kTileRows more.
    const int32_t rows =
        kv_.Prepare(begin, entries, few_keys_ && begin < 2 * kTileRows, !packs_in_product_);
    if (FetchesAhead()) {
      kv_.FindNext(begin + entries, std::min(layout_.tile_rows, end - begin - entries));
    }
    if (rows == 0) continue;
    for (int32_t row = 0; row < group.rows; row += kTileRows) {
      RunBlock(row / kTileRows, std::min(kTileRows, group.rows - row), begin, rows, first);
    }
    first = false;
  }
  if (first) {
    std::memset(
        As<float>(layout_.o), 0,
        static_cast<size_t>(group.rows) * static_cast<size_t>(layout_.o_ld) * sizeof(float));
  }
  Finish(group);
}

}  // namespace

void AttendItem(const RunContext& context, const WorkInfo& work, const PackedWeights& weights,
                std::byte* scratch) {
  ItemState state(context, work, weights, scratch);
  const int32_t heads = work.head_end() - work.head_begin();
  const int32_t q_rows = work.q_end - work.q_begin;
  // The expanded form has keys of its own for every head.
  const int32_t head_step = context.layout.expanded ? 1 : heads;
  for (int32_t head = 0; head < heads; head += head_step) {
    if (context.layout.expanded) state.SelectHead(work.head_begin() + head);
    const int32_t packed = q_rows * head_step;
    for (int32_t first = 0; first < packed; first += context.layout.group_rows) {
      Group group{};
      group.q_begin = work.q_begin;
      group.heads = head_step;
      group.head_begin = work.head_begin() + head;
      group.first = first;
      group.rows = std::min(context.layout.group_rows, packed - first);
      group.item_heads = heads;
      group.item_head = head;
      state.RunGroup(group);
    }
  }
}

}  // namespace mla::kernels::cpu
