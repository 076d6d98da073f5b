#include "kernels/hip/launch/row_work.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

// Workspace for the sums of a product, and for rows that cannot be read in place. For DeepSeek-V3
// the sums of 128 rows take 14 MB and their packed rows 8 MB. Wider products take fewer rows at a
// time.
constexpr int64_t kSumsBytes = int64_t{32} << 20;
constexpr int64_t kPackedBytes = int64_t{16} << 20;

constexpr uintptr_t kCopiedBytes = 16;  // the device copies rows in pieces of this size
static_assert(kCopiedBytes >= ProductLibrary::kOperandAlignment);

int64_t ElementBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

bool ReadInPlace(const RowProjection& projection, const RowProjectionRecord& r, int32_t depth) {
  return projection.in == DType::kBf16 && depth % kRowProductDepth == 0 &&
         reinterpret_cast<uintptr_t>(r.in) % kCopiedBytes == 0 &&
         r.in_row_stride * ElementBytes(projection.in) % int64_t{kCopiedBytes} == 0;
}

int32_t Log2(int32_t power) { return std::countr_zero(static_cast<uint32_t>(power)); }

void SetWeights(const WeightStore::HeldMatrix& weights, RowProductArgs& args) {
  args.columns = weights.shape.rows;
  args.depth = weights.shape.depth;
  args.padded_depth = weights.shape.padded_depth;
  args.weights = weights.weights;
  if (weights.codes == nullptr) return;
  args.codes = weights.codes;
  args.scales = weights.scales;
  args.scale_column_shift = Log2(weights.shape.scale_rows);
  args.scale_step_shift = Log2(weights.shape.scale_depth / kRowProductDepth);
  args.scale_pitch = weights.shape.scale_pitch;
}

int32_t PitchOf(int32_t columns) { return (columns + kRowRun - 1) / kRowRun * kRowRun; }

// The library multiplies as many rows as a product may have, whatever their number: one algorithm
// serves all, and a row's sums depend on no other row. The results of rows that do not exist stay
// in the workspace.
ProductShape LibraryShape(int32_t columns, int32_t padded_depth) {
  return {kRowProductMany, columns, padded_depth, PitchOf(columns)};
}
bool Fits(const ProductShape& shape) {
  return int64_t{shape.rows} * shape.pitch * int64_t{sizeof(float)} <= kSumsBytes &&
         int64_t{shape.rows} * shape.depth * int64_t{sizeof(Bf16)} <= kPackedBytes;
}

// Returns true if the rows are all that a product may have, one after another.
bool IsWhole(std::span<const RowProductRow> rows, int32_t depth) {
  if (rows.size() != static_cast<size_t>(kRowProductMany)) return false;
  const auto* at = static_cast<const Bf16*>(rows.front().in);
  return std::all_of(rows.begin(), rows.end(), [&](const RowProductRow& row) {
    return row.in == std::exchange(at, at + depth);
  });
}

DevicePtr AddressOf(const void* at) { return reinterpret_cast<DevicePtr>(at); }

}  // namespace

int64_t RowWork::WorkspaceBytes(const DeviceState& device, const BackendLimits& limits) {
  if (limits.weights_slots == 0) return 0;
  const int64_t library = device.products != nullptr ? ProductLibrary::kWorkspaceBytes : 0;
  return kSumsBytes + kPackedBytes + library;
}

int64_t RowWork::MetadataBytes(const BackendLimits& limits) {
  constexpr int64_t kProducts = 2;  // products of a launch: queries and hiddens
  return kProducts *
         (limits.launch_rows * static_cast<int64_t>(sizeof(RowProductRow)) + kRegionAlignment);
}

absl::Status RowWork::Allocate(const BackendLimits& limits) {
  if (WorkspaceBytes(device_, limits) == 0) return absl::OkStatus();
  MLA_ASSIGN_OR_RETURN(sums_,
                       DeviceBuffer::Create(device_.runtime, "sums of projected rows", kSumsBytes));
  MLA_ASSIGN_OR_RETURN(packed_,
                       DeviceBuffer::Create(device_.runtime, "projected rows", kPackedBytes));
  if (device_.products != nullptr) {
    MLA_ASSIGN_OR_RETURN(workspace_,
                         DeviceBuffer::Create(device_.runtime, "products of the vendor's library",
                                              ProductLibrary::kWorkspaceBytes));
  }
  rows_.reserve(static_cast<size_t>(limits.launch_rows));
  return absl::OkStatus();
}

