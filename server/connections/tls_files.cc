#include "server/connections/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

constexpr size_t kMaxFileBytes = size_t{16} << 20;

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using RevocationList = std::unique_ptr<X509_CRL, Deleter<X509_CRL, X509_CRL_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;
using Bio = std::unique_ptr<BIO, Deleter<BIO, BIO_free_all>>;

// Refuses encrypted keys instead of asking for a password on the terminal.
int NoPassword(char*, int, int, void*) { return -1; }

Bio Reader(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

absl::Status Bad(const char* key, const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(key, ": ", path, ": ", what));
}

absl::Status ReadFile(const char* key, const std::string& path, std::string* text) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Bad(key, path, "cannot be read");
  // In blocks: memory for the largest file would be cleared at every look at each of the files.
  text->clear();
  char block[4096];
  while (text->size() <= kMaxFileBytes && file) {
    file.read(block, sizeof(block));
    text->append(block, static_cast<size_t>(file.gcount()));
  }
  if (file.bad()) return Bad(key, path, "cannot be read");
  if (text->size() > kMaxFileBytes) {
    return Bad(key, path, absl::StrCat("has more than ", kMaxFileBytes, " bytes"));
  }
  return absl::OkStatus();
}

int64_t UnixSeconds(const ASN1_TIME* time) {
  std::tm utc{};
  if (time == nullptr || ASN1_TIME_to_tm(time, &utc) != 1) return 0;
  return timegm(&utc);
}

std::string DateText(int64_t unix_seconds) {
  const std::time_t time = unix_seconds;
  std::tm utc{};
  char text[32] = "";
  if (gmtime_r(&time, &utc) != nullptr) std::strftime(text, sizeof(text), "%FT%TZ", &utc);
  return text;
}

std::vector<Certificate> ParseCertificates(const std::string& text) {
  std::vector<Certificate> certificates;
  const Bio reader = Reader(text);
  while (X509* one = PEM_read_bio_X509(reader.get(), nullptr, NoPassword, nullptr)) {
    certificates.emplace_back(one);
  }
  ERR_clear_error();
  return certificates;
}

std::string NameOf(const X509_NAME* name) {
  unsigned char* der = nullptr;
  const int size = i2d_X509_NAME(const_cast<X509_NAME*>(name), &der);
  std::string text = size > 0 ? std::string(reinterpret_cast<char*>(der), size) : "";
  OPENSSL_free(der);
  return text;
}

// Identifies a certificate by its issuer and serial number.
std::string IssuedBy(const X509_NAME* issuer, const ASN1_INTEGER* serial) {
  unsigned char* der = nullptr;
  const int size = i2d_ASN1_INTEGER(const_cast<ASN1_INTEGER*>(serial), &der);
  std::string key = NameOf(issuer);
  if (size > 0) key.append(reinterpret_cast<char*>(der), static_cast<size_t>(size));
  OPENSSL_free(der);
  return key;
}

absl::Status CheckChain(const Config::Tls& tls, std::time_t now, TlsMaterial* material) {
  const std::vector<Certificate> chain = ParseCertificates(material->cert);
  if (chain.empty()) return Bad("tls.cert", tls.cert, "holds no PEM certificate");
  material->cert_expires = std::numeric_limits<int64_t>::max();
  for (const Certificate& one : chain) {
    const int64_t begins = UnixSeconds(X509_get0_notBefore(one.get()));
    const int64_t expires = UnixSeconds(X509_get0_notAfter(one.get()));
    if (now >= expires) return Bad("tls.cert", tls.cert, "expired at " + DateText(expires));
    if (now < begins) return Bad("tls.cert", tls.cert, "is not valid before " + DateText(begins));
    material->cert_expires = std::min(material->cert_expires, expires);
  }
  const Bio reader = Reader(material->key);
  const PrivateKey key(PEM_read_bio_PrivateKey(reader.get(), nullptr, NoPassword, nullptr));
  ERR_clear_error();
  if (key == nullptr) return Bad("tls.key", tls.key, "holds no unencrypted PEM private key");
  const bool belongs = X509_check_private_key(chain[0].get(), key.get()) == 1;
  ERR_clear_error();
  return belongs ? absl::OkStatus() : Bad("tls.key", tls.key, "does not belong to tls.cert");
}

