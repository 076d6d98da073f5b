#include "client/mlactl/attend_command.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "client/mlactl/cli/interrupt.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/transport.h"
#include "client/mlactl/tensors/output_comparison.h"
#include "client/mlactl/tensors/random_tensors.h"
#include "client/mlactl/tensors/value_bounds.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

constexpr char kNotes[] =
    "A prompt in the EXPANDED profile and one more row in ABSORBED, on a model of its own. Exit\n"
    "code 5 when the outputs are outside the rule. A first check of a new server; replay is the\n"
    "thorough one.\n";

// The dimensions are ones that every backend supports. Two heads are enough to notice a wrong order
// of heads.
constexpr uint32_t kHeads = 2, kLora = 512, kRope = 64, kNope = 128, kV = 128;
constexpr uint32_t kRow = kLora + kRope;
constexpr double kScale = 0.135234;
// Scores then deviate by one half: enough for rows to differ, and little enough for rounding to
// stay far inside the bounds.
constexpr double kDeviation = 0.5;
constexpr uint32_t kPromptRows = 33, kRows = kPromptRows + 1;

std::vector<uint16_t> Random(uint64_t seed, double deviation, size_t count) {
  std::vector<uint16_t> values(count);
  FillRandomBf16(seed, deviation, values);
  return values;
}

std::vector<float> Wide(const std::vector<uint16_t>& values) {
  return ToFloats(std::as_bytes(std::span(values)), v1::DTYPE_BF16);
}

v1::ModelSpec Model() {
  v1::ModelSpec model;
  model.mutable_geometry()->set_num_heads(kHeads);
  model.mutable_geometry()->set_kv_lora_rank(kLora);
  model.mutable_geometry()->set_rope_dim(kRope);
  model.mutable_geometry()->set_nope_dim(kNope);
  model.mutable_geometry()->set_v_dim(kV);
  model.set_layers(1);
  model.set_softmax_scale(kScale);
  model.set_kv_dtype(v1::DTYPE_BF16);
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  return model;
}

// Computes the textbook form in double precision from the bytes that are sent.
class Example {
 public:
  Example()
      : weights_(Random(1, 1 / std::sqrt(kLora), size_t{kHeads} * kLora * (kNope + kV))),
        kv_(Random(2, kDeviation, size_t{kRows} * kRow)),
        q_expanded_(Random(3, kDeviation, size_t{kRows} * kHeads * (kNope + kRope))),
        q_absorbed_(Random(4, kDeviation, size_t{kHeads} * kRow)),
        wide_weights_(Wide(weights_)),
        wide_kv_(Wide(kv_)) {}

  const std::vector<uint16_t>& weights() const { return weights_; }
  const std::vector<uint16_t>& kv() const { return kv_; }
  const std::vector<uint16_t>& q_expanded() const { return q_expanded_; }
  const std::vector<uint16_t>& q_absorbed() const { return q_absorbed_; }

  // Returns one head of one row: W_UK is applied to the query, then attention to the latents, then
  // W_UV to the result.
  std::vector<float> Expanded(uint32_t row, uint32_t head) const {
    const std::vector<float> q = Wide(q_expanded_);
    const float* const query = q.data() + (size_t{row} * kHeads + head) * (kNope + kRope);
    const float* const uk = wide_weights_.data() + size_t{head} * kNope * kLora;
    const float* const uv =
        wide_weights_.data() + size_t{kHeads} * kNope * kLora + size_t{head} * kLora * kV;
    std::vector<double> absorbed(kRow);
    for (uint32_t n = 0; n < kNope; ++n) {
      for (uint32_t l = 0; l < kLora; ++l) absorbed[l] += double{query[n]} * uk[n * kLora + l];
    }
    std::copy(query + kNope, query + kNope + kRope, absorbed.begin() + kLora);
    double lse = 0;
    const std::vector<double> latent = Latent(row, absorbed, &lse);
    std::vector<float> out(kV);
    for (uint32_t v = 0; v < kV; ++v) {
      double sum = 0;
      for (uint32_t l = 0; l < kLora; ++l) sum += latent[l] * uv[l * kV + v];
      out[v] = static_cast<float>(sum);
    }
    return out;
  }

