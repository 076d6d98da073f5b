#include "kernels/hip/launch/combine.h"

#include <algorithm>

namespace mla::kernels::hip {
int32_t PackedRows(int32_t q_begin, int32_t q_end, uint32_t heads) {
  return (q_end - q_begin) * static_cast<int32_t>((heads >> 16) - (heads & 0xffffu));
}

SegmentRecord ForDevice(const DeviceState& device, const AttentionParams& params,
                        SegmentRecord record) {
  const SegmentRecord& first = params.segments[0];
  record.layer_offset -= first.layer_offset;
  record.weights_slot -= first.weights_slot;
  record.kv_scale = device.RowScale(params.desc.kv_format, record.kv_scale);
  return record;
}

absl::StatusOr<const SegmentRecord*> PutSegments(LaunchRecording& recording,
                                                 const DeviceState& device,
                                                 const AttentionParams& params,
                                                 std::span<const std::byte* const> host_queries) {
  size_t index = 0;
  return recording.metadata().PutEach(params.segments, [&](SegmentRecord record) {
    if (!host_queries.empty()) {
      record.list = reinterpret_cast<const int32_t*>(host_queries[index++]);
    }
    return ForDevice(device, params, record);
  });
}

absl::Status AddCombine(LaunchRecording& recording, const DeviceState& device,
                        const AttentionParams& params, const DevicePlan& plan,
                        const Attended& run) {
  if (params.plan.reduce_final_map.empty()) return absl::OkStatus();
  int32_t rows = 0, parts = 0;
  for (size_t i = 0; i < params.plan.reduce_final_map.size(); ++i) {
    const ReduceTile& t = params.plan.reduce_final_map[i];
    rows = std::max(rows, PackedRows(t.q_begin, t.q_end, t.heads));
    parts = std::max(parts, params.plan.reduce_indptr[i + 1] - params.plan.reduce_indptr[i]);
  }
  const auto tiles = static_cast<uint32_t>(params.plan.reduce_final_map.size());
  CombineArgs args = {};
  args.segments = run.segments;
  args.windows = run.windows;
  args.reduce_indptr = plan.reduce_indptr;
  args.reduce_final_map = plan.reduce_final_map;
  args.reduce_partial_map = plan.reduce_partial_map;
  args.partial_o = device.partial_o.As<float>();
  args.partial_lse = device.partial_lse.As<float>();
  args.o_dim = static_cast<int32_t>(params.desc.value_dim());
  args.o_is_f32 = params.desc.o_dtype == DType::kF32;
  args.waves_per_row =
      CombineWavesPerRow(*device.arch, int64_t{tiles} * rows, parts, device.runtime->units());
  args.column_blocks = CombineColumnBlocks(*device.arch, int64_t{tiles} * rows, args.waves_per_row,
                                           args.o_dim, device.runtime->units());
  args.waves_per_row = CombineWavesBeside(*device.arch, int64_t{tiles} * rows, parts,
                                          args.waves_per_row, args.column_blocks, run.idle_units);
  args.order = run.order;
  args.late = recording.late_word();
  const auto row_blocks = BlocksFor(rows, device.arch->waves_per_block / args.waves_per_row);
  const LaunchShape shape{.grid_x = tiles,
                          .grid_y = row_blocks * static_cast<uint32_t>(args.column_blocks),
                          .threads = kBlockThreads,
                          .shared_bytes = static_cast<uint32_t>(device.arch->combine_shared_bytes),
                          .overlap_predecessor = true};
  return recording.AddKernel(device.kernels.combine, shape, args);
}

}  // namespace mla::kernels::hip
