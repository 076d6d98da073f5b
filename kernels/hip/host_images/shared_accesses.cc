// Prints which addresses of shared memory the lanes of a wave access together, instruction by
// instruction, in the kernels of one architecture that have matrix products. kernels/hip/tools
// counts bank conflicts in them. It runs each kernel on the host, on a small launch without masks.
//
//   shared_accesses IMAGE.so...
//
// There is a line for each attention kernel of the architecture: "variant", its traits
// (attend_variants.h), the bytes of a row, and how many of its values are keys and values. There is
// another line for each kernel, instruction and pattern of addresses, up to a constant offset:
// architecture, kernel, instruction, number of occurrences, and for each lane the bytes from the
// lowest address of the wave.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/emulator/block/image.h"

namespace mla::kernels::hip {
namespace {

using host::SharedAccess;

using Pattern = std::array<uint32_t, SharedAccess::kLanes>;
std::map<std::pair<std::string, Pattern>, int>& Met() {
  static auto& met = *new std::map<std::pair<std::string, Pattern>, int>;
  return met;
}

void Count(const SharedAccess& access) {
  Pattern pattern;
  const uint32_t lowest = *std::min_element(std::begin(access.at), std::end(access.at));
  for (size_t i = 0; i < pattern.size(); ++i) pattern[i] = access.at[i] - lowest;
  ++Met()[{access.instruction, pattern}];
}

constexpr int32_t kRows = 256, kPageRows = 64, kRope = 64, kRow = 576, kHeads = 128;
constexpr int64_t kGranule = 256;
constexpr int32_t kWindowDim = kExpandedLora;  // values of a row, all of them keys and values

// One segment of 128 query heads over kRows cached rows, all zeros, and buffers for any kernel.
struct Launch {
  std::vector<uint16_t> q = std::vector<uint16_t>(size_t{kHeads} * kRow);
  std::vector<float> o = std::vector<float>(size_t{kHeads} * kExpandedLora);
  std::vector<uint16_t> pool = std::vector<uint16_t>(size_t{kRows} * kRow);
  std::vector<uint32_t> pages;
  std::vector<uint16_t> weights = std::vector<uint16_t>(size_t{kExpandedLora} * kDims256.value);
  const uint16_t* weight_slots = weights.data();
  std::vector<uint8_t> workspace = std::vector<uint8_t>(size_t{1} << 20);
  kernels::SegmentRecord segment{};
  kernels::WorkInfo work{};
  int32_t indptr[2] = {0, 1};
  std::vector<int32_t> list = std::vector<int32_t>(kRows);  // all positions
  int32_t list_begin[2] = {0, kRows};
  kernels::WindowRecord window{};  // all rows, and no entries

  Launch() {
    for (int64_t page = 0; page < kRows / kPageRows; ++page) {
      pages.push_back(static_cast<uint32_t>(page * kPageRows * kRow * 2 / kGranule));
    }
    std::iota(list.begin(), list.end(), 0);
    window.window = kRows;
    segment.list = list.data();
    segment.list_begin = list_begin;
    segment.q = q.data();
    segment.o = o.data();
    segment.q_row_stride = int64_t{kHeads} * kRow;
    segment.q_head_stride = kRow;
    segment.o_row_stride = int64_t{kHeads} * kExpandedLora;
    segment.o_head_stride = kExpandedLora;
    segment.kv_scale = 1.0f;
    segment.page_size = kPageRows;
    segment.q_rows = 1;
    segment.kv_rows = kRows;
    segment.num_heads = kHeads;
    segment.softmax_scale = 1.0f;
    work = {.segment = 0,
            .partial_row = kernels::kUnsplit,
            .q_begin = 0,
            .q_end = 1,
            .kv_begin = 0,
            .kv_end = kRows,
            .kv_after = 0,
            .heads = kernels::PackHeads(0, kHeads)};
  }

