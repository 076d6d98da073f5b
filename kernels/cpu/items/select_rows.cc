#include "kernels/cpu/items/select_rows.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <span>

namespace mla::kernels::cpu {
namespace {

// Rows of keys lie this number of elements apart: whole vectors, and a cache line more, so that
// rows do not share cache sets.
constexpr int32_t kKeyLd = kMaxIndexDim + 32;
constexpr int64_t kPanelBytesMost = int64_t{kMaxIndexDim} * kPanel * 4 * 2;
constexpr int32_t kMostPanels = kMaxIndexHeads / kPanel;

// Moves the best `wanted` ranks to the front, with the worst of them last.
void MoveBest(uint64_t* ranks, int32_t count, int32_t wanted) {
  std::nth_element(ranks, ranks + wanted - 1, ranks + count, std::greater<uint64_t>());
}

// Stores the list of a query row: the positions of `best`, or all that the row sees.
void StoreList(const SelectRecord& record, int32_t row, const uint64_t* best) {
  const int32_t count = SelectedRows(record, row);
  int32_t* const list = SelectedList(record, row);
  const bool all = count >= SelectVisible(record, row);
  for (int32_t i = 0; i < count; ++i) list[i] = all ? i : SelectPosition(best[i]);
  if (!all) std::sort(list, list + count);
  CopyWanted(record, row);
}

class RowSelector {
 public:
  RowSelector(const KernelSet& kernels, const PoolView& pool, const SelectRecord& record,
              int32_t row, const SelectLayout& layout, std::byte* scratch)
      : kernels_(kernels),
        pool_(pool),
        record_(record),
        layout_(layout),
        scratch_(scratch),
        key_(MakeKvRowLayout(KvFormat::kIndexKey, record.indexer.dim, 0)),
        inputs_(static_cast<const std::byte*>(record.inputs) +
                row * record.indexer.input_bytes(record.dtype)),
        wanted_(SelectedRows(record, row)),
        visible_(SelectVisible(record, row)),
        panels_((record.indexer.heads + kPanel - 1) / kPanel) {}

  // Returns the best ranks of share `share` of `shares` of the tiles, at most `wanted_`, unordered.
  std::span<uint64_t> Best(int32_t share, int32_t shares) {
    if (wanted_ == 0 || wanted_ >= visible_) return {};  // all are chosen
    const int64_t tiles = (visible_ + kTileRows - 1) / kTileRows;
    const auto begin = static_cast<int32_t>(tiles * share / shares * kTileRows);
    const auto end =
        static_cast<int32_t>(std::min<int64_t>(tiles * (share + 1) / shares * kTileRows, visible_));
    if (begin < end) {
      PackQueries();
      PackWeights();
    }
    for (int32_t first = begin; first < end; first += kTileRows) {
      AddTile(first, std::min(kTileRows, end - first));
      if (count_ >= 2 * wanted_) KeepBest();
    }
    KeepBest();
    return {ranks(), static_cast<size_t>(count_)};
  }

 private:
  template <typename T>
  T* As(int64_t at) const {
    return reinterpret_cast<T*>(scratch_ + at);
  }
  uint64_t* ranks() const { return As<uint64_t>(layout_.ranks); }
  int64_t panel_bytes() const {
    return PanelBytes(kernels_.bf16_operands, kernels_.k_align, record_.indexer.dim);
  }
  bool splits() const { return kernels_.bf16_operands && record_.dtype == DType::kF32; }

  void PackQueries() {
    const int32_t heads = record_.indexer.heads;
    for (int32_t panel = 0; panel < panels_; ++panel) {
      const int32_t first = panel * kPanel;
      const int32_t count = std::min(kPanel, heads - first);
      std::byte* const packed = As<std::byte>(layout_.queries) + panel * panel_bytes();
      if (kernels_.bf16_operands) {
        PackPanel(first, count, packed);
      } else {
        WritePanel(first, count, packed);
      }
    }
  }

  const std::byte* Query(int32_t head) const {
    return inputs_ + int64_t{head} * record_.indexer.dim * int64_t(ElementSize(record_.dtype));
  }

