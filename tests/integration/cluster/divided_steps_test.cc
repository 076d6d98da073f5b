// A step whose sequences are on three servers answers what one server answers for all of them: with
// 8-bit rows, index lists, an indexer, a window, and hidden states.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "absl/strings/str_join.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/projected/projected_model.h"
#include "tests/integration/test_server.h"
#include "tests/integration/window_worker.h"

namespace mla::integration {
namespace {

// A kind of model and of its calls.
struct Form {
  v1::ModelSpec spec;
  v1::Profile profile = v1::PROFILE_ABSORBED;
  v1::DType dtype = v1::DTYPE_BF16;  // of q
  bool fp8_rows = false;
  enum class Lists { kNone, kFixed, kRagged, kIndexer } lists = Lists::kNone;
  std::function<absl::Status(client::Client*)> upload;
};

std::vector<float> Uniform(size_t count, std::mt19937_64* random) {
  std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(*random);
  return values;
}

std::vector<std::byte> AsBf16(const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(uint16_t));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t narrow = ToBf16(values[i]);
    std::memcpy(&bytes[i * sizeof(narrow)], &narrow, sizeof(narrow));
  }
  return bytes;
}

class DividedStepsTest : public ::testing::Test {
 protected:
  static constexpr size_t kOwners[] = {0, 1, 0, 2, 2};  // servers of the sequences

  void Open(Form form) {
    form_ = std::move(form);
    std::vector<std::string> addresses;
    for (const auto& server : servers_) addresses.push_back(server->tcp_target());
    client::ClusterOptions options;
    options.home = addresses[0];
    cluster_ = *client::ClusterClient::Connect(absl::StrJoin(addresses, ","), {}, options);
    one_ = servers_[3]->Connect();  // no member of the cluster
    ASSERT_TRUE(cluster_->RegisterModel(form_.spec).ok());
    ASSERT_TRUE(one_->RegisterModel(form_.spec).ok());
    if (form_.upload) {
      ASSERT_EQ(form_.upload(one_.get()), absl::OkStatus());
      ASSERT_EQ(cluster_->Upload(kModel, "weights", form_.upload), absl::OkStatus());
    }
    for (const size_t owner : kOwners) {
      // Opened by a client of that server alone, and found by the cluster's.
      const auto there = *cluster_->ServerAt(addresses[owner]);
      ASSERT_TRUE(there->RegisterModel(form_.spec).ok());
      auto opened = there->OpenSequence(kModel);
      ASSERT_TRUE(opened.ok()) << opened.status();
      auto attached = cluster_->Attach(kModel, opened->id());
      ASSERT_TRUE(attached.ok()) << attached.status();
      opened->Detach();
      divided_.push_back(*std::move(attached));
      whole_.push_back(*one_->OpenSequence(kModel));
    }
    of_cluster_ = cluster_->OpenSession();
    of_one_ = *one_->OpenSession();
  }