  AttendArgs Attend() {
    return {.segments = &segment,
            .page_tables = pages.data(),
            .pool = reinterpret_cast<const uint8_t*>(pool.data()),
            .work_indptr = indptr,
            .work_info = &work,
            .windows = &window,
            .partial_o = nullptr,
            .partial_lse = nullptr,
            .granule_bytes = kGranule,
            .blocks_per_unit = 1,
            .o_is_f32 = 1,
            .blocks = 1,
            .xcds = 1,
            .late = nullptr,
            .few_tiles = 0,
            .segment_count = 1,
            .item_count = 1,
            .one_item_per_unit = 1};
  }
  Expansion expansion{};
  ExpandArgs Expand() {
    expansion.rows = expansion.padded_rows = kRows;
    expansion.heads = 1;
    return {.segments = &segment,
            .page_tables = pages.data(),
            .pool = reinterpret_cast<const uint8_t*>(pool.data()),
            .expansions = &expansion,
            .w_uk = &weight_slots,
            .w_uv = &weight_slots,
            .workspace = workspace.data(),
            .granule_bytes = kGranule,
            .expansion_count = 1,
            .pairs = kRows / kExpandedRows,
            .first_tile_pairs = 0,
            .blocks = 1};
  }
  ExpandedItem item{};
  ExpandedArgs Expanded(const ExpandedDims& dims) {
    item.work = work;
    item.panel_bytes = int64_t{kRows} * kPanelRowBytes;
    item.rotated = dims.head_bytes(kRows);
    item.carried_row = kernels::kUnsplit;
    return {.segments = &segment,
            .items = &item,
            .unit_indptr = indptr,
            .workspace = workspace.data(),
            .partial_o = nullptr,
            .partial_lse = nullptr,
            .o_is_f32 = 1};
  }
};

// Returns true if the kernel ran without a fault.
bool RunKernel(const host::Image& image, std::string_view name, const void* args) {
  const auto* const end = image.kernels + image.kernel_count;
  const auto* const kernel =
      std::find_if(image.kernels, end, [&](const host::Kernel& k) { return k.name == name; });
  if (kernel == end) return true;  // the architecture lacks it
  Met().clear();
  image.watch(Count);
  const char* const fault =
      image.run(*kernel, {.x = 1, .y = 1, .threads = 256, .shared_bytes = 0}, args, nullptr);
  image.watch(nullptr);
  if (fault != nullptr) {
    std::fprintf(stderr, "shared_accesses: %s: %s\n", image.arch, fault);
    return false;
  }
  for (const auto& [what, count] : Met()) {
    std::printf("%s %s %s %d", image.arch, kernel->name, what.first.c_str(), count);
    for (const uint32_t at : what.second) std::printf(" %u", at);
    std::printf("\n");
  }
  return true;
}

bool RunImage(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* const entry = library == nullptr ? nullptr : dlsym(library, "mla_host_image");
  if (entry == nullptr) {
    std::fprintf(stderr, "shared_accesses: %s\n", dlerror());
    return false;
  }
  const host::Image& image = *reinterpret_cast<const host::Image* (*)()>(entry)();
  Launch launch;
  const AttendArgs attend = launch.Attend();
  const ExpandArgs expand = launch.Expand();
  const ArchTraits& arch = *FindArchTraits(image.arch);
  for (const AttendVariant& v : arch.attend) {
    const bool windowed = v.attention == kernels::AttentionKind::kWindow;
    const int32_t keys = windowed ? kWindowDim : kExpandedLora + kRope;
    const kernels::KvRowLayout row = kernels::MakeKvRowLayout(v.format, keys - kRope, kRope);
    std::printf("variant %s %s %d %d %s %d %d %d\n", image.arch, v.kernel, v.rows, v.tile,
                kernels::Name(v.products), row.row_bytes + row.page_scales_bytes, keys,
                kExpandedLora);
    launch.segment.row_stride = row.row_bytes;
    launch.segment.list_begin = windowed ? nullptr : launch.list_begin;
    if (!RunKernel(image, v.kernel, &attend)) return false;
  }
  for (const ExpandVariant& v : arch.expand) {
    launch.segment.row_stride = kernels::MakeKvRowLayout(v.format, kExpandedLora, kRope).row_bytes;
    if (!RunKernel(image, v.kernel, &expand)) return false;
  }
  for (const ExpandedVariant& v : arch.expanded) {
    const ExpandedArgs expanded = launch.Expanded(v.dims);
    if (!RunKernel(image, v.kernel, &expanded)) return false;
  }
  return true;
}

}  // namespace
}  // namespace mla::kernels::hip

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (!mla::kernels::hip::RunImage(argv[i])) return 1;
  }
  return argc > 1 ? 0 : 2;
}
