// Rows move from one server to another by programs and files: mlactl export and import, servers and
// disks that fail, and clients that are killed.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "tests/integration/processes.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr uint32_t kRows = 11;

std::unique_ptr<client::Client> Connect(const ServerProcess& server) {
  auto client = client::Client::Connect(server.target(), {});
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

std::string Id(const client::Sequence& sequence) { return absl::StrFormat("%016x", sequence.id()); }

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void WriteAll(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

int64_t Stat(const ServerProcess& server, const std::string& name) {
  const json stats = json::parse(Shell(server.Mlactl("status --json")).output);
  return stats[name].is_string() ? std::stoll(stats[name].get<std::string>())
                                 : stats[name].get<int64_t>();
}

class MlactlPagesTest : public ::testing::Test {
 protected:
  MlactlPagesTest()
      : client_(Connect(a_)), worker_(client_.get(), {}, "m", 1), track_(*worker_.Open()) {
    EXPECT_TRUE(worker_.Step({&track_}, {kRows}, v1::PROFILE_ABSORBED).ok());
  }
  std::string file() const { return a_.File("rows.mlapages"); }
  Result Export(const std::string& file, const std::string& more = "") {
    return Shell(a_.Mlactl(absl::StrCat("export ", Id(track_.sequence), " ", file, " ", more)));
  }
  static Result Import(const ServerProcess& server, const std::string& file,
                       const std::string& more = "") {
    return Shell(server.Mlactl(absl::StrCat("import m ", file, " --lease-ms=60000 ", more)));
  }

  const ServerProcess a_{{}}, b_{{}};
  std::unique_ptr<client::Client> client_;
  Worker worker_;
  Track track_;
};

TEST_F(MlactlPagesTest, RowsGoToAnotherServerThroughAFile) {
  const Result out = Export(file(), "--json");
  ASSERT_EQ(out.code, 0) << out.output;
  EXPECT_EQ(json::parse(out.output)["rows"], kRows);
  EXPECT_FALSE(std::filesystem::exists(file() + ".part"));
  const auto client = Connect(b_);
  Worker worker(client.get(), {}, "m", 2);
  const Result in = Import(b_, file(), "--json");
  ASSERT_EQ(in.code, 0) << in.output;
  const json sequence = json::parse(in.output);
  EXPECT_EQ(sequence["length"], kRows);
  // The second export equals the first, byte by byte.
  const std::string again = b_.File("again.mlapages");
  const std::string id = sequence["sequence_id"];
  const Result back = Shell(b_.Mlactl(absl::StrCat("export ", id, " ", again)));
  ASSERT_EQ(back.code, 0) << back.output;
  EXPECT_EQ(ReadAll(again), ReadAll(file()));
}

TEST_F(MlactlPagesTest, TheJsonOfAnExportNamesAnyFile) {
  const std::string name = a_.File("a\"b\\c\u00e9\x01.mlapages");
  const Result out = Export(absl::StrCat("'", name, "'"), "--json");
  ASSERT_EQ(out.code, 0) << out.output;
  EXPECT_EQ(json::parse(out.output)["file"], name);
}

TEST_F(MlactlPagesTest, AnExportThatCannotEndLeavesNothing) {
  const std::string folder = a_.File("folder");
  std::filesystem::create_directory(folder);
  const Result out = Export(folder);
  EXPECT_EQ(out.code, 2) << out.output;
  EXPECT_THAT(out.output, HasSubstr("folder: rename: Is a directory"));
  EXPECT_FALSE(std::filesystem::exists(folder + ".part"));
}

// A command line that runs another one on a terminal.
std::string OnTerminal(const std::string& command) {
  return absl::StrCat("script -qefc '", command, "' /dev/null </dev/null");
}

TEST_F(MlactlPagesTest, LongWorkShowsItsProgressOnATerminal) {
  const Result out =
      Shell(OnTerminal(a_.Mlactl(absl::StrCat("export ", Id(track_.sequence), " ", file()))));
  ASSERT_EQ(out.code, 0) << out.output;
  EXPECT_THAT(out.output, HasSubstr("export  ["));
  EXPECT_THAT(out.output, HasSubstr(absl::StrCat(kRows, " rows from 0 on")));
  const auto client = Connect(b_);
  const Worker worker(client.get(), {}, "m", 2);
  const Result in = Shell(OnTerminal(b_.Mlactl(absl::StrCat("import m ", file()))));
  ASSERT_EQ(in.code, 0) << in.output;
  EXPECT_THAT(in.output, HasSubstr("import  ["));

  // The drain waits for the step, which waits for the drain's progress.
  client::BeginOptions patient;
  patient.lease_ms = 60000;
  auto step = worker_.session().Begin("m", {{&track_.sequence, 1}}, patient);
  ASSERT_TRUE(step.ok()) << step.status();
  const std::string log = a_.File("drain.log");
  BackgroundCommand drain(
      absl::StrCat(OnTerminal(a_.Mlactl("drain --deadline-ms=60000")), " >", log));
  for (int i = 0; i < 600 && ReadAll(log).find("1 open steps") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_THAT(ReadAll(log), HasSubstr("1 open steps"));
  EXPECT_EQ((*step)->Abort(), absl::OkStatus());
  EXPECT_EQ(drain.Finish().code, 0) << ReadAll(log);
}

TEST_F(MlactlPagesTest, ImportedRowsAreComputedOn) {
  const auto client = Connect(b_);
  Worker worker(client.get(), {}, "m", 2);
  v1::ExportRequest request;
  request.set_sequence_id(track_.sequence.id());
  request.set_expected_epoch(track_.sequence.epoch());
  std::vector<v1::PagesPart> parts;
  ASSERT_TRUE(client_
                  ->ExportPages(request,
                                [&](const v1::PagesPart& part) {
                                  parts.push_back(part);
                                  return absl::OkStatus();
                                })
                  .ok());
  v1::ImportTarget target;
  target.set_model_id("m");
  size_t sent = 0;
  auto sequence =
      client->ImportPages(target, [&]() -> absl::StatusOr<std::optional<v1::PagesPart>> {
        if (sent == parts.size()) return std::nullopt;
        return parts[sent++];
      });
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  Track copy{*std::move(sequence), track_.cache};
  for (const uint32_t rows : {1, 5}) {
    const absl::Status status = worker.Step({&copy}, {rows}, v1::PROFILE_ABSORBED);
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_F(MlactlPagesTest, RangesFollowEachOther) {
  ASSERT_EQ(Export(file(), "--end-row=8").code, 0);
  const std::string rest = a_.File("rest.mlapages");
  ASSERT_EQ(Export(rest, "--first-row=8").code, 0);
  EXPECT_NE(Export(rest + "x", "--first-row=3").code, 0);  // not the first row of a page
  EXPECT_FALSE(std::filesystem::exists(rest + "x"));
  const Result first = Import(a_, file(), "--json");
  ASSERT_EQ(first.code, 0) << first.output;
  const std::string id = json::parse(first.output)["sequence_id"];
  EXPECT_NE(Import(a_, file(), "--sequence=" + id).code, 0);  // rows that it has already
  const Result second = Import(a_, rest, "--sequence=" + id);
  EXPECT_EQ(second.code, 0) << second.output;
  EXPECT_THAT(second.output, HasSubstr("has 11 rows"));
}

TEST_F(MlactlPagesTest, TornAndForeignFilesAreRefusedWithTheReason) {
  ASSERT_EQ(Export(file()).code, 0);
  const std::string whole = ReadAll(file());
  const auto client = Connect(b_);
  Worker worker(client.get(), {}, "m", 2);
  const std::string bad = a_.File("bad.mlapages");
  const auto refused = [&](const std::string& bytes) {
    WriteAll(bad, bytes);
    const Result result = Import(b_, bad);
    EXPECT_NE(result.code, 0);
    return result.output;
  };
  EXPECT_THAT(refused(""), HasSubstr("does not begin with MLAPAGES"));
  EXPECT_THAT(refused("elsewhere" + whole), HasSubstr("does not begin with MLAPAGES"));
  std::string older = whole;
  older[8] = 0;
  EXPECT_THAT(refused(older), HasSubstr("version 0"));
  EXPECT_THAT(refused(whole + "x"), HasSubstr("after the trailer"));
  for (const size_t part : {1, 2, 3, 7}) {
    EXPECT_THAT(refused(whole.substr(0, whole.size() * part / 8)), HasSubstr("it ends"));
  }
  std::string flipped = whole;
  flipped[whole.size() / 2] ^= 4;
  refused(flipped);
  EXPECT_EQ(Stat(b_, "sequences"), 0);
  EXPECT_EQ(Stat(b_, "page_groups_used"), 0);
}

TEST_F(MlactlPagesTest, AFileWithAKeyIsOfThoseWhoHaveIt) {
  const auto make_key = [this](const std::string& name, char fill) {
    const std::string path = a_.File(name);
    WriteAll(path, std::string(32, fill));
    chmod(path.c_str(), 0600);
    return path;
  };
  const std::string key = " --mac-key=" + make_key("key", 'k');
  const std::string other = " --mac-key=" + make_key("other", 'o');
  ASSERT_EQ(Export(file(), key).code, 0);
  const std::string whole = ReadAll(file());
  const auto client = Connect(b_);
  Worker worker(client.get(), {}, "m", 2);
  const std::string bad = a_.File("bad.mlapages");
  const auto refused = [&](const std::string& bytes, const std::string& with) {
    WriteAll(bad, bytes);
    const Result result = Import(b_, bad, with);
    EXPECT_NE(result.code, 0);
    return result.output;
  };
  EXPECT_THAT(refused(whole, ""), HasSubstr("written with a key"));
  EXPECT_THAT(refused(whole, other), HasSubstr("another key"));
  // Changes every byte after the version; no changed byte may be taken for rows.
  for (size_t at = 12; at < whole.size(); at += 1 + whole.size() / 40) {
    std::string changed = whole;
    changed[at] ^= 1;
    refused(changed, key);
  }
  for (const size_t part : {1, 3, 7}) refused(whole.substr(0, whole.size() * part / 8), key);
  std::string claims_none = whole;
  claims_none[8] = 1;
  EXPECT_THAT(refused(claims_none, key), HasSubstr("written without a key"));
  EXPECT_EQ(Stat(b_, "sequences"), 0);
  EXPECT_EQ(Import(b_, file(), key).code, 0);
  chmod(a_.File("key").c_str(), 0640);
  EXPECT_THAT(Export(file(), key).output, HasSubstr("others than its owner"));
  WriteAll(a_.File("other"), "short");
  EXPECT_THAT(Export(file(), other).output, HasSubstr("a key has 32 bytes"));
}

TEST_F(MlactlPagesTest, AFullDiskLeavesNoFile) {
  const Result result =
      Shell(absl::StrCat("trap '' XFSZ; ulimit -f 1; ",
                         a_.Mlactl(absl::StrCat("export ", Id(track_.sequence), " ", file()))));
  EXPECT_NE(result.code, 0);
  EXPECT_THAT(result.output, HasSubstr("write"));
  EXPECT_FALSE(std::filesystem::exists(file()));
  EXPECT_FALSE(std::filesystem::exists(file() + ".part"));
}

TEST_F(MlactlPagesTest, AnImportWhoseClientIsKilledLeavesNothing) {
  ASSERT_EQ(Export(file()).code, 0);
  const std::string whole = ReadAll(file());
  const auto client = Connect(b_);
  Worker worker(client.get(), {}, "m", 2);
  for (const size_t percent : {20, 50, 80, 99}) {
    const std::string pipe = absl::StrCat(a_.File("pipe"), percent);
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    BackgroundCommand import(b_.Mlactl("import m " + pipe));
    int feed = -1;  // -1 until the program reads the pipe
    for (int i = 0; i < 500 && feed < 0; ++i) {
      feed = open(pipe.c_str(), O_WRONLY | O_NONBLOCK);
      if (feed < 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    ASSERT_GE(feed, 0) << import.Finish().output;
    const size_t some = whole.size() * percent / 100;
    ASSERT_EQ(write(feed, whole.data(), some), static_cast<ssize_t>(some));
    for (int i = 0; i < 100 && Stat(b_, "sequences") == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_EQ(Stat(b_, "sequences"), 1) << percent;
    import.Signal(SIGKILL);
    import.Finish();
    close(feed);
    for (int i = 0; i < 200 && Stat(b_, "sequences") != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_EQ(Stat(b_, "sequences"), 0) << percent;
    EXPECT_EQ(Stat(b_, "page_groups_used"), 0) << percent;
  }
}

TEST_F(MlactlPagesTest, BoundsOfTheTenantHold) {
  ASSERT_EQ(Export(file()).code, 0);
  const auto client = Connect(b_);
  Worker worker(client.get(), {}, "m", 2);
  ASSERT_EQ(Shell(b_.Mlactl("set-quota default --bounds=kv_bytes=1KiB")).code, 0);
  const Result refused = Import(b_, file());
  EXPECT_EQ(refused.code, 3) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("pages_exhausted"));
  EXPECT_EQ(Stat(b_, "sequences"), 0);
  ASSERT_EQ(Shell(b_.Mlactl("set-quota default --reset")).code, 0);
  EXPECT_EQ(Import(b_, file()).code, 0);
}

// The lines are compared literally, except for ids, keys, numbers and times.
TEST_F(MlactlPagesTest, EventsAndMissesAreShown) {
  v1::Prefix prefix;
  for (uint32_t token = 1; token <= kRows; ++token) prefix.add_token_ids(token);
  ASSERT_TRUE(track_.sequence.Match(prefix).ok());
  prefix.set_token_ids(5, 99);
  ASSERT_TRUE(client_->OpenSequence("m", "", prefix).ok());
  const Result events = Shell(a_.Mlactl("events --all --count=2"));
  ASSERT_EQ(events.code, 0) << events.output;
  const std::string stored = absl::StrCat("stored   m sequence ", Id(track_.sequence), " rows 4");
  EXPECT_THAT(events.output, MatchesRegex(absl::StrCat(
                                 "[0-9]+ ", stored, " page [0-9a-f]+ after [0-9a-f]+\n[0-9]+ ",
                                 stored, " from 4 page [0-9a-f]+ after [0-9a-f]+\n")));
  const Result one = Shell(a_.Mlactl("events --all --count=1 --json"));
  const json event = json::parse(one.output);
  EXPECT_EQ(event["kind"], "CACHE_EVENT_KIND_STORED");
  EXPECT_EQ(event["tier"], "CACHE_TIER_POOL");
  const std::string number = event["number"];
  const Result after = Shell(a_.Mlactl(absl::StrCat("events --count=1 --after=", number)));
  EXPECT_THAT(after.output, HasSubstr(" from 4 "));
  EXPECT_THAT(Shell(a_.Mlactl("explain")).output,
              MatchesRegex("time +sequence +from +asked +found  why, model\n"
                           "[0-9T:Z-]+ +[0-9a-f]+ +0 +11 +5  diverged: what is known goes on with "
                           "other tokens, m\n"));
  const json misses = json::parse(Shell(a_.Mlactl("explain --most=1 --json")).output);
  EXPECT_EQ(misses["misses"][0]["end"], "MATCH_END_DIVERGED");
  // Another tenant sees none of it. Callers of this host are operators, so they do.
  EXPECT_THAT(Shell(a_.Mlactl("events --all --all-tenants --tenant=other --count=1")).output,
              HasSubstr(" stored   default/m sequence "));
  EXPECT_THAT(Shell(a_.Mlactl("explain --tenant=other --all-tenants")).output,
              HasSubstr("other tokens, default/m\n"));
  EXPECT_EQ(Shell(a_.Mlactl("events --all-tenants --after=7")).code, 3);
  EXPECT_EQ(Shell(a_.Mlactl("explain --tenant=other")).output.find("diverged"), std::string::npos);
}

}  // namespace
}  // namespace mla::integration