  std::vector<float> Absorbed(uint32_t row, uint32_t head, float* lse) const {
    const std::vector<float> q = Wide(q_absorbed_);
    double exact = 0;
    const std::vector<double> latent = Latent(
        row, std::vector<double>(q.begin() + head * kRow, q.begin() + (head + 1) * kRow), &exact);
    *lse = static_cast<float>(exact);
    return {latent.begin(), latent.end()};
  }

  // Returns the largest |V| of each row, for the comparison.
  ValueBounds Bounds() const {
    const v1::ModelSpec model = Model();
    ValueProjection projection(model);
    projection.Add(0, 0, kHeads, std::as_bytes(std::span(weights_)));
    ValueBounds bounds(1);
    for (uint32_t row = 0; row < kRows; ++row) {
      bounds.AddRow(0, row, std::span(wide_kv_).subspan(size_t{row} * kRow, kLora), &projection);
    }
    return bounds;
  }

 private:
  std::vector<double> Latent(uint32_t row, const std::vector<double>& q, double* lse) const {
    std::vector<double> scores(row + 1);
    for (uint32_t j = 0; j <= row; ++j) {
      for (uint32_t d = 0; d < kRow; ++d) {
        scores[j] += kScale * q[d] * wide_kv_[size_t{j} * kRow + d];
      }
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& score : scores) sum += score = std::exp(score - largest);
    std::vector<double> latent(kLora);
    for (uint32_t j = 0; j <= row; ++j) {
      for (uint32_t l = 0; l < kLora; ++l) {
        latent[l] += scores[j] / sum * wide_kv_[size_t{j} * kRow + l];
      }
    }
    *lse = std::log(sum) + largest;
    return latent;
  }

  const std::vector<uint16_t> weights_, kv_, q_expanded_, q_absorbed_;
  const std::vector<float> wide_weights_, wide_kv_;
};

// Registers the example's model; the destructor unregisters it.
class Registered {
 public:
  explicit Registered(client::Client* client) : client_(client) {}
  ~Registered() {
    if (!id_.empty()) client_->UnregisterModel(id_).IgnoreError();
  }
  absl::Status Register(const Example& example, const std::string& id) {
    v1::ModelSpec model = Model();
    model.set_model_id(id);
    MLA_RETURN_IF_ERROR(client_->RegisterModel(model).status());
    id_ = id;
    bool sent = false;
    return client_
        ->UploadWeights(
            id_,
            [&]() -> std::optional<client::WeightsChunk> {
              if (std::exchange(sent, true)) return std::nullopt;
              const auto& weights = example.weights();
              return client::WeightsChunk{
                  0, 0, kHeads,
                  std::string(reinterpret_cast<const char*>(weights.data()), weights.size() * 2)};
            })
        .status();
  }
  const std::string& id() const { return id_; }

 private:
  client::Client* const client_;
  std::string id_;
};