  // bf16 levels: packs the queries; low parts of fp32 queries follow after all panels.
  void PackPanel(int32_t first, int32_t count, std::byte* panel) {
    const int32_t dim = record_.indexer.dim;
    auto* const high = As<uint16_t>(layout_.query_terms);
    uint16_t* const low = high + kPanel * kKeyLd;
    const uint16_t *high_rows[kPanel], *low_rows[kPanel];
    float wide[kMaxIndexDim];
    for (int32_t i = 0; i < count; ++i) {
      high_rows[i] = high + i * kKeyLd;
      low_rows[i] = low + i * kKeyLd;
      if (splits()) {
        std::memcpy(wide, Query(first + i), static_cast<size_t>(dim) * sizeof(float));
        kernels_.split(wide, dim, high + i * kKeyLd, low + i * kKeyLd);
      } else {
        std::memcpy(high + i * kKeyLd, Query(first + i), static_cast<size_t>(dim) * sizeof(Bf16));
      }
    }
    kernels_.pack_rows(high_rows, count, dim, reinterpret_cast<uint16_t*>(panel));
    if (!splits()) return;
    kernels_.pack_rows(low_rows, count, dim,
                       reinterpret_cast<uint16_t*>(panel + panels_ * panel_bytes()));
  }

  // fp32 levels use it.
  void WritePanel(int32_t first, int32_t count, std::byte* panel) {
    std::memset(panel, 0, static_cast<size_t>(panel_bytes()));
    for (int32_t n = 0; n < count; ++n) {
      const std::byte* const query = Query(first + n);
      for (int32_t k = 0; k < record_.indexer.dim; ++k) {
        float value = 0.0f;
        if (record_.dtype == DType::kF32) {
          std::memcpy(&value, query + k * int64_t{4}, sizeof value);
        } else {
          Bf16 narrow = 0;
          std::memcpy(&narrow, query + k * int64_t{2}, sizeof narrow);
          value = ToFloat(narrow);
        }
        std::memcpy(panel + PanelOffset(kernels_, k, n), &value, sizeof value);
      }
    }
  }

  void PackWeights() {
    const int32_t heads = record_.indexer.heads;
    float* const weights = As<float>(layout_.weights);
    std::memcpy(weights, Query(heads), static_cast<size_t>(heads) * sizeof(float));
    std::fill(weights + heads, weights + panels_ * kPanel, 0.0f);
  }

  std::byte* Page(int32_t position) const {
    return pool_.Row(record_.page_table, record_.layer_offset, record_.row_stride,
                     record_.page_size, position - position % record_.page_size);
  }

  // Loads keys of positions [first, first + count) as A rows.
  void LoadKeys(int32_t first, int32_t count) {
    auto** const codes = As<const uint8_t*>(layout_.code_rows);
    auto** const keys = As<const void*>(layout_.key_rows);
    auto* const narrow = As<uint16_t>(layout_.keys);
    for (int32_t i = 0; i < count; ++i) {
      const int32_t in_page = (first + i) % record_.page_size;
      codes[i] = reinterpret_cast<const uint8_t*>(Page(first + i) + in_page * record_.row_stride);
      keys[i] = narrow + i * kKeyLd;
    }
    Fp8RowsArgs args{};
    args.rows = codes;
    args.count = count;
    args.latent_dim = record_.indexer.dim;
    args.out = narrow;
    args.ld = kKeyLd;
    kernels_.widen_fp8(args);
    if (kernels_.bf16_operands) return;
    const uint16_t* rows[kTileRows];
    for (int32_t i = 0; i < count; ++i) {
      rows[i] = narrow + i * kKeyLd;
      keys[i] = As<float>(layout_.wide_keys) + i * kKeyLd;
    }
    kernels_.widen(rows, count, record_.indexer.dim, As<float>(layout_.wide_keys), kKeyLd);
  }

  void AddTile(int32_t first, int32_t count) {
    LoadKeys(first, count);
    GemmArgs gemm{};
    gemm.a_rows = As<const void*>(layout_.key_rows);
    gemm.rows = count;
    gemm.k = record_.indexer.dim;
    gemm.b = As<std::byte>(layout_.queries);
    gemm.panel_bytes = panel_bytes();
    gemm.panels = panels_;
    gemm.c = As<float>(layout_.products);
    gemm.ldc = kMaxIndexHeads;
    kernels_.gemm(gemm);
    if (splits()) {
      gemm.b = As<std::byte>(layout_.queries) + panels_ * panel_bytes();
      gemm.accumulate = true;
      kernels_.gemm(gemm);
    }
    for (int32_t i = 0; i < count; ++i) {
      const int32_t position = first + i;
      const uint64_t rank = SelectRank(Sum(gemm.c + i * gemm.ldc) * Scale(position), position);
      if (rank > threshold_) ranks()[count_++] = rank;
    }
  }

