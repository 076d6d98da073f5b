// The decode kernels behind a plain C entry point, for timing side by side with other libraries in
// one process. bf16; all pointers but host_lengths are the device's:
//
//   q [batch, heads, 576]   kv [blocks, page, 576]   table [batch, max_blocks] of block numbers
//   lengths [batch]         out [batch, heads, 512]  lse [batch, heads] fp32, natural log
//
// mla_decode_plan plans for the batch on the host and uploads; it comes before the first mla_decode
// and again whenever lengths, batch, heads or page change. mla_decode uploads the request records
// when an address, max_blocks or scale has changed since the last call, and launches on `stream`,
// without waiting. `lengths` is taken for what was planned and not read, which spares the host from
// waiting for the device; `blocks` bounds nothing.
//
// Returns 0, or 1 with a line on stderr: no GPU, no plan, other sizes than planned, a null pointer,
// or an error of the device's API in its own words. One thread.
#ifndef MLA_TESTS_BENCH_GPU_GPU_DECODE_C_H_
#define MLA_TESTS_BENCH_GPU_GPU_DECODE_C_H_

extern "C" {

__attribute__((visibility("default"))) int mla_decode_plan(const int* host_lengths, int batch,
                                                           int heads, int page);
__attribute__((visibility("default"))) int mla_decode(const void* q, const void* kv,
                                                      const int* table, const int* lengths,
                                                      void* out, float* lse, int batch, int heads,
                                                      int max_blocks, int blocks, int page,
                                                      float scale, void* stream);

}  // extern "C"

namespace mla::kernels::hip {
struct HipBackendOptions;
}

namespace mla::bench {

// What the first of those calls opens the GPU with; later changes have no effect.
kernels::hip::HipBackendOptions& DecodeOptions();

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_GPU_GPU_DECODE_C_H_
