// Reads the PEM files of mutual TLS, checks them as a whole, and looks for changes while serving.
//
// A set of files is taken into use only if everything in it can be used: the certificate chain is
// PEM and valid today, and the key belongs to it. The authorities are PEM and one of them is valid
// today, and one of the authorities signed each revocation list. Otherwise the last good set stays
// in use, and Status gives the reason.
//
// Ownership: shared with the gRPC credentials that use it. Threading: all methods from any thread;
// its own thread watches the files.
#ifndef MLA_SERVER_CONNECTIONS_TLS_FILES_H_
#define MLA_SERVER_CONNECTIONS_TLS_FILES_H_

#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "server/config/config.h"

namespace mla::server {

// A checked set of files. Immutable.
struct TlsMaterial {
  std::string cert, key, client_ca;  // PEM
  std::string client_crl;            // PEM; empty: none
  std::set<std::string> revoked;     // IssuedBy keys of revoked certificates
  // These are Unix seconds. The first expiry in the server's chain, the last expiry of the
  // authorities, and the first time at which a revocation list should have been replaced (0 without
  // lists).
  int64_t cert_expires = 0, client_ca_expires = 0, client_crl_expires = 0;
};

// Reads and checks all files. INVALID_ARGUMENT names the key, the file and the fault. REQUIRES:
// tls.cert, tls.key and tls.client_ca are set.
absl::StatusOr<TlsMaterial> LoadTls(const Config::Tls& tls, std::time_t now);

class TlsFiles final {
 public:
  // Fails like LoadTls.
  static absl::StatusOr<std::shared_ptr<TlsFiles>> Open(const Config::Tls& tls);
  ~TlsFiles();
  TlsFiles(const TlsFiles&) = delete;
  TlsFiles& operator=(const TlsFiles&) = delete;

  std::shared_ptr<const TlsMaterial> current() const;
  ReloadStats status() const;
  bool CertificateExpired() const;
  // Looks at the files at once instead of after tls.reload_ms. Returns before it has.
  void LookSoon();

  // Returns true if a certificate of `pem` (one or several) is on a revocation list in use, or
  // cannot be read while there is such a list.
  bool IsRevoked(const std::string& pem) const;

 private:
  TlsFiles(const Config::Tls& tls, TlsMaterial material);
  void Watch();
  void Reload();

  // At most this number of results of IsRevoked is kept; when it is reached, all are dropped.
  static constexpr size_t kVerdicts = 1024;

  const Config::Tls tls_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::shared_ptr<const TlsMaterial> current_ ABSL_GUARDED_BY(mutex_);
  mutable std::map<std::string, bool> verdicts_
      ABSL_GUARDED_BY(mutex_);  // by the certificate's PEM; valid for the lists in use
  ReloadStats status_ ABSL_GUARDED_BY(mutex_);
  std::string seen_;  // the contents of the files when they were last read
  bool expiry_logged_ = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool look_ ABSL_GUARDED_BY(mutex_) = false;  // LookSoon was called
  std::thread watcher_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONNECTIONS_TLS_FILES_H_
