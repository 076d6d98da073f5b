#include "kernels/hip/device_state/capabilities.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/formats/kv_format.h"
#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/args/kernel_args.h"

namespace mla::kernels::hip {
namespace {

// On an H200, kernels write 33 KiB to host memory in less time than copies of it add to a launch.
// For 132 KiB they need 18 us, which is more than the copies add.
constexpr int64_t kMostBytesInPlace = 40 << 10;

// Launches with at least this number of bytes of queries are streamed. In smaller launches a kernel
// copies inputs and outputs, or the launch computes while another one's copies run.
constexpr int64_t kLeastStreamBytes = 2 << 20;
// Time of a byte of KV rows in launches that were not measured yet. GPUs read 0.8 to 5 TB/s of
// them.
constexpr double kNanosPerKvByte = 1e-3;
// A streamed plan has at most this number of pieces for each unit: many enough that little work
// remains when the last queries arrive, and few enough that merging them costs little. A piece has
// at least item_overhead_rows, so this limit matters only for many KV rows.
constexpr int32_t kStreamPieces = 5;

// Returns the dims of attention with bf16 products, as text: "128/128 or 192/256".
std::string ExpandedDimsOf(const ArchTraits& arch) {
  std::string text;
  for (const ExpandedVariant& v : arch.expanded) {
    if (v.products != DType::kBf16) continue;
    absl::StrAppend(&text, text.empty() ? "" : " or ", v.dims.nope, "/", v.dims.value);
  }
  return text;
}

}  // namespace

BackendInfo InfoOf(const GpuRuntime& runtime, const ArchTraits& arch) {
  BackendInfo info;
  const char* vendor = runtime.vendor() == Vendor::kAmd ? "hip" : "cuda";
  info.name = absl::StrCat(vendor, "-", runtime.arch());
  info.description = "tile kernels on matrix cores, persistent over the plan";
  info.device = runtime.name();
  info.arch = runtime.arch();
  info.fp8 = arch.fp8;
  info.supported = absl::StrCat(
      "absorbed form with nope_dim and v_dim multiples of 8, expanded form with nope_dim/v_dim ",
      ExpandedDimsOf(arch),
      "; kv_lora_rank 512, rope_dim 64, rows of bf16, fp8_tensor or fp8_row, bf16 queries (fp32 "
      "ones in EXPANDED only), bf16 or fp32 outputs, any heads, query rows and page size");
  info.kv_formats.clear();
  for (const KvFormat format : kKvFormats) {
    if (MostRows(arch, format, DType::kBf16, AttentionKind::kDense) > 0) {
      info.kv_formats.push_back(format);
    }
  }
  info.sparse = std::any_of(arch.attend.begin(), arch.attend.end(), [](const AttendVariant& v) {
    return v.attention == AttentionKind::kSparse;
  });
  if (info.sparse) info.supported += "; index lists in the absorbed form";
  info.windows = std::any_of(arch.attend.begin(), arch.attend.end(), [](const AttendVariant& v) {
    return v.attention == AttentionKind::kWindow;
  });
  if (info.windows) {
    info.supported +=
        "; windows with kv_lora_rank 448, rows and entries both of bf16 or both of fp8_page";
  }
  info.selects = arch.indexer;
  if (info.selects) {
    info.index_dim = kIndexDim;
    info.supported += absl::StrCat("; an indexer with index_dim ", kIndexDim);
  }
  info.projects = true;
  info.projects_codes = true;
  info.supported += "; PROJECTED with queries and outputs of bf16";
  info.fp8_products = !arch.fp8_compute.empty();
  if (info.fp8_products) info.fp8_compute = std::string(arch.fp8_compute);
  info.units = runtime.units();
  info.unified_memory = false;
  info.nanos_per_kv_byte = kNanosPerKvByte;
  SetHostMemory(runtime, arch, &info);
  info.absorbed_q_of_f32 = DType::kBf16;  // the kernels read no other queries
  info.notes = {{"runtime", runtime.vendor() == Vendor::kAmd
                                ? absl::StrCat(runtime.library(), ", ", RocmName(runtime.version()))
                                : runtime.library()}};
  return info;
}

void SetHostMemory(const GpuRuntime& runtime, const ArchTraits& arch, BackendInfo* info) {
  const bool reach = runtime.kernels_reach_host();
  info->in_place_bytes = reach ? kMostBytesInPlace : 0;
  info->stream_bytes = reach && !arch.stream.empty() ? kLeastStreamBytes : 0;
  info->waits_for_words = reach;
}

absl::Status CheckSupported(const ArchTraits& arch, const BackendInfo& info,
                            const AttentionDesc& desc) {
  const Geometry& g = desc.geometry;
  const char* missing = nullptr;
  if (g.num_heads < 1 || g.num_heads > 65535) missing = "this head count";
  // Matrix cores take bf16, and rounding fp32 queries to it would exceed the accepted error.
  if (desc.q_dtype != DType::kBf16) missing = "this query dtype";
  if (desc.page_size < 1) missing = "this page size";
  const bool windowed = desc.attention == AttentionKind::kWindow;
  if (g.kv_lora_rank != (windowed ? 448 : 512)) missing = "this kv_lora_rank";
  if (g.rope_dim != 64) missing = "this rope_dim";
  if (g.nope_dim < 0 || g.nope_dim % 8 != 0) missing = "this nope_dim";
  if (g.v_dim < 0 || g.v_dim % 8 != 0) missing = "this v_dim";
  const bool expanded = desc.form == AttentionForm::kExpanded;
  const ExpandedDims dims{g.nope_dim, g.v_dim};
  if (windowed) {
    if (expanded || MostRows(arch, desc.kv_format, DType::kBf16, desc.attention) == 0) {
      missing = expanded ? "a window in the expanded form" : "a window over this row format";
    }
    if (desc.entry_format != desc.kv_format) missing = "entries of another format than rows";
    if (desc.products != DType::kBf16) missing = "these products with a window";
  } else if (expanded
                 ? FindExpand(arch, kDims128, desc.kv_format, DType::kBf16) == arch.expand.size()
                 : MostRows(arch, desc.kv_format, DType::kBf16, AttentionKind::kDense) == 0) {
    missing = "this row format";
  } else if (desc.attention == AttentionKind::kSparse &&
             (expanded || MostRows(arch, desc.kv_format, DType::kBf16, desc.attention) == 0)) {
    missing = expanded ? "index lists in the expanded form" : "index lists";
  } else if (desc.products != DType::kBf16) {
    // A model with 8-bit products in prefill alone gets bf16 products in the absorbed form.
    const bool prefill = info.fp8_prefill_keys > 0 && desc.attention == AttentionKind::kDense &&
                         FindExpand(arch, dims, desc.kv_format, desc.products) < arch.expand.size();
    if (expanded && !prefill) {
      missing = "these products in the expanded form";
    } else if (!prefill && MostRows(arch, desc.kv_format, desc.products, desc.attention) == 0) {
      missing = "these products";
    }
  }
  if (expanded && !HasExpandedForm(arch, dims)) {
    missing = "this nope_dim with this v_dim in the expanded form";
  }
  if (missing == nullptr) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("wanted: ", ToString(desc), "; supported: ", info.supported,
                   "; missing: ", missing, "; device: ", info.device, " (", info.arch, ")"));
}

