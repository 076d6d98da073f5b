#include "client/mlactl/bench/svg_plot.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace mla::mlactl {
namespace {

constexpr double kWidth = 960, kLeft = 90, kRight = 20, kTop = 40, kBottom = 50, kPlotHeight = 300;
constexpr double kLegendLine = 18;
// Colours that can be told apart with red-green colour blindness; the lines also differ in their
// dashes.
constexpr const char* kColors[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                   "#e69f00", "#56b4e9", "#000000"};
constexpr size_t kColorCount = std::size(kColors);
constexpr const char* kDashes[] = {"none", "6 3", "2 2", "8 3 2 3"};

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

struct Tick {
  double at;  // on the axis, 0..1
  std::string label;
};

// Maps values to positions along an axis.
class Axis {
 public:
  Axis(AxisScale scale, double least, double most) : scale_(scale) {
    if (scale == AxisScale::kLog) {
      low_ = std::floor(std::log10(least));
      high_ = std::max(std::ceil(std::log10(most)), low_ + 1);
    } else if (scale == AxisScale::kPercentile) {
      low_ = 0;
      high_ = std::max(1.0, std::ceil(Nines(most)));
    } else {
      low_ = 0;
      high_ = most > 0 ? most : 1;
    }
  }

  double At(double value) const {
    if (scale_ == AxisScale::kLog) value = value > 0 ? std::log10(value) : low_;
    if (scale_ == AxisScale::kPercentile) value = Nines(value);
    return std::clamp((value - low_) / (high_ - low_), 0.0, 1.0);
  }

  std::vector<Tick> Ticks() const {
    std::vector<Tick> ticks;
    if (scale_ == AxisScale::kLinear) {
      const double step = Step();
      for (int i = 0; i * step <= high_ * 1.0001; ++i) {
        const double value = i * step;
        ticks.push_back({At(value), absl::StrFormat("%g", value)});
      }
      return ticks;
    }
    for (int i = 0; low_ + i <= high_; ++i) {
      const double power = low_ + i;
      const double value =
          scale_ == AxisScale::kLog ? std::pow(10, power) : 1 - std::pow(10, -power);
      ticks.push_back({(power - low_) / (high_ - low_),
                       scale_ == AxisScale::kLog ? absl::StrFormat("%g", value)
                                                 : absl::StrFormat("%.10g %%", 100 * value)});
    }
    return ticks;
  }

 private:
  static double Nines(double quantile) { return -std::log10(std::max(1 - quantile, 1e-9)); }
  // Returns a round number that divides the axis into four to ten parts.
  double Step() const {
    const double power = std::pow(10, std::floor(std::log10(high_)));
    for (const double part : {0.1, 0.2, 0.5, 1.0}) {
      if (high_ / (power * part) <= 10) return power * part;
    }
    return power;
  }

  const AxisScale scale_;
  double low_ = 0, high_ = 1;
};

Axis AxisOf(const Chart& chart, bool x) {
  const AxisScale scale = x ? chart.x_scale : chart.y_scale;
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const PlotLine& line : chart.lines) {
    for (const auto& [x_value, y_value] : line.points) {
      const double value = x ? x_value : y_value;
      // A quantile of 1 does not have a place on an axis of nines.
      if (scale == AxisScale::kPercentile && value >= 1) continue;
      if (value > 0) least = std::min(least, value);
      most = std::max(most, value);
    }
  }
  if (!std::isfinite(least)) least = most = 1;
  return Axis(scale, least, most);
}

class ChartWriter {
 public:
  ChartWriter(const Chart& chart, double top)
      : chart_(chart), top_(top), x_(AxisOf(chart, true)), y_(AxisOf(chart, false)) {}

  void Write(std::string* svg) const {
    absl::StrAppendFormat(svg, "<g role=\"img\" aria-label=\"%s\">\n", Escaped(chart_.title));
    Text(svg, kLeft, top_ + 24, "start", chart_.title, "font-weight=\"bold\"");
    WriteAxes(svg);
    for (size_t i = 0; i < chart_.lines.size(); ++i) WriteLine(svg, i);
    absl::StrAppend(svg, "</g>\n");
  }

  static double Height(const Chart& chart) {
    return kTop + kPlotHeight + kBottom + kLegendLine * static_cast<double>(chart.lines.size());
  }

 private:
  double X(double at) const { return kLeft + at * (kWidth - kLeft - kRight); }
  double Y(double at) const { return top_ + kTop + (1 - at) * kPlotHeight; }

  static void Text(std::string* svg, double x, double y, const char* anchor,
                   const std::string& text, const char* more = "") {
    absl::StrAppendFormat(svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" %s>%s</text>\n", x,
                          y, anchor, more, Escaped(text));
  }
  static void Stroke(std::string* svg, double x1, double y1, double x2, double y2) {
    absl::StrAppendFormat(
        svg, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ccc\"/>\n", x1, y1,
        x2, y2);
  }

  void WriteAxes(std::string* svg) const {
    for (const Tick& tick : x_.Ticks()) {
      Stroke(svg, X(tick.at), Y(0), X(tick.at), Y(1));
      Text(svg, X(tick.at), Y(0) + 16, "middle", tick.label);
    }
    for (const Tick& tick : y_.Ticks()) {
      Stroke(svg, X(0), Y(tick.at), X(1), Y(tick.at));
      Text(svg, X(0) - 6, Y(tick.at) + 4, "end", tick.label);
    }
    Text(svg, X(0.5), Y(0) + 34, "middle", chart_.x_label);
    absl::StrAppendFormat(
        svg,
        "<text transform=\"translate(16 %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
        Y(0.5), Escaped(chart_.y_label));
  }

  void WriteLine(std::string* svg, size_t index) const {
    const PlotLine& line = chart_.lines[index];
    const char* color = kColors[line.color % kColorCount];
    const char* dash = kDashes[line.color / kColorCount % std::size(kDashes)];
    absl::StrAppendFormat(
        svg, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\" stroke-dasharray=\"%s\"",
        color, dash);
    absl::StrAppend(svg, " points=\"");
    for (const auto& [x, y] : line.points) {
      absl::StrAppendFormat(svg, "%.1f,%.1f ", X(x_.At(x)), Y(y_.At(y)));
    }
    absl::StrAppendFormat(svg, "\"><title>%s</title></polyline>\n", Escaped(line.name));
    const double y = Y(0) + kBottom + kLegendLine * static_cast<double>(index);
    absl::StrAppendFormat(svg,
                          "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" "
                          "stroke-width=\"3\" stroke-dasharray=\"%s\"/>\n",
                          kLeft, y, kLeft + 24, y, color, dash);
    Text(svg, kLeft + 32, y + 4, "start", line.name);
  }

  const Chart& chart_;
  const double top_;
  const Axis x_, y_;
};

}  // namespace

std::string RenderSvg(const std::string& title, const std::vector<Chart>& charts) {
  double height = 40;
  for (const Chart& chart : charts) height += ChartWriter::Height(chart);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
      "height=\"%.0f\" font-family=\"sans-serif\" font-size=\"12\">\n<title>%s</title>\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
      "<text x=\"%.0f\" y=\"24\" font-size=\"16\">%s</text>\n",
      kWidth, height, kWidth, height, Escaped(title), kLeft, Escaped(title));
  double top = 36;
  for (const Chart& chart : charts) {
    ChartWriter(chart, top).Write(&svg);
    top += ChartWriter::Height(chart);
  }
  return svg + "</svg>\n";
}

}  // namespace mla::mlactl
