#include "kernels/hip/launch/row_work.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

// Workspace for the sums of a product, and for rows that cannot be read in place. For DeepSeek-V3
// on 132 units the sums of 128 rows take 11 MB (W_O in three splits; W_UQ needs none on sm_90), and
// their packed rows 8 MB. Wider products take fewer rows at a time.
constexpr int64_t kSumsBytes = int64_t{32} << 20;
constexpr int64_t kPackedBytes = int64_t{16} << 20;

constexpr uintptr_t kCopiedBytes = 16;  // the device copies rows in pieces of this size

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

}  // namespace

int64_t RowWork::WorkspaceBytes(const BackendLimits& limits) {
  return limits.weights_slots > 0 ? kSumsBytes + kPackedBytes : 0;
}

int64_t RowWork::MetadataBytes(const BackendLimits& limits) {
  constexpr int64_t kProducts = 2;  // products of a launch: queries and hiddens
  return kProducts *
         (limits.launch_rows * static_cast<int64_t>(sizeof(RowProductRow)) + kRegionAlignment);
}

absl::Status RowWork::Allocate(const BackendLimits& limits) {
  if (WorkspaceBytes(limits) == 0) return absl::OkStatus();
  MLA_ASSIGN_OR_RETURN(sums_,
                       DeviceBuffer::Create(device_.runtime, "sums of projected rows", kSumsBytes));
  MLA_ASSIGN_OR_RETURN(packed_,
                       DeviceBuffer::Create(device_.runtime, "projected rows", kPackedBytes));
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
    args.pitch = (args.columns + kRowRun - 1) / kRowRun * kRowRun;
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
    const bool is_few = args.count <= kRowProductFew;
    args.splits = is_few ? few : many;
    args.finishes = FinishesRows(is_few ? device_.arch->few_rows : device_.arch->many_rows, args);
    MLA_RETURN_IF_ERROR(AddProduct(recording, args));
  }
  return absl::OkStatus();
}

absl::Status RowWork::AddProduct(LaunchRecording& recording, const RowProductArgs& args) {
  constexpr int32_t kPackRun = 8;  // elements that a thread packs
  LaunchShape shape{.grid_y = static_cast<uint32_t>(args.count),
                    .threads = kBlockThreads,
                    .overlap_predecessor = true};
  if (args.packed != nullptr) {
    shape.grid_x = BlocksFor(args.padded_depth, int64_t{kBlockThreads} * kPackRun);
    MLA_RETURN_IF_ERROR(recording.AddKernel(device_.kernels.pack_rows, shape, args));
  }
  const bool few = args.count <= kRowProductFew;
  const bool codes = args.codes != nullptr;
  const RowProductShape& kernel = few ? device_.arch->few_rows : device_.arch->many_rows;
  const KernelSet& kernels = device_.kernels;
  const Function of_weights = few ? kernels.few_rows : kernels.many_rows;
  const Function of_codes = few ? kernels.few_code_rows : kernels.many_code_rows;
  LaunchShape product = shape;
  product.grid_x = BlocksFor(args.columns, kernel.columns);
  product.grid_y = static_cast<uint32_t>(args.splits);
  product.shared_bytes =
      static_cast<uint32_t>(codes ? kernel.code_shared_bytes : kernel.shared_bytes);
  MLA_RETURN_IF_ERROR(recording.AddKernel(codes ? of_codes : of_weights, product, args));
  if (args.finishes != 0) return absl::OkStatus();
  shape.grid_x = BlocksFor(args.columns, int64_t{kBlockThreads} * kRowRun);
  return recording.AddKernel(device_.kernels.finish_rows, shape, args);
}

}  // namespace mla::kernels::hip
