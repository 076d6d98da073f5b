// Opens a command ring over UCX for wire_benchmark: with a relay of its own, without the gRPC call
// that a session makes for it.
#ifndef MLA_TESTS_BENCH_WIRE_UCX_PATH_H_
#define MLA_TESTS_BENCH_WIRE_UCX_PATH_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "client/cpp/ucx/ucx_memory.h"

namespace mla::bench {

struct UcxPathOptions {
  std::string transports;  // as of UCX_TLS
  bool puts = false;
  bool batches = true;                // entries that are submitted together travel together
  std::chrono::microseconds spin{0};  // of both sides
  int relay_cpu = -1, own_cpu = -1;   // of the relay, and of the calling thread; -1: any
};

// `listener` is the path of the server's listener for shared memory, `bytes` the size of the arena.
// This process's program must be a relay if its first argument is
// server::kRelayCommand. Failures end the program.
std::unique_ptr<client::UcxMemory> OpenUcxRing(const std::string& listener, uint64_t bytes,
                                               const UcxPathOptions& path);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_UCX_PATH_H_
