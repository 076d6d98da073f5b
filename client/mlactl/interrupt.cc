#include "client/mlactl/interrupt.h"

#include <signal.h>

namespace mla::mlactl {
namespace {

std::atomic<bool> g_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "stored by a signal handler");

}  // namespace

const std::atomic<bool>& CatchInterrupts() {
  struct sigaction action {};
  action.sa_handler = [](int) { g_interrupted.store(true); };
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return g_interrupted;
}

}  // namespace mla::mlactl
