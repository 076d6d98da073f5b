// A relay between clients and a server that can forget its connections: what they send then
// vanishes, as after the restart of a firewall. New connections work. It can also end them, and
// refuse the next ones, as a server that is away.
#ifndef MLA_TESTS_INTEGRATION_RPC_CLIENTS_FORGETFUL_RELAY_H_
#define MLA_TESTS_INTEGRATION_RPC_CLIENTS_FORGETFUL_RELAY_H_

#include <atomic>
#include <cstddef>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mla::integration {

// Threading: any thread.
class ForgetfulRelay final {
 public:
  // Relays to a port of the loopback, from a free one.
  explicit ForgetfulRelay(int server_port);
  ~ForgetfulRelay();
  ForgetfulRelay(const ForgetfulRelay&) = delete;
  ForgetfulRelay& operator=(const ForgetfulRelay&) = delete;

  std::string target() const;
  // Forgets all connections that exist now.
  void Forget();
  // Ends all connections that exist now, and each of the next `attempts` as soon as it comes.
  void Refuse(int attempts);
  // From now on new connections go to another port, as a balancer's may.
  void To(int server_port) { server_port_ = server_port; }
  // How many connections are still to be ended.
  int refusals_left() const { return refusals_left_; }

 private:
  struct Link {
    int client, server;
    bool known = true;
  };

  void Run();
  // Passes on what has come. Returns false at the connection's end.
  static bool Carry(int from, int to, bool known);

  std::atomic<int> server_port_;
  int listener_ = -1, port_ = 0;
  std::atomic<bool> stop_{false}, forget_{false}, end_{false};
  std::atomic<int> refusals_left_{0};
  std::vector<Link> links_;
  std::thread thread_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_RPC_CLIENTS_FORGETFUL_RELAY_H_
