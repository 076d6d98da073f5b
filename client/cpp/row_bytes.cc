#include "client/cpp/row_bytes.h"

namespace mla::client {
namespace {

// Returns the element size of non-fp8 tensors; tensors sent together with fp8 are bf16.
uint64_t ElementSize(v1::DType dtype) { return dtype == v1::DTYPE_F32 ? 4 : 2; }

}  // namespace

bool HasFp8Kv(const AttendCall& call) {
  return call.kv != nullptr && call.kv_row_dtype == v1::DTYPE_F8_E4M3;
}

bool HasFp8Queries(const AttendCall& call) {
  return call.q_dtype == v1::DTYPE_F8_E4M3 && call.profile != v1::PROFILE_APPEND_ONLY;
}

RowBytes RowBytesOf(const AttendCall& call, const v1::ModelSpec& model) {
  const v1::Geometry& geometry = model.geometry();
  const uint64_t q_element = ElementSize(call.q_dtype), o_element = ElementSize(call.o_dtype);
  const uint64_t row = uint64_t{geometry.kv_lora_rank()} + geometry.rope_dim();
  RowBytes bytes;
  if (call.kv != nullptr) bytes.kv = (row + model.index_dim()) * q_element;
  if (call.index_inputs != nullptr) {
    bytes.lists = model.index_heads() * (model.index_dim() * q_element + sizeof(float));
    if (call.chosen != nullptr) bytes.chosen = model.top_k() * sizeof(int32_t);
  }
  if (call.lse != nullptr) bytes.lse = call.num_heads * sizeof(float);
  if (call.profile == v1::PROFILE_ABSORBED) {
    bytes.q = call.num_heads * row * q_element;
    bytes.o = call.num_heads * (model.window() > 0 ? row : geometry.kv_lora_rank()) * o_element;
  } else if (call.profile == v1::PROFILE_PROJECTED) {
    bytes.q = model.q_lora_rank() * q_element;
    bytes.o = model.hidden_size() * o_element;
  } else if (call.profile == v1::PROFILE_EXPANDED) {
    bytes.q = call.num_heads * (uint64_t{geometry.nope_dim()} + geometry.rope_dim()) * q_element;
    bytes.o = uint64_t{call.num_heads} * geometry.v_dim() * o_element;
  }
  if (HasFp8Kv(call)) bytes.kv = Fp8RowBytes(model, 1);
  if (HasFp8Queries(call)) bytes.q = Fp8QueryBytes(model, call.profile, call.num_heads);
  return bytes;
}

}  // namespace mla::client
