// Draws reports of `mlactl bench` by mlactl-plot (mlactl_plot.py), a program that needs Python and
// matplotlib.
#ifndef MLA_CLIENT_MLACTL_BENCH_PLOTTER_H_
#define MLA_CLIENT_MLACTL_BENCH_PLOTTER_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mla::mlactl {

// Threading: any thread. Both calls block until mlactl-plot has ended.
class Plotter final {
 public:
  // Looks for mlactl-plot next to this program and then in PATH, and asks it whether it can draw to
  // `file`. Otherwise fails with its message, so that no load runs for a picture that cannot be
  // drawn.
  static absl::StatusOr<Plotter> Find(std::string file);

  // Draws a report, as `mlactl bench --json` prints it, to the file, whose content it replaces.
  absl::Status Draw(const std::string& report) const;

 private:
  Plotter(std::string program, std::string file)
      : program_(std::move(program)), file_(std::move(file)) {}

  std::string program_, file_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_PLOTTER_H_
