// Draws charts as SVG text: lines over a linear or logarithmic axis, a legend, and titles and
// descriptions for screen readers. The text has neither scripts nor embedded fonts.
#ifndef MLA_CLIENT_MLACTL_BENCH_SVG_PLOT_H_
#define MLA_CLIENT_MLACTL_BENCH_SVG_PLOT_H_

#include <string>
#include <utility>
#include <vector>

namespace mla::mlactl {

enum class AxisScale {
  kLinear,
  kLog,  // values below the smallest positive one are drawn at its place
  // A quantile 0..1 is placed by its number of nines, so that 0.9, 0.99 and 0.999 are equally far
  // apart.
  kPercentile,
};

struct PlotLine {
  size_t color = 0;  // lines with the same number share a colour and a legend entry
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y
};

struct Chart {
  std::string title, x_label, y_label;
  AxisScale x_scale = AxisScale::kLinear, y_scale = AxisScale::kLinear;
  std::vector<PlotLine> lines;
};

// Draws the charts one above the other.
std::string RenderSvg(const std::string& title, const std::vector<Chart>& charts);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_SVG_PLOT_H_
