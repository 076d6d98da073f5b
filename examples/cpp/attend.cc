// Attends to a sequence of one layer: a prompt of 100 rows, then two tokens.
//
//   attend [TARGET]
//
// It is the quickstart's program in C++. Inputs and weights are random; a model's worker has its
// own.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"

namespace {

constexpr uint32_t kHeads = 16, kLora = 512, kRope = 64, kNope = 128, kV = 128;

// Returns bf16 patterns of random numbers.
std::vector<uint16_t> RandomNumbers(size_t count, float deviation) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<uint16_t> numbers(count);
  for (uint16_t& number : numbers) {
    const float value = normal(generator);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    number = static_cast<uint16_t>(bits >> 16);
  }
  return numbers;
}

// Returns the value of `result`, or ends the program with its error.
template <typename T>
T OrExit(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "attend: %s\n", std::string(result.status().message()).c_str());
  std::exit(1);
}

mla::v1::ModelSpec Model() {
  mla::v1::ModelSpec spec;
  spec.set_model_id("quickstart-cpp");
  spec.set_layers(1);
  spec.set_softmax_scale(0.135234);
  spec.set_rope_owner(mla::v1::ROPE_OWNER_WORKER);  // queries and keys arrive rotated
  mla::v1::Geometry* const geometry = spec.mutable_geometry();
  geometry->set_num_heads(kHeads);
  geometry->set_kv_lora_rank(kLora);
  geometry->set_rope_dim(kRope);
  geometry->set_nope_dim(kNope);
  geometry->set_v_dim(kV);
  return spec;
}

// W_UK [heads, nope, lora], then W_UV [heads, lora, v]: what EXPANDED needs.
void UploadWeights(mla::client::Client* client, const std::string& model_id) {
  const std::vector<uint16_t> weights = RandomNumbers(kHeads * kLora * (kNope + kV), 1.0F / 23);
  std::optional<mla::client::WeightsChunk> chunk(
      {.head_count = kHeads,
       .bytes = std::string(reinterpret_cast<const char*>(weights.data()), weights.size() * 2)});
  OrExit(client->UploadWeights(model_id, [&] { return std::exchange(chunk, std::nullopt); }));
}

}  // namespace

int main(int argc, char** argv) {
  const auto client =
      OrExit(mla::client::Client::Connect(argc > 1 ? argv[1] : "127.0.0.1:50551", {}));
  const mla::v1::ModelSpec spec = Model();
  OrExit(client->RegisterModel(spec));
  UploadWeights(client.get(), spec.model_id());
  const auto session = OrExit(client->OpenSession());
  mla::client::Sequence sequence = OrExit(client->OpenSequence(spec.model_id()));
  for (const uint32_t rows : {100U, 1U, 1U}) {
    const auto step = OrExit(session->Begin(spec.model_id(), {{&sequence, rows}}));
    const std::vector<uint16_t> q = RandomNumbers(rows * kHeads * (kNope + kRope), 1);
    const std::vector<uint16_t> kv = RandomNumbers(rows * (kLora + kRope), 1);
    std::vector<uint16_t> o(rows * kHeads * kV);
    mla::client::AttendCall call;
    call.row_count = rows;
    call.num_heads = kHeads;
    call.q = q.data(), call.kv = kv.data(), call.o = o.data();
    const mla::client::AttendTimes times = OrExit(step->Attend(call));
    const std::vector<uint64_t> lengths = OrExit(step->End());
    std::printf("%u rows computed in %u us, the sequence has %llu\n", rows, times.kernel_us,
                static_cast<unsigned long long>(lengths[0]));
  }
  return 0;
}
