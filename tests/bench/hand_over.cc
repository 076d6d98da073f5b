// Measures how fast a server that drains hands its sequences and its weights over, and the
// processor time that both servers take for it.
//
//   hand_over_benchmark [--json FILE] [--streams N] [--sequences N] [--weights N]
//
// Two servers of this process, on loopback with mutual TLS. In one case the first has --sequences
// sequences of kRows rows, in the other the weights of one model, in kLayers x --weights heads; it
// drains to the second over --streams connections. 0 streams: one for every two cores, because a
// stream takes a core on each side. Prints seconds, GB/s and processor seconds a GB of payload, of
// both servers together. Next to them it prints the part that the format's digests and TLS take: a
// GB of SHA-256 and a GB through AES-256-GCM, each on both sides, measured on one thread. Exits 1
// if a sequence or the weights have not moved.
#include <openssl/evp.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "proto/wire/grpc_tuning.h"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/test_server.h"

namespace mla::bench {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr uint32_t kRows = 4096, kStepRows = 1024, kLayers = 16, kHeads = 16;
constexpr uint32_t kRank = 512, kRope = 64, kNope = 128, kV = 128;
constexpr int64_t kRowBytes = int64_t{kRank + kRope} * 2 * kLayers;
constexpr int64_t kSequenceBytes = int64_t{kRows} * kRowBytes;
constexpr int64_t kHeadBytes = int64_t{kRank} * (kNope + kV) * 2;
constexpr uint32_t kDrainMs = 120'000;
// Bounds of the flags.
constexpr int kMostStreams = 16, kMostSequences = 256, kMostHeads = 1024;
constexpr char kTenant[] = "red", kOperator[] = "blue", kModel[] = "m";

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "hand_over_benchmark: %s\n", what.c_str());
  std::exit(2);
}

struct Flags {
  std::string json;  // empty: none
  int streams = 4;
  int sequences = 8;
  int weights = 128;  // heads of each layer
  int64_t row_bytes() const { return sequences * kSequenceBytes; }
  int64_t weight_bytes() const { return int64_t{weights} * kLayers * kHeadBytes; }
};

// Returns nothing, and prints the usage, if the arguments are not as the usage says.
std::optional<Flags> ReadFlags(int argc, char** argv) {
  Flags flags;
  const auto number = [](std::string_view text, int least, int most, int* to) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *to);
    return error == std::errc() && end == text.data() + text.size() && *to >= least && *to <= most;
  };
  bool valid = true;
  for (int i = 1; valid && i < argc; ++i) {
    std::string_view name = argv[i], value;
    if (const size_t equals = name.find('='); equals != name.npos) {
      value = name.substr(equals + 1);
      name = name.substr(0, equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    }
    if (name == "--json") flags.json = value;
    valid = (name == "--json" && !value.empty()) ||
            (name == "--streams" && number(value, 0, kMostStreams, &flags.streams)) ||
            (name == "--sequences" && number(value, 1, kMostSequences, &flags.sequences)) ||
            (name == "--weights" && number(value, 1, kMostHeads, &flags.weights));
  }
  if (!valid) {
    std::fprintf(stderr,
                 "usage: hand_over_benchmark [--json FILE] [--streams 0..%d] [--sequences 1..%d] "
                 "[--weights 1..%d]\n",
                 kMostStreams, kMostSequences, kMostHeads);
    return std::nullopt;
  }
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (flags.streams == 0) flags.streams = std::clamp(cores / 2, 1, kMostStreams);
  return flags;
}