PlanTraits PlanTraitsOf(const ArchTraits& arch, int32_t units, const AttentionDesc& desc) {
  PlanTraits traits;
  if (desc.form == AttentionForm::kExpanded) {
    const ExpandedDims dims{desc.geometry.nope_dim, desc.geometry.v_dim};
    const size_t variant = FindExpanded(arch, dims, desc.products);
    // A refused shape has no variant; it gets numbers that are valid for any shape.
    const int32_t blocks = variant < arch.expanded.size() ? arch.expanded[variant].blocks : 1;
    traits.units = std::max(1, units * blocks);
    traits.tile_rows = kExpandedRows;
    traits.max_heads_per_tile = 1;
    traits.kv_granularity = kExpandedRows;
    traits.item_overhead_rows = 2 * kExpandedRows;
    traits.rounds.cache_bytes = arch.cache_bytes;
    traits.rounds.dims = dims;
    return traits;
  }
  const DType products = AbsorbedProducts(arch, desc.kv_format, desc.products, desc.attention);
  int32_t largest = MostRows(arch, desc.kv_format, products, desc.attention);
  // A refused shape has no variant; it gets numbers that are valid for any shape.
  if (largest == 0) largest = MostRows(arch, KvFormat::kBf16, DType::kBf16, desc.attention);
  largest = std::max(1, largest);
  // Few heads fit one block's tile, so each block is a unit. Many heads are shared by neighbouring
  // blocks.
  const int32_t blocks = desc.geometry.num_heads > largest ? BlocksOfUnit(arch, largest) : 1;
  traits.units = std::max(1, units / blocks);
  traits.tile_rows = largest * blocks;
  traits.max_q_rows_per_tile = desc.attention == AttentionKind::kDense ? 0 : 1;
  traits.kv_granularity = arch.kv_granularity;
  traits.item_overhead_rows = arch.item_overhead_rows;
  if (desc.streamed && !arch.stream.empty() && desc.attention == AttentionKind::kDense &&
      desc.kv_format == KvFormat::kBf16) {
    traits.units = std::max(1, (units - kPushBlocks) / blocks);
    traits.dealt_pieces = kStreamPieces;
    return traits;
  }
  const int32_t spread =
      desc.kv_format == KvFormat::kBf16 ? arch.spread_kv_rows : arch.spread_code_rows;
  if (spread > 0 && desc.attention == AttentionKind::kDense) {
    const int32_t least = LeastRows(arch, desc.kv_format, products, desc.attention);
    traits.small = {units, std::max(1, least), spread};
  }
  return traits;
}

}  // namespace mla::kernels::hip
