// Measures how fast a server that drains hands its sequences over, and the processor time that both
// servers take for it.
//
//   hand_over_benchmark [--json FILE]
//
// Two servers of this process, on loopback with mutual TLS. The first has kSequences sequences of
// kRows rows; it drains to the second. Prints seconds, GB/s and processor seconds a GB of payload,
// of both servers together. Next to them it prints the part that the format's digests and TLS take:
// a GB of SHA-256 and a GB through AES-256-GCM, each on both sides, measured on one thread. Exits 1
// if a sequence has not moved.
#include <openssl/evp.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "proto/wire/grpc_tuning.h"
#include "tests/bench/json_flag.h"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/test_server.h"

namespace mla::bench {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int kSequences = 8;
constexpr uint32_t kRows = 4096, kStepRows = 1024, kLayers = 16, kHeads = 16;
constexpr uint32_t kRank = 512, kRope = 64;
constexpr int64_t kRowBytes = int64_t{kRank + kRope} * 2 * kLayers;
constexpr int64_t kPayload = kSequences * int64_t{kRows} * kRowBytes;
constexpr uint32_t kDrainMs = 120'000;
constexpr char kTenant[] = "red", kOperator[] = "blue", kModel[] = "m";

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "hand_over_benchmark: %s\n", what.c_str());
  std::exit(2);
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

std::unique_ptr<integration::TestServer> Serve(const integration::Authority& authority) {
  return std::make_unique<integration::TestServer>([&](server::Config& config) {
    config.backend = "cpu";
    config.tls.cert = authority.File("server.pem");
    config.tls.key = authority.File("server.key");
    config.tls.client_ca = authority.File("ca.pem");
    config.listen.operators = absl::StrCat(kOperator, ",localhost");
    config.listen.unix_path = "";
    config.limits.kv_cache_bytes = 2 * kPayload;
    config.limits.default_page_size = 64;
    config.limits.max_sequence_rows = 2 * kRows;
    config.limits.max_layers = kLayers;
    config.limits.max_heads = kHeads;
    config.limits.max_row_dim = kRank + kRope;
    config.limits.max_v_dim = kRank;
    config.limits.max_step_rows = kStepRows;
    config.limits.launch_rows = kStepRows;
    config.wire.message_bytes = int64_t{4} << 20;
    config.wire.inflight_bytes = int64_t{16} << 20;
    config.wire.staging_bytes = int64_t{64} << 20;
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

// Opens the sequences and appends their rows.
std::vector<client::Sequence> Fill(client::Client* client) {
  v1::ModelSpec model;
  model.set_model_id(kModel);
  v1::Geometry* const geometry = model.mutable_geometry();
  geometry->set_num_heads(kHeads);
  geometry->set_kv_lora_rank(kRank);
  geometry->set_rope_dim(kRope);
  model.set_layers(kLayers);
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  model.set_softmax_scale(0.1);
  Check(client->RegisterModel(model).status());
  std::vector<uint16_t> rows(size_t{kStepRows} * (kRank + kRope));
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<uint16_t>(0x3c00 + i * 2654435761u % 512);
  const auto session = client->OpenSession();
  Check(session.status());
  std::vector<client::Sequence> sequences;
  for (int i = 0; i < kSequences; ++i) {
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

int Main(int argc, char** argv) {
  const auto json = ReadJsonFlag(argc, argv, "hand_over_benchmark");
  if (!json) return 2;
  // As the server's program does.
  wire::KeepMessageMemory();
  wire::SkipChecksOfLockOrder();
  const integration::Authority authority;
  const auto from = Serve(authority), to = Serve(authority);
  const auto tenant = Connect(authority, *from, kTenant);
  std::vector<client::Sequence> sequences = Fill(tenant.get());
  // The kernel gives the second pool its memory here, not during the hand-over.
  Fill(Connect(authority, *to, kTenant).get());
  const auto drainer = Connect(authority, *from, kOperator);
  const double processor = ProcessorSeconds();
  const auto begin = SteadyClock::now();
  const auto drained =
      drainer->Drain(kDrainMs, false, absl::StrCat("localhost:", to->server().tcp_port()));
  const double seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count();
  const double used = ProcessorSeconds() - processor;
  Check(drained.status());
  int moved = 0;
  for (const v1::HandedOver& one : drained->handed_over()) {
    moved += one.outcome() == v1::HAND_OVER_OUTCOME_MOVED;
    if (one.outcome() != v1::HAND_OVER_OUTCOME_MOVED) {
      std::fprintf(stderr, "%s\n", one.message().c_str());
    }
  }
  for (client::Sequence& sequence : sequences) sequence.Detach();
  const double gb = static_cast<double>(kPayload) / 1e9;
  std::printf("%d of %d sequences, %.2f GB: %.2f s, %.2f GB/s, %.2f processor s a GB\n", moved,
              kSequences, gb, seconds, gb / seconds, used / gb);
  std::printf("SHA-256 on both sides %.2f processor s a GB, AES-256-GCM on both sides %.2f\n",
              2 * DigestSeconds(), 2 * CipherSeconds());
  if (!json->empty()) {
    std::ofstream(*json) << absl::StrFormat(
        "[{\"shape\": \"%d sequences of %d rows\", \"gb_per_s\": %.4f, "
        "\"processor_s_a_gb\": %.4f}]\n",
        kSequences, kRows, gb / seconds, used / gb);
  }
  return moved == kSequences ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
