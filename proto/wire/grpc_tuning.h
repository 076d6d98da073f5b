// Settings that both ends of a gRPC connection share; measurements chose them
// (docs/adr/0005-what-a-message-costs.md).
#ifndef MLA_PROTO_WIRE_GRPC_TUNING_H_
#define MLA_PROTO_WIRE_GRPC_TUNING_H_

#include <malloc.h>

#include "absl/synchronization/mutex.h"

namespace mla::wire {

// Bytes that a peer may send on a stream before it hears of a read. It is a whole message of the
// default size, so that large messages need no window updates on their way.
// GRPC_ARG_HTTP2_STREAM_LOOKAHEAD on either end; connections widen it themselves if they measure
// that more is useful.
inline constexpr int kStreamWindowBytes = 4 << 20;

// A process keeps at most this much freed memory at the top of each heap.
inline constexpr int kKeptHeapBytes = 256 << 20;

// Blocks up to this size come from a heap, larger ones straight from the kernel.
inline constexpr int kHeapBlockBytes = 32 << 20;

// Programs that exchange large messages call this once at their start. gRPC receives a message into
// slices of 64 KiB, which come from the heap and return to it with the message. By default the C
// library hands the pages back to the kernel each time and takes page faults for the next message,
// which is half the time of a message of some megabytes.
inline void KeepMessageMemory() {
#if defined(__GLIBC__)
  mallopt(M_TRIM_THRESHOLD, kKeptHeapBytes);
  // Setting one threshold ends the adaptation of the other, so that one is set to the upper end of
  // its range. Otherwise every block over 128 KiB would be mapped and faulted in again each time.
  mallopt(M_MMAP_THRESHOLD, kHeapBlockBytes);
#endif
}

// Programs call this once at their start. Debian's Abseil checks the order of locks: each lock and
// unlock of gRPC's mutexes then looks two tables up, which is 3 % of a stream of large messages.
// The order of gRPC's locks is checked by its own tests.
inline void SkipChecksOfLockOrder() {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_GRPC_TUNING_H_
