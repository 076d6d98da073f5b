#include "kernels/types/attention_desc.h"

#include "absl/strings/str_cat.h"

namespace mla::kernels {

const char* Name(AttentionForm form) {
  return form == AttentionForm::kAbsorbed ? "absorbed" : "expanded";
}

std::string ToString(const AttentionDesc& desc) {
  constexpr const char* kKinds[] = {"", " sparse", " window"};
  const Geometry& g = desc.geometry;
  return absl::StrCat(Name(desc.form), " heads=", g.num_heads, " lora=", g.kv_lora_rank,
                      " rope=", g.rope_dim, " nope=", g.nope_dim, " v=", g.v_dim,
                      " q=", Name(desc.q_dtype), " o=", Name(desc.o_dtype),
                      " kv=", Name(desc.kv_format), " page=", desc.page_size,
                      kKinds[static_cast<int>(desc.attention) - 1],
                      desc.products == DType::kBf16 ? "" : " products=",
                      desc.products == DType::kBf16 ? "" : Name(desc.products));
}

}  // namespace mla::kernels
