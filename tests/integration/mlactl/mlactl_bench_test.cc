// mlactl bench against a real server: its report, its leftovers, and its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <future>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/mlactl/bench/bench_worker.h"
#include "nlohmann/json.hpp"
#include "tests/integration/processes.h"

namespace mla::integration {
namespace {

using nlohmann::json;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// A model small enough for the test servers.
constexpr char kSmall[] =
    " --heads=4 --lora=32 --rope=8 --nope=16 --v=16 --layers=2 --page-size=4 --context=8";

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class MlactlBenchTest : public testing::Test {
 protected:
  Result Bench(const std::string& options) const {
    return Shell(server_.Mlactl(absl::StrCat("bench --quiet", kSmall, " ", options)));
  }

  // Runs the benchmark, which must succeed, and returns the parsed document.
  json Measure(const std::string& options) const {
    const Result result = Bench(options + " --output=json");
    EXPECT_EQ(result.code, 0) << result.output;
    const json document = json::parse(result.output, nullptr, false);
    EXPECT_FALSE(document.is_discarded()) << result.output;
    return document;
  }

  uint64_t Answered() const {
    const json stats = json::parse(Shell(server_.Mlactl("status --json")).output, nullptr, false);
    return stats.is_discarded() ? 0 : std::stoull(stats["requests_total"].get<std::string>());
  }

  // Returns once enough requests were answered that the load is past its preparations, whose time
  // depends on the machine.
  void AwaitLoad(uint64_t before) const {
    const auto timeout = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (Answered() < before + 100 && std::chrono::steady_clock::now() < timeout) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  void ExpectNothingLeft() const {
    const json stats = json::parse(Shell(server_.Mlactl("status --json")).output);
    EXPECT_EQ(stats["sequences"], 0);
    EXPECT_EQ(stats["models"], 0);
    EXPECT_EQ(stats["open_steps"], 0);
    EXPECT_EQ(stats["page_groups_used"], "0");
  }

  ServerProcess server_{{}};
};

void ExpectKeys(const json& object, const std::set<std::string>& keys) {
  std::set<std::string> found;
  for (const auto& [key, value] : object.items()) found.insert(key);
  EXPECT_EQ(found, keys);
}

TEST_F(MlactlBenchTest, ReportsEveryTransportInJsonTextAndPicture) {
  const std::string json_file = server_.File("bench.json"), svg_file = server_.File("bench.svg");
  const Result result = Bench(absl::StrCat("--transport=all --duration=0.4 --warmup=0.1 --json ",
                                           json_file, " --plot=", svg_file));
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("shm EXPANDED batch 1 rows 1 context 8.*over shm"));
  EXPECT_THAT(result.output, HasSubstr("steps/s"));
  EXPECT_THAT(result.output, ContainsRegex("    kernel +[0-9]"));

  const json document = json::parse(ReadAll(json_file));
  ExpectKeys(document, {"format", "version", "server", "client_cores", "model", "load", "runs"});
  EXPECT_EQ(document["format"], "mlactl-bench");
  EXPECT_EQ(document["version"], 1);
  EXPECT_EQ(document["server"]["backend"], "reference");
  EXPECT_EQ(document["model"]["layers"], 2);
  ASSERT_EQ(document["runs"].size(), 4u);
  const char* const transports[] = {"inline", "shm", "ring", "ring"};
  for (size_t i = 0; i < 4; ++i) {
    const json& run = document["runs"][i];
    ExpectKeys(run, {"name", "asked", "transport", "seconds", "interrupted", "steps", "attends",
                     "unfinished_steps", "failures", "steps_per_s", "attends_per_s", "tokens_per_s",
                     "gigabytes_per_s", "copied_bytes_per_attend", "launch", "latency_us",
                     "step_curve", "series"});
    ExpectKeys(run["latency_us"], {"step", "start_delay", "begin", "attend", "network", "queue",
                                   "plan", "kernel", "write", "end"});
    ExpectKeys(run["latency_us"]["step"],
               {"count", "mean", "min", "p50", "p90", "p95", "p99", "p99.9", "max"});
    EXPECT_EQ(run["transport"], transports[i]);
    EXPECT_EQ(run["seconds"], 0.4);
    EXPECT_GT(run["steps"], 0);
    EXPECT_NEAR(run["attends"].get<double>(), 2 * run["steps"].get<double>(), 4);
    EXPECT_EQ(run["latency_us"]["step"]["count"], run["steps"]);
    EXPECT_GT(run["latency_us"]["step"]["p50"], run["latency_us"]["attend"]["p50"]);
    EXPECT_GE(run["latency_us"]["step"]["p99"], run["latency_us"]["step"]["p50"]);
    EXPECT_EQ(run["step_curve"].back()[0], 1.0);
    EXPECT_FALSE(run["series"].empty());
    EXPECT_EQ(run["copied_bytes_per_attend"].get<double>() > 0, i == 0);
  }
  const std::string svg = ReadAll(svg_file);
  EXPECT_THAT(svg, HasSubstr("<svg "));
  EXPECT_THAT(svg, HasSubstr("ring-spin EXPANDED"));
  ExpectNothingLeft();
}

TEST_F(MlactlBenchTest, TensorsOf8BitsTravelAsSuch) {
  const json document = Measure(
      "--profile=all --transport=inline,ring-spin --rows=2 --steps=4 --warmup=0 --grow --touch "
      "--q-dtype=e4m3 --kv-row-dtype=e4m3");
  ASSERT_EQ(document["runs"].size(), 6u);
  EXPECT_EQ(document["load"]["q_dtype"], "DTYPE_F8_E4M3");
  for (const json& run : document["runs"]) EXPECT_EQ(run["steps"], 4) << run["name"];
}

TEST_F(MlactlBenchTest, SparseModelsBringTheirListsAndEntries) {
  const std::string load = " --transport=inline,shm,ring-spin --rows=3 --steps=4 --warmup=0 ";
  const json listed = Measure("--attention=v32 --profile=absorbed --top-k=3" + load);
  EXPECT_EQ(listed["model"]["attention"], "ATTENTION_KIND_SPARSE_V32");
  // 8 rows of context make 4 entries, which a list holds completely or not. Some steps complete two
  // entries.
  for (const char* options : {"--top-k=2", "--top-k=16", "--top-k=2 --grow --batch=2"}) {
    const json windowed = Measure(absl::StrCat(
        "--attention=v4 --profile=absorbed,append-only --window=4 --ratio=2 ", options, load));
    EXPECT_EQ(windowed["model"]["attention"], "ATTENTION_KIND_SPARSE_V4");
    ASSERT_EQ(windowed["runs"].size(), 6u);
    for (const json& run : windowed["runs"]) EXPECT_EQ(run["steps"], 4) << run["name"];
  }
  EXPECT_EQ(Bench("--attention=v4 --profile=expanded --steps=1").code, 1);
  ExpectNothingLeft();
}

TEST_F(MlactlBenchTest, EveryShapeOfTheListsIsARun) {
  const json document = Measure(
      "--profile=all --batch=1,3 --rows=2 --concurrency=2 --steps=6 --warmup=0 --grow --lse "
      "--touch --output-dtype=f32");
  ASSERT_EQ(document["runs"].size(), 6u);
  std::set<std::string> names;
  for (const json& run : document["runs"]) {
    names.insert(run["name"]);
    EXPECT_EQ(run["steps"], 6);
    const double tokens = run["asked"]["batch"].get<double>() * 2;
    EXPECT_NEAR(run["tokens_per_s"].get<double>(), tokens * run["steps_per_s"].get<double>(), 1e-6);
    // kv, q, o and lse of one attend, computed from the shape alone.
    const std::string profile = run["asked"]["profile"];
    double bytes = 40 * 2;
    if (profile == "ABSORBED") bytes += 4 * (40 * 2 + 32 * 4 + 4);
    if (profile == "EXPANDED") bytes += 4 * (24 * 2 + 16 * 4 + 4);
    EXPECT_NEAR(run["gigabytes_per_s"].get<double>() * 1e9 / run["attends_per_s"].get<double>(),
                tokens * bytes, 1e-3);
  }
  EXPECT_EQ(names.size(), 6u);
  ExpectNothingLeft();
}

// Heads of 32 rows of W_UQ and 64 columns of W_O, which are parts of blocks of 128 x 128.
constexpr char kProjected[] =
    "bench --quiet --heads=5 --lora=32 --rope=8 --nope=24 --v=64 --layers=2 --page-size=4 "
    "--context=8 --profile=projected --q-lora=140 --hidden=150 --output=json --warmup=0 ";

TEST_F(MlactlBenchTest, LowRankQueriesBecomeHiddenStates) {
  for (const std::string dtype : {"bf16", "e4m3"}) {
    const Result result = Shell(server_.Mlactl(
        absl::StrCat(kProjected, "--projected-dtype=", dtype,
                     " --transport=inline,ring-spin --batch=1,3 --rows=2 --steps=4 --grow")));
    ASSERT_EQ(result.code, 0) << result.output;
    const json document = json::parse(result.output);
    EXPECT_EQ(document["model"]["projected_dtype"],
              dtype == "e4m3" ? "DTYPE_F8_E4M3" : "DTYPE_BF16");
    EXPECT_EQ(document["model"]["q_lora_rank"], 140);
    ASSERT_EQ(document["runs"].size(), 4u);
    for (const json& run : document["runs"]) {
      EXPECT_EQ(run["steps"], 4) << run["name"];
      EXPECT_EQ(run["asked"]["profile"], "PROJECTED");
      // Queries, row and hidden states of a token.
      const double tokens = run["asked"]["batch"].get<double>() * 2;
      EXPECT_NEAR(run["gigabytes_per_s"].get<double>() * 1e9 / run["attends_per_s"].get<double>(),
                  tokens * 2 * (140 + 40 + 150), 1e-3);
    }
  }
  const json appended = Measure("--profile=projected,append-only --steps=2 --warmup=0");
  EXPECT_EQ(appended["runs"].size(), 2u);
  EXPECT_EQ(appended["model"]["hidden_size"], 2048);
  ExpectNothingLeft();
}

TEST_F(MlactlBenchTest, ProjectedGoesWithoutWhatItDoesNotHave) {
  for (const char* options :
       {"--profile=projected,expanded", "--profile=all,projected",
        "--profile=projected --q-dtype=e4m3", "--profile=projected --lse",
        "--profile=projected --attention=v32", "--profile=projected --scene=agents",
        "--projected-dtype=bf16", "--q-lora=8"}) {
    const Result result = Bench(absl::StrCat(options, " --steps=1"));
    EXPECT_EQ(result.code, 1) << options;
  }
  EXPECT_THAT(Bench("--hidden=8 --steps=1").output, HasSubstr("go with --profile projected"));
  // A figure of weights in another type than the one asked for would mislead.
  const ServerProcess cpu({"--backend=cpu"});
  const Result held =
      Shell(cpu.Mlactl(absl::StrCat(kProjected, "--projected-dtype=e4m3 --steps=1")));
  EXPECT_EQ(held.code, 3) << held.output;
  EXPECT_THAT(held.output, HasSubstr("the server holds W_UQ and W_O as DTYPE_BF16"));
  EXPECT_EQ(Shell(cpu.Mlactl(absl::StrCat(kProjected, "--steps=1"))).code, 0);
  const json left = json::parse(Shell(cpu.Mlactl("status --json")).output);
  EXPECT_EQ(left["models"], 0);
  ExpectNothingLeft();
}

TEST_F(MlactlBenchTest, SharedContextsAreForks) {
  // 16 sequences of 64 rows take 16 x 16 page groups separately, and 16 + 16 with a shared context.
  const json document =
      Measure("--batch=16 --context=64 --shared-context --steps=2 --warmup=0 --profile=absorbed");
  EXPECT_EQ(document["runs"][0]["steps"], 2);
  EXPECT_EQ(document["load"]["shared_context"], true);
  ExpectNothingLeft();
}

// The server stops for a second. In the open loop every step that arrives in that time waits; in
// the closed loop only one step does.
TEST_F(MlactlBenchTest, OpenLoopSeesAStallOfTheServer) {
  const auto measure = [this](const std::string& loop) {
    const uint64_t before = Answered();
    auto document = std::async(std::launch::async, [&] {
      return Measure(absl::StrCat("--duration=4 --warmup=0 ", loop));
    });
    AwaitLoad(before);
    server_.Signal(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(1000));
    server_.Signal(SIGCONT);
    return document.get()["runs"][0]["latency_us"];
  };
  const json closed = measure("--concurrency=1");
  EXPECT_GT(closed["step"]["max"], 5e5);
  EXPECT_LT(closed["step"]["p99"], 3e5);
  const json open = measure("--rate=100 --arrivals=uniform --concurrency=8");
  EXPECT_GE(open["step"]["count"], 390);
  EXPECT_GT(open["step"]["p90"], 2e5);
  EXPECT_GT(open["start_delay"]["p90"], 1e5);
}

// A bound that no machine misses holds at every rate, and one that none keeps at no rate.
TEST_F(MlactlBenchTest, FindsTheHighestRateWithinABound) {
  const std::string short_runs = " --duration=0.2 --warmup=0 --concurrency=4";
  const json loose = Measure("--within-p99-ms=1e7" + short_runs);
  ASSERT_EQ(loose["rates"].size(), 1u);
  EXPECT_EQ(loose["rates"][0]["asked"]["loop"], "closed");
  EXPECT_EQ(loose["runs"][0]["asked"]["loop"], "closed");
  EXPECT_EQ(loose["rates"][0]["rate_per_s"], loose["runs"].back()["asked"]["rate_per_s"]);
  EXPECT_EQ(loose["load"]["within_p99_ms"], 1e7);
  const json tight = Measure("--within-p99-ms=0.001" + short_runs);
  EXPECT_TRUE(tight["rates"][0]["rate_per_s"].is_null());
  EXPECT_THAT(Bench("--within-p99-ms=0.001" + short_runs).output,
              HasSubstr("p99 of a step within 0.001 ms up to no rate that was tried"));
  EXPECT_EQ(Bench("--within-p99-ms=1 --rate=5").code, 1);
  ExpectNothingLeft();
}

TEST_F(MlactlBenchTest, AnInterruptPrintsWhatThereIsAndLeavesNothing) {
  const std::string file = server_.File("cut.json");
  const std::string bench =
      absl::StrCat("bench --quiet", kSmall, " --concurrency=3 --duration=60 --warmup=0.1 --json=");
  const uint64_t before = Answered();
  BackgroundCommand command(server_.Mlactl(bench + file));
  AwaitLoad(before);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  command.Signal(SIGINT);
  const Result result = command.Finish();
  EXPECT_EQ(result.code, 130);
  EXPECT_THAT(result.output, HasSubstr("interrupted; what it had created is gone from the server"));
  EXPECT_THAT(result.output, HasSubstr("steps/s"));
  const json document = json::parse(ReadAll(file));
  EXPECT_EQ(document["runs"][0]["interrupted"], true);
  EXPECT_GT(document["runs"][0]["steps"], 0);
  EXPECT_LT(document["runs"][0]["seconds"], 30);
  ExpectNothingLeft();
}

TEST_F(MlactlBenchTest, ErrorsSayWhatIsWrong) {
  const Result shapes = Bench("--batch=0 --rate=x --preset=tiny --transport=pigeon");
  EXPECT_EQ(shapes.code, 1);
  EXPECT_THAT(shapes.output, HasSubstr("--batch: got \"0\", must be 1..1048576"));
  EXPECT_THAT(shapes.output, HasSubstr("--rate: got \"x\""));
  EXPECT_THAT(shapes.output, HasSubstr("--preset: got \"tiny\", must be one of small"));
  EXPECT_THAT(shapes.output, HasSubstr("--transport: got \"pigeon\""));
  EXPECT_EQ(Bench("--steps=3 --duration=3").code, 1);
  EXPECT_EQ(Bench("--arrivals=uniform").code, 1);
  EXPECT_EQ(Bench("--batch=1,2,3,4,5,6 --rows=1,2,3,4,5,6 --context=1,2,3").code, 1);

  const Result pages = Bench("--context=100000 --profile=absorbed --duration=0.2");
  EXPECT_EQ(pages.code, 3);
  EXPECT_THAT(pages.output, HasSubstr("reason "));
  // Before any load runs.
  const Result place = Bench("--duration=1000 --plot=/nonexistent/x.svg");
  EXPECT_EQ(place.code, 3);
  EXPECT_THAT(place.output, HasSubstr("/nonexistent/x.svg: there is no folder /nonexistent"));
  const Result gone = Shell(absl::StrCat(kMlactl, " --target=unix:/nonexistent bench"));
  EXPECT_EQ(gone.code, 2);
  ExpectNothingLeft();
}

// Two uploads, of which the first is not taken for the whole.
TEST_F(MlactlBenchTest, ProgressOfProjectedWeightsGoesUpOnce) {
  auto client = client::Client::Connect(server_.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  mlactl::BenchOptions options;
  options.points.resize(1);
  options.points[0].profile = v1::PROFILE_PROJECTED;
  v1::ModelSpec& spec = options.model;
  spec.mutable_geometry()->set_num_heads(4);
  spec.mutable_geometry()->set_kv_lora_rank(32);
  spec.mutable_geometry()->set_rope_dim(8);
  spec.mutable_geometry()->set_nope_dim(24);
  spec.mutable_geometry()->set_v_dim(64);
  spec.set_layers(2);
  spec.set_page_size(4);
  spec.set_softmax_scale(0.2);
  spec.set_rope_owner(v1::ROPE_OWNER_SERVER);
  spec.set_rope_layout(v1::ROPE_LAYOUT_INTERLEAVED);
  spec.set_q_lora_rank(140);
  spec.set_hidden_size(150);
  spec.set_projected_dtype(v1::DTYPE_BF16);
  std::vector<double> shown;
  const auto model = mlactl::BenchModel::Create(client->get(), options, "m", [&](double done) {
    shown.push_back(done);
    return true;
  });
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(std::is_sorted(shown.begin(), shown.end())) << testing::PrintToString(shown);
  EXPECT_THAT(shown, testing::Contains(0.5));
  EXPECT_EQ(shown.front(), 0);
  EXPECT_EQ(shown.back(), 1);
}

TEST_F(MlactlBenchTest, ProgressIsPlainLinesWithoutATerminal) {
  const Result result = Shell(absl::StrCat(
      "( ", server_.Mlactl(absl::StrCat("bench", kSmall, " --duration=0.3 --warmup=0.2")),
      " >/dev/null )"));
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.output, HasSubstr("uploading weights"));
  EXPECT_THAT(result.output, HasSubstr("warm-up\n"));
  EXPECT_EQ(result.output.find('\r'), std::string::npos);
  // On a terminal the line is redrawn.
  const Result terminal = Shell(absl::StrCat(
      "script -qec \"",
      server_.Mlactl(absl::StrCat("bench", kSmall, " --duration=0.5 --warmup=0.2\" /dev/null"))));
  EXPECT_THAT(terminal.output, HasSubstr("\r"));
  EXPECT_THAT(terminal.output, ContainsRegex("\\[#*\\.*\\]"));
}

}  // namespace
}  // namespace mla::integration
