#include "client/mlactl/replay/recording.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/mlactl/tensors/value_bounds.h"

namespace mla::mlactl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kHeader[] =
    R"({"format":"mla-recording","version":1,"models":[{"model_id":"m","num_heads":2,)"
    R"("kv_lora_rank":4,"rope_dim":2,"nope_dim":3,"v_dim":5,"layers":2,"softmax_scale":0.5,)"
    R"("page_size":0,"later":true}]})";

std::string Path(const std::string& name) { return testing::TempDir() + "/" + name; }

template <typename Number>
std::string Bytes(Number value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

// Written by hand, after the format's description.
std::string RecordBytes(const std::string& header, const std::string& payload = "") {
  return Bytes(static_cast<uint32_t>(header.size())) + header + Bytes(uint64_t{payload.size()}) +
         payload;
}

std::string Floats(size_t count, float first) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) bytes += Bytes(first + static_cast<float>(i));
  return bytes;
}

constexpr char kOpen[] = R"({"kind":"open","sequence":1,"model_id":"m"})";
constexpr char kBegin[] =
    R"({"kind":"begin","step":9,"sequences":[{"sequence":1,"start_position":0,"rows":3}]})";
// 2 rows of 6 bf16, 4 row heads of 6 bf16, then 4 x 4 and 4 floats.
constexpr char kAttend[] =
    R"({"kind":"attend","step":9,"layer":1,"row_begin":1,"row_count":2,"head_offset":0,)"
    R"("num_heads":2,"profile":"ABSORBED","has_kv":true,"dtype":"bf16","kv_bytes":24,)"
    R"("q_bytes":48,"o_bytes":64,"lse_bytes":16})";
constexpr char kEnd[] = R"({"kind":"end","step":9,"committed_rows":[3],"lengths":[3]})";
constexpr char kDone[] = R"({"kind":"done"})";

std::string AttendPayload() {
  return std::string(24, 'k') + std::string(48, 'q') + Floats(16, 1) + Floats(4, 100);
}

std::string Whole() {
  return std::string(kHeader) + "\n" +
         RecordBytes(R"({"kind":"weights","model_id":"m","layer":1,"head_begin":0,"head_count":2})",
                     std::string(2 * 4 * 8 * 2, 'w')) +
         RecordBytes(kOpen) + RecordBytes(R"({"kind":"fork","sequence":2,"parent":1,"length":0})") +
         RecordBytes(R"({"kind":"truncate","sequence":2,"length":0})") + RecordBytes(kBegin) +
         RecordBytes(kAttend, AttendPayload()) + RecordBytes(kEnd) +
         RecordBytes(R"({"kind":"begin","step":9,"sequences":[{"sequence":1,)"
                     R"("start_position":3,"rows":1}]})") +
         RecordBytes(R"({"kind":"abort","step":9})") +
         RecordBytes(R"({"kind":"release","sequence":2})") + RecordBytes(kDone);
}

// Reads all records; the status of the first that fails.
absl::Status ReadAll(const std::string& bytes, std::vector<RecordKind>* kinds = nullptr) {
  const std::string path = Path("read.rec");
  std::ofstream(path, std::ios::binary) << bytes;
  MLA_ASSIGN_OR_RETURN(auto reader, RecordingReader::Open(path));
  Record record;
  do {
    MLA_RETURN_IF_ERROR(reader->Next(&record));
    if (kinds != nullptr) kinds->push_back(record.kind);
  } while (record.kind != RecordKind::kDone);
  return absl::OkStatus();
}

TEST(RecordingTest, ReadsEveryKind) {
  std::vector<RecordKind> kinds;
  ASSERT_EQ(ReadAll(Whole(), &kinds), absl::OkStatus());
  EXPECT_THAT(kinds, ElementsAre(RecordKind::kWeights, RecordKind::kOpen, RecordKind::kFork,
                                 RecordKind::kTruncate, RecordKind::kBegin, RecordKind::kAttend,
                                 RecordKind::kEnd, RecordKind::kBegin, RecordKind::kAbort,
                                 RecordKind::kRelease, RecordKind::kDone));
}

