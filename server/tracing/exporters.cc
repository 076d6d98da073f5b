#include "server/tracing/exporters.h"

#include <fcntl.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "otlp/trace_service.grpc.pb.h"

namespace mla::server {
namespace {

class OtlpExporter final : public SpanExporter {
 public:
  OtlpExporter(const std::string& target, TraceResource resource)
      : resource_(std::move(resource)),
        stub_(otlp::TraceService::NewStub(
            grpc::CreateChannel(target, grpc::InsecureChannelCredentials()))) {}

  absl::Status Export(const std::vector<TraceSpan>& spans) override {
    otlp::ExportTraceServiceRequest request;
    otlp::ExportTraceServiceResponse response;
    ToOtlp(resource_, spans, &request);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::milliseconds(kOtlpTimeoutMs));
    const grpc::Status status = stub_->Export(&context, request, &response);
    if (status.ok()) return absl::OkStatus();
    return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
  }

 private:
  const TraceResource resource_;
  const std::unique_ptr<otlp::TraceService::Stub> stub_;
};

class JsonExporter final : public SpanExporter {
 public:
  JsonExporter(int file, int64_t max_bytes, TraceResource resource)
      : file_(file), max_bytes_(max_bytes), resource_(std::move(resource)) {}
  ~JsonExporter() override { close(file_); }

  absl::Status Export(const std::vector<TraceSpan>& spans) override {
    std::string text;
    for (const TraceSpan& span : spans) absl::StrAppend(&text, ToJsonLine(resource_, span), "\n");
    struct stat now {};
    if (fstat(file_, &now) != 0 || now.st_size + static_cast<int64_t>(text.size()) > max_bytes_) {
      return absl::ResourceExhaustedError("the file of traces is full");
    }
    const ssize_t written = write(file_, text.data(), text.size());
    if (written == static_cast<ssize_t>(text.size())) return absl::OkStatus();
    const std::string why = written < 0 ? std::strerror(errno) : "no room for all lines";
    // A full disk has taken a part of the lines; the next ones must not go on in a line that is
    // cut.
    if (written > 0 && !RemoveLast(written)) {
      return absl::UnavailableError(absl::StrCat("truncate: ", std::strerror(errno)));
    }
    return absl::UnavailableError(absl::StrCat("write: ", why));
  }

 private:
  // Removes the bytes of the last write. They stay if the file does not end with them: another
  // server may have appended its lines, or a rotation may have cut the file.
  bool RemoveLast(ssize_t written) {
    const off_t end = lseek(file_, 0, SEEK_CUR);  // where the write has ended, in spite of O_APPEND
    struct stat now {};
    if (end < written || fstat(file_, &now) != 0) return false;
    return now.st_size != end || ftruncate(file_, end - written) == 0;
  }

  const int file_;
  const int64_t max_bytes_;
  const TraceResource resource_;
};

}  // namespace

std::unique_ptr<SpanExporter> MakeOtlpExporter(const std::string& target, TraceResource resource) {
  return std::make_unique<OtlpExporter>(target, std::move(resource));
}

absl::StatusOr<std::unique_ptr<SpanExporter>> MakeJsonExporter(const std::string& path,
                                                               int64_t max_bytes,
                                                               TraceResource resource) {
  const int file = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);
  if (file < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("tracing.file: cannot open ", path, ": ", std::strerror(errno)));
  }
  struct stat is {};
  if (fstat(file, &is) != 0 || !S_ISREG(is.st_mode)) {
    close(file);
    return absl::FailedPreconditionError(
        absl::StrCat("tracing.file: ", path, " is not an ordinary file"));
  }
  return std::make_unique<JsonExporter>(file, max_bytes, std::move(resource));
}

}  // namespace mla::server
