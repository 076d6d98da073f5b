// The product's programs as an operator runs them: flags, exit codes, signals, mlactl.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/preflight.h"
#include "server/process/exit_guards.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using ::testing::HasSubstr;

// Returns true once the log has the text, within five seconds.
bool Says(const ServerProcess& process, const std::string& text) {
  for (int i = 0; i < 100; ++i) {
    if (process.Log().find(text) != std::string::npos) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

TEST(ProcessTest, ConfigCommands) {
  const Result good = Shell(absl::StrCat(kServer, " --check-config"));
  EXPECT_EQ(good.code, 0);
  EXPECT_THAT(good.output, HasSubstr("AMD GPUs: "));
  EXPECT_THAT(Shell(absl::StrCat(kServer, " --check-config --gpu-runtime-library=/none")).output,
              HasSubstr("AMD GPUs: none of gfx942, gfx950 can be driven: no GPU runtime: /none"));
  const Result bad = Shell(
      absl::StrCat(kServer, " --check-config --listen=0.0.0.0:1 --limits-max-heads=0 --nonsense"));
  EXPECT_EQ(bad.code, 1);
  EXPECT_THAT(bad.output, HasSubstr("server.listen: got \"0.0.0.0:1\""));
  EXPECT_THAT(bad.output, HasSubstr("limits.max_heads: got \"0\""));
  EXPECT_THAT(bad.output, HasSubstr("--nonsense: unknown flag"));
  const Result printed =
      Shell(absl::StrCat("MLA_KV_CACHE_BYTES=2GiB ", kServer, " --print-config --log-level=debug"));
  EXPECT_EQ(printed.code, 0);
  EXPECT_THAT(printed.output, ::testing::ContainsRegex("kv_cache.bytes += 2GiB +# env MLA_KV"));
  EXPECT_THAT(printed.output, ::testing::ContainsRegex("log.level += debug +# flag --log-level"));
  EXPECT_THAT(Shell(absl::StrCat(kServer, " --version")).output, HasSubstr("mla-server "));
  EXPECT_THAT(Shell(absl::StrCat(kServer, " --help")).output, HasSubstr("--kv-cache-bytes"));
}

// What a full disk has cut off must not look whole. Faults of the configuration matter more.
TEST(ProcessTest, LostOutputHasAnExitCodeOfItsOwn) {
  for (const char* flag : {" --print-config", " --check-config", " --help"}) {
    const Result lost = Shell(absl::StrCat("(", kServer, flag, " >/dev/full)"));
    EXPECT_EQ(lost.code, server::kExitOutputLost) << flag;
    EXPECT_THAT(lost.output, HasSubstr("standard output: ")) << flag;
  }
  const Result bad =
      Shell(absl::StrCat("(", kServer, " --check-config --backend=abacus >/dev/full)"));
  EXPECT_EQ(bad.code, server::kExitBadConfig);
  EXPECT_THAT(bad.output, HasSubstr("backend.name: "));
}

// --check-config finds conditions that would stop a start on this machine, or fail once clients
// connect.
TEST(ProcessTest, CheckConfigFindsWhatWouldStopTheStart) {
  const TempFolder folder;
  ASSERT_EQ(Shell("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout " +
                  folder.File("key") + " -out " + folder.File("cert") + " -subj /CN=x")
                .code,
            0);
  const std::string tls =
      absl::StrCat(" --tls-cert=", folder.File("cert"), " --tls-key=", folder.File("key"),
                   " --tls-client-ca=", folder.File("cert"));
  const std::string path = folder.path();
  const struct {
    std::string flags;
    std::string fault;
  } kCases[] = {
      {" --backend=abacus", "backend.name: "},
      {tls + " --tls-cert=/nonexistent.pem", "tls.cert: /nonexistent.pem: cannot be read"},
      {tls + " --tls-key=" + folder.File("cert"), "holds no unencrypted PEM private key"},
      {tls + " --tls-client-ca=" + path, "tls.client_ca: " + path + ": cannot be read"},
      {tls + " --tls-client-crl=" + folder.File("cert"), "holds no PEM revocation list"},
      {" --unix-path=/nonexistent/a.sock", "server.unix_path: /nonexistent/a.sock: its folder"},
      {" --unix-path=" + folder.File("cert"), "is a file and not a socket"},
      {" --unix-path=" + path, "server.unix_path: " + path + ": is a folder"},
      {" --shm-path=/nonexistent/a.shm", "shm.path: /nonexistent/a.shm: its folder"},
      {" --server-socket-group=no-such-group", "server.socket_group: got \"no-such-group\""},
      {" --kv-cache-bytes=900GiB", "the configured buffers need"},
      {" --listen=127.0.0.1:7000 --ops-listen=127.0.0.1:7000", "ops.listen: got"},
      {" --listen=127.0.0.1:7000 --ops-listen=0.0.0.0:7000", "ops.listen: got"},
      {" --config=" + path, path + ": cannot be read"},
      {" --shm-tenant-regions=65", "shm.tenant_regions: got 65, must be at most shm.regions_max"},
  };
  const std::string check = absl::StrCat(
      kServer, " --backend=reference --unix-path=", folder.File("mla.sock"), " --check-config");
  const Result good = Shell(check + tls);
  EXPECT_EQ(good.code, 0) << good.output;
  EXPECT_EQ(good.output, "");
  for (const auto& [flags, fault] : kCases) {
    const Result bad = Shell(check + flags);
    EXPECT_EQ(bad.code, 1) << flags << "\n" << bad.output;
    EXPECT_THAT(bad.output, HasSubstr(fault)) << flags;
  }
  // No socket was created.
  EXPECT_NE(Shell("test -e " + folder.File("mla.sock")).code, 0);
}

// By default a server has room for the weights of the models that it is made for.
TEST(ProcessTest, DefaultWeightsHoldDeepSeekV3) {
  constexpr int64_t kLayer = int64_t{128} * 512 * (128 + 128) * 2, kGiB = int64_t{1} << 30;
  EXPECT_GE(server::DefaultWeightsBytes(16 * kGiB), 61 * kLayer);
  EXPECT_EQ(server::DefaultWeightsBytes(4 * kGiB), kGiB / 2);  // most of it is for other uses
  EXPECT_EQ(server::DefaultWeightsBytes(1024 * kGiB), 2 * kGiB);
  ServerProcess process({"--limits-weights-bytes=-1"});
  ASSERT_EQ(process.Health(), 0) << process.Log();
  const auto info = nlohmann::json::parse(Shell(process.Mlactl("info --json")).output);
  const int64_t chosen = std::stoll(info["limits"]["weights_bytes"].get<std::string>());
  EXPECT_GT(chosen, 0);
  EXPECT_LE(chosen, 2 * kGiB);
  EXPECT_THAT(process.Log(), HasSubstr(absl::StrCat("weights_bytes=", chosen)));
}

// Workers of the group, under users of their own, reach both sockets; other users reach neither.
TEST(ProcessTest, TheSocketGroupMayConnect) {
  constexpr int kGroup = 61234, kUser = 61235;
  const std::string group = geteuid() == 0 ? std::to_string(kGroup) : std::to_string(getegid());
  ServerProcess process({"--server-socket-group=" + group});
  ASSERT_EQ(process.Health(), 0) << process.Log();
  for (const char* name : {"mla.sock", "mla.sock.shm"}) {
    EXPECT_EQ(Shell("stat -c '%a %g' " + process.File(name)).output, "660 " + group + "\n");
  }
  if (geteuid() != 0) GTEST_SKIP() << "only root can act for another user";
  ASSERT_EQ(Shell("chmod 755 " + process.File("")).code, 0);
  const auto connect = [&](const std::string& groups, const char* kind, const char* name) {
    return Shell(absl::StrCat(
        "setpriv --reuid=", kUser, " --regid=", kUser, " ", groups, " /usr/bin/python3 -c \"",
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_", kind, "); s.connect('",
        process.File(name), "'); s.settimeout(1)\ntry: print(s.recv(1))\n",
        "except TimeoutError: print('open')\""));
  };
  const std::string member = absl::StrCat("--groups=", kGroup);
  EXPECT_EQ(connect(member, "SEQPACKET", "mla.sock.shm").output, "open\n");
  EXPECT_EQ(connect(member, "STREAM", "mla.sock").code, 0);
  EXPECT_THAT(connect("--clear-groups", "SEQPACKET", "mla.sock.shm").output,
              HasSubstr("PermissionError"));
  EXPECT_THAT(connect("--clear-groups", "STREAM", "mla.sock").output, HasSubstr("PermissionError"));
}

TEST(ProcessTest, TooMuchMemoryStopsTheStart) {
  const Result refused =
      Shell(absl::StrCat(kServer, " --kv-cache-bytes=1TiB --listen=127.0.0.1:0 --ops-listen="));
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.output, HasSubstr("RESOURCE_EXHAUSTED"));
  EXPECT_THAT(refused.output, HasSubstr("kv_cache.bytes"));
  const Result unknown = Shell(absl::StrCat(kServer, " --backend=abacus --listen=127.0.0.1:0"));
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.output, HasSubstr("reference"));
}

