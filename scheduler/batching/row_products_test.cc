#include "scheduler/batching/row_products.h"

#include <memory>
#include <vector>

#include "gtest/gtest.h"

namespace mla::scheduler {
namespace {

class PlainRequest final : public StreamRequest {
 public:
  explicit PlainRequest(Step* step, int32_t layer, Profile profile = Profile::kProjected) {
    engine.step = step;
    attend.layer = layer;
    attend.profile = profile;
  }
  void Done(const absl::Status&) override {}
};

TEST(RowProductsTest, ALaunchHasFewModelsAndLayers) {
  Model model, same, other;
  same.contents = model.contents;
  Step of_model, of_same, of_other;
  of_model.model = &model;
  of_same.model = &same;
  of_other.model = &other;
  RowProducts products;
  const auto limit = static_cast<int32_t>(RowProducts::kMost);
  for (int32_t layer = 0; layer < limit; ++layer) {
    const PlainRequest request(&of_model, layer);
    EXPECT_TRUE(products.Fits(request)) << layer;
    products.Add(request);
    products.Add(request);
  }
  EXPECT_FALSE(products.Fits(PlainRequest(&of_model, limit)));
  EXPECT_FALSE(products.Fits(PlainRequest(&of_other, 0)));
  // Requests of weights that are there, or of none, cost no further kernels.
  EXPECT_TRUE(products.Fits(PlainRequest(&of_model, 0)));
  EXPECT_TRUE(products.Fits(PlainRequest(&of_same, limit - 1)));
  EXPECT_TRUE(products.Fits(PlainRequest(&of_other, 0, Profile::kExpanded)));
  products.clear();
  EXPECT_TRUE(products.Fits(PlainRequest(&of_other, 0)));
}

}  // namespace
}  // namespace mla::scheduler