void Check(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

double ProcessorSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::unique_ptr<integration::TestServer> Serve(const integration::Authority& authority,
                                               const Flags& flags) {
  return std::make_unique<integration::TestServer>([&](server::Config& config) {
    config.backend = "cpu";
    config.tls.cert = authority.File("server.pem");
    config.tls.key = authority.File("server.key");
    config.tls.client_ca = authority.File("ca.pem");
    config.listen.operators = absl::StrCat(kOperator, ",localhost");
    config.listen.unix_path = "";
    config.hand_over_streams = flags.streams;
    config.limits.kv_cache_bytes = 2 * flags.row_bytes();
    config.limits.weights_bytes = 2 * flags.weight_bytes();  // a tenant has less than all
    config.limits.max_sequences = 2 * kMostSequences;
    config.limits.default_page_size = 64;
    config.limits.max_sequence_rows = 2 * kRows;
    config.limits.max_layers = kLayers;
    config.limits.max_heads = std::max<int32_t>(kHeads, flags.weights);
    config.limits.max_row_dim = kRank + kRope;
    config.limits.max_v_dim = kRank;
    config.limits.max_step_rows = kStepRows;
    config.limits.launch_rows = kStepRows;
    config.wire.message_bytes = int64_t{4} << 20;
    config.wire.inflight_bytes = int64_t{16} << 20;
    config.wire.staging_bytes = int64_t{64} << 20;
    // A tenant, here the server that drains, may have half of them.
    config.wire.max_uploads = 2 * kMostStreams;
  });
}

std::unique_ptr<client::Client> Connect(const integration::Authority& authority,
                                        const integration::TestServer& server, const char* name) {
  client::ClientOptions options = authority.As(name);
  options.call_timeout_ms = options.request_timeout_ms = kDrainMs;
  options.sequence_lease_ms = 10 * kDrainMs;
  auto client = client::Client::Connect(server.tcp_target(), options);
  Check(client.status());
  return *std::move(client);
}

v1::ModelSpec ModelOf(uint32_t heads) {
  v1::ModelSpec model;
  model.set_model_id(kModel);
  v1::Geometry* const geometry = model.mutable_geometry();
  geometry->set_num_heads(heads);
  geometry->set_kv_lora_rank(kRank);
  geometry->set_rope_dim(kRope);
  model.set_layers(kLayers);
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  model.set_softmax_scale(0.1);
  return model;
}

// Opens the sequences and appends their rows.
std::vector<client::Sequence> Fill(client::Client* client, int count) {
  Check(client->RegisterModel(ModelOf(kHeads)).status());
  std::vector<uint16_t> rows(size_t{kStepRows} * (kRank + kRope));
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<uint16_t>(0x3c00 + i * 2654435761u % 512);
  const auto session = client->OpenSession();
  Check(session.status());
  std::vector<client::Sequence> sequences;
  for (int i = 0; i < count; ++i) {
    auto opened = client->OpenSequence(kModel);
    Check(opened.status());
    sequences.push_back(*std::move(opened));
    for (uint32_t row = 0; row < kRows; row += kStepRows) {
      const auto step = (*session)->Begin(kModel, {{&sequences.back(), kStepRows}});
      Check(step.status());
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        client::AttendCall call;
        call.layer = layer;
        call.row_count = kStepRows;
        call.profile = v1::PROFILE_APPEND_ONLY;
        call.kv = rows.data();
        Check((*step)->Attend(call).status());
      }
      Check((*step)->End().status());
    }
  }
  return sequences;
}

// Registers the model with weights, and uploads them.
void UploadWeights(client::Client* client, uint32_t heads) {
  v1::ModelSpec model = ModelOf(heads);
  model.mutable_geometry()->set_nope_dim(kNope);
  model.mutable_geometry()->set_v_dim(kV);
  Check(client->RegisterModel(model).status());
  std::string head(static_cast<size_t>(kHeadBytes), '\0');
  for (size_t i = 0; i + 1 < head.size(); i += 2) {
    head[i] = static_cast<char>(i * 2654435761u >> 13);
    head[i + 1] = 0x3c;
  }
  uint32_t next = 0;
  const auto reply = client->UploadWeights(kModel, [&]() -> std::optional<client::WeightsChunk> {
    if (next == kLayers * heads) return std::nullopt;
    const client::WeightsChunk chunk{next / heads, next % heads, 1, head};
    ++next;
    return chunk;
  });
  Check(reply.status());
  if (!reply->complete()) Die("the weights are not complete");
}

// Processor seconds of one thread for a GB of SHA-256.
double DigestSeconds() {
  const std::vector<unsigned char> bytes(size_t{64} << 20);
  unsigned char digest[EVP_MAX_MD_SIZE];
  const double begin = ProcessorSeconds();
  EVP_Digest(bytes.data(), bytes.size(), digest, nullptr, EVP_sha256(), nullptr);
  return (ProcessorSeconds() - begin) / static_cast<double>(bytes.size()) * 1e9;
}

// Processor seconds of one thread for a GB through AES-256-GCM, in records of TLS's size.
double CipherSeconds() {
  constexpr int kRecord = 16 << 10, kRecords = 4096;
  std::vector<unsigned char> in(kRecord), out(kRecord + 16);
  const unsigned char key[32] = {}, nonce[12] = {};
  const std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)> cipher(EVP_CIPHER_CTX_new(),
                                                                               EVP_CIPHER_CTX_free);
  EVP_EncryptInit_ex(cipher.get(), EVP_aes_256_gcm(), nullptr, key, nonce);
  const double begin = ProcessorSeconds();
  for (int i = 0; i < kRecords; ++i) {
    int written = 0;
    EVP_EncryptUpdate(cipher.get(), out.data(), &written, in.data(), kRecord);
  }
  return (ProcessorSeconds() - begin) / (double{kRecord} * kRecords) * 1e9;
}

