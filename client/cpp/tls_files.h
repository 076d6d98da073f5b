// Keeps the PEM files of TLS connections, and reads them again when they have changed.
//
// gRPC reads certificates when a channel is made and never again. So a connection that is made
// after a change needs a new channel, with the credentials that Current returns then.
//
// Changed files come into use only as a whole: authorities and certificate are PEM, and the key
// belongs to the certificate. While a file is missing, half-written or does not fit the others, the
// last good set stays in use, and each call of Current reads the files again.
//
// Ownership: one owner. Threading: one thread at a time.
#ifndef MLA_CLIENT_CPP_TLS_FILES_H_
#define MLA_CLIENT_CPP_TLS_FILES_H_

#include <grpcpp/security/credentials.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mla::client {

class TlsFiles final {
 public:
  struct Paths {
    std::string ca;         // empty: the system's authorities
    std::string cert, key;  // either both or none; none: this client shows no certificate
  };

  // Reads the files. INVALID_ARGUMENT names the field, which is `prefix` and ca, cert or key, the
  // file and what is wrong with it.
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Open(const Paths& paths,
                                                        const std::string& prefix);

  // Looks at the files, and returns the same object as before unless they have changed to a set
  // that can be used.
  std::shared_ptr<grpc::ChannelCredentials> Current();

 private:
  // Changes with a file: its inode, size, and the nanoseconds of its last change.
  using Mark = std::array<int64_t, 3>;
  using Marks = std::array<Mark, 3>;

  TlsFiles(const Paths& paths, const std::string& prefix) : paths_(paths), prefix_(prefix) {}
  // Returns nullopt if a file is missing.
  std::optional<Marks> MarksNow() const;
  // Reads the files, and makes credentials unless the texts are those in use.
  absl::Status Read();
  absl::Status Check(const grpc::SslCredentialsOptions& ssl) const;
  absl::Status ReadInto(const char* field, const std::string& path, std::string* text) const;
  absl::Status Bad(const char* field, const std::string& path, const std::string& what) const;

  const Paths paths_;
  const std::string prefix_;
  std::optional<Marks> seen_;  // taken before the files in use were read
  grpc::SslCredentialsOptions in_use_;
  std::shared_ptr<grpc::ChannelCredentials> current_;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_TLS_FILES_H_
