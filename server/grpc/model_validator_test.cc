// How the type of PROJECTED's weights is read from a model, and written.
#include <gtest/gtest.h>

#include "base/error.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

using scheduler::Limits;

TEST(ModelValidatorTest, ProjectedDtype) {
  v1::ModelSpec model;
  model.set_model_id("m");
  v1::Geometry* const geometry = model.mutable_geometry();
  geometry->set_num_heads(4);
  geometry->set_kv_lora_rank(32);
  geometry->set_rope_dim(16);
  geometry->set_nope_dim(16);
  geometry->set_v_dim(64);
  model.set_layers(1);
  model.set_softmax_scale(0.5);
  for (const bool projected : {false, true}) {
    model.set_rope_owner(projected ? v1::ROPE_OWNER_SERVER : v1::ROPE_OWNER_WORKER);
    model.set_rope_layout(projected ? v1::ROPE_LAYOUT_HALVES : v1::ROPE_LAYOUT_UNSPECIFIED);
    model.set_q_lora_rank(projected ? 32 : 0);
    model.set_hidden_size(projected ? 32 : 0);
    for (const int value : {0, 1, 2, 3, 4, -1}) {
      model.set_projected_dtype(static_cast<v1::DType>(value));
      scheduler::ModelSpec spec;
      const absl::Status parsed = ParseModelSpec(model, Limits(), &spec);
      const bool good = value == 0 || (projected && (value == 1 || value == 3));
      EXPECT_EQ(DetailOf(parsed).field, good ? "" : "model.projected_dtype") << value;
      if (!good) continue;
      EXPECT_EQ(spec.projected.codes(), value == v1::DTYPE_F8_E4M3);
      v1::ModelSpec back;
      FillModel(spec, &back);
      const v1::DType held = value == 3 ? v1::DTYPE_F8_E4M3 : v1::DTYPE_BF16;
      EXPECT_EQ(back.projected_dtype(), projected ? held : v1::DTYPE_UNSPECIFIED);
    }
  }
}

}  // namespace
}  // namespace mla::server
