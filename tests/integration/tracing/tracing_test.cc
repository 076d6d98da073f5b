// Traces of a server process, from a client's header to the lines in the file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using ::testing::IsSupersetOf;
using Line = nlohmann::json;
using Transport = client::ClientOptions::Transport;

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kSpan[] = "00f067aa0ba902b7";

std::string Header(const char* flags = "01") {
  return absl::StrCat("00-", kTrace, "-", kSpan, "-", flags);
}

std::vector<Line> Read(const std::string& path) {
  std::ifstream in(path);
  std::vector<Line> lines;
  for (std::string text; std::getline(in, text);) {
    Line line = Line::parse(text, nullptr, false);
    if (!line.is_discarded()) lines.push_back(std::move(line));  // one is being written
  }
  return lines;
}

// The spans in the file once `count` of them have this name, or after ten seconds.
std::vector<Line> Await(const std::string& path, const std::string& name, size_t count) {
  std::vector<Line> lines;
  for (int i = 0; i < 200; ++i) {
    lines = Read(path);
    size_t found = 0;
    for (const Line& line : lines) found += line["name"] == name ? 1 : 0;
    if (found >= count) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return lines;
}

class TracingTest : public ::testing::TestWithParam<Transport> {
 protected:
  std::unique_ptr<client::Client> Connect(const ServerProcess& process, const std::string& header) {
    client::ClientOptions options;
    options.transport = GetParam();
    options.traceparent = [header] { return header; };
    auto client = client::Client::Connect(process.target(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  const TempFolder folder_;
  const std::string file_ = folder_.File("spans.jsonl");
};

TEST_P(TracingTest, AStepIsAChildOfItsCallersSpan) {
  ServerProcess process({"--tracing-file=" + file_});
  const auto client = Connect(process, Header());
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {4}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const std::vector<Line> lines = Await(file_, "step", 1);
  std::map<std::string, Line> by_name;
  std::set<std::string> names;
  for (const Line& line : lines) {
    EXPECT_EQ(line["trace_id"], kTrace);
    EXPECT_LE(line["start_unix_ns"], line["end_unix_ns"]);
    by_name[line["name"]] = line;
    names.insert(line["name"]);
  }
  EXPECT_THAT(names,
              IsSupersetOf({"step", "begin_step", "attend", "receive", "queue", "launch", "plan",
                            "kernel", "reply", "end_step", "Models.Register", "Sequences.Open"}));
  EXPECT_EQ(by_name["step"]["parent_span_id"], kSpan);
  EXPECT_EQ(by_name["step"]["mla.model"], "m");
  EXPECT_EQ(by_name["Sequences.Open"]["parent_span_id"], kSpan);
  EXPECT_EQ(by_name["attend"]["parent_span_id"], by_name["step"]["span_id"]);
  EXPECT_EQ(by_name["attend"]["mla.rows"], 4);
  EXPECT_EQ(by_name["kernel"]["parent_span_id"], by_name["launch"]["span_id"]);
}

TEST_P(TracingTest, AFailureNamesItsTrace) {
  ServerProcess process({"--tracing-file=" + file_});
  const auto client = Connect(process, Header());
  Worker worker(client.get(), {}, "m", 1);
  const absl::Status status = worker.session().Begin("m", {}).status();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(client::DetailOf(status)->trace_id(), kTrace);
  for (const Line& line : Await(file_, "step", 1)) {
    if (line["name"] != "step") continue;
    EXPECT_TRUE(line.contains("error")) << line;
  }
  const absl::Status missing = client->UnregisterModel("none");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(client::DetailOf(missing)->trace_id(), kTrace);
}

TEST_P(TracingTest, OnlyWhatCallersOrTheSampleAskForIsRecorded) {
  ServerProcess process({"--tracing-file=" + file_, "--tracing-sample-every=4"});
  const auto silent = Connect(process, Header("00"));  // has decided against it
  Worker worker(silent.get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const auto without = Connect(process, "");
  Worker sampled(without.get(), {}, "m", 1);
  Track other = *sampled.Open();
  for (int i = 0; i < 16; ++i) {
    ASSERT_EQ(sampled.Step({&other}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  std::set<std::string> roots;
  for (const Line& line : Await(file_, "step", 2)) {
    EXPECT_NE(line["trace_id"], kTrace);
    if (!line.contains("parent_span_id")) roots.insert(line["name"]);
  }
  EXPECT_TRUE(roots.contains("step"));
}

INSTANTIATE_TEST_SUITE_P(Transports, TracingTest,
                         ::testing::Values(Transport::kInline, Transport::kShm, Transport::kRing),
                         [](const auto& info) {
                           return info.param == Transport::kInline ? "Inline"
                                  : info.param == Transport::kShm  ? "Shm"
                                                                   : "Ring";
                         });

TEST(TracingOffTest, WithoutATargetNothingIsRecorded) {
  ServerProcess process({"--tracing-sample-every=1"});
  client::ClientOptions options;
  options.traceparent = [] { return Header(); };
  auto client = client::Client::Connect(process.target(), options);
  ASSERT_TRUE(client.ok()) << client.status();
  Worker worker(client->get(), {}, "m", 1);
  const absl::Status status = worker.session().Begin("m", {}).status();
  EXPECT_EQ(client::DetailOf(status)->trace_id(), "");
}

}  // namespace
}  // namespace mla::integration