absl::Status CheckAuthorities(const Config::Tls& tls, std::time_t now,
                              const std::vector<Certificate>& authorities, TlsMaterial* material) {
  if (authorities.empty()) {
    return Bad("tls.client_ca", tls.client_ca, "holds no PEM certificate");
  }
  for (const Certificate& one : authorities) {
    const int64_t expires = UnixSeconds(X509_get0_notAfter(one.get()));
    material->client_ca_expires = std::max(material->client_ca_expires, expires);
  }
  if (now < material->client_ca_expires) return absl::OkStatus();
  return Bad("tls.client_ca", tls.client_ca, "expired at " + DateText(material->client_ca_expires));
}

bool SignedByOne(X509_CRL* list, const std::vector<Certificate>& authorities) {
  return std::any_of(authorities.begin(), authorities.end(), [&](const Certificate& one) {
    return X509_NAME_cmp(X509_get_subject_name(one.get()), X509_CRL_get_issuer(list)) == 0 &&
           X509_CRL_verify(list, X509_get0_pubkey(one.get())) == 1;
  });
}

absl::Status CheckRevocations(const Config::Tls& tls, const std::vector<Certificate>& authorities,
                              TlsMaterial* material) {
  const Bio reader = Reader(material->client_crl);
  int lists = 0;
  while (const RevocationList list{
      PEM_read_bio_X509_CRL(reader.get(), nullptr, NoPassword, nullptr)}) {
    ++lists;
    const bool is_signed = SignedByOne(list.get(), authorities);
    ERR_clear_error();
    if (!is_signed) {
      return Bad("tls.client_crl", tls.client_crl,
                 absl::StrCat("list ", lists, " is not signed by an authority of tls.client_ca"));
    }
    const int64_t next = UnixSeconds(X509_CRL_get0_nextUpdate(list.get()));
    if (material->client_crl_expires == 0 || next < material->client_crl_expires) {
      material->client_crl_expires = next;
    }
    const STACK_OF(X509_REVOKED)* entries = X509_CRL_get_REVOKED(list.get());
    for (int i = 0; i < sk_X509_REVOKED_num(entries); ++i) {
      const X509_REVOKED* entry = sk_X509_REVOKED_value(entries, i);
      material->revoked.insert(
          IssuedBy(X509_CRL_get_issuer(list.get()), X509_REVOKED_get0_serialNumber(entry)));
    }
  }
  ERR_clear_error();
  if (lists == 0) return Bad("tls.client_crl", tls.client_crl, "holds no PEM revocation list");
  return absl::OkStatus();
}

absl::Status ReadAll(const Config::Tls& tls, TlsMaterial* material) {
  absl::Status status = ReadFile("tls.cert", tls.cert, &material->cert);
  if (status.ok()) status = ReadFile("tls.key", tls.key, &material->key);
  if (status.ok()) status = ReadFile("tls.client_ca", tls.client_ca, &material->client_ca);
  if (status.ok() && !tls.client_crl.empty()) {
    status = ReadFile("tls.client_crl", tls.client_crl, &material->client_crl);
  }
  return status;
}

absl::Status Check(const Config::Tls& tls, std::time_t now, TlsMaterial* material) {
  absl::Status status = CheckChain(tls, now, material);
  if (!status.ok()) return status;
  const std::vector<Certificate> authorities = ParseCertificates(material->client_ca);
  status = CheckAuthorities(tls, now, authorities, material);
  if (!status.ok() || tls.client_crl.empty()) return status;
  return CheckRevocations(tls, authorities, material);
}

std::string Contents(const TlsMaterial& material) {
  return absl::StrCat(material.cert, "\n", material.key, "\n", material.client_ca, "\n",
                      material.client_crl);
}

}  // namespace

absl::StatusOr<TlsMaterial> LoadTls(const Config::Tls& tls, std::time_t now) {
  TlsMaterial material;
  absl::Status status = ReadAll(tls, &material);
  if (status.ok()) status = Check(tls, now, &material);
  if (!status.ok()) return status;
  return material;
}

