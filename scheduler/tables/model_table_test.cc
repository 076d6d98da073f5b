// Registration and weights, without an engine around them.
#include "scheduler/tables/model_table.h"
#include "base/error.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/tables/model_checks.h"
#include "scheduler/testing/tiny_model_fixture.h"

namespace mla::scheduler {
namespace {

using ::testing::ElementsAre;
using testing::EngineHarness;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using ModelTableTest = TinyModelTest;

TEST_F(ModelTableTest, RegisteringAgainSucceedsOnlyWithEqualContents) {
  EXPECT_EQ(*table_.Register(tenant_, h_.model()), model_);
  ModelSpec other = h_.model();
  other.softmax_scale = 0.25;
  EXPECT_EQ(table_.Register(tenant_, other).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(ModelTableTest, UseRenewsTheLeaseAndFindDoesNot) {
  ModelSpec spec = h_.model();
  spec.id = "leased";
  Model* const leased = *table_.Register(tenant_, spec, 1000);
  const MonotonicNanos deadline = leased->lease_deadline;
  h_.clock().Advance(400'000'000);
  EXPECT_EQ(*table_.Find(tenant_, "leased", "model_id"), leased);
  EXPECT_EQ(leased->lease_deadline, deadline);
  EXPECT_EQ(*table_.Use(tenant_, "leased", "model_id"), leased);
  EXPECT_EQ(leased->lease_deadline, deadline + 400'000'000);
  EXPECT_EQ(table_.Use(tenant_, "absent", "model_id").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ModelTableTest, EveryBadFieldIsRefusedByName) {
  const struct {
    const char* field;
    void (*spoil)(ModelSpec&);
  } cases[] = {
      {"model.model_id", [](ModelSpec& m) { m.id = ""; }},
      {"model.model_id", [](ModelSpec& m) { m.id = std::string(129, 'x'); }},
      {"model.geometry.num_heads", [](ModelSpec& m) { m.geometry.num_heads = 0; }},
      {"model.geometry.num_heads", [](ModelSpec& m) { m.geometry.num_heads = 5; }},
      {"model.geometry.kv_lora_rank", [](ModelSpec& m) { m.geometry.kv_lora_rank = -1; }},
      {"model.geometry.rope_dim", [](ModelSpec& m) { m.geometry.rope_dim = 9; }},
      {"model.geometry.nope_dim", [](ModelSpec& m) { m.geometry.nope_dim = INT32_MAX; }},
      {"model.geometry.v_dim", [](ModelSpec& m) { m.geometry.v_dim = 0; }},
      {"model.layers", [](ModelSpec& m) { m.layers = 0; }},
      {"model.page_size", [](ModelSpec& m) { m.page_size = -1; }},
      {"model.softmax_scale", [](ModelSpec& m) { m.softmax_scale = 0; }},
      {"model.softmax_scale", [](ModelSpec& m) { m.softmax_scale = -1; }},
  };
  for (const auto& c : cases) {
    ModelSpec spec = h_.model();
    spec.id = "other";
    c.spoil(spec);
    EXPECT_EQ(table_.Register(tenant_, spec).status().code(), absl::StatusCode::kInvalidArgument)
        << c.field;
    EXPECT_EQ(DetailOf(table_.Register(tenant_, spec).status()).field, c.field);
  }
}

TEST_F(ModelTableTest, ModelsAndTenantsAreBounded) {
  ModelSpec spec = h_.model();
  spec.id = "second";
  ASSERT_TRUE(table_.Register(tenant_, spec).ok());
  spec.id = "third";
  EXPECT_EQ(table_.Register(tenant_, spec).status().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(table_.Unregister(tenant_, "second").ok());
  EXPECT_TRUE(table_.Register(tenant_, spec).ok());
}

TEST_F(ModelTableTest, AModelInUseStays) {
  h_.Open();
  EXPECT_EQ(table_.Unregister(tenant_, "tiny").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(table_.Unregister(tenant_, "tiny")).reason, "model_in_use");
}

TEST_F(ModelTableTest, WeightsCountWhenEveryHeadIsCommitted) {
  ASSERT_TRUE(Load(1, 0, 0, 2).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 1), ElementsAre(1));
  EXPECT_FALSE(model_->contents->weights_complete);
  ASSERT_TRUE(Load(2, 1, 0, 1).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 2), ElementsAre(1));
  ASSERT_TRUE(Load(3, 1, 1, 1).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 3), IsEmpty());
  EXPECT_TRUE(model_->contents->weights_complete);
}

class ScalesTest : public ModelTableTest {
 protected:
  ScalesTest() {
    ModelSpec spec = *model_->spec;
    spec.id = "fp8";
    spec.kv_format = kernels::KvFormat::kFp8Tensor;
    fp8_ = *table_.Register(tenant_, spec);
  }
  absl::Status Set(std::vector<float> scales) { return table_.SetScales(*fp8_, scales, "scales"); }

  Model* fp8_ = nullptr;
};

TEST_F(ModelTableTest, ProductsOfEightBitsAreSettledAtRegistration) {
  ModelSpec spec = *model_->spec;
  spec.id = "products";
  // A backend without them: AUTO is OFF, and a repeat with either is the same model.
  spec.kv_format = kernels::KvFormat::kFp8Row;
  const auto settled = table_.Register(tenant_, spec);
  ASSERT_TRUE(settled.ok()) << settled.status();
  EXPECT_EQ((*settled)->spec->fp8_compute, Fp8Compute::kOff);
  EXPECT_EQ((*settled)->spec->products(), kernels::DType::kBf16);
  spec.fp8_compute = Fp8Compute::kOff;
  EXPECT_EQ(table_.Register(tenant_, spec).value(), *settled);
  spec.fp8_compute = Fp8Compute::kOn;
  EXPECT_EQ(table_.Register(tenant_, spec).status().code(), absl::StatusCode::kUnimplemented);
  // Rows of bf16 leave nothing to settle.
  spec.kv_format = kernels::KvFormat::kBf16;
  EXPECT_EQ(table_.Register(tenant_, spec).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(model_->spec->fp8_compute, Fp8Compute::kAuto);
}

TEST_F(ScalesTest, OneALayerAndEachANumberThatRowsCanHave) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(fp8_->scales_complete());
  for (const auto& [scales, field] : std::vector<std::pair<std::vector<float>, std::string>>{
           {{}, "scales"},
           {{1.0f}, "scales"},
           {{1.0f, 1.0f, 1.0f}, "scales"},
           {{0.0f, 1.0f}, "scales[0]"},
           {{1.0f, -1.0f}, "scales[1]"},
           {{1.0f, std::nanf("")}, "scales[1]"},
           {{kInfinity, 1.0f}, "scales[0]"},
           {{1.0f, 1e-40f}, "scales[1]"},
           {{2 * kernels::kLargestKvScale, 1.0f}, "scales[0]"}}) {
    EXPECT_EQ(Set(scales).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DetailOf(Set(scales)).field, field);
  }
  EXPECT_FALSE(fp8_->scales_complete());
  ASSERT_TRUE(Set({kernels::kSmallestKvScale, kernels::kLargestKvScale}).ok());
  EXPECT_TRUE(fp8_->scales_complete());
  EXPECT_EQ(fp8_->kv_scale(1), kernels::kLargestKvScale);
  EXPECT_TRUE(table_.Info(*fp8_).scales_complete);
}

// Kernels multiply by both at once.
TEST_F(ScalesTest, TheirProductWithTheSoftmaxScaleIsANormalNumber) {
  ModelSpec spec = *fp8_->spec;
  spec.softmax_scale = 0x1p-60;
  for (const auto& [scale, good] : std::vector<std::pair<float, bool>>{
           {0x1p-66f, true}, {0x1p-67f, false}, {kernels::kSmallestKvScale, false}, {1.0f, true}}) {
    const float scales[] = {1.0f, scale};
    const absl::Status s = CheckKvScales(spec, scales, "scales");
    EXPECT_EQ(s.ok(), good) << scale << ": " << s;
    EXPECT_EQ(DetailOf(s).field, good ? "" : "scales[1]");
  }
  spec.softmax_scale = 0x1p60;
  for (const auto& [scale, good] : std::vector<std::pair<float, bool>>{
           {0x1p65f, true}, {0x1p66f, false}, {kernels::kLargestKvScale, false}}) {
    const float scales[] = {scale, 1.0f};
    EXPECT_EQ(CheckKvScales(spec, scales, "scales").ok(), good) << scale;
  }
}

TEST_F(ScalesTest, ChangeOnlyWithoutOpenSequences) {
  ASSERT_TRUE(Set({0.5f, 0.25f}).ok());
  ASSERT_TRUE(Set({0.5f, 0.125f}).ok());
  fp8_->sequences = 1;
  EXPECT_TRUE(Set({0.5f, 0.125f}).ok());
  EXPECT_EQ(Set({0.5f, 0.25f}).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(DetailOf(Set({0.5f, 0.25f})).reason, "scales_differ");
  EXPECT_EQ(fp8_->kv_scale(1), 0.125f);
  fp8_->sequences = 0;
  EXPECT_TRUE(Set({0.5f, 0.25f}).ok());
}

TEST_F(ScalesTest, OtherFormatsHaveNone) {
  const float scales[2] = {1.0f, 1.0f};
  EXPECT_EQ(table_.SetScales(*model_, scales, "scales").code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(table_.SetScales(*model_, scales, "scales")).reason, "no_layer_scales");
  EXPECT_TRUE(model_->scales_complete());
}

TEST_F(ModelTableTest, RowsTakeTheBytesOfTheirFormat) {
  ModelSpec spec = *model_->spec;
  const int64_t rows = int64_t{spec.page_size} * spec.layers;
  EXPECT_EQ(model_->contents->layout.bytes, rows * 12 * 2);
  spec.id = "tensor";
  spec.kv_format = kernels::KvFormat::kFp8Tensor;
  EXPECT_EQ((*table_.Register(tenant_, spec))->contents->layout.bytes, rows * 12);
  ASSERT_TRUE(table_.Unregister(tenant_, "tensor").ok());  // two models are the bound
  spec.id = "row";
  spec.kv_format = kernels::KvFormat::kFp8Row;  // 8 codes, a scale, 4 rotated
  EXPECT_EQ((*table_.Register(tenant_, spec))->contents->layout.bytes, rows * 20);
  // The name of a registered model with another format is refused.
  spec.kv_format = kernels::KvFormat::kBf16;
  EXPECT_EQ(table_.Register(tenant_, spec).status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(table_.Unregister(tenant_, "row").ok());
  spec.id = "page";
  spec.kv_format = kernels::KvFormat::kFp8Page;  // the same, and 8 bytes a row after all rows
  const int64_t page = (int64_t{spec.page_size} * 24 + 575) / 576 * 576;
  EXPECT_EQ((*table_.Register(tenant_, spec))->contents->layout.rows(1).offset, page);
}

TEST_F(ModelTableTest, IndexKeysHaveAPlaneOfTheirOwn) {
  ModelSpec spec = *model_->spec;
  spec.id = "indexed";
  spec.attention = kernels::AttentionKind::kSparse;
  spec.top_k = 4;
  spec.indexer = {64, 128};
  const Model& model = **table_.Register(tenant_, spec);
  const int64_t kv = int64_t{spec.page_size} * 12 * 2;
  const int64_t keys = (int64_t{spec.page_size} * 132 + 15) / 16 * 16;  // 128 codes, then a scale
  EXPECT_EQ(model.contents->layout.bytes, spec.layers * (kv + keys));
  EXPECT_EQ(model.contents->layout.rows(1).offset, kv + keys);
  EXPECT_EQ(model.contents->layout.index_keys(1).offset, kv + keys + kv);
  EXPECT_EQ(model.contents->layout.index_keys(1).row_stride, 128);
  const auto refused = [&](int heads, int dim, int top_k) {
    ModelSpec other = spec;
    other.id = "other";
    other.indexer = {heads, dim};
    other.top_k = top_k;
    if (top_k == 0) other.attention = kernels::AttentionKind::kDense;
    return DetailOf(table_.Register(tenant_, other).status()).field;
  };
  EXPECT_EQ(refused(129, 128, 4), "model.index_heads");
  EXPECT_EQ(refused(64, 129, 4), "model.index_dim");
  EXPECT_EQ(refused(64, 0, 4), "model.index_dim");
  EXPECT_EQ(refused(0, 128, 4), "model.index_dim");
  EXPECT_EQ(refused(64, 128, 0), "model.index_heads");
}

TEST_F(ModelTableTest, ARepeatedUploadSucceedsAndAChangedOneDoesNot) {
  ASSERT_TRUE(Load(1, 0, 0, 2).ok());
  ASSERT_TRUE(Load(1, 1, 0, 2).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 1), IsEmpty());
  ASSERT_TRUE(Load(2, 0, 0, 2).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 2), IsEmpty());
  weights_.back() ^= std::byte{1};
  EXPECT_EQ(Load(3, 0, 0, 2).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(DetailOf(Load(3, 0, 0, 2)).reason, "weights_differ");
  EXPECT_THAT(DetailOf(Load(3, 0, 0, 2)).got, HasSubstr("head 1"));
  EXPECT_TRUE(model_->contents->weights_complete);
}

// A chunk of one upload must not count because another upload committed.
TEST_F(ModelTableTest, UploadsDoNotCommitEachOthersHeads) {
  ASSERT_TRUE(Load(1, 0, 0, 2).ok());
  ASSERT_TRUE(Load(2, 1, 0, 2).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 2), ElementsAre(0));
  table_.weights().Discard(*model_, 1);
  EXPECT_THAT(table_.weights().MissingLayers(*model_), ElementsAre(0));
  ASSERT_TRUE(Load(3, 0, 0, 2).ok());
  ASSERT_TRUE(Load(4, 0, 0, 1).ok());  // takes head 0 over
  EXPECT_THAT(table_.weights().Commit(*model_, 3), ElementsAre(0));
  EXPECT_THAT(table_.weights().Commit(*model_, 4), IsEmpty());
}

class SharedContentsTest : public ModelTableTest {
 protected:
  // In the place of the harness's model: two with equal contents, of which its client says so.
  SharedContentsTest() {
    spec_ = *model_->spec;
    spec_.weights_digest = std::string(kWeightsDigestBytes, 'd');
    EXPECT_EQ(table_.Unregister(tenant_, spec_.id), absl::OkStatus());
    model_ = Register("first");
    second_ = Register("second");
  }
  Model* Register(const std::string& id) {
    spec_.id = id;
    return *table_.Register(tenant_, spec_);
  }
  int64_t Used(Resource resource) { return h_.core().tenants().Usage(h_.tenant()).used[resource]; }

  ModelSpec spec_;
  Model* second_ = nullptr;
};

TEST_F(SharedContentsTest, WeightsAreThereOnce) {
  EXPECT_EQ(second_->contents, model_->contents);
  EXPECT_EQ(table_.weights_slot(*second_, 1), table_.weights_slot(*model_, 1));
  EXPECT_EQ(Used(Resource::kModels), 2);
  ASSERT_TRUE(Load(1, 0, 0, 2).ok());
  ASSERT_TRUE(Load(1, 1, 0, 2).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 1), IsEmpty());
  const int64_t bytes = Used(Resource::kWeightBytes);
  EXPECT_GT(bytes, 0);
  EXPECT_TRUE(table_.Info(*second_).weights_complete);
  // An upload to the other is a repeat, or is refused.
  std::swap(model_, second_);
  EXPECT_EQ(Load(2, 0, 0, 2), absl::OkStatus());
  EXPECT_EQ(Used(Resource::kWeightBytes), bytes);
  weights_.back() ^= std::byte{1};
  EXPECT_EQ(DetailOf(Load(3, 0, 0, 2)).reason, "weights_differ");
  // They go with the last.
  ASSERT_EQ(table_.Unregister(tenant_, "first"), absl::OkStatus());
  EXPECT_TRUE(table_.Info(*model_).weights_complete);
  EXPECT_EQ(Used(Resource::kWeightBytes), bytes);
  EXPECT_EQ(Used(Resource::kModels), 1);
  // Another model takes another slot.
  spec_.weights_digest[0] = 'e';
  EXPECT_NE(table_.weights_slot(*Register("first"), 0), table_.weights_slot(*model_, 0));
  ASSERT_EQ(table_.Unregister(tenant_, "first"), absl::OkStatus());
  ASSERT_EQ(table_.Unregister(tenant_, "second"), absl::OkStatus());
  EXPECT_EQ(Used(Resource::kWeightBytes), 0);
  EXPECT_EQ(Used(Resource::kModels), 0);
}

TEST(LayerWeightBytesTest, RowsOfProjectedCountAsAGpuPadsThem) {
  ModelSpec spec;
  spec.geometry = {.num_heads = 1, .kv_lora_rank = 8, .rope_dim = 0, .nope_dim = 8, .v_dim = 8};
  EXPECT_EQ(spec.layer_weight_bytes(), 2 * (8 * (8 + 8)));
  spec.projected.q_lora_rank = 1;
  spec.projected.hidden_size = 16384;
  EXPECT_EQ(spec.layer_weight_bytes(), 2 * (8 * (8 + 8) + 8 * 64 + 16384 * 64));
  spec.projected.q_lora_rank = 128;
  spec.geometry.num_heads = 16;
  EXPECT_EQ(spec.layer_weight_bytes(), 2 * (16 * 8 * (8 + 8) + 16 * 8 * 128 + 16384 * 16 * 8));
}

TEST(LayerWeightBytesTest, ALayerOfDeepSeekV3) {
  ModelSpec spec;
  spec.geometry = {128, 512, 64, 128, 128};
  constexpr int64_t kUp = int64_t{2} * 128 * 512 * (128 + 128);  // W_UK and W_UV, always bf16
  spec.projected = {1536, 7168};
  EXPECT_EQ(spec.layer_weight_bytes(), kUp + 310378496);
  spec.projected.weights = kernels::DType::kFp8E4m3;
  EXPECT_EQ(spec.layer_weight_bytes(), kUp + 310378496 / 2 + 47104);  // with the scales
  EXPECT_EQ(spec.head_bytes(kernels::ProjectedPart::kQueries, 1), 192 * 1536 + 2 * 12 * 4);
}

// The reference holds codes.
TEST(ProjectedDtypeTest, HeadsMustFitScales) {
  testing::HarnessOptions options;
  options.limits = testing::TinyLimits();
  options.limits.max_v_dim = 64;
  options.model = testing::TinyModel();
  EngineHarness h(std::move(options));
  ModelTable& table = h.core().models();
  const TenantKey tenant = h.core().FindTenant(h.tenant());
  ModelSpec spec = h.model();
  spec.id = "codes";
  spec.geometry = {2, 8, 4, 12, 64};
  spec.projected = {32, 32, kernels::DType::kFp8E4m3};
  spec.rope = kernels::RopeLayout::kHalves;
  const ModelSpec good = spec;
  auto registered = table.Register(tenant, good);
  ASSERT_TRUE(registered.ok()) << registered.status();
  EXPECT_EQ((*registered)->spec->projected.weights, kernels::DType::kFp8E4m3);
  spec.projected.weights = kernels::DType::kBf16;
  registered = table.Register(tenant, spec);  // a repeat: the type in force stays
  EXPECT_EQ((*registered)->spec->projected.weights, kernels::DType::kFp8E4m3);
  const auto field = [&](const ModelSpec& other) {
    return DetailOf(table.Register(tenant, other).status()).field;
  };
  spec = good;
  spec.geometry.v_dim = 32;
  EXPECT_EQ(field(spec), "model.projected_dtype");
  spec.geometry = good.geometry;
  spec.geometry.nope_dim = 6;
  EXPECT_EQ(field(spec), "model.projected_dtype");
  spec = h.model();
  spec.projected.weights = kernels::DType::kFp8E4m3;
  EXPECT_EQ(field(spec), "model.projected_dtype");
}

TEST_F(SharedContentsTest, OpenSequencesOfAllKeepWhatRowsAreStoredUnder) {
  ASSERT_EQ(table_.Unregister(tenant_, "second"), absl::OkStatus());
  ASSERT_EQ(table_.Unregister(tenant_, "first"), absl::OkStatus());
  spec_.kv_format = kernels::KvFormat::kFp8Tensor;
  Model* const first = Register("first");
  Model* const second = Register("second");
  ASSERT_EQ(table_.SetScales(*first, std::vector{0.5f, 0.25f}, "scales"), absl::OkStatus());
  EXPECT_TRUE(second->scales_complete());
  first->sequences = 1;
  EXPECT_EQ(DetailOf(table_.SetScales(*second, std::vector{0.5f, 0.5f}, "scales")).reason,
            "scales_differ");
  EXPECT_EQ(second->kv_scale(1), 0.25f);
  first->sequences = 0;
  EXPECT_EQ(table_.SetScales(*second, std::vector{0.5f, 0.5f}, "scales"), absl::OkStatus());
  EXPECT_EQ(first->kv_scale(1), 0.5f);
}

TEST_F(SharedContentsTest, OnlyEqualContentsThatTheClientVouchesForAreShared) {
  const auto shared = [&](void (*change)(ModelSpec&)) {
    EXPECT_EQ(table_.Unregister(tenant_, "second"), absl::OkStatus());
    ModelSpec spec = spec_;
    spec.id = "second";
    change(spec);
    const Model* const other = *table_.Register(tenant_, spec);
    return other->contents == model_->contents;
  };
  EXPECT_TRUE(shared([](ModelSpec&) {}));
  EXPECT_FALSE(shared([](ModelSpec& spec) { spec.weights_digest[31] = 'e'; }));
  EXPECT_FALSE(shared([](ModelSpec& spec) { spec.softmax_scale *= 1.0000001; }));
  EXPECT_FALSE(shared([](ModelSpec& spec) { spec.page_size += 1; }));
  EXPECT_FALSE(shared([](ModelSpec& spec) { spec.weights_digest.clear(); }));
  ASSERT_EQ(table_.Unregister(tenant_, "first"), absl::OkStatus());
  spec_.weights_digest.clear();
  model_ = Register("first");  // equal to "second", but no digest says that their weights are equal
  EXPECT_FALSE(shared([](ModelSpec&) {}));
  ASSERT_EQ(table_.Unregister(tenant_, "first"), absl::OkStatus());
  spec_.weights_digest = std::string(kWeightsDigestBytes, 'd');
  model_ = Register("first");
  ASSERT_EQ(table_.Unregister(tenant_, "second"), absl::OkStatus());
  const TenantRef other = *h_.core().tenants().Enter("other");
  EXPECT_NE((*table_.Register(other->key(), spec_))->contents, model_->contents);
}

TEST(ModelSpecTest, TheTextOfContentsTellsApartWhatDiffers) {
  void (*const changes[])(ModelSpec&) = {
      [](ModelSpec& m) { m.geometry.num_heads += 1; },
      [](ModelSpec& m) { m.geometry.kv_lora_rank += 1; },
      [](ModelSpec& m) { m.geometry.rope_dim += 1; },
      [](ModelSpec& m) { m.geometry.nope_dim += 1; },
      [](ModelSpec& m) { m.geometry.v_dim += 1; },
      [](ModelSpec& m) { m.layers += 1; },
      [](ModelSpec& m) { m.softmax_scale = std::nextafter(m.softmax_scale, 1.0); },
      [](ModelSpec& m) { m.page_size += 1; },
      [](ModelSpec& m) { m.query_precision = QueryPrecision::kSplit; },
      [](ModelSpec& m) { m.kv_format = kernels::KvFormat::kFp8Row; },
      [](ModelSpec& m) { m.attention = kernels::AttentionKind::kSparse; },
      [](ModelSpec& m) { m.top_k += 1; },
      [](ModelSpec& m) { m.indexer.heads += 1; },
      [](ModelSpec& m) { m.indexer.dim += 1; },
      [](ModelSpec& m) { m.weights_digest += 'e'; },
      [](ModelSpec& m) { m.fp8_compute = Fp8Compute::kOn; },
      [](ModelSpec& m) { m.window += 1; },
      [](ModelSpec& m) { m.ratios = {4}; },
      [](ModelSpec& m) {
        m.ratios = {0, 4};
      },
      [](ModelSpec& m) { m.tail_bytes += 1; },
      [](ModelSpec& m) { m.entry_format = kernels::KvFormat::kFp8Row; },
      [](ModelSpec& m) { m.needs_sinks = true; },
  };
  std::set<std::string> texts = {testing::TinyModel().ContentsText()};
  for (const auto& change : changes) {
    ModelSpec spec = testing::TinyModel();
    change(spec);
    EXPECT_TRUE(texts.insert(spec.ContentsText()).second) << spec.ContentsText();
    spec.id += "other";
    EXPECT_FALSE(texts.insert(spec.ContentsText()).second);
  }
}

// Room for the weights of one model: the second waits until the first has gone.
TEST(ModelTableBudgetTest, WeightsOfAllModelsAreBoundedAndGivenBack) {
  Limits limits = testing::TinyLimits();
  limits.weights_bytes = 2 * 2 * 8 * (6 + 5) * 2;  // layers x heads x lora x (nope + v) x bf16
  EngineHarness h({limits, testing::TinyModel(), nullptr, nullptr});
  ModelTable& table = h.core().models();
  const TenantKey tenant = h.core().FindTenant(h.tenant());
  ModelSpec spec = h.model();
  Model* const first = *table.Find(tenant, spec.id, "model_id");
  spec.id = "second";
  Model* const second = *table.Register(tenant, spec);
  const std::vector<std::byte> head(8 * (6 + 5) * 2, std::byte{3});
  const auto load = [&](Model* model, UploadId upload) {
    return table.weights().Load(*model, upload, 0, 0, 1, head);
  };
  ASSERT_EQ(load(first, 1), absl::OkStatus());
  EXPECT_EQ(load(second, 2).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailOf(load(second, 2)).reason, "weights_exhausted");
  EXPECT_EQ(DetailOf(load(second, 2)).limit, "at most 704 bytes in all, 0 free");
  EXPECT_EQ(DetailOf(load(second, 2)).bound_of, BoundOwner::kServer);
  ASSERT_EQ(table.Unregister(tenant, h.model().id), absl::OkStatus());
  EXPECT_EQ(load(second, 3), absl::OkStatus());
}

TEST_F(ModelTableTest, WeightChunksAreChecked) {
  EXPECT_EQ(Load(1, 2, 0, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(Load(1, 2, 0, 1)).field, "chunk.layer");
  EXPECT_EQ(Load(1, 0, 2, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Load(1, 0, 1, 2).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(Load(1, 0, 1, 2)).field, "chunk.head_count");
  EXPECT_EQ(table_.weights()
                .Load(*model_, 1, 0, 0, 1, std::span<const std::byte>(weights_).first(7))
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(table_.weights().Load(*model_, 1, 0, 0, 1,
                                           std::span<const std::byte>(weights_).first(7)))
                .field,
            "chunk.payload");
}

}  // namespace
}  // namespace mla::scheduler
