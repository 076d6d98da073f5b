// Keys and certificates, which tests make with the openssl command at run time.
#ifndef MLA_TESTS_INTEGRATION_HAND_OVER_AUTHORITY_H_
#define MLA_TESTS_INTEGRATION_HAND_OVER_AUTHORITY_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/integration/test_server.h"

namespace mla::integration {

// A folder of keys and certificates.
class Authority final {
 public:
  Authority() {
    MakeCa("ca", "Test CA");
    MakeCa("other", "Another CA");
    Make("server", "ca", "/CN=localhost", "DNS:localhost,IP:127.0.0.1", 30);
    Make("red", "ca", "/CN=ignored", "DNS:red", 30);
    Make("alias", "ca", "/CN=blue", "DNS:red,DNS:blue", 30);
    Make("blue", "ca", "/CN=blue", "", 30);
    Make("nameless", "ca", "/O=none", "", 30);
    Make("foreign", "other", "/CN=red", "DNS:red", 30);
    Make("expired", "ca", "/CN=red", "DNS:red", -1);
  }

  std::string File(const std::string& name) const { return folder_.File(name); }

  client::ClientOptions As(const std::string& name) const {
    client::ClientOptions options;
    options.tls_ca = File("ca.pem");
    options.tls_cert = File(name + ".pem");
    options.tls_key = File(name + ".key");
    options.tls_server_name = "localhost";
    options.call_timeout_ms = 3000;
    return options;
  }

  // Makes NAME.pem for the key of `name`, valid for `seconds` from now.
  void MakeShort(const std::string& name, int seconds) {
    std::ofstream(File("ca.cnf")) << Config();
    std::ofstream(File("ca.index"), std::ios::app);
    std::ofstream(File("ca.serial")) << "01\n";
    const std::time_t now = std::time(nullptr);
    const auto date = [](std::time_t time) {
      char text[32];
      std::strftime(text, sizeof(text), "%y%m%d%H%M%SZ", std::gmtime(&time));
      return std::string(text);
    };
    Run(absl::StrCat("openssl ca -batch -notext -rand_serial -config ", File("ca.cnf"), " -in ",
                     File(name), ".csr -out ", File(name), ".pem -startdate ", date(now - 60),
                     " -enddate ", date(now + seconds)));
  }

  // Writes NAME.crl: the certificates of `names` are revoked by `ca`.
  void Revoke(const std::string& crl, const std::string& ca,
              const std::vector<std::string>& names) {
    std::ofstream(File("ca.cnf")) << Config();
    std::ofstream(File("ca.index"), std::ios::trunc);
    const std::string options = absl::StrCat(" -config ", File("ca.cnf"), " -cert ", File(ca),
                                             ".pem -keyfile ", File(ca), ".key");
    for (const std::string& name : names) {
      Run(absl::StrCat("openssl ca", options, " -revoke ", File(name), ".pem"));
    }
    Run(absl::StrCat("openssl ca", options, " -gencrl -crldays 30 -out ", File(crl), ".new && mv ",
                     File(crl), ".new ", File(crl)));
  }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(File(name), std::ios::trunc) << text;
  }
  std::string Read(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(File(name)).rdbuf();
    return text.str();
  }

  // Replaces NAME.pem and NAME.key.
  void Make(const std::string& name, const std::string& ca, const std::string& subject,
            const std::string& san, int days) {
    const std::string file = File(name);
    Run(absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ",
                     file, ".new.key -out ", file, ".csr -subj '", subject, "'"));
    std::ofstream(file + ".ext") << (san.empty() ? "" : "subjectAltName=" + san + "\n");
    // Only `openssl ca` can set a validity in the past; `x509` counts days from now.
    Run(absl::StrCat("openssl x509 -req -in ", file, ".csr -CA ", File(ca), ".pem -CAkey ",
                     File(ca), ".key -CAcreateserial -days ", days, " -extfile ", file,
                     ".ext -out ", file, ".new.pem"));
    Run(absl::StrCat("mv ", file, ".new.key ", file, ".key && mv ", file, ".new.pem ", file,
                     ".pem"));
  }

 private:
  std::string Config() const {
    return absl::StrCat("[ca]\ndefault_ca=d\n[d]\ndatabase=", File("ca.index"),
                        "\nserial=", File("ca.serial"), "\nnew_certs_dir=", folder_.path(),
                        "\ncertificate=", File("ca.pem"), "\nprivate_key=", File("ca.key"),
                        "\ndefault_md=sha256\nunique_subject=no\npolicy=p\n[p]\n"
                        "commonName=optional\n");
  }
  static void Run(const std::string& command) {
    ASSERT_EQ(std::system((command + " 2>/dev/null").c_str()), 0) << command;
  }
  void MakeCa(const std::string& name, const std::string& subject) {
    Run(absl::StrCat(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ", File(name),
        ".key -out ", File(name), ".pem -days 30 -subj '/CN=", subject, "'"));
  }
  TempFolder folder_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_HAND_OVER_AUTHORITY_H_