struct Measured {
  std::string shape;
  double gb = 0, seconds = 0, processor = 0;
  bool moved = false;  // all of it
};

// Drains one server to the other.
Measured Drain(const integration::Authority& authority, const integration::TestServer& from,
               const integration::TestServer& to, int64_t bytes, v1::DrainReply* reply) {
  const auto drainer = Connect(authority, from, kOperator);
  const double processor = ProcessorSeconds();
  const auto begin = SteadyClock::now();
  const auto drained =
      drainer->Drain(kDrainMs, false, {absl::StrCat("localhost:", to.server().tcp_port())});
  Measured measured;
  measured.seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count();
  measured.processor = ProcessorSeconds() - processor;
  measured.gb = static_cast<double>(bytes) / 1e9;
  Check(drained.status());
  *reply = *drained;
  return measured;
}

Measured MoveSequences(const integration::Authority& authority, const Flags& flags) {
  const auto from = Serve(authority, flags), to = Serve(authority, flags);
  const auto tenant = Connect(authority, *from, kTenant);
  std::vector<client::Sequence> sequences = Fill(tenant.get(), flags.sequences);
  // The kernel gives the second pool its memory here, not during the hand-over.
  Fill(Connect(authority, *to, kTenant).get(), flags.sequences);
  v1::DrainReply reply;
  Measured measured = Drain(authority, *from, *to, flags.row_bytes(), &reply);
  int moved = 0;
  for (const v1::HandedOver& one : reply.handed_over()) {
    moved += one.outcome() == v1::HAND_OVER_OUTCOME_MOVED;
    if (one.outcome() != v1::HAND_OVER_OUTCOME_MOVED) {
      std::fprintf(stderr, "%s\n", one.message().c_str());
    }
  }
  for (client::Sequence& sequence : sequences) sequence.Detach();
  measured.shape = absl::StrFormat("%d sequences of %d rows", flags.sequences, kRows);
  measured.moved = moved == flags.sequences;
  return measured;
}

Measured MoveWeights(const integration::Authority& authority, const Flags& flags) {
  const auto from = Serve(authority, flags), to = Serve(authority, flags);
  const auto heads = static_cast<uint32_t>(flags.weights);
  UploadWeights(Connect(authority, *from, kTenant).get(), heads);
  // A virtual machine gets memory from its host here, not during the hand-over.
  const auto there = Connect(authority, *to, kTenant);
  UploadWeights(there.get(), heads);
  Check(there->UnregisterModel(kModel));
  v1::DrainReply reply;
  Measured measured = Drain(authority, *from, *to, flags.weight_bytes(), &reply);
  measured.shape = absl::StrFormat("weights of %d layers of %d heads", kLayers, flags.weights);
  const auto models = there->ListModels();
  Check(models.status());
  measured.moved = models->models_size() == 1 && models->models(0).weights_complete();
  return measured;
}

int Main(int argc, char** argv) {
  const std::optional<Flags> flags = ReadFlags(argc, argv);
  if (!flags) return 2;
  // As the server's program does.
  wire::KeepMessageMemory();
  wire::SkipChecksOfLockOrder();
  const integration::Authority authority;
  std::string rows;
  bool moved = true;
  for (const auto& move : {MoveSequences, MoveWeights}) {
    const Measured m = move(authority, *flags);
    std::printf("%s, %d streams, %.2f GB: %.2f s, %.2f GB/s, %.2f processor s a GB%s\n",
                m.shape.c_str(), flags->streams, m.gb, m.seconds, m.gb / m.seconds,
                m.processor / m.gb, m.moved ? "" : "; NOT ALL HAVE MOVED");
    moved = moved && m.moved;
    absl::StrAppendFormat(&rows,
                          "%s{\"shape\": \"%s\", \"streams\": %d, \"gb_per_s\": %.4f, "
                          "\"processor_s_a_gb\": %.4f}",
                          rows.empty() ? "" : ", ", m.shape, flags->streams, m.gb / m.seconds,
                          m.processor / m.gb);
  }
  std::printf("SHA-256 on both sides %.2f processor s a GB, AES-256-GCM on both sides %.2f\n",
              2 * DigestSeconds(), 2 * CipherSeconds());
  if (!flags->json.empty()) std::ofstream(flags->json) << "[" << rows << "]\n";
  return moved ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
