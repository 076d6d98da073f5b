// The decode kernels as a plain C API, for timing in one process with other libraries. bf16; all
// pointers but host_lengths are the device's:
//
//   q [batch, heads, 576]   kv [blocks, page, 576]   table [batch, max_blocks] of block numbers
//   lengths [batch]         out [batch, heads, 512]  lse [batch, heads] fp32, natural log
//
// mla_decode_plan plans for the batch on the host and uploads. Call it before the first mla_decode,
// and again whenever lengths, batch, heads or page change. mla_decode uploads the request records
// if an address, max_blocks or scale has changed since the last call, and launches on `stream`,
// without waiting. It assumes that `lengths` equals the planned lengths and does not read it, so
// that the host need not wait for the device; `blocks` is not checked.
//
// Returns 0, or 1 with a line on stderr: no GPU, no plan, sizes that differ from the plan, a null
// pointer, or the text of an error of the device's API. One thread.
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

// Options with which the first of those calls opens the GPU; later changes have no effect.
kernels::hip::HipBackendOptions& DecodeOptions();

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_GPU_GPU_DECODE_C_H_