TEST(RecordingTest, ReadsFieldsAndTensors) {
  const std::string path = Path("fields.rec");
  std::ofstream(path, std::ios::binary)
      << kHeader << "\n"
      << RecordBytes(kOpen) << RecordBytes(kBegin) << RecordBytes(kAttend, AttendPayload())
      << RecordBytes(kEnd) << RecordBytes(kDone);
  auto reader = RecordingReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ((*reader)->models().size(), 1u);
  const v1::ModelSpec& model = (*reader)->models()[0];
  EXPECT_EQ(model.model_id(), "m");
  EXPECT_EQ(model.geometry().v_dim(), 5u);
  EXPECT_EQ(model.softmax_scale(), 0.5);
  EXPECT_EQ(model.rope_owner(), v1::ROPE_OWNER_WORKER);
  Record record;
  ASSERT_EQ((*reader)->Next(&record), absl::OkStatus());
  EXPECT_EQ(record.sequence, 1u);
  ASSERT_EQ((*reader)->Next(&record), absl::OkStatus());
  EXPECT_EQ(record.step, 9u);
  ASSERT_EQ(record.rows.size(), 1u);
  EXPECT_EQ(record.rows[0].rows, 3u);
  ASSERT_EQ((*reader)->Next(&record), absl::OkStatus());
  EXPECT_EQ(record.layer, 1u);
  EXPECT_EQ(record.row_begin, 1u);
  EXPECT_EQ(record.profile, v1::PROFILE_ABSORBED);
  EXPECT_EQ(record.kv.size(), 24u);
  EXPECT_EQ(static_cast<char>(record.q.back()), 'q');
  ASSERT_EQ(record.o.size(), 16u);
  EXPECT_EQ(record.o[15], 16.0F);
  ASSERT_EQ(record.lse.size(), 4u);
  EXPECT_EQ(record.lse[0], 100.0F);
  ASSERT_EQ((*reader)->Next(&record), absl::OkStatus());
  EXPECT_THAT(record.committed_rows, ElementsAre(3));
  EXPECT_THAT(record.lengths, ElementsAre(3));
  ASSERT_EQ((*reader)->Next(&record), absl::OkStatus());
  EXPECT_EQ((*reader)->records(), 5u);
  EXPECT_EQ((*reader)->fraction_read(), 1.0);
  EXPECT_FALSE((*reader)->Next(&record).ok());
}

TEST(RecordingTest, ACopyHasTheSameBytes) {
  const std::string from = Path("from.rec"), copy_path = Path("to.rec");
  std::ofstream(from, std::ios::binary) << Whole();
  auto reader = RecordingReader::Open(from);
  ASSERT_TRUE(reader.ok());
  auto writer = RecordingWriter::Create(copy_path, (*reader)->header_line());
  ASSERT_TRUE(writer.ok());
  Record record;
  do {
    ASSERT_EQ((*reader)->Next(&record), absl::OkStatus());
    const std::span<const std::byte> parts[] = {record.payload};
    ASSERT_EQ((*writer)->Write(record.header, parts), absl::OkStatus());
  } while (record.kind != RecordKind::kDone);
  ASSERT_EQ((*writer)->Close(), absl::OkStatus());
  std::ostringstream copy;
  copy << std::ifstream(copy_path, std::ios::binary).rdbuf();
  EXPECT_EQ(copy.str(), Whole());
  EXPECT_FALSE(RecordingWriter::Create("/nonexistent/x", "").ok());
}

TEST(RecordingTest, EveryCutIsNoticed) {
  const std::string whole = Whole();
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    ASSERT_EQ(ReadAll(whole.substr(0, bytes)).code(), absl::StatusCode::kDataLoss) << bytes;
  }
  EXPECT_EQ(ReadAll(whole + "x").code(), absl::StatusCode::kDataLoss);
}

// Any one byte changed: the file is refused or read, with memory and time bounded by its size.
TEST(RecordingTest, ChangedBytesDoNoHarm) {
  const std::string whole = Whole();
  int refused = 0;
  for (size_t offset = 0; offset < whole.size(); ++offset) {
    constexpr char kValues[] = {'\0', '\xff', '9', '"'};
    std::string changed = whole;
    changed[offset] = kValues[offset % 4];
    refused += ReadAll(changed).ok() ? 0 : 1;
  }
  EXPECT_GT(refused, 300);
}