absl::StatusOr<std::shared_ptr<TlsFiles>> TlsFiles::Open(const Config::Tls& tls) {
  MLA_ASSIGN_OR_RETURN(auto material, LoadTls(tls, std::time(nullptr)));
  return std::shared_ptr<TlsFiles>(new TlsFiles(tls, std::move(material)));
}

TlsFiles::TlsFiles(const Config::Tls& tls, TlsMaterial material)
    : tls_(tls),
      current_(std::make_shared<const TlsMaterial>(std::move(material))),
      seen_(Contents(*current_)),
      watcher_([this] { Watch(); }) {}

TlsFiles::~TlsFiles() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  watcher_.join();
}

std::shared_ptr<const TlsMaterial> TlsFiles::current() const {
  const MutexLock lock(mutex_);
  return current_;
}

ReloadStats TlsFiles::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

bool TlsFiles::CertificateExpired() const { return std::time(nullptr) >= current()->cert_expires; }

bool TlsFiles::IsRevoked(const std::string& pem) const {
  std::shared_ptr<const TlsMaterial> material;
  {
    const MutexLock lock(mutex_);
    if (current_->revoked.empty()) return false;
    if (const auto known = verdicts_.find(pem); known != verdicts_.end()) return known->second;
    material = current_;
  }
  const std::vector<Certificate> chain = ParseCertificates(pem);
  const bool revoked =
      chain.empty() || std::any_of(chain.begin(), chain.end(), [&](const Certificate& one) {
        return material->revoked.count(IssuedBy(X509_get_issuer_name(one.get()),
                                                X509_get0_serialNumber(one.get()))) != 0;
      });
  const MutexLock lock(mutex_);
  if (material != current_) return revoked;
  if (verdicts_.size() >= kVerdicts) verdicts_.clear();
  verdicts_[pem] = revoked;
  return revoked;
}

void TlsFiles::LookSoon() {
  const MutexLock lock(mutex_);
  look_ = true;
  changed_.NotifyAll();
}

void TlsFiles::Watch() {
  const auto period = std::chrono::milliseconds(tls_.reload_ms);
  MutexLock lock(mutex_);
  for (;;) {
    changed_.WaitFor(lock, period,
                     [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || look_; });
    if (stop_) return;
    look_ = false;
    lock.Unlock();
    Reload();
    lock.Lock();
  }
}

void TlsFiles::Reload() {
  if (CertificateExpired() && !std::exchange(expiry_logged_, true)) {
    Log(LogLevel::kError, "tls_expired",
        {{"cert", tls_.cert}, {"expired", DateText(current()->cert_expires)}});
  }
  TlsMaterial material;
  absl::Status status = ReadAll(tls_, &material);
  const std::string contents = status.ok() ? Contents(material) : status.ToString();
  const bool changed = std::exchange(seen_, contents) != contents;
  // Refused files may become valid with time.
  if (!changed && this->status().why.empty()) return;
  // Restored files may be in use already.
  const bool in_use = status.ok() && contents == Contents(*current());
  if (status.ok() && !in_use) status = Check(tls_, std::time(nullptr), &material);
  if (!status.ok() && !changed) return;
  if (!status.ok()) {
    Log(LogLevel::kError, "tls_reload_refused",
        {{"why", std::string(status.message())}, {"in_use", "the last good files"}});
    const MutexLock lock(mutex_);
    ++status_.refused;
    status_.why = std::string(status.message());
    return;
  }
  const int64_t expires = in_use ? current()->cert_expires : material.cert_expires;
  {
    const MutexLock lock(mutex_);
    status_.why.clear();
    if (!in_use) {
      ++status_.reloads;
      current_ = std::make_shared<const TlsMaterial>(std::move(material));
      verdicts_.clear();
      expiry_logged_ = false;
    }
  }
  Log(LogLevel::kInfo, "tls_reloaded", {{"cert", tls_.cert}, {"expires", DateText(expires)}});
}

}  // namespace mla::server
