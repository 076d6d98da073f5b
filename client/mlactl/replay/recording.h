// Reads and writes recordings: requests of the stepping protocol with their expected replies, in
// the format of client/demo/RECORDING.md.
//
// A file is not trusted: every number is checked against the models of its header line before it is
// used, and a fault names the record and the key. DATA_LOSS: not a recording, or truncated.
// Threading: not thread-safe.
#ifndef MLA_CLIENT_MLACTL_REPLAY_RECORDING_H_
#define MLA_CLIENT_MLACTL_REPLAY_RECORDING_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mla/v1/attention.pb.h"
#include "mla/v1/model.pb.h"

namespace mla::mlactl {

class RecordFields;

enum class RecordKind {
  kWeights,
  kOpen,
  kFork,
  kTruncate,
  kRelease,
  kBegin,
  kAttend,
  kEnd,
  kAbort,
  kDone
};

struct RecordedRows {
  uint64_t sequence = 0, start_position = 0;
  uint32_t rows = 0;
};

// Fields that its kind does not have stay at zero.
struct Record {
  RecordKind kind = RecordKind::kDone;
  std::string header;               // its JSON, as in the file
  std::vector<std::byte> payload;   // its tensors, as in the file
  std::string model_id;             // weights, open, fork, begin
  uint64_t sequence = 0, step = 0;  // numbers of the file's own
  uint64_t parent = 0, length = 0;
  uint32_t layer = 0, head_begin = 0, head_count = 0;  // weights; layer: attend too
  std::vector<RecordedRows> rows;                      // begin
  uint32_t row_begin = 0, row_count = 0, head_offset = 0, num_heads = 0;  // attend
  v1::Profile profile = v1::PROFILE_UNSPECIFIED;
  v1::DType dtype = v1::DTYPE_BF16;  // type of kv and q
  // Parts of the payload of an attend.
  std::span<const std::byte> kv, q;
  std::span<const float> o, lse;  // expected
  std::vector<float> expected;    // holds them
  std::vector<uint32_t> committed_rows;
  std::vector<uint64_t> lengths;  // expected
};

class RecordingReader final {
 public:
  static absl::StatusOr<std::unique_ptr<RecordingReader>> Open(const std::string& path);

  const std::string& header_line() const { return header_line_; }  // without its '\n'
  const std::vector<v1::ModelSpec>& models() const { return models_; }
  // Reads the next record. The last one is kDone; bytes after it are an error. The record's spans
  // are valid until the next call with the same record.
  absl::Status Next(Record* record);
  uint64_t records() const { return records_; }
  double fraction_read() const;

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  explicit RecordingReader(std::FILE* file) : file_(file) {}
  absl::Status ReadHeaderLine();
  absl::Status ReadBytes(void* to, uint64_t bytes);
  absl::Status ReadPayload(Record* record);
  absl::Status Parse(Record* record);
  absl::Status ParseWeights(RecordFields* fields, Record* record) const;
  absl::Status ParseSequence(RecordFields* fields, Record* record);
  absl::Status ParseBegin(RecordFields* fields, Record* record);
  absl::Status ParseAttend(RecordFields* fields, Record* record) const;
  const v1::ModelSpec* Model(const std::string& id) const;

  const std::unique_ptr<std::FILE, CloseFile> file_;
  uint64_t file_bytes_ = 0, read_ = 0, records_ = 0;
  bool done_ = false;
  std::string header_line_;
  std::vector<v1::ModelSpec> models_;
  std::map<uint64_t, std::string> sequences_;  // open ones, with their models
  struct OpenStep {
    std::string model_id;
    uint32_t rows = 0;
  };
  std::map<uint64_t, OpenStep> steps_;
};

// Writes a copy of a recording, record by record. A file that was not closed is removed,
// so that no incomplete recording stays.
class RecordingWriter final {
 public:
  static absl::StatusOr<std::unique_ptr<RecordingWriter>> Create(const std::string& path,
                                                                 std::string_view header_line);
  ~RecordingWriter();

  // `parts` make up the payload.
  absl::Status Write(std::string_view header, std::span<const std::span<const std::byte>> parts);
  absl::Status Close();  // reports write errors that were still pending

 private:
  RecordingWriter(std::FILE* file, std::string path) : file_(file), path_(std::move(path)) {}
  absl::Status Fault() const;
  bool WriteBytes(const void* from, uint64_t bytes);

  std::FILE* file_;
  const std::string path_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_REPLAY_RECORDING_H_
