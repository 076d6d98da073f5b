// Parts of gpu_step's worker: its shapes, the way of its tensors, and a kernel that stands for the
// kernels that a model runs between two layers, as far as a server notices them. It reads every
// byte of the last outputs and writes every byte of the next inputs. PTX for sm_90, which the
// driver compiles.
#ifndef MLA_TESTS_BENCH_GPU_STEP_WORKER_H_
#define MLA_TESTS_BENCH_GPU_STEP_WORKER_H_

#include <cstdint>

namespace mla::bench {

inline constexpr uint64_t kLora = 512, kRope = 64, kNope = 128, kValue = 128;
inline constexpr uint64_t kAlignment = 64;

inline uint64_t AlignUp(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Memory of the tensors, and whether a thread or the stream waits for replies.
enum class Way { kHost, kDevice, kChained };
inline const char* NameOf(Way way) {
  return way == Way::kHost ? "host" : way == Way::kDevice ? "device" : "chained";
}

// Sizes of an attend's tensors, in bytes; q follows kv.
struct Point {
  bool absorbed = true;
  uint32_t batch = 1;
  uint64_t kv_bytes = 0, in_bytes = 0, out_bytes = 0;
};

inline Point MakePoint(int32_t heads, bool absorbed, int32_t batch) {
  const uint64_t rows_heads = uint64_t{static_cast<uint32_t>(batch)} * static_cast<uint32_t>(heads);
  Point point{absorbed, static_cast<uint32_t>(batch)};
  point.kv_bytes = AlignUp(point.batch * (kLora + kRope) * 2);
  point.in_bytes = point.kv_bytes + rows_heads * ((absorbed ? kLora : kNope) + kRope) * 2;
  point.out_bytes = rows_heads * (absorbed ? kLora : kValue) * 2;
  return point;
}

inline constexpr char kTouchKernel[] = "touch";
inline constexpr uint32_t kTouchThreads = 256;

// Pieces have 16 bytes, and addresses are aligned to that. `read` may be 0 pieces long.
struct TouchArgs {
  uint64_t write = 0;
  uint64_t read = 0;
  uint64_t sink = 0;  // 4 bytes that keep the reads
  uint32_t write_pieces = 0;
  uint32_t read_pieces = 0;
};

// Word w of the written memory, two values in bf16 between 0.0625 and 0.125.
constexpr uint32_t TouchedWord(uint64_t w) {
  return 0x3d803d80u | static_cast<uint32_t>(w / 4 % 128) * 0x00010001u;
}

inline constexpr char kTouchPtx[] = R"(
.version 7.8
.target sm_90
.address_size 64

.visible .entry touch(.param .align 8 .b8 args[32])
{
  .reg .pred %p;
  .reg .b32 %r<12>;
  .reg .b64 %rd<8>;

  ld.param.u64 %rd1, [args];
  ld.param.u64 %rd2, [args+8];
  ld.param.u64 %rd3, [args+16];
  ld.param.u32 %r1, [args+24];
  ld.param.u32 %r2, [args+28];
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %ctaid.x;
  mov.u32 %r5, %tid.x;
  mad.lo.u32 %r4, %r4, %r3, %r5;
  mov.u32 %r5, %nctaid.x;
  mul.lo.u32 %r3, %r3, %r5;
  mov.u32 %r11, 0;

  mov.u32 %r5, %r4;
read_next:
  setp.ge.u32 %p, %r5, %r2;
  @%p bra read_done;
  mul.wide.u32 %rd4, %r5, 16;
  add.u64 %rd4, %rd4, %rd2;
  ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd4];
  xor.b32 %r6, %r6, %r7;
  xor.b32 %r8, %r8, %r9;
  xor.b32 %r11, %r11, %r6;
  xor.b32 %r11, %r11, %r8;
  add.u32 %r5, %r5, %r3;
  bra read_next;
read_done:
  setp.ne.u32 %p, %r11, 0x6d6c6131;
  @%p bra kept;
  st.global.u32 [%rd3], %r11;
kept:

  mov.u32 %r5, %r4;
write_next:
  setp.ge.u32 %p, %r5, %r1;
  @%p bra write_done;
  mul.wide.u32 %rd4, %r5, 16;
  add.u64 %rd4, %rd4, %rd1;
  and.b32 %r6, %r5, 127;
  mul.lo.u32 %r6, %r6, 0x00010001;
  or.b32 %r6, %r6, 0x3d803d80;
  st.global.v4.u32 [%rd4], {%r6, %r6, %r6, %r6};
  add.u32 %r5, %r5, %r3;
  bra write_next;
write_done:
  ret;
}
)";

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_GPU_STEP_WORKER_H_
