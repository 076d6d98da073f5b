// Waits for a word in memory that two processes share, by the kernel's futex, not private.
#ifndef MLA_PROTO_WIRE_FUTEX_H_
#define MLA_PROTO_WIRE_FUTEX_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <ctime>

namespace mla::wire {

// Sleeps while `*word` equals `value`, for `nanos` at most; may return early.
inline void FutexWait(uint32_t* word, uint32_t value, int64_t nanos) {
  const timespec timeout{static_cast<time_t>(nanos / 1'000'000'000),
                         static_cast<long>(nanos % 1'000'000'000)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

inline void FutexWake(uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Tells the processor that this is a spinning loop.
inline void SpinPause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_FUTEX_H_
