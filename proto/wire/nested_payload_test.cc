#include "proto/wire/nested_payload.h"

#include <gtest/gtest.h>

#include <vector>

#include "mla/v1/cache.pb.h"
#include "mla/v1/model.pb.h"

namespace mla::wire {
namespace {

constexpr int kRows[] = {v1::ImportRequest::kPartFieldNumber, v1::PagesPart::kChunkFieldNumber};
constexpr int kWeights[] = {v1::UploadWeightsRequest::kChunkFieldNumber};

std::vector<Fragment> Cut(const std::string& bytes, size_t piece) {
  std::vector<Fragment> fragments;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    fragments.emplace_back(reinterpret_cast<const std::byte*>(bytes.data()) + at,
                           std::min(piece, bytes.size() - at));
    fragments.emplace_back();  // empty slices occur
  }
  return fragments;
}

bool Scan(const std::string& bytes, std::span<const int> path) {
  std::string inside;
  PayloadRange payload;
  return ScanNested(Cut(bytes, 7), path, &inside, &payload);
}

v1::ImportRequest Rows(const std::string& payload) {
  v1::ImportRequest message;
  message.mutable_part()->mutable_chunk()->set_payload(payload);
  return message;
}

v1::UploadWeightsRequest Weights(const std::string& payload) {
  v1::UploadWeightsRequest message;
  message.mutable_chunk()->set_layer(61);
  message.mutable_chunk()->set_head_begin(300);
  message.mutable_chunk()->set_head_count(1);
  message.mutable_chunk()->set_part(v1::WEIGHT_PART_OUTPUTS);
  message.mutable_chunk()->set_payload(payload);
  return message;
}

TEST(NestedPayloadTest, WritesWhatProtobufWrites) {
  for (const size_t size : {1, 100, 127, 128, 20000, 3000000}) {
    const std::string payload(size, 'p');
    std::string header;
    EncodeNested(kRows, v1::PageChunk(), size, &header);
    EXPECT_EQ(header + payload, Rows(payload).SerializeAsString()) << size;
    v1::UploadWeightsRequest::Chunk inside = Weights("").chunk();
    EncodeNested(kWeights, inside, size, &header);
    EXPECT_EQ(header + payload, Weights(payload).SerializeAsString()) << size;
  }
}

TEST(NestedPayloadTest, ReadsTheUsualFormAtEveryFragmentSize) {
  for (const size_t size : {1, 100, 128, 20000}) {
    const std::string payload(size, 'p');
    for (const size_t piece : {1, 2, 3, 5, 64, 8192}) {
      const std::string bytes = Weights(payload).SerializeAsString();
      std::string inside;
      PayloadRange range;
      ASSERT_TRUE(ScanNested(Cut(bytes, piece), kWeights, &inside, &range)) << size;
      EXPECT_EQ(bytes.substr(range.offset, range.size), payload);
      EXPECT_EQ(inside, Weights("").chunk().SerializeAsString());
      const std::string rows = Rows(payload).SerializeAsString();
      ASSERT_TRUE(ScanNested(Cut(rows, piece), kRows, &inside, &range)) << size;
      EXPECT_EQ(rows.substr(range.offset, range.size), payload);
      EXPECT_EQ(inside, "");
    }
  }
}

TEST(NestedPayloadTest, LeavesEveryOtherFormToProtobuf) {
  const std::string bytes = Rows(std::string(200, 'p')).SerializeAsString();
  ASSERT_TRUE(Scan(bytes, kRows));
  EXPECT_FALSE(Scan(bytes, kWeights));
  for (size_t cut = 0; cut < bytes.size(); ++cut) EXPECT_FALSE(Scan(bytes.substr(0, cut), kRows));
  EXPECT_FALSE(Scan(bytes + bytes, kRows)) << "protobuf merges the two";
  EXPECT_FALSE(Scan(bytes + std::string("\x18\x01", 2), kRows)) << "a field after the payload";
  v1::ImportRequest other;
  EXPECT_FALSE(Scan(other.SerializeAsString(), kRows));
  other.mutable_part()->mutable_group()->set_rows(3);
  EXPECT_FALSE(Scan(other.SerializeAsString(), kRows));
  other.mutable_part()->mutable_group_end()->set_sha256(std::string(32, 's'));
  EXPECT_FALSE(Scan(other.SerializeAsString(), kRows));
  EXPECT_FALSE(Scan(Rows("").SerializeAsString(), kRows)) << "no payload";
}

TEST(NestedPayloadTest, FieldsThatAreNotNumbersAreLeftToProtobuf) {
  std::string bytes = Weights(std::string(50, 'p')).SerializeAsString();
  ASSERT_TRUE(Scan(bytes, kWeights));
  // The first field of the chunk gets another wire type, or the number 0.
  for (const char key : {'\x09', '\x0a', '\x0b', '\x0d', '\x0f', '\x00'}) {
    bytes[2] = key;
    EXPECT_FALSE(Scan(bytes, kWeights)) << int{key};
  }
}

TEST(NestedPayloadTest, LongerEncodingsThanNecessaryAreLeftToProtobuf) {
  // A payload of one byte, whose length has two bytes.
  const std::string chunk("\xfa\x7f\x81\x00p", 5);
  EXPECT_FALSE(Scan(std::string("\x12\x07\x1a\x05") + chunk, kRows));
  v1::ImportRequest parsed;
  EXPECT_TRUE(parsed.ParseFromString(std::string("\x12\x07\x1a\x05") + chunk));
  const std::string usual("\xfa\x7f\x01p", 4);
  EXPECT_TRUE(Scan(std::string("\x12\x06\x1a\x04") + usual, kRows));
}

TEST(NestedPayloadTest, TheHeaderIsBounded) {
  std::string fields;
  while (fields.size() + 10 < kMostNestedHeader) fields += std::string("\x08\x01", 2);
  const auto message = [](const std::string& inside) {
    const std::string chunk = inside + std::string("\xfa\x7f\x01p", 4);
    return std::string("\x12") + static_cast<char>(chunk.size()) + chunk;
  };
  EXPECT_TRUE(Scan(message(fields), kWeights));
  EXPECT_FALSE(Scan(message(fields + fields.substr(0, 12)), kWeights));
}

}  // namespace
}  // namespace mla::wire
