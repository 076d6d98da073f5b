#include "client/mlactl/cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace mla::mlactl {
namespace {

constexpr size_t kBarWidth = 20;
constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr auto kPlainLine = std::chrono::seconds(5);

// A longer line would wrap, and only its last part would be redrawn.
size_t Columns(std::FILE* stream) {
  winsize size{};
  return ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(std::FILE* stream, bool quiet)
    : stream_(stream), quiet_(quiet), terminal_(isatty(fileno(stream)) != 0) {}

Progress::~Progress() { Clear(); }

std::string Progress::Line(const std::string& phase, double fraction,
                           const std::string& detail) const {
  std::string line = phase;
  if (fraction >= 0) {
    const double shown = std::clamp(fraction, 0.0, 1.0);
    const auto full = static_cast<size_t>(shown * kBarWidth);
    if (terminal_) {
      absl::StrAppend(&line, "  [", std::string(full, '#'), std::string(kBarWidth - full, '.'),
                      "]");
    }
    absl::StrAppendFormat(&line, " %3.0f %%", 100 * shown);
  }
  if (!detail.empty()) absl::StrAppend(&line, "  ", detail);
  return line;
}

void Progress::Show(const std::string& phase, double fraction, const std::string& detail) {
  if (quiet_) return;
  const MutexLock lock(mutex_);
  const Clock::time_point now = Clock::now();
  const bool changed = phase != phase_;
  if (!changed && now - last_ < (terminal_ ? Clock::duration(kRedraw) : kPlainLine)) return;
  phase_ = phase;
  last_ = now;
  std::string line = Line(phase, fraction, detail);
  if (terminal_) {
    line.resize(std::min(line.size(), Columns(stream_) - 1));
    std::fprintf(stream_, "\r\x1b[K%s", line.c_str());
    drawn_ = true;
  } else {
    std::fprintf(stream_, "%s\n", line.c_str());
  }
  std::fflush(stream_);
}

void Progress::Clear() {
  const MutexLock lock(mutex_);
  if (!drawn_) return;
  std::fputs("\r\x1b[K", stream_);
  std::fflush(stream_);
  drawn_ = false;
}

}  // namespace mla::mlactl