  // A step of these rows, in both ways; each layer comes in two calls.
  void Step(const std::vector<uint32_t>& rows) {
    std::vector<client::StepRows> whole;
    std::vector<client::ClusterRows> divided;
    uint32_t total = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      whole.push_back({&whole_[i], rows[i]});
      divided.push_back({&divided_[i], rows[i]});
      total += rows[i];
    }
    client::ClusterBeginOptions options;
    const std::vector<float> rotations =
        Uniform(total * form_.spec.geometry().rope_dim(), &random_);
    if (form_.profile == v1::PROFILE_PROJECTED) options.step.rotations = rotations;
    auto step = of_one_->Begin(kModel, whole, options.step);
    ASSERT_TRUE(step.ok()) << step.status();
    auto parts = of_cluster_->Begin(kModel, divided, options);
    ASSERT_TRUE(parts.ok()) << parts.status();
    EXPECT_EQ((*parts)->owners(), 3u);
    for (uint32_t layer = 0; layer < form_.spec.layers(); ++layer) {
      for (const auto& [begin, end] : {std::pair(0u, total / 3), std::pair(total / 3, total)}) {
        if (begin < end) Compare(step->get(), parts->get(), layer, begin, end, rows);
      }
    }
    EXPECT_EQ((*step)->End().value(), (*parts)->End().value());
  }

  void Compare(client::Step* step, client::ClusterStep* parts, uint32_t layer, uint32_t begin,
               uint32_t end, const std::vector<uint32_t>& rows) {
    const v1::Geometry& geometry = form_.spec.geometry();
    const bool projected = form_.profile == v1::PROFILE_PROJECTED;
    const size_t count = end - begin, heads = geometry.num_heads();
    const size_t row = geometry.kv_lora_rank() + geometry.rope_dim();
    const size_t q_dim = projected ? form_.spec.q_lora_rank() : heads * row;
    const size_t o_dim = projected
                             ? form_.spec.hidden_size()
                             : heads * (form_.spec.window() > 0 ? row : geometry.kv_lora_rank());
    const size_t entries = step->EntriesOf(layer, begin, end);
    EXPECT_EQ(entries, parts->EntriesOf(layer, begin, end));
    const auto kv_values = Uniform((count + entries) * (row + form_.spec.index_dim()), &random_);
    const auto q_values = Uniform(count * q_dim, &random_);
    const auto kv =
        form_.fp8_rows ? client::EncodeFp8Rows(form_.spec, kv_values) : AsBf16(kv_values);
    const auto q = form_.dtype == v1::DTYPE_F8_E4M3
                       ? client::EncodeFp8Queries(form_.spec, form_.profile, q_values)
                       : AsBf16(q_values);
    client::AttendCall call;
    call.layer = layer;
    call.row_begin = begin;
    call.row_count = static_cast<uint32_t>(count);
    call.num_heads = static_cast<uint32_t>(heads);
    call.profile = form_.profile;
    call.q_dtype = form_.dtype;
    if (form_.fp8_rows) call.kv_row_dtype = v1::DTYPE_F8_E4M3;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = kv.data();
    call.q = q.data();
    std::vector<int32_t> listed, begins;
    std::vector<std::byte> inputs;
    AddLists(layer, begin, end, rows, &call, &listed, &begins, &inputs);
    std::vector<float> o[2], lse[2];
    std::vector<int32_t> chosen[2];
    for (int way = 0; way < 2; ++way) {
      o[way].assign(count * o_dim, -7);
      lse[way].assign(count * heads, -7);
      chosen[way].assign(count * std::max<size_t>(form_.spec.top_k(), 1), -7);
      call.o = o[way].data();
      call.lse = projected ? nullptr : lse[way].data();
      call.chosen = inputs.empty() ? nullptr : chosen[way].data();
      const auto done = way == 0 ? step->Attend(call) : parts->Attend(call);
      ASSERT_TRUE(done.ok()) << "way " << way << ", layer " << layer << ": " << done.status();
    }
    for (size_t i = 0; i < o[0].size(); ++i) {
      ASSERT_NEAR(o[0][i], o[1][i], 1e-5)
          << "layer " << layer << ", rows " << begin << " to " << end << ", value " << i;
    }
    for (size_t i = 0; i < lse[0].size(); ++i) ASSERT_NEAR(lse[0][i], lse[1][i], 1e-4) << i;
    EXPECT_EQ(chosen[0], chosen[1]);
    EXPECT_TRUE(std::any_of(o[0].begin(), o[0].end(), [](float one) { return one != 0; }));
  }

  // Lists of positions, or in a model with a window of entries, that each row sees.
  void AddLists(uint32_t layer, uint32_t begin, uint32_t end, const std::vector<uint32_t>& rows,
                client::AttendCall* call, std::vector<int32_t>* listed,
                std::vector<int32_t>* begins, std::vector<std::byte>* inputs) {
    const v1::ModelSpec& spec = form_.spec;
    const bool window = spec.window() > 0;
    const uint32_t ratio = window ? spec.ratios(static_cast<int>(layer)) : 1;
    if (form_.lists == Form::Lists::kNone || ratio == 0) return;
    if (form_.lists == Form::Lists::kIndexer) {
      for (uint32_t row = begin; row < end; ++row) {
        const auto queries = AsBf16(Uniform(spec.index_heads() * spec.index_dim(), &random_));
        const auto weights = Uniform(spec.index_heads(), &random_);
        const auto bytes = std::as_bytes(std::span(weights));
        inputs->insert(inputs->end(), queries.begin(), queries.end());
        inputs->insert(inputs->end(), bytes.begin(), bytes.end());
      }
      call->index_inputs = inputs->data();
      return;
    }
    const bool fixed = form_.lists == Form::Lists::kFixed;
    uint32_t row = 0;
    begins->push_back(0);
    for (size_t i = 0; i < rows.size(); ++i) {
      for (uint32_t own = 0; own < rows[i]; ++own, ++row) {
        if (row < begin || row >= end) continue;
        const auto seen = static_cast<int32_t>((whole_[i].length() + own + 1) / ratio);
        std::vector<int32_t> all(static_cast<size_t>(seen)), some;
        for (int32_t at = 0; at < seen; ++at) all[static_cast<size_t>(at)] = at;
        const size_t most = fixed ? spec.top_k() : 1 + random_() % spec.top_k();
        std::sample(all.begin(), all.end(), std::back_inserter(some), most, random_);
        if (fixed) some.resize(spec.top_k(), -1);
        listed->insert(listed->end(), some.begin(), some.end());
        begins->push_back(static_cast<int32_t>(listed->size()));
      }
    }
    if (listed->empty()) listed->push_back(-1);
    call->lists = {listed->data(), fixed ? spec.top_k() : 0, fixed ? nullptr : begins->data()};
  }

  void Run(Form form) {
    Open(std::move(form));
    if (HasFatalFailure()) return;
    for (const std::vector<uint32_t>& rows : {std::vector<uint32_t>{7, 3, 4, 2, 9},
                                              {1, 1, 1, 1, 1},
                                              {4, 5, 1, 6, 2},
                                              {1, 2, 1, 1, 3}}) {
      Step(rows);
      if (HasFatalFailure()) return;
    }
  }

  static Form Plain() { return {.spec = SpecOf(Dims(), kModel), .upload = {}}; }
  static Form Sparse(Form::Lists lists) {
    Form form = Plain();
    form.spec.set_attention(v1::ATTENTION_KIND_SPARSE_V32);
    form.spec.set_top_k(3);
    form.lists = lists;
    return form;
  }
  static Form Window(Form::Lists lists) {
    return {.spec = WindowWorker(1).Spec(kModel), .lists = lists, .upload = {}};
  }

  std::vector<std::unique_ptr<TestServer>> servers_ = [] {
    std::vector<std::unique_ptr<TestServer>> servers;
    for (int i = 0; i < 4; ++i) servers.push_back(std::make_unique<TestServer>());
    return servers;
  }();
  Form form_;
  std::mt19937_64 random_{5};
  std::unique_ptr<client::ClusterClient> cluster_;
  std::unique_ptr<client::Client> one_;
  std::vector<client::ClusterSequence> divided_;
  std::vector<client::Sequence> whole_;
  std::unique_ptr<client::ClusterSession> of_cluster_;
  std::unique_ptr<client::Session> of_one_;
};

