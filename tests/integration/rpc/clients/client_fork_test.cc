// Clients of the C++ and the C library in a process that forks. The child's copies refuse every
// call, and nothing that the child does reaches the server or disturbs the parent.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c/mla_client.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "tests/integration/processes.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using Transport = client::ClientOptions::Transport;

constexpr unsigned kChildSeconds = 60;  // a child that hangs ends by a signal
constexpr uint64_t kBlockBytes = 4096;
constexpr std::byte kOfParent{0x5a}, kOfChild{0xff};

// Runs `work` in a forked child. Returns what it returns there, and words about a child that did
// not end by itself.
std::string InChild(const std::function<std::string()>& work) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    alarm(kChildSeconds);
    const std::string said = work();
    const bool written =
        write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  std::string said;
  std::array<char, 4096> buffer;
  for (ssize_t n; (n = read(ends[0], buffer.data(), buffer.size())) > 0;) {
    said.append(buffer.data(), static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0) absl::StrAppend(&said, "\nthe child ended with wait status ", status);
  return said;
}

// Collects the calls of a child that did not say that the client belongs to another process.
class Refusals {
 public:
  void Add(const char* call, const absl::Status& status) {
    const auto detail = client::DetailOf(status);
    if (status.code() == absl::StatusCode::kFailedPrecondition && detail.has_value() &&
        detail->reason() == "forked") {
      return;
    }
    absl::StrAppend(&others_, call, ": ", status.ToString(), "\n");
  }
  void Add(const char* call, mla_code code, mla_error* error) {
    if (code != MLA_FAILED_PRECONDITION || std::string(mla_error_reason(error)) != "forked") {
      absl::StrAppend(&others_, call, ": ", static_cast<int>(code), " ", mla_error_message(error),
                      "\n");
    }
    mla_error_free(error);
  }
  void Expect(const char* what, bool right) {
    if (!right) absl::StrAppend(&others_, what, "\n");
  }
  const std::string& others() const { return others_; }

 private:
  std::string others_;
};

struct Way {
  const char* name;
  Transport cpp;
  mla_transport c;
};

class ClientForkTest : public ::testing::TestWithParam<Way> {};

// A parent's client, with a sequence, an open step and a request under way.
struct Parent {
  std::unique_ptr<client::Client> client;
  std::unique_ptr<Worker> worker;
  std::optional<Track> track;
  std::optional<client::Sequence> open;
  std::unique_ptr<client::Step> step;
  std::span<std::byte> block;
  std::vector<uint16_t> q, kv;
  std::vector<float> o;

  Parent(const std::string& target, Transport transport) {
    client::ClientOptions options;
    options.transport = transport;
    auto connected = client::Client::Connect(target, options);
    EXPECT_TRUE(connected.ok()) << connected.status();
    client = *std::move(connected);
    worker = std::make_unique<Worker>(client.get(), Dims(), "m", 1);
    track = *worker->Open();
    open = *client->OpenSequence("m");
    auto begun = worker->session().Begin("m", {{&*open, 2}});
    EXPECT_TRUE(begun.ok()) << begun.status();
    step = *std::move(begun);
    block = worker->session().Allocate(kBlockBytes);
    std::fill(block.begin(), block.end(), kOfParent);
    const Dims& dims = worker->dims();
    kv = RandomBf16(2 * static_cast<size_t>(dims.row()), &worker->random());
    q = RandomBf16(2 * static_cast<size_t>(dims.heads * dims.row()), &worker->random());
    o.assign(2 * static_cast<size_t>(dims.heads * dims.lora),
             std::numeric_limits<float>::quiet_NaN());
  }

  client::AttendCall Call(uint32_t layer) {
    client::AttendCall call;
    call.layer = layer;
    call.row_count = 2;
    call.num_heads = static_cast<uint32_t>(worker->dims().heads);
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = kv.data();
    call.q = q.data();
    call.o = o.data();
    return call;
  }

  // Returns true if the first row's outputs are its latent part: a row that sees itself alone is
  // its own average.
  bool FirstRowIsRight() const {
    const auto lora = static_cast<size_t>(worker->dims().lora);
    for (size_t i = 0; i < o.size() / 2; ++i) {
      if (!(std::abs(o[i] - FromBf16(kv[i % lora])) <= 1e-3f)) return false;
    }
    return true;
  }

