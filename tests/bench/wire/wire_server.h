// The serving half of wire_benchmark: the product's transport and engine over a backend that
// computes nothing, and bare gRPC methods without any logic.
#ifndef MLA_TESTS_BENCH_WIRE_WIRE_SERVER_H_
#define MLA_TESTS_BENCH_WIRE_WIRE_SERVER_H_

#include <atomic>
#include <cstdint>
#include <string>

namespace mla::bench {

// DeepSeek-V3's attention, as both processes know it.
inline constexpr uint32_t kLayers = 61, kHeads = 128, kLora = 512, kRope = 64, kNope = 128,
                          kV = 128;
inline constexpr char kModel[] = "v3";
inline constexpr int64_t kMessageBytes = int64_t{64} << 20;
inline constexpr uint32_t kLongestSpinMicros = 1'000'000;
inline constexpr char kBareStream[] = "/bench.Bare/Stream";
inline constexpr char kBareUnary[] = "/bench.Bare/Unary";

// Lies in memory that the processes share. The server writes it, except `stop`, `spin_us`, `touch`
// and `in_place`.
struct Shared {
  std::atomic<int32_t> ready{0}, stock_ready{0};
  std::atomic<int32_t> tcp_port{0}, bare_port{0};
  std::atomic<int32_t> stop{0};
  std::atomic<int32_t> spin_us{0};  // of the thread that polls the streams
  int32_t poll_threads = 4;         // before Serve
  int32_t copy_threads = 1;         // before Serve
  int32_t trace_every = 0;          // before Serve: one of this many steps is traced; 0: no tracer
  // N > 0: the receiver of tensor bytes reads each once and the sender writes each once, with one
  // thread (1) or with `touch_threads` (more).
  std::atomic<int32_t> touch{0};
  int32_t touch_threads = 1;  // before Serve
  // Streams that begin while this is 0 gather their queries into staging memory, as for a device.
  // Otherwise the backend reads them in place, as a CPU backend does.
  std::atomic<int32_t> in_place{1};
  std::atomic<uint64_t> copied_bytes{0};
  std::atomic<int64_t> allocations{0};  // of the whole process
};

// Serves unix:`folder`/s and the listener `folder`/s.shm until shared->stop, with a model of
// `layers` layers.
void Serve(const std::string& folder, Shared* shared, uint32_t layers = kLayers);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_WIRE_SERVER_H_
