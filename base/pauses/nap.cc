#include "base/pauses/nap.h"

#include <sys/prctl.h>

#include <thread>

namespace mla {

void Nap(std::chrono::nanoseconds waited) {
  // A system that refuses it ends sleeps late, as it does without the call.
  [[maybe_unused]] thread_local const int asked = prctl(PR_SET_TIMERSLACK, 1UL);
  std::this_thread::sleep_for(std::chrono::nanoseconds(NapNanos(waited.count())));
}

}  // namespace mla
