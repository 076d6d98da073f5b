// Absorbed attention whose queries arrive from host memory while it runs, and whose outputs leave
// for host memory as segments end. Copies and computation overlap without further launches.
//
//     copy engine     queries of segment 0 | of segment 1 | of segment 2 | ...
//     units' blocks   new rows | KV rows, wait for queries of segment 0 | attend | merge | KV ...
//     last blocks     wait for segment 0 | its outputs to the host | wait for segment 1 | ...
//
// The engine makes one copy of all queries, and the units' blocks watch them arrive. While outputs
// leave, this copy uses the bus better than kernels' loads do, and better than several copies with
// signals between them. Outputs leave through few blocks, because stores from many blocks would
// delay the arriving queries.
//
// For the host the launch has ended once these blocks have reported that all outputs are in host
// memory (StreamReport). Later work on the device waits for the kernel's end.
//
// Segments arrive in the order in which units have their items. A tile is cut into pieces of few KV
// rows, so that all units have work soon, and little work remains when the last segment has
// arrived.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_STREAMED_ATTEND_STREAM_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_STREAMED_ATTEND_STREAM_H_

#include "kernels/hip/device/sm90/decode/rows64_bf16/attend_wgmma.h"
#include "kernels/hip/device/sm90/decode/streamed/append_rows.h"

namespace mla::kernels::hip {

template <class C>
class AttendStream {
  using Loop = AttendWgmma<C, StreamArgs>;

 public:
  static constexpr int kThreads = Loop::kThreads;
  static constexpr int kSharedBytes = Loop::kSharedBytes;

  MLA_DEVICE static void run(const StreamArgs& args) {
    wait_for_previous_kernel();
    if (block_index() < args.blocks) {
      append_rows<Loop::L::kRows, kThreads / tile::kWave>(args);
      Loop::run(args);
    } else {
      push(args);
    }
  }

 private:
  static constexpr int kPushWarps = kPushBlocks * kThreads / tile::kWave;
  static constexpr int kWarpBytes = tile::kWave * 16;
  static constexpr int kAhead = 11;  // runs of kWarpBytes that a warp loads at a time

  // Each warp waits on its own, so that some warps store while others wait.
  MLA_DEVICE static void push(const StreamArgs& args) {
    let_next_kernel_start();
    const int block = block_index() - args.blocks;
    const int warp = block * (kThreads / tile::kWave) + tile::wave_index();
    const int first = warp * kWarpBytes;
    uint32_t* const finished = args.finished + block * args.segment_count;
    if (block == 0 && thread_index() == 0) args.report->begun = realtime_ns();
    for (int i = 0; i < args.segment_count; ++i) {
      const StreamedTensors t = args.tensors[i];
      if (tile::lane_index() == 0) tile::await_finished(finished + i, t.writers);
      tile::sync_warp();
      for (int64_t at = first; at < t.o_bytes; at += kAhead * kPushWarps * kWarpBytes) {
        push_runs(t, at + tile::lane_index() * 16);
      }
      if (warp == i % kPushWarps) push_lse(t);
    }
    block_barrier();
    if (thread_index() == 0) {
      args.report->ended[block] = realtime_ns();
      store_host_word(args.report->tickets + block, args.ticket);
    }
    for (int i = thread_index(); i < args.segment_count; i += kThreads) finished[i] = 0;
  }

  MLA_DEVICE static void push_lse(const StreamedTensors& t) {
    for (int i = tile::lane_index(); i < t.lse_count; i += tile::kWave) {
      t.lse_to[i] = tile::load_fresh(t.lse_from + i);
    }
  }

  MLA_DEVICE static void push_runs(const StreamedTensors& t, int64_t first) {
    uint32_t x[kAhead][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = first + i * kPushWarps * kWarpBytes;
      if (at < t.o_bytes) tile::load_fresh(x[i], reinterpret_cast<const float*>(t.o_from + at));
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = first + i * kPushWarps * kWarpBytes;
      if (at < t.o_bytes) store_words(t.o_to + at, x[i]);
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_STREAMED_ATTEND_STREAM_H_
