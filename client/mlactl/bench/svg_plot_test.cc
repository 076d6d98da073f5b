#include "client/mlactl/bench/svg_plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <string>
#include <vector>

namespace mla::mlactl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Coordinates of the n-th line that was drawn.
std::vector<std::pair<double, double>> Points(const std::string& svg, size_t n) {
  const std::regex polyline("points=\"([^\"]*)\"");
  auto found = std::sregex_iterator(svg.begin(), svg.end(), polyline);
  std::advance(found, n);
  const std::string text = (*found)[1];
  std::vector<std::pair<double, double>> points;
  const std::regex pair("([-0-9.]+),([-0-9.]+)");
  for (auto it = std::sregex_iterator(text.begin(), text.end(), pair); it != std::sregex_iterator();
       ++it) {
    points.emplace_back(std::stod((*it)[1]), std::stod((*it)[2]));
  }
  return points;
}

// Tags close in the order that they were opened, and nothing is left open.
bool IsBalanced(const std::string& svg) {
  std::vector<std::string> open;
  const std::regex tag("<(/?)([a-z]+)([^>]*?)(/?)>");
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), tag); it != std::sregex_iterator();
       ++it) {
    if ((*it)[1].length() > 0) {
      if (open.empty() || open.back() != (*it)[2]) return false;
      open.pop_back();
    } else if ((*it)[4].length() == 0) {
      open.push_back((*it)[2]);
    }
  }
  return open.empty();
}

TEST(SvgPlotTest, LinearAxesAreProportional) {
  Chart chart;
  chart.lines = {{0, "line", {{0, 0}, {5, 50}, {10, 100}}}};
  const std::string svg = RenderSvg("t", {chart});
  const auto points = Points(svg, 0);
  ASSERT_EQ(points.size(), 3u);
  EXPECT_NEAR(points[1].first, (points[0].first + points[2].first) / 2, 0.11);
  EXPECT_NEAR(points[1].second, (points[0].second + points[2].second) / 2, 0.11);
  EXPECT_LT(points[2].second, points[0].second);  // larger is higher
  EXPECT_TRUE(IsBalanced(svg));
}

TEST(SvgPlotTest, LogAxesGiveEachDecadeTheSameRoom) {
  Chart chart;
  chart.y_scale = AxisScale::kLog;
  chart.lines = {{0, "line", {{0, 1}, {1, 10}, {2, 100}, {3, 1000}}}};
  const auto points = Points(RenderSvg("t", {chart}), 0);
  ASSERT_EQ(points.size(), 4u);
  const double decade = points[0].second - points[1].second;
  EXPECT_NEAR(points[1].second - points[2].second, decade, 0.11);
  EXPECT_NEAR(points[2].second - points[3].second, decade, 0.11);
}

TEST(SvgPlotTest, PercentilesSpreadByNines) {
  Chart chart;
  chart.x_scale = AxisScale::kPercentile;
  chart.lines = {{0, "line", {{0, 1}, {0.9, 2}, {0.99, 3}, {0.999, 4}, {1, 5}}}};
  const std::string svg = RenderSvg("t", {chart});
  const auto points = Points(svg, 0);
  ASSERT_EQ(points.size(), 5u);
  const double nine = points[1].first - points[0].first;
  EXPECT_GT(nine, 50);
  EXPECT_NEAR(points[2].first - points[1].first, nine, 0.11);
  EXPECT_NEAR(points[3].first - points[2].first, nine, 0.11);
  EXPECT_NEAR(points[4].first, points[3].first, 0.11);  // the end of the axis
  EXPECT_THAT(svg, HasSubstr(">99.9 %<"));
}

TEST(SvgPlotTest, NamesAreEscapedAndEveryLineIsInTheLegend) {
  Chart chart;
  chart.title = "a < b & \"c\"";
  for (size_t i = 0; i < 12; ++i) {
    chart.lines.push_back({i, "run " + std::to_string(i) + " <x>", {{0, 1}, {1, 2}}});
  }
  const std::string svg = RenderSvg("title", {chart, chart});
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; &quot;c&quot;"));
  EXPECT_THAT(svg, Not(HasSubstr("<x>")));
  EXPECT_THAT(svg, HasSubstr(">run 11 &lt;x&gt;</text>"));
  EXPECT_TRUE(IsBalanced(svg));
  const std::regex style("<polyline fill=\"none\" stroke=\"([^\"]+)\"[^>]*dasharray=\"([^\"]+)\"");
  std::set<std::pair<std::string, std::string>> styles;
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), style); it != std::sregex_iterator();
       ++it) {
    styles.emplace((*it)[1], (*it)[2]);
  }
  EXPECT_EQ(styles.size(), 12u);
}

TEST(SvgPlotTest, OddDataStaysInsideTheFrame) {
  const std::vector<std::vector<std::pair<double, double>>> cases = {
      {}, {{0, 0}}, {{0, 0}, {0, 0}}, {{1, 1e-9}, {2, 1e12}}, {{1, 5}}};
  for (const auto& points : cases) {
    for (const AxisScale scale : {AxisScale::kLinear, AxisScale::kLog, AxisScale::kPercentile}) {
      Chart chart;
      chart.x_scale = chart.y_scale = scale;
      chart.lines = {{0, "line", points}};
      const std::string svg = RenderSvg("t", {chart});
      EXPECT_THAT(svg, Not(HasSubstr("nan")));
      EXPECT_THAT(svg, Not(HasSubstr("inf")));
      for (const auto& [x, y] : Points(svg, 0)) {
        EXPECT_GE(x, 0);
        EXPECT_LE(x, 960);
        EXPECT_GE(y, 0);
        EXPECT_LE(y, 460);
      }
      EXPECT_LT(svg.size(), 20000u);
    }
  }
  EXPECT_TRUE(IsBalanced(RenderSvg("nothing", {})));
}

}  // namespace
}  // namespace mla::mlactl