// Runs a prompt in EXPANDED, then one more row in ABSORBED. CANCELLED after an interrupt.
absl::Status RunSteps(client::Client* client, const Example& example, const std::string& model_id,
                      OutputComparison* comparison, std::string* transport) {
  Registered model(client);
  MLA_RETURN_IF_ERROR(model.Register(example, model_id));
  MLA_ASSIGN_OR_RETURN(auto sequence, client->OpenSequence(model.id()));
  MLA_ASSIGN_OR_RETURN(auto session, client->OpenSession());
  *transport = std::string(session->transport());
  const ValueBounds bounds = example.Bounds();
  for (const bool expanded : {true, false}) {
    if (CatchInterrupts().load()) return absl::CancelledError("interrupted");
    const uint32_t first = expanded ? 0 : kPromptRows, rows = expanded ? kPromptRows : 1;
    const uint32_t width = expanded ? kV : kLora;
    MLA_ASSIGN_OR_RETURN(auto step, session->Begin(model.id(), {{&sequence, rows}}));
    std::vector<float> o(size_t{rows} * kHeads * width), lse(size_t{rows} * kHeads);
    client::AttendCall call;
    call.row_count = rows;
    call.num_heads = kHeads;
    call.profile = expanded ? v1::PROFILE_EXPANDED : v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = example.kv().data() + size_t{first} * kRow;
    call.q = expanded ? example.q_expanded().data() : example.q_absorbed().data();
    call.o = o.data();
    call.lse = lse.data();
    MLA_RETURN_IF_ERROR(step->Attend(call).status());
    MLA_RETURN_IF_ERROR(step->End().status());
    for (uint32_t cell = 0; cell < rows * kHeads; ++cell) {
      const uint32_t row = first + cell / kHeads, head = cell % kHeads;
      float expected_lse = lse[cell];
      const std::vector<float> expected =
          expanded ? example.Expanded(row, head) : example.Absorbed(row, head, &expected_lse);
      const std::string where =
          absl::StrCat(v1::Profile_Name(call.profile).substr(8), " row ", row, ", head ", head);
      comparison->AddRow(std::span(o).subspan(size_t{cell} * width, width), expected,
                         bounds.Largest(0, row, call.profile), where);
      comparison->AddLse(lse[cell], expected_lse, where);
    }
  }
  return absl::OkStatus();
}

int Attend(const CommonOptions& common, const std::string& transport_name) {
  client::ClientOptions options = common.client;
  std::string transport;
  SetTransport(transport_name, kDefaultSpinMicros, &options);
  auto client = client::Client::Connect(common.target, options);
  if (!client.ok()) return Fail(client.status());
  const std::atomic<bool>& interrupted = CatchInterrupts();
  OutputComparison comparison{OutputRule{}};
  const std::string model_id = NewModelId("attend");
  const absl::Status status = RunSteps(client->get(), Example(), model_id, &comparison, &transport);
  if (interrupted.load()) {
    if (!status.ok() && !absl::IsCancelled(status)) Fail(status);
    return Interrupted(client->get(), {{model_id}});
  }
  if (!status.ok()) return Fail(status);
  const v1::Backend& backend = (*client)->info().backend();
  const nlohmann::ordered_json json{{"backend", backend.name()},
                                    {"transport", transport},
                                    {"rows", kRows},
                                    {"cosine", comparison.cosine().value},
                                    {"error_of_allowed", comparison.of_allowed().value},
                                    {"first_outside", comparison.first_outside()},
                                    {"agrees", comparison.agrees()}};
  const std::string text = absl::StrFormat(
      "backend %s over %s: %d rows, cosine difference at most %.2g, error at most %.2g of what is "
      "allowed\n%s\n",
      backend.name(), transport, kRows, comparison.cosine().value, comparison.of_allowed().value,
      comparison.agrees() ? "the outputs agree"
                          : absl::StrCat("the outputs DIFFER: ", comparison.first_outside()));
  const int code = Emit(common, json.dump(2) + "\n", text);
  return code != kOk ? code : comparison.agrees() ? kOk : kDifferent;
}

}  // namespace

void AddAttendCommand(Program* program) {
  const auto transport = std::make_shared<std::string>("auto");
  Command command =
      program->Add({.name = "attend",
                    .group = "Checks and load",
                    .summary = "compute a few rows of attention and check them",
                    .examples = "mlactl attend\nmlactl attend --transport=shm --json\n",
                    .notes = kNotes});
  AddTransport(&command, transport.get());
  command.Run([transport](const CommonOptions& common) { return Attend(common, *transport); });
}

}  // namespace mla::mlactl
