#include "server/tracing/exporters.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "otlp/trace_service.grpc.pb.h"

namespace {

// While it is set, a write by way of the C library takes half of its bytes, and others change the
// file before it and after it.
struct CutWrite {
  std::function<void()> before, after;
};
std::optional<CutWrite> cut_write;

}  // namespace

// Stands in for the C library's: a test cannot otherwise act between a write and the calls around
// it.
extern "C" ssize_t write(int file, const void* bytes, size_t count) {
  const std::optional<CutWrite> cut = std::exchange(cut_write, std::nullopt);
  if (cut && cut->before) cut->before();
  const ssize_t written = syscall(SYS_write, file, bytes, cut ? count / 2 : count);
  if (cut && cut->after) cut->after();
  return written;
}

namespace mla::server {
namespace {

const TraceResource kResource{"mla-server", "1.2.3", "boot"};

TraceSpan Example() {
  TraceSpan span;
  span.trace = {0x0102030405060708, 0x090a0b0c0d0e0f10};
  span.id = 0x1112131415161718;
  span.parent = 0x2122232425262728;
  span.name = "attend";
  span.begin_ns = 1000;
  span.end_ns = 2000;
  span.tenant = "t\xff";  // not UTF-8
  span.layer = 0;
  span.error = "out_of_range";
  return span;
}

class Collector final : public otlp::TraceService::Service {
 public:
  grpc::Status Export(grpc::ServerContext*, const otlp::ExportTraceServiceRequest* request,
                      otlp::ExportTraceServiceResponse*) override {
    got = *request;
    return grpc::Status::OK;
  }
  otlp::ExportTraceServiceRequest got;
};

TEST(ExportersTest, ACollectorGetsTheSpans) {
  Collector collector;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&collector);
  const auto server = builder.BuildAndStart();
  const auto exporter = MakeOtlpExporter(absl::StrCat("127.0.0.1:", port), kResource);
  ASSERT_TRUE(exporter->Export({Example()}).ok());
  server->Shutdown();
  ASSERT_EQ(collector.got.resource_spans_size(), 1);
  EXPECT_EQ(collector.got.resource_spans(0).resource().attributes(0).key(), "service.name");
  const otlp::Span& span = collector.got.resource_spans(0).scope_spans(0).spans(0);
  EXPECT_EQ(span.trace_id(), "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10");
  EXPECT_EQ(span.parent_span_id(), "\x21\x22\x23\x24\x25\x26\x27\x28");
  EXPECT_EQ(span.start_time_unix_nano(), 1000u);
  EXPECT_EQ(span.status().code(), otlp::Status::STATUS_CODE_ERROR);
  EXPECT_EQ(span.attributes(0).value().string_value(), "t\xef\xbf\xbd");  // U+FFFD
  EXPECT_EQ(span.attributes(1).key(), "mla.layer");
  EXPECT_EQ(span.attributes(1).value().int_value(), 0);
}

TEST(ExportersTest, ACollectorThatIsAwayIsAnError) {
  const auto exporter = MakeOtlpExporter("unix:/nowhere/collector", kResource);
  EXPECT_FALSE(exporter->Export({Example()}).ok());
}

TEST(ExportersTest, AFileGetsALineForEachSpanUpToItsBound) {
  const std::string path = ::testing::TempDir() + "/spans";
  auto exporter = MakeJsonExporter(path, 1000, kResource);
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  ASSERT_TRUE((*exporter)->Export({Example(), Example()}).ok());
  EXPECT_EQ((*exporter)->Export(std::vector<TraceSpan>(50, Example())).code(),
            absl::StatusCode::kResourceExhausted);
  std::ifstream in(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 2u);
  const auto line = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(line["trace_id"], "0102030405060708090a0b0c0d0e0f10");
  EXPECT_EQ(line["parent_span_id"], "2122232425262728");
  EXPECT_EQ(line["mla.layer"], 0);
  EXPECT_EQ(line["error"], "out_of_range");
  EXPECT_FALSE(line.contains("mla.rows"));
}

TEST(ExportersTest, LinesThatAFullDiskHasCutDoNotStay) {
  const std::string path = ::testing::TempDir() + "/cut_spans";
  auto exporter = MakeJsonExporter(path, 1 << 20, kResource);
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  ASSERT_TRUE((*exporter)->Export({Example()}).ok());
  struct stat one {};
  ASSERT_EQ(stat(path.c_str(), &one), 0);
  // The kernel cuts what goes beyond this as it does on a full disk.
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit room{static_cast<rlim_t>(one.st_size + one.st_size / 2), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &room), 0);
  EXPECT_EQ((*exporter)->Export({Example()}).code(), absl::StatusCode::kUnavailable);
  setrlimit(RLIMIT_FSIZE, &before);
  ASSERT_TRUE((*exporter)->Export({Example()}).ok());
  std::ifstream in(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[1], lines[0]);
}

// Two servers may write to one file, which may be rotated by a copy and a cut to nothing. A write
// that a full disk has cut must be taken back without theirs.
TEST(ExportersTest, OnlyItsOwnLastLinesAreTakenBack) {
  const std::string path = ::testing::TempDir() + "/shared_spans";
  auto exporter = MakeJsonExporter(path, 1 << 20, kResource);
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  const auto append = [&path] { std::ofstream(path, std::ios::app) << "another server's\n"; };
  const auto text = [&path] {
    std::ifstream in(path);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const auto cut = [&](std::function<void()> before, std::function<void()> after) {
    EXPECT_EQ(truncate(path.c_str(), 0), 0);
    EXPECT_TRUE((*exporter)->Export({Example()}).ok());
    cut_write = {std::move(before), std::move(after)};
    EXPECT_EQ((*exporter)->Export({Example()}).code(), absl::StatusCode::kUnavailable);
    cut_write.reset();
    return text();
  };
  const std::string line = cut({}, {});
  EXPECT_THAT(line, ::testing::EndsWith("}\n"));
  EXPECT_EQ(cut(append, {}), line + "another server's\n");
  const std::string kept = cut({}, append);
  EXPECT_THAT(kept, ::testing::StartsWith(line));
  EXPECT_THAT(kept, ::testing::EndsWith("another server's\n"));
  const auto rotate = [&path] { EXPECT_EQ(truncate(path.c_str(), 0), 0); };
  EXPECT_EQ(cut(rotate, {}), "");
  EXPECT_EQ(cut({}, rotate), "");
}

TEST(ExportersTest, OnlyAnOrdinaryFileIsWritten) {
  const std::string pipe = ::testing::TempDir() + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_FALSE(MakeJsonExporter(pipe, 1000, kResource).ok());
  EXPECT_FALSE(MakeJsonExporter("/nowhere/spans", 1000, kResource).ok());
  EXPECT_FALSE(MakeJsonExporter(::testing::TempDir(), 1000, kResource).ok());
}

}  // namespace
}  // namespace mla::server