TEST(ProcessTest, StartsDeterministicWithDefaultLimits) {
  ServerProcess process({"--backend=cpu", "--deterministic"});
  EXPECT_EQ(process.Health(), 0) << process.Log();
}

TEST(ProcessTest, WarnsOfAQuotaThatQueriesInPlaceWouldFill) {
  for (const bool small : {false, true}) {
    ServerProcess process({"--backend=cpu", "--wire-inflight-bytes=32MiB",
                           "--wire-staging-bytes=32MiB",
                           small ? "--wire-quota-bytes=63MiB" : "--wire-quota-bytes=64MiB"});
    ASSERT_EQ(process.Health(), 0) << process.Log();
    const std::string log = process.Log();
    EXPECT_EQ(log.find("quota_small") != std::string::npos, small) << log;
  }
}

TEST(ProcessTest, SaysOnceWhatProductsRowsOf8BitsGet) {
  ServerProcess process({"--backend=cpu"});
  ASSERT_EQ(process.Health(), 0) << process.Log();
  const std::string log = process.Log();
  const size_t at = log.find("fp8_compute");
  ASSERT_NE(at, std::string::npos) << log;
  EXPECT_THAT(log.substr(at), HasSubstr("bf16 products: this backend multiplies no 8-bit floats"));
  EXPECT_EQ(log.find("fp8_compute", at + 1), std::string::npos) << log;
}