  // Every call of a client, a sequence, a session and a step.
  void Try(const std::string& target, Refusals* refusals) {
    const auto of_client = [&](const char* name, const auto& call) { refusals->Add(name, call()); };
    of_client("GetServerInfo", [&] { return client->GetServerInfo().status(); });
    of_client("GetStats", [&] { return client->GetStats().status(); });
    of_client("IsServing", [&] { return client->IsServing().status(); });
    of_client("WatchStatus",
              [&] { return client->WatchStatus(0, [](const auto&) { return false; }); });
    of_client("GetQuota", [&] { return client->GetQuota().status(); });
    of_client("RegisterModel",
              [&] { return client->RegisterModel(SpecOf(worker->dims(), "other")).status(); });
    of_client("UploadWeights", [&] { return worker->Upload(); });
    of_client("ListModels", [&] { return client->ListModels().status(); });
    of_client("UnregisterModel", [&] { return client->UnregisterModel("m"); });
    of_client("OpenSequence", [&] { return client->OpenSequence("m").status(); });
    of_client("Attach", [&] { return client->Attach(track->sequence.id()).status(); });
    of_client("GetSequences", [&] { return client->GetSequences({}, true).status(); });
    of_client("ReleaseSequences",
              [&] { return client->ReleaseSequences({track->sequence.id()}).status(); });
    of_client("RenewLeases", [&] { return client->RenewLeases().status(); });
    of_client("ExportPages", [&] {
      return client->ExportPages({}, [](const auto&) { return absl::OkStatus(); });
    });
    of_client("ImportPages", [&] {
      return client
          ->ImportPages(
              {}, []() -> absl::StatusOr<std::optional<v1::PagesPart>> { return std::nullopt; })
          .status();
    });
    of_client("WatchEvents",
              [&] { return client->WatchEvents(0, [](const auto&) { return false; }); });
    of_client("Checkpoint", [&] { return client->Checkpoint({track->sequence.id()}).status(); });
    of_client("OpenSession", [&] { return client->OpenSession().status(); });
    client::Sequence& sequence = track->sequence;
    of_client("Fork", [&] { return sequence.Fork().status(); });
    of_client("Match", [&] { return sequence.Match({}).status(); });
    of_client("Truncate", [&] { return sequence.Truncate(0); });
    of_client("ReadTail", [&] { return sequence.ReadTail().status(); });
    of_client("Refresh", [&] { return sequence.Refresh(); });
    of_client("Begin", [&] { return worker->session().Begin("m", {{&sequence, 1}}).status(); });
    of_client("Attend", [&] { return step->Attend(Call(1)).status(); });
    of_client("AttendAsync", [&] { return step->AttendAsync(Call(1)).Wait().status(); });
    of_client("End", [&] { return step->End().status(); });
    of_client("Abort", [&] { return step->Abort(); });
    of_client("Connect", [&] { return client::Client::Connect(target, {}).status(); });
    refusals->Expect("Allocate gave memory", worker->session().Allocate(64).empty());
  }

  void Destroy() {
    step.reset();
    open.reset();
    track.reset();
    worker.reset();
    client.reset();
  }
};