absl::Status RowWork::AddRows(const RowProjection& projection, const RowProjectionRecord& record) {
  if (rows_.size() + static_cast<size_t>(record.rows) > rows_.capacity()) {
    return absl::ResourceExhaustedError(absl::StrCat("projected rows: limit ", rows_.capacity()));
  }
  const int64_t in = record.in_row_stride * ElementBytes(projection.in);
  const int64_t out = record.out_row_stride * ElementBytes(projection.out);
  for (int64_t row = 0; row < record.rows; ++row) {
    rows_.push_back({static_cast<const std::byte*>(record.in) + row * in,
                     static_cast<std::byte*>(record.out) + row * out,
                     record.rotations == nullptr
                         ? nullptr
                         : record.rotations + row * projection.geometry.rope_dim});
  }
  return absl::OkStatus();
}

absl::Status RowWork::Add(LaunchRecording& recording, const RowProjection& projection,
                          ProjectedPart part) {
  if (projection.records.empty()) return absl::OkStatus();
  const bool queries = part == ProjectedPart::kQueries;
  rows_.clear();
  for (const RowProjectionRecord& record : projection.records) {
    MLA_RETURN_IF_ERROR(AddRows(projection, record));
  }
  MLA_ASSIGN_OR_RETURN(auto rows, recording.metadata().Put(std::span<const RowProductRow>(rows_)));
  Group group = {};
  for (size_t i = 0; i < projection.records.size();) {
    const int32_t slot = projection.records[i].weights_slot;
    const WeightStore::HeldMatrix weights = device_.weights.Projected(slot, part);
    if (!weights.whole()) {
      return absl::FailedPreconditionError(absl::StrCat(queries ? "queries" : "hiddens",
                                                        ".records[", i, "]: weights slot ", slot,
                                                        " does not hold all heads"));
    }
    group.first_row += std::exchange(group.rows, 0);
    bool in_place = true;
    for (; i < projection.records.size() && projection.records[i].weights_slot == slot; ++i) {
      group.rows += projection.records[i].rows;
      in_place = in_place && ReadInPlace(projection, projection.records[i], weights.shape.depth);
    }
    RowProductArgs& args = group.args;
    args = {};
    args.rows = rows;
    SetWeights(weights, args);
    args.packed = in_place ? nullptr : packed_.As<uint16_t>();
    args.sums = sums_.As<float>();
    args.pitch = PitchOf(args.columns);
    args.in_is_f32 = projection.in == DType::kF32;
    args.out_is_f32 = projection.out == DType::kF32;
    args.planes = args.in_is_f32 ? 2 : 1;
    if (queries) {
      args.head = projection.geometry.expanded_q_dim();
      args.pairs = projection.geometry.rope_dim / 2;
      args.halves = projection.rope == RopeLayout::kHalves;
    }
    args.late = recording.late_word();
    MLA_RETURN_IF_ERROR(AddGroup(recording, group));
  }
  return absl::OkStatus();
}

absl::Status RowWork::AddGroup(LaunchRecording& recording, const Group& group) {
  RowProductArgs args = group.args;
  const auto splits = [&](const RowProductShape& shape) {
    return RowSplits(shape, args.columns, args.planes * (args.padded_depth / kRowProductDepth),
                     device_.runtime->units());
  };
  const int32_t few = splits(device_.arch->few_rows), many = splits(device_.arch->many_rows);
  const int64_t sums_row =
      int64_t{std::max(few, many)} * args.pitch * static_cast<int64_t>(sizeof(float));
  const int64_t packed_row =
      int64_t{args.planes} * args.padded_depth * static_cast<int64_t>(sizeof(uint16_t));
  int64_t at_once = std::min<int64_t>(kRowProductMany, kSumsBytes / sums_row);
  if (args.packed != nullptr) at_once = std::min(at_once, kPackedBytes / packed_row);
  if (at_once < 1) {
    return absl::ResourceExhaustedError(
        absl::StrCat("projected rows: got rows of ", sums_row, " bytes of sums and ", packed_row,
                     " packed, limits ", kSumsBytes, " and ", kPackedBytes));
  }
  for (int64_t done = 0; done < group.rows; done += at_once) {
    args.rows = group.args.rows + group.first_row + done;
    args.count = static_cast<int32_t>(std::min(at_once, group.rows - done));
    const auto host_rows = std::span(rows_).subspan(static_cast<size_t>(group.first_row + done),
                                                    static_cast<size_t>(args.count));
    MLA_ASSIGN_OR_RETURN(const bool by_library, AddLibraryProduct(recording, args, host_rows));
    if (by_library) continue;
    const bool is_few = args.count <= kRowProductFew;
    args.splits = is_few ? few : many;
    args.finishes = FinishesRows(is_few ? device_.arch->few_rows : device_.arch->many_rows, args);
    MLA_RETURN_IF_ERROR(AddProduct(recording, args));
  }
  return absl::OkStatus();
}

