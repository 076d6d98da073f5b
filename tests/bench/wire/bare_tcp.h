// A TCP connection over loopback without any protocol: as many bytes go and come as an attend has.
// No path over TCP can be faster on the machine.
#ifndef MLA_TESTS_BENCH_WIRE_BARE_TCP_H_
#define MLA_TESTS_BENCH_WIRE_BARE_TCP_H_

#include <vector>

#include "tests/bench/wire/wire_paths.h"
#include "tests/bench/wire/wire_server.h"

namespace mla::bench {

// Serves one connection after the other at shared->bare_port, until the process is ended.
void ServeBareTcp(Shared* shared);

// Both sides sleep while they wait.
class BareTcp final : public Path {
 public:
  BareTcp(const Shared& shared, const Shape& shape);
  ~BareTcp() override;
  void Call(v1::AttendStreamRequest) override {}
  bool commits() const override { return false; }
  void Attend(uint64_t step, uint32_t layer) override;

 private:
  int socket_ = -1;
  std::vector<std::byte> in_memory_, out_memory_;
};

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_BARE_TCP_H_
