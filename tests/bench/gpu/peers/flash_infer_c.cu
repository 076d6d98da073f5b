// FlashInfer's kernel for MLA decode on sm_90 as a plain C API (time_peers.py), compiled against
// its headers (build_peers.sh). It keeps one plan.
// Their headers expect these first.
// clang-format off
#include <flashinfer/page.cuh>
#include <flashinfer/math.cuh>
#include <flashinfer/layout.cuh>
#include <flashinfer/utils.cuh>
#include <flashinfer/pos_enc.cuh>
#include <flashinfer/fastdiv.cuh>
#include <flashinfer/attention/variant_helper.cuh>
#include <flashinfer/attention/mla_params.cuh>
#include <flashinfer/attention/mla_hopper.cuh>
#include <flashinfer/attention/scheduler.cuh>
// clang-format on

namespace {

using Bf16 = __nv_bfloat16;
using Params = flashinfer::MLAParams<Bf16, Bf16, Bf16, int32_t>;

constexpr int kRow = 576, kValues = 512;

flashinfer::MLAPlanInfo plan;

int32_t* Words(void* base, int64_t offset) {
  return flashinfer::GetPtrFromBaseOffset<int32_t>(base, offset);
}

}  // namespace

extern "C" {

// floats and words are device memory, pinned is host memory of as many bytes as words. The last
// three arrays are the host's: query rows and pages before each request, [batch + 1], and lengths.
int fi_plan(void* floats, size_t float_bytes, void* words, void* pinned, size_t word_bytes,
            int32_t* query_rows, int32_t* pages, int32_t* lengths, int batch, int heads,
            void* stream) {
  return flashinfer::MLAPlan(floats, float_bytes, words, pinned, word_bytes, plan, query_rows,
                             pages, lengths, batch, heads, kValues, false,
                             static_cast<cudaStream_t>(stream));
}

// q [rows, heads, 576], kv [blocks, page, 576], table [pages of all requests], out [rows, heads,
// 512], lse [rows, heads].
int fi_run(void* floats, void* words, void* q, void* kv, int32_t* table, void* out, float* lse,
           int heads, int page, float scale, void* stream) {
  Params p = {};
  auto* const queries = static_cast<Bf16*>(q);
  auto* const rows = static_cast<Bf16*>(kv);
  p.q_nope = queries;
  p.q_pe = queries + kValues;
  p.ckv = rows;
  p.kpe = rows + kValues;
  p.q_indptr = Words(words, plan.q_indptr_offset);
  p.kv_indptr = Words(words, plan.kv_indptr_offset);
  p.partial_indptr = Words(words, plan.partial_indptr_offset);
  p.kv_indices = table;
  p.q_len = Words(words, plan.q_len_offset);
  p.kv_len = Words(words, plan.kv_len_offset);
  p.q_start = Words(words, plan.q_start_offset);
  p.kv_start = Words(words, plan.kv_start_offset);
  p.kv_end = Words(words, plan.kv_end_offset);
  p.work_indptr = Words(words, plan.work_indptr_offset);
  p.merge_packed_offset_start = Words(words, plan.merge_packed_offset_start_offset);
  p.merge_packed_offset_end = Words(words, plan.merge_packed_offset_end_offset);
  p.merge_partial_packed_offset_start = Words(words, plan.merge_partial_packed_offset_start_offset);
  p.merge_partial_packed_offset_end = Words(words, plan.merge_partial_packed_offset_end_offset);
  p.merge_partial_stride = Words(words, plan.merge_partial_stride_offset);
  p.final_o = static_cast<Bf16*>(out);
  p.final_lse = lse;
  p.partial_o = flashinfer::GetPtrFromBaseOffset<Bf16>(floats, plan.partial_o_offset);
  p.partial_lse = flashinfer::GetPtrFromBaseOffset<float>(floats, plan.partial_lse_offset);
  p.num_heads = flashinfer::uint_fastdiv(heads);
  p.block_size = flashinfer::uint_fastdiv(page);
  p.q_nope_stride_n = p.q_pe_stride_n = heads * kRow;
  p.q_nope_stride_h = p.q_pe_stride_h = kRow;
  p.ckv_stride_page = p.kpe_stride_page = page * kRow;
  p.ckv_stride_n = p.kpe_stride_n = kRow;
  p.o_stride_n = heads * kValues;
  p.o_stride_h = kValues;
  p.sm_scale = scale;
  p.ckv_scale = p.kpe_scale = 1;
  return flashinfer::mla::BatchMLAPageAttentionHopper<flashinfer::MaskMode::kNone, kValues, 64>(
      p, plan.num_blks_x, plan.num_blks_y, static_cast<cudaStream_t>(stream));
}

}  // extern "C"