TEST_P(ClientForkTest, CopiesOfTheCppLibraryRefuseAndEndNothing) {
  const ServerProcess server({});
  Parent parent(server.target(), GetParam().cpp);
  ASSERT_EQ(parent.worker->session().transport(), GetParam().name);
  ASSERT_EQ(parent.worker->Step({&*parent.track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  client::PendingAttend pending = parent.step->AttendAsync(parent.Call(0));
  for (int child = 0; child < 2; ++child) {
    EXPECT_EQ(InChild([&] {
                Refusals refusals;
                parent.Try(server.target(), &refusals);
                // A reply that came before the fork is the child's, too.
                const absl::Status waited = pending.Wait().status();
                if (!waited.ok()) refusals.Add("Wait", waited);
                refusals.Expect("an answer is wrong", !waited.ok() || parent.FirstRowIsRight());
                // What a child writes stays with it.
                std::fill(parent.block.begin(), parent.block.end(), kOfChild);
                parent.Destroy();
                return refusals.others();
              }),
              "");
    // Answers are compared with the dense model.
    ASSERT_EQ(parent.worker->Step({&*parent.track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  EXPECT_TRUE(pending.Wait().ok());
  EXPECT_TRUE(parent.FirstRowIsRight());
  EXPECT_TRUE(parent.step->Attend(parent.Call(1)).ok());
  const auto ended = parent.step->End();
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(parent.open->length(), 2u);
  for (const std::byte one : parent.block) EXPECT_EQ(one, kOfParent);
}

// The same of the C library.
struct CParent {
  mla_client* client = nullptr;
  mla_sequence* sequence = nullptr;
  mla_session* session = nullptr;
  mla_step* step = nullptr;
  mla_model model{};
  std::vector<uint16_t> q = std::vector<uint16_t>(2 * 40, 0x3f80);
  std::vector<uint16_t> kv = std::vector<uint16_t>(40, 0x3f80);
  std::vector<float> o = std::vector<float>(2 * 32);
  mla_attend call{};

  CParent(const std::string& target, mla_transport transport) {
    mla_connect_options options{};
    options.struct_size = sizeof(options);
    options.transport = transport;
    EXPECT_EQ(mla_connect(target.c_str(), &options, &client, nullptr), MLA_OK);
    model.struct_size = sizeof(model);
    model.model_id = "m";
    model.num_heads = 2;
    model.kv_lora_rank = 32;
    model.rope_dim = 8;
    model.nope_dim = 16;
    model.v_dim = 16;
    model.layers = 1;
    model.softmax_scale = 0.25;
    EXPECT_EQ(mla_register_model(client, &model, nullptr, nullptr), MLA_OK);
    EXPECT_EQ(mla_sequence_open(client, "m", nullptr, &sequence, nullptr), MLA_OK);
    EXPECT_EQ(mla_session_open(client, &session, nullptr), MLA_OK);
    const mla_step_rows rows = {sequence, 1};
    EXPECT_EQ(mla_step_begin(session, "m", &rows, 1, nullptr, &step, nullptr), MLA_OK);
    call.struct_size = sizeof(call);
    call.row_count = 1;
    call.num_heads = 2;
    call.profile = MLA_PROFILE_ABSORBED;
    call.o_dtype = MLA_DTYPE_F32;
    call.q = q.data();
    call.kv = kv.data();
    call.o = o.data();
  }

  void Try(const std::string& target, Refusals* refusals) {
    mla_error* error = nullptr;
    mla_sequence* other = nullptr;
    mla_session* session_of_child = nullptr;
    mla_step* step_of_child = nullptr;
    mla_client* client_of_child = nullptr;
    const mla_step_rows rows = {sequence, 1};
    const mla_weights head = {0, 0, 1, q.data(), q.data()};
    mla_prefix prefix{};
    prefix.struct_size = sizeof(prefix);
    // Each call is made before its error is looked at.
    const auto add = [&](const char* name, mla_code code) {
      refusals->Add(name, code, std::exchange(error, nullptr));
    };
    add("register", mla_register_model(client, &model, nullptr, &error));
    add("upload", mla_upload_weights(client, "m", &head, 1, nullptr, &error));
    add("unregister", mla_unregister_model(client, "m", &error));
    add("open", mla_sequence_open(client, "m", nullptr, &other, &error));
    add("fork", mla_sequence_fork(sequence, UINT64_MAX, &other, &error));
    add("match", mla_sequence_match(sequence, &prefix, 0, nullptr, &error));
    add("truncate", mla_sequence_truncate(sequence, 0, &error));
    add("refresh", mla_sequence_refresh(sequence, &error));
    add("session", mla_session_open(client, &session_of_child, &error));
    add("begin", mla_step_begin(session, "m", &rows, 1, nullptr, &step_of_child, &error));
    add("attend", mla_step_attend(step, &call, nullptr, &error));
    mla_pending* pending = nullptr;
    mla_code code = mla_step_attend_async(step, &call, &pending, &error);
    if (code == MLA_OK) code = mla_pending_wait(pending, nullptr, &error);
    add("attend_async", code);
    add("end", mla_step_end(step, nullptr, &error));
    add("abort", mla_step_abort(step, &error));
    add("connect", mla_connect(target.c_str(), nullptr, &client_of_child, &error));
    refusals->Expect("allocate gave memory", mla_session_allocate(session, 64) == nullptr);
  }

  void Free() {
    mla_step_free(step);
    mla_session_free(session);
    mla_sequence_free(sequence);
    mla_client_free(client);
  }
};

TEST_P(ClientForkTest, CopiesOfTheCLibraryRefuseAndEndNothing) {
  const ServerProcess server({});
  CParent parent(server.target(), GetParam().c);
  ASSERT_STREQ(mla_session_transport(parent.session), GetParam().name);
  EXPECT_EQ(InChild([&] {
              Refusals refusals;
              parent.Try(server.target(), &refusals);
              parent.Free();
              return refusals.others();
            }),
            "");
  mla_error* error = nullptr;
  ASSERT_EQ(mla_step_attend(parent.step, &parent.call, nullptr, &error), MLA_OK)
      << mla_error_message(error);
  for (const float value : parent.o) EXPECT_EQ(value, 1.0f);  // one row is its own average
  EXPECT_EQ(mla_step_end(parent.step, nullptr, &error), MLA_OK) << mla_error_message(error);
  EXPECT_EQ(mla_sequence_length(parent.sequence), 1u);
  parent.Free();
}

INSTANTIATE_TEST_SUITE_P(Ways, ClientForkTest,
                         ::testing::Values(Way{"inline", Transport::kInline, MLA_TRANSPORT_INLINE},
                                           Way{"shm", Transport::kShm, MLA_TRANSPORT_SHM},
                                           Way{"ring", Transport::kRing, MLA_TRANSPORT_RING}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace mla::integration