TEST(ProcessTest, TermDrainsAndEndsWithZero) {
  ServerProcess process({"--log-format=json"});
  ASSERT_EQ(process.Health(), 0) << process.Log();
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
  std::istringstream lines(process.Log());
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << line;
    EXPECT_TRUE(json.contains("event") && json.contains("level") && json.contains("time")) << line;
  }
  EXPECT_GT(count, 4);
}

TEST(ProcessTest, AHangUpEndsNothing) {
  ServerProcess process({});
  process.Signal(SIGHUP);
  EXPECT_TRUE(Says(process, "info config_unchanged")) << process.Log();
  EXPECT_EQ(process.Health(), 0);
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
}

TEST(ProcessTest, AbortedStepsShowInTheExitCode) {
  ServerProcess process({"--server-drain-deadline-ms=200", "--limits-step-lease-ms=60000"});
  auto client = client::Client::Connect(process.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  Worker worker(client->get(), {}, "m", 1);
  Track track = *worker.Open();
  auto step = worker.session().Begin("m", {{&track.sequence, 1}});
  ASSERT_TRUE(step.ok()) << step.status();
  process.Signal(SIGINT);
  EXPECT_EQ(process.Wait(), 3);
  EXPECT_THAT(process.Log(), HasSubstr("waiting for 1 open steps"));
}

// The operator's drain has a later deadline; the signal's deadline counts, and the signal is the
// cause.
TEST(ProcessTest, TermEndsALongerDrain) {
  ServerProcess process({"--server-drain-deadline-ms=200", "--limits-step-lease-ms=60000"});
  auto client = client::Client::Connect(process.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  Worker worker(client->get(), {}, "m", 1);
  Track track = *worker.Open();
  auto step = worker.session().Begin("m", {{&track.sequence, 1}});
  ASSERT_TRUE(step.ok()) << step.status();
  BackgroundCommand drain(process.Mlactl("drain --deadline-ms=60000"));
  while (process.Health() != 4) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 3);
  EXPECT_THAT(process.Log(), HasSubstr("1 steps aborted"));
  EXPECT_THAT(process.Log(), ::testing::Not(HasSubstr("stop_hangs")));
  EXPECT_EQ(drain.Finish().code, 4);
}

TEST(ProcessTest, Mlactl) {
  ServerProcess process({});
  auto client = client::Client::Connect(process.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  Worker worker(client->get(), {}, "m", 1);
  Track track = *worker.Open();
  const std::string shown = Shell(process.Mlactl("info")).output;
  for (const char* part : {"backend reference", "wire_dtypes              bf16, f32\n",
                           "kv_dtypes                bf16\n",
                           "kv_formats               bf16, fp8_tensor, fp8_row, fp8_page\n",
                           "fp8_compute              bf16 products: this backend multiplies no ",
                           "profiles                 ABSORBED, ",
                           "capabilities             fork, truncate, ", "  weight_chunk_bytes "}) {
    EXPECT_THAT(shown, HasSubstr(part));
  }
  const auto info = nlohmann::json::parse(Shell(process.Mlactl("info --json")).output);
  EXPECT_EQ(info["api_version"], "mla.v1");
  EXPECT_EQ(info["limits"]["kv_cache_bytes"], std::to_string(8 << 20));
  const auto stats = nlohmann::json::parse(Shell(process.Mlactl("status --json")).output);
  EXPECT_EQ(stats["sequences"], 1);
  EXPECT_THAT(Shell(process.Mlactl("status")).output, HasSubstr("kv_bytes_used"));
  const auto list = nlohmann::json::parse(Shell(process.Mlactl("sequences --json")).output);
  EXPECT_EQ(list["sequences"].size(), 1u);
  EXPECT_THAT(Shell(process.Mlactl("sequences")).output, HasSubstr("cpp-"));
  EXPECT_THAT(Shell(process.Mlactl("sequences --tenant=other")).output,
              ::testing::Not(HasSubstr("cpp-")));
  EXPECT_EQ(nlohmann::json::parse(Shell(process.Mlactl("health --json")).output)["status"],
            "SERVING");

  EXPECT_EQ(Shell(process.Mlactl("dance")).code, 1);
  EXPECT_EQ(Shell(process.Mlactl("info --wrong=1")).code, 1);
  EXPECT_EQ(Shell(absl::StrCat(kMlactl, " --target=unix:/nonexistent info")).code, 2);
  EXPECT_EQ(Shell(process.Mlactl("info --tenant='a b'")).code, 3);

  const Result drained = Shell(process.Mlactl("drain --deadline-ms=100 --json"));
  EXPECT_EQ(drained.code, 0) << drained.output;
  EXPECT_EQ(nlohmann::json::parse(drained.output)["drained"], true);
  EXPECT_EQ(process.Health(), 4);
  EXPECT_EQ(Shell(process.Mlactl("drain --exit")).code, 0);
  EXPECT_EQ(process.Wait(), 0);
}

// From the server's counters, read by another process: in this process gRPC would work for the
// session, too.
int64_t CopiedBytes(const ServerProcess& process) {
  const std::string stats = Shell(process.Mlactl("status --json")).output;
  const auto document = nlohmann::json::parse(stats, nullptr, false);
  if (document.is_discarded() || !document.contains("copied_bytes")) return 0;
  const auto& value = document["copied_bytes"];
  return value.is_string() ? std::stoll(value.get<std::string>()) : value.get<int64_t>();
}

// Requests too large for a socket's buffer arrive although their sender does not yet wait for
// replies.
TEST(ProcessTest, RequestsTravelBeforeAnybodyWaits) {
  ServerProcess process({});
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kInline;
  options.renew_leases = false;
  auto client = client::Client::Connect(process.target(), options);
  ASSERT_TRUE(client.ok()) << client.status();
  Worker worker(client->get(), {}, "m", 1);
  Track track = *worker.Open();
  constexpr uint32_t kRows = 1024;
  const auto heads = static_cast<size_t>(worker.dims().heads);
  const auto kv = RandomBf16(kRows * static_cast<size_t>(worker.dims().row()), &worker.random());
  const auto q = RandomBf16(kv.size() * heads, &worker.random());
  std::vector<uint16_t> o(2 * kRows * heads * static_cast<size_t>(worker.dims().lora));
  auto step = worker.session().Begin("m", {{&track.sequence, kRows}});
  ASSERT_TRUE(step.ok()) << step.status();
  std::vector<client::PendingAttend> pending;
  for (uint32_t layer = 0; layer < 2; ++layer) {
    client::AttendCall call;
    call.layer = layer;
    call.row_count = kRows;
    call.num_heads = static_cast<uint32_t>(heads);
    call.profile = v1::PROFILE_ABSORBED;
    call.kv = kv.data();
    call.q = q.data();
    call.o = o.data() + layer * o.size() / 2;
    pending.push_back((*step)->AttendAsync(call));
  }
  const auto all = static_cast<int64_t>(2 * 2 * (kv.size() + q.size()));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (CopiedBytes(process) < all && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(CopiedBytes(process), all);
  for (client::PendingAttend& one : pending) EXPECT_TRUE(one.Wait().ok());
  EXPECT_TRUE((*step)->End().ok());
}

}  // namespace
}  // namespace mla::integration
