#include "proto/wire/calls/reused_bytes.h"

#include <gtest/gtest.h>

#include <optional>

namespace mla::wire {
namespace {

std::string Text(const grpc::Slice& slice) {
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

// Long enough to have memory of its own.
const std::string kFirst(100, 'a'), kSecond(100, 'b');

TEST(ReusedBytesTest, TheSliceIsTheStringsOwnMemory) {
  ReusedBytes buffers;
  std::string bytes = kFirst;
  const char* const memory = bytes.data();
  const grpc::Slice slice = buffers.SliceOf(&bytes);
  EXPECT_EQ(static_cast<const void*>(slice.begin()), memory);
  EXPECT_EQ(Text(slice), kFirst);
  EXPECT_TRUE(bytes.empty()) << "nothing has come back yet";
}

TEST(ReusedBytesTest, MemoryComesBackOnceTheLastCopyOfTheSliceHasGone) {
  ReusedBytes buffers;
  std::string bytes = kFirst;
  const char* const memory = bytes.data();
  std::optional<grpc::Slice> slice = buffers.SliceOf(&bytes), copy = slice;
  slice.reset();
  bytes = kSecond;
  const grpc::Slice second = buffers.SliceOf(&bytes);
  EXPECT_NE(bytes.data(), memory);
  EXPECT_EQ(Text(*copy), kFirst);
  copy.reset();
  bytes = kSecond;
  const grpc::Slice third = buffers.SliceOf(&bytes);
  EXPECT_EQ(bytes.data(), memory);
  EXPECT_EQ(bytes, kFirst);
}

TEST(ReusedBytesTest, KeepsNoMoreThanItsBound) {
  ReusedBytes buffers;
  std::vector<grpc::Slice> slices;
  for (size_t i = 0; i < ReusedBytes::kKept + 2; ++i) {
    std::string bytes = kFirst;
    slices.push_back(buffers.SliceOf(&bytes));
  }
  slices.clear();
  size_t kept = 0;
  for (std::string bytes = kSecond; !bytes.empty() && kept < 9; ++kept) {
    slices.push_back(buffers.SliceOf(&bytes));
  }
  EXPECT_EQ(kept, ReusedBytes::kKept + 1);
}

TEST(ReusedBytesTest, SlicesOutliveIt) {
  std::optional<grpc::Slice> slice;
  {
    ReusedBytes buffers;
    std::string bytes = kFirst;
    slice = buffers.SliceOf(&bytes);
  }
  EXPECT_EQ(Text(*slice), kFirst);
}

}  // namespace
}  // namespace mla::wire
