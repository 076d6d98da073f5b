#include "scheduler/batching/launch_cost.h"

#include <memory>

#include "gtest/gtest.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kLaunch = 20'000;

BatchKey Key(int32_t heads) {
  BatchKey key;
  key.geometry.num_heads = heads;
  return key;
}

Model MakeModel() {
  auto spec = std::make_shared<ModelSpec>();
  spec->geometry = {128, 512, 64, 128, 128};
  Model model;
  model.spec = spec;
  model.contents->layout = kvcache::MakeLayout({.row_bytes = 1152, .page_size = 64, .layers = 1});
  model.tile_rows = 128;
  return model;
}

TEST(LaunchCostTest, UnitsAreTheBytesThatTilesStream) {
  const Model model = MakeModel();
  EXPECT_EQ(AbsorbedCost(model, Profile::kAbsorbed, 128).Units(1, 4095), 4096 * 1152);
  EXPECT_EQ(AbsorbedCost(model, Profile::kAbsorbed, 16).Units(1, 4095), 4096 * 1152)
      << "a tile streams its rows however few heads it has";
  EXPECT_EQ(AbsorbedCost(model, Profile::kAbsorbed, 128).Units(2, 4095), 2 * 4096 * 1152);
  EXPECT_GT(AbsorbedCost(model, Profile::kExpanded, 128).Units(1, 0), 100 * 1152)
      << "projections count";
  EXPECT_EQ(AbsorbedCost(model, Profile::kAppendOnly, 0).Units(7, 4095), 0);
}

TEST(LaunchCostTest, ChargedRowsHaveAFloorWhereTheBackendSaysSo) {
  Model model = MakeModel();
  model.min_charged_rows = 32;
  const int64_t full = AbsorbedCost(model, Profile::kAbsorbed, 128).Units(1, 4095);
  EXPECT_EQ(AbsorbedCost(model, Profile::kAbsorbed, 64).Units(1, 4095), full / 2);
  EXPECT_EQ(AbsorbedCost(model, Profile::kAbsorbed, 16).Units(1, 4095), full / 4);
}

TEST(LaunchCostTest, ExpandedFormCostsLessForManyRowsAndMoreForFew) {
  const Model model = MakeModel();
  const auto absorbed = [&](int64_t rows) {
    return AbsorbedCost(model, Profile::kExpanded, 128).Units(rows, 0);
  };
  const auto expanded = [&](int64_t rows) {
    return LaunchCost::ExpandedUnits(model, rows, 128, 0);
  };
  EXPECT_LT(expanded(2048), absorbed(2048));
  EXPECT_GT(LaunchCost::ExpandedUnits(model, 8, 128, 16'000),
            AbsorbedCost(model, Profile::kExpanded, 128).Units(8, 16'000));
}

TEST(LaunchCostTest, RatesFollowWhatIsMeasured) {
  LaunchCost cost;
  const BatchKey key = Key(128);
  const LaunchUnits units{.absorbed = 10'000'000};
  for (int i = 0; i < 100; ++i) cost.Observe(key, units, kLaunch + 1'000'000);
  EXPECT_NEAR(static_cast<double>(cost.Nanos(key, units)), kLaunch + 1e6, 5e4);
  const LaunchUnits twice{.absorbed = 20'000'000};
  EXPECT_NEAR(static_cast<double>(cost.Nanos(key, twice)), kLaunch + 2e6, 1e5);
  // Slower at once.
  for (int i = 0; i < 4; ++i) cost.Observe(key, units, kLaunch + 3'000'000);
  EXPECT_GT(cost.Nanos(key, units), 2'500'000);
}

TEST(LaunchCostTest, OneMeasurementMovesARateByABoundedFactor) {
  LaunchCost cost;
  const BatchKey key = Key(128);
  const LaunchUnits units{.absorbed = 10'000'000};
  for (int i = 0; i < 100; ++i) cost.Observe(key, units, 1'000'000);
  cost.Observe(key, units, 60'000'000'000);
  EXPECT_LT(cost.Nanos(key, units), 4'100'000);
}

TEST(LaunchCostTest, KeysKeepTheirOwnRatesAndNewOnesStartAtTheLatest) {
  LaunchCost cost;
  const LaunchUnits units{.absorbed = 10'000'000};
  for (int i = 0; i < 100; ++i) cost.Observe(Key(1), units, 100'000);
  for (int i = 0; i < 100; ++i) cost.Observe(Key(2), units, 10'000'000);
  EXPECT_LT(cost.Nanos(Key(1), units), 200'000);
  EXPECT_GT(cost.Nanos(Key(2), units), 9'000'000);
  EXPECT_GT(cost.Nanos(Key(3), units), 9'000'000);
  // More keys than are kept: the oldest goes, and nothing else does.
  for (int heads = 3; heads < 18; ++heads) cost.Observe(Key(heads), units, 10'000'000);
  EXPECT_GT(cost.Nanos(Key(2), units), 5'000'000);
}

TEST(LaunchCostTest, PageWorkHasARateOfItsOwn) {
  LaunchCost cost;
  const LaunchUnits pages{.pages = 100'000'000};
  for (int i = 0; i < 100; ++i) cost.Observe(Key(1), pages, 10'000'000);
  EXPECT_NEAR(static_cast<double>(cost.PageBytes(10'000'000)), 1e8, 1e7);
}

}  // namespace
}  // namespace mla::scheduler
