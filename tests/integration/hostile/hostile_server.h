// A gRPC server that answers calls with the bytes that a test chooses: invalid messages, too many,
// too large ones, or none.
#ifndef MLA_TESTS_INTEGRATION_HOSTILE_HOSTILE_SERVER_H_
#define MLA_TESTS_INTEGRATION_HOSTILE_HOSTILE_SERVER_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/support/status.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::integration {

struct HostileAnswer {
  std::vector<std::string> messages;            // bytes of the replies
  grpc::Status status;                          // after them
  std::map<std::string, std::string> trailers;  // with the status
  std::map<std::string, std::string> initial;   // metadata that goes before all else
  bool ends = true;                             // false: the call stays open after the messages
  bool reads = true;                            // false: requests are not read
  bool compressed = false;                      // the messages, with gzip
  // Gets what sends the answer, which a test calls once; empty: the answer is sent at once.
  std::function<void(std::function<void()> send)> hold;
};

class HostileServer final {
 public:
  // Listens on a free port of the loopback.
  explicit HostileServer(const std::shared_ptr<grpc::ServerCredentials>& credentials =
                             grpc::InsecureServerCredentials());
  ~HostileServer();

  // From now on answers calls of `method`, for example "/mla.v1.Cache/Import". Other calls are
  // UNIMPLEMENTED.
  void Answer(const std::string& method, HostileAnswer answer);
  int port() const { return port_; }
  std::string target() const;
  // Number of calls of the method so far.
  int calls(const std::string& method) const;

 private:
  class Call;
  class Service final : public grpc::CallbackGenericService {
   public:
    explicit Service(HostileServer* server) : server_(server) {}
    grpc::ServerGenericBidiReactor* CreateReactor(
        grpc::GenericCallbackServerContext* context) override;

   private:
    HostileServer* const server_;
  };

  HostileAnswer Take(const std::string& method);

  mutable Mutex mutex_;
  std::map<std::string, HostileAnswer> answers_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> calls_ ABSL_GUARDED_BY(mutex_);
  Service service_{this};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_HOSTILE_HOSTILE_SERVER_H_