LibraryProduct RowWork::ProductOf(const RowProductArgs& args, const void* in) const {
  return {.library = device_.products,
          .plan = nullptr,
          .weights = AddressOf(args.weights),
          .rows = AddressOf(in),
          .sums = sums_.at(),
          .workspace = workspace_.at()};
}

absl::Status RowWork::ChooseProduct(int32_t slot, ProjectedPart part, Stream stream) {
  const WeightStore::HeldMatrix weights = device_.weights.Projected(slot, part);
  if (device_.products == nullptr || weights.weights == nullptr) return absl::OkStatus();
  RowProductArgs args = {};
  SetWeights(weights, args);
  const ProductShape shape = LibraryShape(args.columns, args.padded_depth);
  if (!Fits(shape)) return absl::OkStatus();
  return device_.products->Choose(shape, ProductOf(args, packed_.As<const void>()), stream);
}

absl::StatusOr<bool> RowWork::AddLibraryProduct(LaunchRecording& recording, RowProductArgs args,
                                                std::span<const RowProductRow> host_rows) {
  if (device_.products == nullptr || args.weights == nullptr || args.planes != 1 ||
      args.count < device_.library_rows) {
    return false;
  }
  const ProductShape shape = LibraryShape(args.columns, args.padded_depth);
  const ProductPlan* const plan = Fits(shape) ? device_.products->Find(shape) : nullptr;
  if (plan == nullptr) return false;
  const void* in = host_rows.front().in;
  if (args.packed != nullptr || !IsWhole(host_rows, args.padded_depth)) {
    args.packed = packed_.As<uint16_t>();
    in = args.packed;
    MLA_RETURN_IF_ERROR(AddPack(recording, args));
  }
  LibraryProduct product = ProductOf(args, in);
  product.plan = plan;
  MLA_RETURN_IF_ERROR(recording.AddProduct(product));
  args.splits = 1;
  args.finishes = 0;
  MLA_RETURN_IF_ERROR(AddFinish(recording, args, /*overlaps=*/false));
  return true;
}

absl::Status RowWork::AddPack(LaunchRecording& recording, const RowProductArgs& args) {
  constexpr int32_t kPackRun = 8;  // elements that a thread packs
  const LaunchShape shape{.grid_x = BlocksFor(args.padded_depth, int64_t{kBlockThreads} * kPackRun),
                          .grid_y = static_cast<uint32_t>(args.count),
                          .threads = kBlockThreads,
                          .overlap_predecessor = true};
  return recording.AddKernel(device_.kernels.pack_rows, shape, args);
}

absl::Status RowWork::AddFinish(LaunchRecording& recording, const RowProductArgs& args,
                                bool overlaps) {
  const LaunchShape shape{.grid_x = BlocksFor(args.columns, int64_t{kBlockThreads} * kRowRun),
                          .grid_y = static_cast<uint32_t>(args.count),
                          .threads = kBlockThreads,
                          .overlap_predecessor = overlaps};
  return recording.AddKernel(device_.kernels.finish_rows, shape, args);
}

absl::Status RowWork::AddProduct(LaunchRecording& recording, const RowProductArgs& args) {
  if (args.packed != nullptr) MLA_RETURN_IF_ERROR(AddPack(recording, args));
  const bool few = args.count <= kRowProductFew;
  const bool codes = args.codes != nullptr;
  const RowProductShape& kernel = few ? device_.arch->few_rows : device_.arch->many_rows;
  const KernelSet& kernels = device_.kernels;
  const Function of_weights = few ? kernels.few_rows : kernels.many_rows;
  const Function of_codes = few ? kernels.few_code_rows : kernels.many_code_rows;
  const int32_t shared_bytes = codes ? kernel.code_shared_bytes : kernel.shared_bytes;
  const LaunchShape shape{.grid_x = BlocksFor(args.columns, kernel.columns),
                          .grid_y = static_cast<uint32_t>(args.splits),
                          .threads = kBlockThreads,
                          .shared_bytes = static_cast<uint32_t>(shared_bytes),
                          .overlap_predecessor = true};
  MLA_RETURN_IF_ERROR(recording.AddKernel(codes ? of_codes : of_weights, shape, args));
  return args.finishes != 0 ? absl::OkStatus() : AddFinish(recording, args, /*overlaps=*/true);
}

}  // namespace mla::kernels::hip