  // Sums weight times relu over the heads; NaN stays NaN.
  float Sum(const float* products) const {
    const float* const weights = As<const float>(layout_.weights);
    float sums[kPanel] = {};
    for (int32_t panel = 0; panel < panels_; ++panel) {
      for (int32_t n = 0; n < kPanel; ++n) {
        const float product = products[panel * kPanel + n];
        sums[n] += weights[panel * kPanel + n] * (product < 0.0f ? 0.0f : product);
      }
    }
    for (int32_t half = kPanel / 2; half > 0; half /= 2) {
      for (int32_t n = 0; n < half; ++n) sums[n] += sums[n + half];
    }
    return sums[0];
  }

  float Scale(int32_t position) const {
    const KvRowPlace<std::byte> key = KvRowIn(key_, Page(position), record_.row_stride,
                                              record_.page_size, position % record_.page_size);
    float scale = 0.0f;
    std::memcpy(&scale, key.scales, sizeof scale);
    return KvScale(scale, kHostFp8);
  }

  void KeepBest() {
    if (count_ < wanted_) return;
    MoveBest(ranks(), count_, wanted_);
    count_ = wanted_;
    threshold_ = ranks()[wanted_ - 1];
  }

  const KernelSet& kernels_;
  const PoolView& pool_;
  const SelectRecord& record_;
  const SelectLayout& layout_;
  std::byte* const scratch_;
  const KvRowLayout key_;
  const std::byte* const inputs_;
  const int32_t wanted_, visible_, panels_;
  int32_t count_ = 0;       // count of ranks
  uint64_t threshold_ = 0;  // later ranks above it may be among the best
};

}  // namespace

SelectLayout MakeSelectLayout(const KernelSet& kernels, int32_t top_k) {
  SelectLayout layout;
  int64_t next = 0;
  const auto take = [&next](int64_t bytes) {
    const int64_t begin = next;
    next += (bytes + 63) / 64 * 64;
    return begin;
  };
  layout.code_rows = take(kTileRows * int64_t{sizeof(void*)});
  layout.key_rows = take(kTileRows * int64_t{sizeof(void*)});
  layout.keys = take(int64_t{kTileRows} * kKeyLd * int64_t{sizeof(Bf16)});
  if (!kernels.bf16_operands) {
    layout.wide_keys = take(int64_t{kTileRows} * kKeyLd * int64_t{sizeof(float)});
  }
  layout.query_terms = take(int64_t{2} * kPanel * kKeyLd * int64_t{sizeof(Bf16)});
  layout.queries = take(kMostPanels * kPanelBytesMost);
  layout.products = take(int64_t{kTileRows} * kMaxIndexHeads * int64_t{sizeof(float)});
  layout.weights = take(kMaxIndexHeads * int64_t{sizeof(float)});
  layout.ranks = take((int64_t{2} * top_k + kTileRows) * int64_t{sizeof(uint64_t)});
  layout.bytes = next;
  return layout;
}

void SelectRow(const KernelSet& kernels, const PoolView& pool, const SelectRecord& record,
               int32_t row, const SelectLayout& layout, std::byte* scratch) {
  RowSelector selector(kernels, pool, record, row, layout, scratch);
  StoreList(record, row, selector.Best(0, 1).data());
}

void SelectShare(const KernelSet& kernels, const PoolView& pool, const SelectRecord& record,
                 int32_t row, int32_t share, int32_t shares, const SelectLayout& layout,
                 std::byte* scratch, SelectCandidates* candidates) {
  RowSelector selector(kernels, pool, record, row, layout, scratch);
  const std::span<const uint64_t> best = selector.Best(share, shares);
  candidates->count = static_cast<int32_t>(best.size());
  std::copy(best.begin(), best.end(), candidates->ranks);
}

void MergeSelected(const SelectRecord& record, int32_t row,
                   std::span<const SelectCandidates> shares) {
  uint64_t* const ranks = shares.front().ranks;
  int32_t count = shares.front().count;
  for (const SelectCandidates& share : shares.subspan(1)) {
    std::copy_n(share.ranks, share.count, ranks + count);
    count += share.count;
  }
  const int32_t wanted = SelectedRows(record, row);
  if (count > wanted && wanted > 0) MoveBest(ranks, count, wanted);
  StoreList(record, row, ranks);
}

}  // namespace mla::kernels::cpu
