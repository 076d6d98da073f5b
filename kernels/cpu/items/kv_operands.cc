#include "kernels/cpu/items/kv_operands.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/items/row_io.h"
#include "kernels/cpu/items/weights.h"

namespace mla::kernels::cpu {
namespace {

// This number of rows is widened at a time. Packed tiles are padded to groups of 32.
constexpr int32_t kWidenedRows = 32;
static_assert(kTileRows % kWidenedRows == 0 && kMostKvRows % kWidenedRows == 0);

bool AllFinite(const float* values, int32_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

// Checks four bf16 values at a time: adding one to the last place of an exponent of ones carries
// into the sign. It runs over every masked tile, so its cost is noticeable next to the products.
bool AllFinite(const Bf16* values, int32_t count) {
  constexpr uint64_t kExponents = 0x7f80'7f80'7f80'7f80;
  constexpr uint64_t kLastPlaces = 0x0080'0080'0080'0080;
  constexpr uint64_t kSigns = 0x8000'8000'8000'8000;
  uint64_t carries = 0;
  int32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    uint64_t four;
    std::memcpy(&four, values + i, sizeof(four));
    carries |= (four & kExponents) + kLastPlaces;
  }
  for (; i < count; ++i) carries |= (values[i] & kExponents) + (kLastPlaces & 0xffff);
  return (carries & kSigns) == 0;
}

}  // namespace

void KvOperands::SelectHead(int32_t head) {
  const WeightLayout layout = MakeWeightLayout(kernels_, context_.params->desc.geometry);
  head_weights_ = weights_.heads + head * layout.head_bytes;
  TransposeUk(kernels_, context_.params->desc.geometry, head_weights_, layout_.uk_panel_bytes,
              As<std::byte>(layout_.uk));
}

// Widens rows of an 8-bit format to bf16 rows in scratch memory; all later steps read these.
void KvOperands::WidenRows(int32_t first, int32_t count) {
  const int32_t rows = std::clamp(of_segment_ - first, 0, count);
  WidenPart(layout_.kv, first, rows);
  WidenPart(layout_.entry, first + rows, count - rows);
}

void KvOperands::WidenPart(const KvRowLayout& kv, int32_t first, int32_t count) {
  if (count == 0 || kv.traits.latent == DType::kBf16) return;
  auto** rows = As<const uint8_t*>(layout_.kv_rows) + first;
  Fp8RowsArgs args{};
  args.rows = rows;
  args.count = count;
  args.latent_dim = kv.latent_dim;
  args.rope_dim = kv.rope_dim;
  args.group = kv.traits.group;
  args.scales_at = kv.scales_at;
  if (kv.traits.scales == KvScales::kInPage) {
    args.exponents = As<const uint8_t*>(layout_.scales) + first;
  }
  args.rope_at = kv.rope_at;
  args.out = As<uint16_t>(layout_.widened) + first * layout_.widened_ld;
  args.ld = layout_.widened_ld;
  kernels_.widen_fp8(args);
  for (int32_t i = 0; i < count; ++i) {
    rows[i] = reinterpret_cast<const uint8_t*>(args.out + i * args.ld);
  }
}

// Packs value panels of rows [first, first + count) of the chunk. All are of one tile, and `first`
// is even.
void KvOperands::PackValues(const uint16_t* const* values, int32_t first, int32_t count) {
  std::byte* const tile =
      As<std::byte>(layout_.value_panels_at + first / layout_.tile_rows * layout_.v_tile_bytes);
  const int64_t pairs = first % layout_.tile_rows / 2;
  kernels_.pack_values(values + first, count, layout_.value_dim,
                       reinterpret_cast<uint16_t*>(tile + pairs * 4 * kPanel),
                       layout_.v_panel_bytes);
}

KvOperands::Found KvOperands::Find(int32_t begin, int32_t count, const FoundRows& places) const {
  if (window_ != nullptr) return FindWindow(begin, count, places);
  const RowPages pages = PagesOfRows(segment_, layout_.kv);
  if (context_.params->desc.attention == AttentionKind::kSparse) {
    const int32_t first = segment_.list_begin[q_row_] - segment_.list_begin[0] + begin;
    count = FindListedRows(context_.pool, pages, segment_.list + first, count,
                           VisibleRows(segment_, q_row_), places);
  } else {
    FindRows(context_.pool, pages, begin, count, places);
  }
  return {count, count};
}

// Finds places of the window first, then places of the entries.
KvOperands::Found KvOperands::FindWindow(int32_t begin, int32_t count,
                                         const FoundRows& places) const {
  const int32_t visible = VisibleRows(segment_, q_row_);
  const int32_t held = WindowRows(*window_, visible);
  const int32_t rows = std::clamp(held - begin, 0, count);
  FindRows(context_.pool, PagesOfRows(segment_, layout_.kv), visible - held + begin, rows, places);
  if (rows == count) return {count, count};
  const RowPages entries = PagesOfEntries(*window_, layout_.entry);
  const int32_t first = begin + rows - held;
  if (segment_.list_begin == nullptr) {
    FindRows(context_.pool, entries, first, count - rows, places.Behind(rows));
    return {count, rows};
  }
  const int32_t* const list =
      segment_.list + (segment_.list_begin[q_row_] - segment_.list_begin[0]);
  return {rows + FindListedRows(context_.pool, entries, list + first, count - rows,
                                WholeEntries(*window_, visible), places.Behind(rows)),
          rows};
}

bool KvOperands::PacksInProduct(int32_t panels) const {
  return context_.params->desc.attention != AttentionKind::kDense && !layout_.widens &&
         !layout_.expanded && panels <= kernels_.packs_in_gemm &&
         layout_.value_dim % (2 * kPanel) == 0;
}

int32_t KvOperands::Prepare(int32_t begin, int32_t entries, bool keep_rests, bool pack_values) {
  const Found found =
      Find(begin, entries, {As<const void*>(layout_.kv_rows), As<const uint8_t*>(layout_.scales)});
  const int32_t count = found.rows;
  of_segment_ = found.of_segment;
  auto** rows = As<const uint16_t*>(layout_.kv_rows);
  auto** keys = As<const void*>(layout_.key_ptrs);
  auto** values = As<const uint16_t*>(layout_.value_ptrs);
  if (!layout_.expanded && bf16()) {
    // Widened rows are packed in small pieces, while they are in the first-level cache.
    const int32_t piece = layout_.widens ? kWidenedRows : layout_.tile_rows;
    for (int32_t first = 0; first < count; first += piece) {
      const int32_t some = std::min(piece, count - first);
      if (layout_.widens) WidenRows(first, some);
      if (pack_values) PackValues(rows, first, some);
    }
    std::memcpy(keys, rows, static_cast<size_t>(count) * sizeof(void*));
    std::memcpy(values, rows, static_cast<size_t>(count) * sizeof(void*));
    return count;
  }
  if (layout_.widens) WidenRows(0, count);
  if (!layout_.expanded) {
    kernels_.widen(rows, count, layout_.key_dim, As<float>(layout_.keys),
                   layout_.key_row_bytes / 4);
    for (int32_t i = 0; i < count; ++i)
      keys[i] = As<std::byte>(layout_.keys) + i * layout_.key_row_bytes;
    return count;
  }
  UpProject(count, keep_rests);
  for (int32_t i = 0; i < count; ++i) {
    keys[i] = As<std::byte>(layout_.keys) + i * layout_.key_row_bytes;
    values[i] = As<const uint16_t>(layout_.values + i * layout_.value_row_bytes);
  }
  for (int32_t first = 0; bf16() && first < count; first += kTileRows) {
    PackValues(values, first, std::min(kTileRows, count - first));
  }
  return count;
}

void KvOperands::FindNext(int32_t begin, int32_t count) {
  next_count_ = Find(begin, count, {As<const void*>(layout_.next_rows), nullptr}).rows;
}

// Computes keys = [latent x W_UK^T, rotated part] and values = latent x W_UV.
void KvOperands::UpProject(int32_t count, bool keep_rests) {
  const Geometry& g = context_.params->desc.geometry;
  const WeightLayout layout = MakeWeightLayout(kernels_, g);
  auto** rows = As<const uint16_t*>(layout_.kv_rows);
  auto** latents = As<const void*>(layout_.key_ptrs);
  const int64_t latent_ld = (g.kv_lora_rank + kPanel - 1) / kPanel * kPanel;
  if (bf16()) {
    std::memcpy(latents, rows, static_cast<size_t>(count) * sizeof(void*));
  } else {
    kernels_.widen(rows, count, g.kv_lora_rank, As<float>(layout_.latents), latent_ld);
    for (int32_t i = 0; i < count; ++i) latents[i] = As<float>(layout_.latents) + i * latent_ld;
  }
  GemmArgs gemm{};
  gemm.a_rows = latents;
  gemm.rows = count;
  gemm.k = g.kv_lora_rank;
  gemm.b = As<std::byte>(layout_.uk);
  gemm.panel_bytes = layout_.uk_panel_bytes;
  gemm.panels = (g.nope_dim + kPanel - 1) / kPanel;
  gemm.c = bf16() ? As<float>(layout_.up) : As<float>(layout_.keys);
  gemm.ldc = bf16() ? layout_.up_ld : layout_.key_row_bytes / 4;
  kernels_.gemm(gemm);
  if (bf16()) {
    kernels_.narrow(gemm.c, gemm.ldc, count, g.nope_dim, As<uint16_t>(layout_.keys),
                    layout_.key_row_bytes / 2);
  }
  for (int32_t i = 0; i < count; ++i) {
    CopyOperands(rows[i] + g.kv_lora_rank, g.rope_dim, bf16(),
                 As<std::byte>(layout_.keys) + i * layout_.key_row_bytes, g.nope_dim);
  }
  gemm.b = head_weights_ + layout.project_at;
  gemm.panel_bytes = layout.project_panel_bytes;
  gemm.panels = layout.project_panels;
  if (!bf16()) {
    gemm.c = As<float>(layout_.values);
    gemm.ldc = layout_.value_row_bytes / 4;
  }
  kernels_.gemm(gemm);
  if (bf16()) {
    kernels_.narrow(gemm.c, gemm.ldc, count, g.v_dim, As<uint16_t>(layout_.values),
                    layout_.value_row_bytes / 2);
    if (keep_rests) PackRests(gemm.c, count);
  }
}

// Packs value panels of the remainders up - bf16(up).
void KvOperands::PackRests(const float* up, int32_t count) {
  const uint16_t* rows[kTileRows];
  for (int32_t r = 0; r < count; ++r) {
    const auto* rounded = As<const uint16_t>(layout_.values + r * layout_.value_row_bytes);
    auto* rest = As<uint16_t>(layout_.value_rests + r * layout_.value_row_bytes);
    for (int32_t d = 0; d < layout_.value_dim; ++d) {
      const float difference = up[r * layout_.up_ld + d] - ToFloat(rounded[d]);
      rest[d] = std::isfinite(difference) ? ToBf16(difference) : Bf16{0};
    }
    rows[r % kTileRows] = rest;
    if (r % kTileRows != kTileRows - 1 && r != count - 1) continue;
    kernels_.pack_values(
        rows, r % kTileRows + 1, layout_.value_dim,
        As<uint16_t>(layout_.rest_panels_at + r / kTileRows * layout_.v_tile_bytes),
        layout_.v_panel_bytes);
  }
}

float KvOperands::Value(int32_t row, int32_t d, bool with_rest) const {
  if (bf16()) {
    const float rest =
        with_rest ? ToFloat(As<uint16_t>(layout_.value_rests + row * layout_.value_row_bytes)[d])
                  : 0.0f;
    return ToFloat(As<const uint16_t*>(layout_.value_ptrs)[row][d]) + rest;
  }
  return FloatValues(row)[d];
}

const float* KvOperands::FloatValues(int32_t row) const {
  const int64_t base = layout_.expanded ? layout_.values : layout_.keys;
  const int64_t stride = layout_.expanded ? layout_.value_row_bytes : layout_.key_row_bytes;
  return As<const float>(base + row * stride);
}

bool KvOperands::ValuesFinite(int32_t row, int32_t rows) const {
  for (int32_t r = row; r < row + rows; ++r) {
    if (bf16() ? !AllFinite(As<const uint16_t*>(layout_.value_ptrs)[r], layout_.value_dim)
               : !AllFinite(FloatValues(r), layout_.value_dim)) {
      return false;
    }
  }
  return true;
}

const void* KvOperands::values(int32_t row) const {
  if (bf16()) return value_panels(row);
  const int64_t stride = layout_.expanded ? layout_.value_row_bytes : layout_.key_row_bytes;
  return As<std::byte>((layout_.expanded ? layout_.values : layout_.keys) + row * stride);
}

int64_t KvOperands::values_ld() const {
  if (bf16()) return layout_.v_panel_bytes;
  return (layout_.expanded ? layout_.value_row_bytes : layout_.key_row_bytes) / 4;
}

const void* KvOperands::value_rests(int32_t row) const {
  return As<std::byte>(layout_.rest_panels_at + row / kTileRows * layout_.v_tile_bytes);
}

}  // namespace mla::kernels::cpu
