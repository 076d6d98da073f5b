#include "client/cpp/cluster/row_tensors.h"

#include <cstring>

#include "client/cpp/row_bytes.h"

namespace mla::client {
namespace {

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
  const RowBytes row = RowBytesOf(call, model);
  CallForms forms;
  forms.kv.bytes = row.kv;
  forms.q.bytes = row.q;
  forms.index_inputs.bytes = row.lists;
  forms.o = row.o;
  forms.lse = call.profile == v1::PROFILE_APPEND_ONLY ? 0 : row.lse;
  forms.chosen = row.chosen;
  // A code is a byte, and the scales follow all codes.
  const uint64_t latent_row = uint64_t{geometry.kv_lora_rank()} + geometry.rope_dim();
  if (HasFp8Kv(call)) {
    const uint64_t codes = latent_row + model.index_dim();
    forms.kv = {codes, row.kv - codes};
  }
  if (HasFp8Queries(call)) {
    const bool expanded = call.profile == v1::PROFILE_EXPANDED;
    const uint64_t codes =
        call.num_heads *
        (expanded ? uint64_t{geometry.nope_dim()} + geometry.rope_dim() : latent_row);
    forms.q = {codes, row.q - codes};
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
