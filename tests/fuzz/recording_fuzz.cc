// Recordings come from elsewhere: mlactl replay must read them or refuse them with a reason.
#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/mlactl/replay/recording.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

// A file in memory that holds `bytes`.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("recording", MFD_CLOEXEC)) {}
  ~MemoryFile() { close(descriptor_); }
  bool Fill(const std::string& bytes) const {
    return ftruncate(descriptor_, 0) == 0 &&
           pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  }
  std::string path() const { return absl::StrCat("/proc/self/fd/", descriptor_); }

 private:
  const int descriptor_;
};

std::string Read(const std::string& path, size_t file_bytes) {
  auto reader = mlactl::RecordingReader::Open(path);
  if (!reader.ok()) return reader.status().message().empty() ? "a refusal without words" : "";
  mlactl::Record record;
  for (uint64_t n = 0;; ++n) {
    const absl::Status status = (*reader)->Next(&record);
    if (!status.ok()) return status.message().empty() ? "a refusal without words" : "";
    if (record.kind == mlactl::RecordKind::kDone) return "";
    if (n > file_bytes) return "more records than bytes";
    if (record.payload.size() > file_bytes) return "a payload larger than its file";
    const auto inside = [&record](std::span<const std::byte> part) {
      return part.empty() ||
             (part.data() >= record.payload.data() &&
              part.data() + part.size() <= record.payload.data() + record.payload.size());
    };
    if (!inside(record.kv) || !inside(record.q)) return "tensors outside their payload";
  }
}

// Number of records in a file that is valid to its end.
size_t WholeRecords(const std::string& path) {
  const auto reader = mlactl::RecordingReader::Open(path);
  if (!reader.ok()) Require(reader.status().ToString());
  mlactl::Record record;
  for (size_t n = 0;; ++n) {
    const absl::Status status = (*reader)->Next(&record);
    if (!status.ok()) Require(status.ToString());
    if (record.kind == mlactl::RecordKind::kDone) return n;
  }
}

std::string Length(size_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> 8 * i);
  return text;
}

const MemoryFile& File() {
  static const MemoryFile file;
  return file;
}

std::string CheckOne(const std::string& input) {
  return File().Fill(input) ? Read(File().path(), input.size()) : std::string("memfd is full");
}

}  // namespace

FuzzTarget TargetUnderTest() {
  FuzzTarget target;
  target.executions = 3000;
  target.seeds = {
      R"({"format":"mla-recording","version":1,"models":[{"model_id":"m","num_heads":2,)"
      R"("kv_lora_rank":4,"rope_dim":2,"nope_dim":3,"v_dim":5,"layers":2,"softmax_scale":0.5,)"
      R"("page_size":0}]})"
      "\n"};
  const std::pair<std::string, size_t> kRecords[] = {
      {R"({"kind":"weights","model_id":"m","layer":1,"head_begin":0,"head_count":2})", 128},
      {R"({"kind":"open","sequence":1,"model_id":"m"})", 0},
      {R"({"kind":"begin","step":9,"sequences":[{"sequence":1,"start_position":0,"rows":3}]})", 0},
      {R"({"kind":"attend","step":9,"layer":1,"row_begin":1,"row_count":2,"head_offset":0,)"
       R"("num_heads":2,"profile":"ABSORBED","has_kv":true,"dtype":"bf16","kv_bytes":24,)"
       R"("q_bytes":48,"o_bytes":64,"lse_bytes":16})",
       152},
      {R"({"kind":"end","step":9,"committed_rows":[3],"lengths":[3]})", 0},
      {R"({"kind":"done"})", 0},
  };
  for (const auto& [text, payload] : kRecords) {
    target.seeds.push_back(target.seeds.back() + Length(text.size(), 4) + text +
                           Length(payload, 8) + std::string(payload, '\0'));
  }
  // Each seed is the valid beginning of a recording; the last seed is complete.
  Require(File().Fill(target.seeds.back()) ? "" : "memfd is full");
  Require(WholeRecords(File().path()) == std::size(kRecords) - 1 ? "" : "a seed that is not whole");
  return target;
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::CheckOne({reinterpret_cast<const char*>(data), size}));
  return 0;
}
