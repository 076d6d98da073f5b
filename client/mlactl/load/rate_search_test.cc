#include "client/mlactl/load/rate_search.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace mla::mlactl {
namespace {

// Runs a search for a bound that holds up to `limit`. Returns the rates that were tried.
std::vector<double> Tried(RateSearch* search, double limit) {
  std::vector<double> rates;
  while (const auto rate = search->Next()) {
    rates.push_back(*rate);
    search->Note(*rate <= limit);
  }
  return rates;
}

TEST(RateSearchTest, FindsTheHighestRateWithinItsPrecision) {
  for (const double limit : {3.0, 40.0, 97.0, 130.0, 420.0}) {
    RateSearch search(100);
    Tried(&search, limit);
    EXPECT_LE(search.highest(), limit);
    EXPECT_GE(search.highest(), limit * (1 - 2 * RateSearch::kPrecision)) << limit;
  }
}

TEST(RateSearchTest, BeginsBelowTheCapacityAndHalvesTheRangeThatIsLeft) {
  RateSearch search(100);
  EXPECT_THAT(Tried(&search, 80),
              ::testing::ElementsAre(50, 75, 112.5, 93.75, 84.375, 79.6875, 82.03125));
  EXPECT_EQ(search.highest(), 79.6875);
}

TEST(RateSearchTest, EndsWhereTheBoundNeverOrAlwaysHolds) {
  RateSearch never(100), always(100);
  EXPECT_EQ(Tried(&never, 0).size(), size_t{RateSearch::kMostRuns});
  EXPECT_EQ(never.highest(), 0);
  EXPECT_EQ(Tried(&always, 1e9).size(), size_t{RateSearch::kMostRuns});
  EXPECT_GT(always.highest(), 1000);
}

}  // namespace
}  // namespace mla::mlactl
