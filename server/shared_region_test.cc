// Regions: what the backend is told, and how long memory lives.
#include "server/shared_region.h"

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"

namespace mla::server {
namespace {

constexpr int64_t kMiB = 1 << 20;

class SharedRegionTest : public ::testing::Test {
 protected:
  SharedRegionTest()
      : table_({kMiB, 4 * kMiB, 3, 2}, {[this](std::span<std::byte> memory) {
                                          mapped_.push_back(memory.data());
                                          return answer_;
                                        },
                                        [this](std::span<std::byte> memory) {
                                          // Still mapped: whoever unpins it may look at it.
                                          memory[0] = std::byte{1};
                                          unmapped_.push_back(memory.data());
                                        }}) {}

  absl::Status answer_;
  std::vector<std::byte*> mapped_, unmapped_;
  SharedRegionTable table_;
};

TEST_F(SharedRegionTest, TheBackendKnowsTheMemoryFromFirstToLast) {
  auto region = table_.Create("a", 5000, 4096);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(mapped_, std::vector<std::byte*>{(*region)->data()});
  std::byte* const at = (*region)->data();
  std::shared_ptr<SharedRegion> of_a_request = *region;
  table_.Remove(**region);
  region->reset();
  EXPECT_TRUE(unmapped_.empty()) << "a request still points into it";
  of_a_request.reset();
  EXPECT_EQ(unmapped_, std::vector<std::byte*>{at});
  EXPECT_EQ(table_.mapped_bytes(), 0);
}

TEST_F(SharedRegionTest, MemoryThatCannotBePinnedServesAllTheSame) {
  answer_ = absl::ResourceExhaustedError("no more pages may be pinned");
  auto region = table_.Create("a", 5000, 4096);
  ASSERT_TRUE(region.ok()) << region.status();
  std::fill_n((*region)->data(), (*region)->size(), std::byte{7});
  EXPECT_EQ(table_.Find("a", {reinterpret_cast<const char*>((*region)->handle().data()),
                              (*region)->handle().size()}),
            *region);
  table_.Remove(**region);
  region->reset();
  EXPECT_TRUE(unmapped_.empty()) << "what was not registered is not unregistered";
  EXPECT_EQ(table_.mapped_bytes(), 0);
  EXPECT_EQ(table_.count(), 0);
}

}  // namespace
}  // namespace mla::server