TEST_F(DividedStepsTest, OfRowsIn8BitFloats) {
  Form form = Plain();
  form.fp8_rows = true;
  Run(form);
}

TEST_F(DividedStepsTest, OfQueriesAndRowsIn8BitFloats) {
  Form form = Plain();
  form.fp8_rows = true;
  form.dtype = v1::DTYPE_F8_E4M3;
  Run(form);
}

TEST_F(DividedStepsTest, WithListsOfOneWidth) { Run(Sparse(Form::Lists::kFixed)); }

TEST_F(DividedStepsTest, WithListsOfDifferentLengths) { Run(Sparse(Form::Lists::kRagged)); }

TEST_F(DividedStepsTest, WithAnIndexer) {
  Form form = Sparse(Form::Lists::kIndexer);
  form.spec.set_index_heads(2);
  form.spec.set_index_dim(16);
  Run(form);
}

TEST_F(DividedStepsTest, WithAWindow) { Run(Window(Form::Lists::kNone)); }

TEST_F(DividedStepsTest, WithAWindowAndLists) { Run(Window(Form::Lists::kRagged)); }

TEST_F(DividedStepsTest, RefusesWhatOneServerRefuses) {
  Open(Window(Form::Lists::kNone));
  client::AttendCall call;
  call.row_count = 2;
  call.num_heads = 1;
  call.profile = v1::PROFILE_ABSORBED;
  call.kv_row_dtype = v1::DTYPE_F8_E4M3;
  const std::vector<std::byte> tensor(size_t{1} << 12);
  std::vector<std::byte> o(size_t{1} << 12);
  call.kv = call.q = tensor.data();
  call.o = o.data();
  const auto step = of_one_->Begin(kModel, {{&whole_[0], 1}, {&whole_[1], 1}});
  const auto parts = of_cluster_->Begin(kModel, {{&divided_[0], 1}, {&divided_[1], 1}});
  ASSERT_TRUE(step.ok() && parts.ok()) << step.status() << parts.status();
  for (const absl::Status& status :
       {(*step)->Attend(call).status(), (*parts)->Attend(call).status()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(client::DetailOf(status)->field(), "attend.kv_row_dtype") << status;
  }
}

TEST_F(DividedStepsTest, OfHiddenStates) {
  const ProjectedDims dims;
  Form form = Plain();
  form.spec = SpecOf(dims, kModel);
  form.profile = v1::PROFILE_PROJECTED;
  auto weights = std::make_shared<ProjectedWeights>(RandomProjectedWeights(dims, &random_));
  form.upload = [dims, weights](client::Client* server) {
    std::vector<client::WeightsChunk> chunks = ChunksOf(dims.dims, weights->up);
    for (auto& chunk : ProjectedChunks(dims, 0, dims.dims.heads, false, weights.get())) {
      chunks.push_back(std::move(chunk));
    }
    size_t next = 0;
    return server
        ->UploadWeights(kModel,
                        [&]() -> std::optional<client::WeightsChunk> {
                          if (next == chunks.size()) return std::nullopt;
                          return std::move(chunks[next++]);
                        })
        .status();
  };
  Run(form);
  client::ClusterBeginOptions options;
  const std::vector<float> short_of_one(form_.spec.geometry().rope_dim() * 2 - 1);
  options.step.rotations = short_of_one;
  const auto refused = of_cluster_->Begin(kModel, {{&divided_[0], 1}, {&divided_[1], 1}}, options);
  EXPECT_EQ(client::DetailOf(refused.status())->field(), "step.rotations") << refused.status();
}

}  // namespace
}  // namespace mla::integration
