#include "scheduler/planning/planner.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "scheduler/testing/heap_buffers.h"

namespace mla::scheduler {
namespace {

constexpr PlanCapacity kCapacity{
    .units = 3, .work_items = 5, .reduce_tiles = 7, .reduce_partials = 9, .partial_rows = 11};

TEST(MetadataBuffersTest, ArraysHaveTheirLengths) {
  const auto buffers = testing::MakeBuffers(kCapacity);
  EXPECT_EQ(buffers->capacity(), kCapacity);
  EXPECT_EQ(buffers->work_indptr().size(), 4u);
  EXPECT_EQ(buffers->work_info().size(), 5u);
  EXPECT_EQ(buffers->reduce_indptr().size(), 8u);
  EXPECT_EQ(buffers->reduce_final_map().size(), 7u);
  EXPECT_EQ(buffers->reduce_partial_map().size(), 9u);
}

// Memory that starts anywhere and ends exactly where it must, as an allocator may hand out.
class OddBuffer final : public kernels::HostBuffer {
 public:
  explicit OddBuffer(size_t size) : size_(size), data_(new std::byte[size + 1]) {}
  std::span<std::byte> bytes() override { return {data_.get() + 1, size_}; }

 private:
  size_t size_;
  std::unique_ptr<std::byte[]> data_;
};

TEST(MetadataBuffersTest, ArraysAreAlignedApartAndInside) {
  auto memory = std::make_unique<OddBuffer>(static_cast<size_t>(kCapacity.bytes()));
  const std::span<std::byte> bytes = memory->bytes();
  const auto buffers = MetadataBuffers::Create(kCapacity, std::move(memory)).value();
  const std::byte* last_end = bytes.data();
  const auto check = [&](auto array) {
    const auto* begin = reinterpret_cast<const std::byte*>(array.data());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(begin) % 64, 0u);
    EXPECT_GE(begin, last_end);
    last_end = begin + array.size_bytes();
    EXPECT_LE(last_end, bytes.data() + bytes.size());
  };
  check(buffers->work_info());
  check(buffers->reduce_final_map());
  check(buffers->work_indptr());
  check(buffers->reduce_indptr());
  check(buffers->reduce_partial_map());
}

TEST(MetadataBuffersTest, FaultsNameTheCapacity) {
  const auto fault = [](PlanCapacity capacity) {
    const auto made = MetadataBuffers::Create(capacity, std::make_unique<testing::HeapBuffer>(0));
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(made.status().message());
  };
  PlanCapacity capacity = kCapacity;
  EXPECT_NE(fault(capacity).find("plan memory: got 0 bytes"), std::string::npos);
  capacity.units = 0;
  EXPECT_EQ(fault(capacity), "plan capacity.units: got 0, limit 1..2147483646");
  capacity = kCapacity;
  capacity.work_items = -1;
  EXPECT_EQ(fault(capacity), "plan capacity.work_items: got -1, limit 0..2147483646");
  capacity = kCapacity;
  capacity.reduce_tiles = INT64_MAX;
  EXPECT_NE(fault(capacity).find("reduce_tiles"), std::string::npos);
  capacity = kCapacity;
  capacity.reduce_partials = int64_t{1} << 31;
  EXPECT_NE(fault(capacity).find("reduce_partials"), std::string::npos);
  capacity = kCapacity;
  capacity.partial_rows = int64_t{1} << 32;
  EXPECT_NE(fault(capacity).find("partial_rows"), std::string::npos);
}

}  // namespace
}  // namespace mla::scheduler