// A value far deeper than any stack, at every place where a value may stand.
TEST(RecordingTest, DeepNestingIsRefused) {
  const std::string deep(1 << 17, '[');
  const std::string closed = deep.substr(0, 60'000) + std::string(60'000, ']');
  const std::string header = std::string(kHeader) + "\n";
  for (const std::string& value : {deep, closed}) {
    EXPECT_THAT(ReadAll("{\"format\":" + value + "}\n").ToString(), HasSubstr("nested deeper"));
    EXPECT_THAT(ReadAll("{\"models\":[" + value + "]}\n").ToString(), HasSubstr("nested deeper"));
    for (const char* start :
         {"{\"kind\":", "{\"kind\":\"done\",\"later\":", "[", "{\"kind\":[{\"a\":"}) {
      EXPECT_THAT(ReadAll(header + RecordBytes(absl::StrCat(start, value, "}"))).ToString(),
                  HasSubstr("nested deeper"));
    }
  }
  // An unknown key of small depth is ignored, as every unknown key.
  EXPECT_EQ(ReadAll(header + RecordBytes(R"({"kind":"done","later":[[[[[[{}]]]]]]})")),
            absl::OkStatus());
}

struct Fault {
  std::string from, replacement, message;
};

TEST(RecordingTest, FaultsNameTheRecordAndTheKey) {
  const std::string big = "4294967296";
  const Fault faults[] = {
      {"\"version\":1", "\"version\":2", "want mla-recording version 1"},
      {"mla-recording", "other-thing", "want mla-recording"},
      {"\"num_heads\":2,\"kv", "\"num_heads\":0,\"kv", "num_heads: got 0, must be 1..65536"},
      {"\"layers\":2,", "\"layerz\":2,", "layers: missing"},
      {"\"softmax_scale\":0.5", "\"softmax_scale\":[1]", "softmax_scale: got [1]"},
      {"\"kind\":\"open\"", "\"kind\":\"oxen\"", "kind: got oxen"},
      {"{\"kind\":\"open\"", "[\"kind\",\"open\"", "not a JSON object"},
      {"\"parent\":1", "\"parent\":7", "record 3: parent: not open"},
      {"\"sequence\":2,\"parent", "\"sequence\":1,\"parent", "sequence: open already"},
      {"\"head_count\":2", "\"head_count\":3", "record 1: head_count: got 3, must be 1..2"},
      {"\"layer\":1,\"head_b", "\"layer\":2,\"head_b", "layer: got 2, must be 0..1"},
      {"\"rows\":3", "\"rows\":0", "rows: got 0"},
      {"\"rows\":3", "\"rows\":1", "row_begin: got 1, must be 0..0"},
      {"\"row_count\":2", "\"row_count\":" + big, "row_count: got 4294967296, must be 1..2"},
      {"\"row_count\":2", "\"row_count\":-1", "row_count: got -1"},
      {"\"row_count\":2", "\"row_count\":2.0", "row_count: got 2.0"},
      {"\"num_heads\":2,\"profile", "\"num_heads\":3,\"profile", "num_heads: got 3"},
      {"ABSORBED", "UNSPECIFIED", "profile: got UNSPECIFIED"},
      {"\"bf16\"", "\"fp8\"", "dtype: got fp8, must be bf16 or f32"},
      {"\"has_kv\":true", "\"has_kv\":1", "has_kv: got 1"},
      {"\"kv_bytes\":24", "\"kv_bytes\":25", "kv_bytes: got 25, must be 24..24"},
      {"\"lse_bytes\":16", "\"lse_bytes\":12", "lse_bytes: got 12, must be 0 or 16"},
      {"\"lse_bytes\":16", "\"lse_bytes\":0", "payload: got 152 bytes, must be 136 bytes"},
      {"\"step\":9,\"layer\"", "\"step\":8,\"layer\"", "record 6: step: not open"},
      {"\"committed_rows\":[3]", "\"committed_rows\":3", "committed_rows: got 3, must be an array"},
      {"\"lengths\":[3]", "\"lengths\":[\"3\"]", "lengths: got \"3\""},
  };
  // Lengths in the text differ, so length fields must too: rebuild record by record.
  const std::string records[] = {
      R"({"kind":"weights","model_id":"m","layer":1,"head_begin":0,"head_count":2})",
      kOpen,
      R"({"kind":"fork","sequence":2,"parent":1,"length":0})",
      R"({"kind":"truncate","sequence":2,"length":0})",
      kBegin,
      kAttend,
      kEnd,
      kDone};
  for (const Fault& fault : faults) {
    bool replaced = false;
    const auto change = [&](std::string text) {
      const size_t at = text.find(fault.from);
      if (at != std::string::npos && !replaced) {
        text.replace(at, fault.from.size(), fault.replacement);
        replaced = true;
      }
      return text;
    };
    std::string bytes = change(kHeader) + "\n";
    for (const std::string& record : records) {
      const std::string payload = record == records[0]   ? std::string(128, 'w')
                                  : record == records[5] ? AttendPayload()
                                                         : "";
      bytes += RecordBytes(change(record), payload);
    }
    ASSERT_TRUE(replaced) << fault.from;
    const absl::Status status = ReadAll(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << fault.replacement;
    EXPECT_THAT(std::string(status.message()), HasSubstr(fault.message));
  }
  EXPECT_EQ(RecordingReader::Open("/nonexistent").status().code(),
            absl::StatusCode::kInvalidArgument);
}

// ---------------------------------------------------------------------------------- ValueBounds

v1::ModelSpec SmallModel() {
  v1::ModelSpec model;
  model.set_layers(2);
  v1::Geometry* geometry = model.mutable_geometry();
  geometry->set_num_heads(2);
  geometry->set_kv_lora_rank(2);
  geometry->set_nope_dim(1);
  geometry->set_v_dim(2);
  return model;
}

std::string Bf16(const std::vector<float>& values) {
  std::string bytes;
  for (const float value : values) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    bytes += Bytes(static_cast<uint16_t>(bits >> 16));
  }
  return bytes;
}

