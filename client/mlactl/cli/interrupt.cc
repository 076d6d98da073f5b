#include "client/mlactl/cli/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include "client/mlactl/cli/common.h"

namespace mla::mlactl {
namespace {

std::atomic<bool> g_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "stored by a signal handler");

void Catch(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace

void ExitOnInterrupts() {
  Catch([](int) { _exit(kInterrupted); });
}

const std::atomic<bool>& CatchInterrupts() {
  static const bool kCaught = [] {
    Catch([](int) { g_interrupted.store(true); });
    return true;
  }();
  (void)kCaught;
  return g_interrupted;
}

}  // namespace mla::mlactl
