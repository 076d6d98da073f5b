#include "client/cpp/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::client {
namespace {

// The most that a bundle of authorities may have. A path may name any file, /dev/zero for one.
constexpr size_t kMostFileBytes = size_t{16} << 20;

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;
using Bio = std::unique_ptr<BIO, Deleter<BIO, BIO_free_all>>;

// Refuses encrypted keys, because OpenSSL would ask for a password on the terminal.
int NoPassword(char*, int, int, void*) { return -1; }

Bio Reader(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Returns the first certificate of a PEM text, or null if it has none.
Certificate FirstCertificate(const std::string& text) {
  const Bio reader = Reader(text);
  Certificate first(PEM_read_bio_X509(reader.get(), nullptr, NoPassword, nullptr));
  ERR_clear_error();
  return first;
}

PrivateKey KeyOf(const std::string& text) {
  const Bio reader = Reader(text);
  PrivateKey key(PEM_read_bio_PrivateKey(reader.get(), nullptr, NoPassword, nullptr));
  ERR_clear_error();
  return key;
}

bool BelongTogether(const X509* certificate, const EVP_PKEY* key) {
  const bool fit = X509_check_private_key(certificate, key) == 1;
  ERR_clear_error();
  return fit;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsFiles>> TlsFiles::Open(const Paths& paths,
                                                         const std::string& prefix) {
  std::unique_ptr<TlsFiles> files(new TlsFiles(paths, prefix));
  files->seen_ = files->MarksNow();
  MLA_RETURN_IF_ERROR(files->Read());
  return files;
}

std::shared_ptr<grpc::ChannelCredentials> TlsFiles::Current() {
  const std::optional<Marks> now = MarksNow();
  if (!now || now == seen_) return current_;
  // A set that cannot be used is not remembered: it may be one that is still being written.
  if (Read().ok()) seen_ = now;
  return current_;
}

std::optional<TlsFiles::Marks> TlsFiles::MarksNow() const {
  constexpr int64_t kNanos = 1'000'000'000;
  Marks marks{};
  size_t place = 0;
  for (const std::string* path : {&paths_.ca, &paths_.cert, &paths_.key}) {
    Mark& mark = marks[place++];
    if (path->empty()) continue;
    struct stat about {};
    if (stat(path->c_str(), &about) != 0) return std::nullopt;
    mark = {static_cast<int64_t>(about.st_ino), static_cast<int64_t>(about.st_size),
            about.st_mtim.tv_sec * kNanos + about.st_mtim.tv_nsec};
  }
  return marks;
}

absl::Status TlsFiles::Read() {
  grpc::SslCredentialsOptions ssl;
  MLA_RETURN_IF_ERROR(ReadInto("ca", paths_.ca, &ssl.pem_root_certs));
  MLA_RETURN_IF_ERROR(ReadInto("cert", paths_.cert, &ssl.pem_cert_chain));
  MLA_RETURN_IF_ERROR(ReadInto("key", paths_.key, &ssl.pem_private_key));
  MLA_RETURN_IF_ERROR(Check(ssl));
  // Files that are written again with the same text do not cost a connection.
  if (current_ != nullptr && ssl.pem_root_certs == in_use_.pem_root_certs &&
      ssl.pem_cert_chain == in_use_.pem_cert_chain &&
      ssl.pem_private_key == in_use_.pem_private_key) {
    return absl::OkStatus();
  }
  current_ = grpc::SslCredentials(ssl);
  in_use_ = std::move(ssl);
  return absl::OkStatus();
}

absl::Status TlsFiles::Check(const grpc::SslCredentialsOptions& ssl) const {
  if (!paths_.ca.empty() && FirstCertificate(ssl.pem_root_certs) == nullptr) {
    return Bad("ca", paths_.ca, "holds no PEM certificate");
  }
  if (paths_.cert.empty() && paths_.key.empty()) return absl::OkStatus();
  const Certificate certificate = FirstCertificate(ssl.pem_cert_chain);
  if (certificate == nullptr) return Bad("cert", paths_.cert, "holds no PEM certificate");
  const PrivateKey key = KeyOf(ssl.pem_private_key);
  if (key == nullptr) return Bad("key", paths_.key, "holds no unencrypted PEM private key");
  if (!BelongTogether(certificate.get(), key.get())) {
    return Bad("key", paths_.key, absl::StrCat("does not belong to ", prefix_, "cert"));
  }
  return absl::OkStatus();
}

absl::Status TlsFiles::ReadInto(const char* field, const std::string& path,
                                std::string* text) const {
  if (path.empty()) return absl::OkStatus();
  std::ifstream file(path, std::ios::binary);
  if (!file) return Bad(field, path, "cannot be read");
  char block[4096];
  while (text->size() <= kMostFileBytes && (file.read(block, sizeof(block)) || file.gcount() > 0)) {
    text->append(block, static_cast<size_t>(file.gcount()));
  }
  if (file.bad()) return Bad(field, path, "cannot be read");
  if (text->size() <= kMostFileBytes) return absl::OkStatus();
  return Bad(field, path, absl::StrCat("has more than ", kMostFileBytes, " bytes"));
}

absl::Status TlsFiles::Bad(const char* field, const std::string& path,
                           const std::string& what) const {
  return absl::InvalidArgumentError(absl::StrCat(prefix_, field, ": ", path, ": ", what));
}

}  // namespace mla::client