TEST(ValueBoundsTest, KeepsTheLargestThatARowSees) {
  ValueProjection projection(SmallModel());
  // Each head: W_UK [1, 2], for both, then W_UV [2, 2] for both.
  const std::string weights = Bf16({9, 9, 9, 9, /*head 0*/ 1, 0, 0, 1, /*head 1*/ 2, 0, 0, -4});
  projection.Add(0, 0, 2, std::as_bytes(std::span(weights)));
  ValueBounds bounds(2);
  bounds.AddRow(0, 0, std::vector<float>{1, -2}, &projection);
  bounds.AddRow(0, 1, std::vector<float>{0.5F, 1}, &projection);
  bounds.AddRow(0, 2, std::vector<float>{6, 0}, &projection);
  bounds.AddRow(0, 2, std::vector<float>{100, 0}, &projection);  // a repeat changes nothing
  EXPECT_EQ(bounds.Largest(0, 0, v1::PROFILE_ABSORBED), 2);
  EXPECT_EQ(bounds.Largest(0, 1, v1::PROFILE_ABSORBED), 2);
  EXPECT_EQ(bounds.Largest(0, 2, v1::PROFILE_ABSORBED), 6);
  EXPECT_EQ(bounds.Largest(0, 0, v1::PROFILE_EXPANDED), 8);
  EXPECT_EQ(bounds.Largest(0, 2, v1::PROFILE_EXPANDED), 12);
  EXPECT_FALSE(bounds.Has(1, 0));
  ValueBounds fork = bounds;
  fork.Truncate(1);
  EXPECT_FALSE(fork.Has(0, 1));
  fork.AddRow(0, 1, std::vector<float>{-3, 0}, &projection);
  EXPECT_EQ(fork.Largest(0, 1, v1::PROFILE_ABSORBED), 3);
  EXPECT_EQ(bounds.Largest(0, 2, v1::PROFILE_ABSORBED), 6);
}

TEST(ValueBoundsTest, WidensBf16) {
  const std::string bytes = Bf16({1.5F, -2, 0});
  EXPECT_THAT(ToFloats(std::as_bytes(std::span(bytes)), v1::DTYPE_BF16),
              ElementsAre(1.5F, -2.0F, 0.0F));
  EXPECT_TRUE(ToFloats({}, v1::DTYPE_F32).empty());
}

}  // namespace
}  // namespace mla::mlactl
