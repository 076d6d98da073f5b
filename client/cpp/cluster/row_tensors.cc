#include "client/cpp/cluster/row_tensors.h"

#include <cstring>

namespace mla::client {
namespace {

// Tensors sent together with 8-bit ones are bf16.
uint64_t ElementBytes(v1::DType dtype) { return dtype == v1::DTYPE_F32 ? 4 : 2; }

void CopyRows(const std::byte* tensor, uint64_t row_bytes, std::span<const uint32_t> places,
              std::vector<std::byte>* copy) {
  for (const uint32_t place : places) {
    const std::byte* const row = tensor + place * row_bytes;
    copy->insert(copy->end(), row, row + row_bytes);
  }
}

}  // namespace

CallForms FormsOf(const AttendCall& call, const v1::ModelSpec& model) {
  const v1::Geometry& geometry = model.geometry();
  const uint64_t in = ElementBytes(call.q_dtype), out = ElementBytes(call.o_dtype);
  const uint64_t latent = geometry.kv_lora_rank(), row = latent + geometry.rope_dim();
  const bool expanded = call.profile == v1::PROFILE_EXPANDED;
  const bool queries = call.profile != v1::PROFILE_APPEND_ONLY;
  const uint64_t q_dim = expanded ? uint64_t{geometry.nope_dim()} + geometry.rope_dim() : row;
  CallForms forms;
  if (call.kv != nullptr) {
    const uint64_t dim = row + model.index_dim();
    forms.kv.bytes = dim * in;
    if (call.kv_row_dtype == v1::DTYPE_F8_E4M3) forms.kv = {dim, Fp8RowBytes(model, 1) - dim};
  }
  if (queries && call.q_dtype == v1::DTYPE_F8_E4M3) {
    const uint64_t codes = call.num_heads * q_dim;
    forms.q = {codes, Fp8QueryBytes(model, call.profile, call.num_heads) - codes};
  } else if (call.profile == v1::PROFILE_PROJECTED) {
    forms.q.bytes = model.q_lora_rank() * in;
  } else if (queries) {
    forms.q.bytes = call.num_heads * q_dim * in;
  }
  if (call.index_inputs != nullptr) {
    forms.index_inputs.bytes = model.index_heads() * (model.index_dim() * in + sizeof(float));
    forms.chosen = call.chosen != nullptr ? model.top_k() * sizeof(int32_t) : 0;
  }
  if (queries) {
    const uint64_t o_dim = expanded ? geometry.v_dim() : model.window() > 0 ? row : latent;
    const bool hidden = call.profile == v1::PROFILE_PROJECTED;
    forms.o = (hidden ? model.hidden_size() : call.num_heads * o_dim) * out;
    forms.lse = call.lse != nullptr ? call.num_heads * sizeof(float) : 0;
  }
  return forms;
}

bool AreTogether(std::span<const uint32_t> places) {
  return places.empty() || places.back() - places.front() + 1 == places.size();
}

const void* TakeRows(const RowForm& form, const void* tensor, uint64_t total,
                     std::span<const uint32_t> places, std::vector<std::byte>* copy) {
  if (tensor == nullptr || places.empty()) return tensor;
  const auto* const codes = static_cast<const std::byte*>(tensor);
  const bool whole = places.size() == total;
  if (AreTogether(places) && (whole || form.scale_bytes == 0)) {
    return codes + places.front() * form.bytes;
  }
  copy->reserve(places.size() * (form.bytes + form.scale_bytes));
  CopyRows(codes, form.bytes, places, copy);
  if (form.scale_bytes > 0) CopyRows(codes + total * form.bytes, form.scale_bytes, places, copy);
  return copy->data();
}

void PutRows(uint64_t row_bytes, const std::byte* rows, std::span<const uint32_t> places,
             void* tensor) {
  for (const uint32_t place : places) {
    std::memcpy(static_cast<std::byte*>(tensor) + place * row_bytes, rows, row_bytes);
    rows += row_bytes;
  }
}

void FillRows(uint64_t row_bytes, std::span<const std::byte> element,
              std::span<const uint32_t> places, void* tensor) {
  for (const uint32_t place : places) {
    std::byte* const row = static_cast<std::byte*>(tensor) + place * row_bytes;
    for (uint64_t at = 0; at + element.size() <= row_bytes; at += element.size()) {
      std::memcpy(row + at, element.data(), element.size());
    }
  }
}

IndexLists TakeLists(const IndexLists& lists, std::span<const uint32_t> places,
                     std::vector<int32_t>* entries, std::vector<int32_t>* begins) {
  if (lists.entries == nullptr || places.empty()) return lists;
  if (lists.width > 0 && AreTogether(places)) {
    return {lists.entries + uint64_t{places.front()} * lists.width, lists.width, nullptr};
  }
  if (lists.width == 0) begins->push_back(0);
  for (const uint32_t place : places) {
    const int64_t first = lists.width > 0 ? int64_t{place} * lists.width : lists.begin[place];
    const int64_t last = lists.width > 0 ? first + lists.width : lists.begin[place + 1];
    entries->insert(entries->end(), lists.entries + first, lists.entries + last);
    if (lists.width == 0) begins->push_back(static_cast<int32_t>(entries->size()));
  }
  if (entries->empty()) entries->push_back(-1);  // lists without entries are lists
  return {entries->data(), lists.width, lists.width == 0 ? begins->data() : nullptr};
}

}  // namespace mla::client
