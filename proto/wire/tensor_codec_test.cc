#include "proto/wire/tensor_codec.h"

#include <gtest/gtest.h>

#include <random>

#include "mla/v1/attention.pb.h"

namespace mla::wire {
namespace {

std::vector<Fragment> Cut(const std::string& bytes, size_t piece) {
  std::vector<Fragment> fragments;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    fragments.emplace_back(reinterpret_cast<const std::byte*>(bytes.data()) + at,
                           std::min(piece, bytes.size() - at));
    fragments.emplace_back();  // empty slices occur
  }
  return fragments;
}

std::string Gather(const std::vector<Fragment>& fragments, PayloadRange range) {
  std::string out(range.size, '\0');
  GatherBytes(fragments, range.offset, range.size, reinterpret_cast<std::byte*>(out.data()));
  return out;
}

v1::AttendStreamRequest Message(const std::string& payload) {
  v1::AttendStreamRequest message;
  message.set_tag(uint64_t{1} << 60);
  v1::Attend* attend = message.mutable_attend();
  attend->set_step_id(12345678901234);
  attend->set_row_count(7);
  attend->set_num_heads(128);
  attend->set_profile(v1::PROFILE_EXPANDED);
  message.set_payload(payload);
  return message;
}

TEST(TensorCodecTest, SplitsAtEveryFragmentSize) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{20000}}) {
    std::string payload(size, '\0');
    for (size_t i = 0; i < size; ++i) payload[i] = static_cast<char>(i * 31);
    const v1::AttendStreamRequest message = Message(payload);
    const std::string bytes = message.SerializeAsString();
    for (const size_t piece : {size_t{1}, size_t{2}, size_t{3}, size_t{17}, bytes.size()}) {
      const std::vector<Fragment> fragments = Cut(bytes, piece);
      std::string header = "left over";
      PayloadRange range;
      ASSERT_TRUE(ScanMessage(fragments, &header, &range).ok());
      v1::AttendStreamRequest parsed;
      ASSERT_TRUE(parsed.ParseFromString(header));
      EXPECT_TRUE(parsed.payload().empty());
      parsed.set_payload(Gather(fragments, range));
      EXPECT_EQ(parsed.SerializeAsString(), bytes);
    }
  }
}

TEST(TensorCodecTest, EncodesWhatProtobufWould) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{1} << 20}) {
    const std::string payload(size, 'p');
    v1::AttendStreamRequest message = Message(payload);
    const std::string expected = message.SerializeAsString();
    message.clear_payload();
    std::string header;
    EncodeHeader(message, size, &header);
    EXPECT_EQ(header + payload, expected);
  }
}

TEST(TensorCodecTest, TheLastPayloadCounts) {
  std::string bytes, header;
  EncodeHeader(v1::AttendStreamRequest(), 3, &header);
  bytes = header + "one" + header + "two";
  v1::AttendStreamRequest tag;
  tag.set_tag(9);
  bytes += tag.SerializeAsString();
  PayloadRange range;
  const auto fragments = Cut(bytes, 5);
  ASSERT_TRUE(ScanMessage(fragments, &header, &range).ok());
  EXPECT_EQ(Gather(fragments, range), "two");
  v1::AttendStreamRequest whole;
  ASSERT_TRUE(whole.ParseFromString(bytes));
  EXPECT_EQ(whole.payload(), "two");
  EXPECT_EQ(header, tag.SerializeAsString());
}

TEST(TensorCodecTest, MalformedIsRefused) {
  const std::string kBad[] = {
      std::string(1, '\x08'),
      std::string("\x00\x01", 2),
      "\x0b",
      "\x0c",
      "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
      "\x09\x01\x02",
      "\x0d\x01",
      "\x12\x05 abc",
      "\xfa\x7f\x04 ab",
      "\xfa\x7f\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
      // Protobuf reads no length or tag of more than five bytes.
      "\xfa\x7f" + std::string(5, '\x80') + '\0',
      "\xfa\xff" + std::string(3, '\x80') + std::string(2, '\0'),
  };
  for (const std::string& bytes : kBad) {
    std::string header;
    PayloadRange range;
    const absl::Status status = ScanMessage(Cut(bytes, 1), &header, &range);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
}

TEST(TensorCodecTest, HeadersAreBounded) {
  v1::AttendStreamRequest message;
  message.mutable_begin_step()->set_model_id(std::string(kMaxHeaderBytes + 1, 'x'));
  const std::string bytes = message.SerializeAsString();
  std::string header;
  PayloadRange range;
  EXPECT_FALSE(ScanMessage(Cut(bytes, bytes.size()), &header, &range).ok());
  EXPECT_LT(header.size(), 100u);  // refused before it was copied
}

TEST(TensorCodecTest, ReadersBoundHeadersTighter) {
  constexpr size_t kMost = 64;
  v1::AttendStreamRequest fits, empty, scalars;
  fits.mutable_begin_step()->set_model_id(std::string(kMost - 4, 'x'));
  for (size_t i = 0; i <= kMost / 2; ++i) empty.mutable_begin_step()->add_sequences();
  std::string bytes;
  for (size_t i = 0; i <= kMost / 2; ++i) bytes += std::string("\x08\x01");  // tag = 1, again
  std::string header;
  PayloadRange range;
  const std::string good = fits.SerializeAsString() + std::string("\xfa\x7f\x03xyz");
  ASSERT_EQ(fits.SerializeAsString().size(), kMost);
  EXPECT_EQ(ScanMessage(Cut(good, 3), &header, &range, kMost), absl::OkStatus());
  EXPECT_EQ(range.size, 3u);  // the payload does not count
  for (const std::string& bad : {good + "\x08\x01", empty.SerializeAsString(), bytes}) {
    EXPECT_EQ(ScanMessage(Cut(bad, 3), &header, &range, kMost).message(),
              "message: more than 64 bytes besides the payload");
    EXPECT_LE(header.size(), kMost + 2);
    EXPECT_EQ(ScanMessage(Cut(bad, 3), &header, &range), absl::OkStatus());
  }
}

// Random bytes and random changes of good messages: accepted messages must mean the same here as in
// protobuf; no input may crash or read outside its memory (sanitizers watch).
TEST(TensorCodecTest, AgreesWithProtobufOnRandomBytes) {
  std::mt19937_64 random(11);
  const std::string good = Message("0123456789").SerializeAsString();
  int accepted = 0;
  for (int i = 0; i < 50000; ++i) {
    std::string bytes = good;
    for (int changes = static_cast<int>(random() % 4); changes >= 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    const auto fragments = Cut(bytes, 1 + random() % 9);
    std::string header;
    PayloadRange range;
    const bool scanned = ScanMessage(fragments, &header, &range).ok();
    v1::AttendStreamRequest ours, theirs;
    const bool mine = scanned && ours.ParseFromString(header);
    if (!mine) continue;
    ++accepted;
    if (range.size > 0) ours.set_payload(Gather(fragments, range));
    ASSERT_TRUE(theirs.ParseFromString(bytes));
    // Unknown fields keep their order relative to each other, so the bytes agree as well.
    EXPECT_EQ(ours.SerializeAsString(), theirs.SerializeAsString());
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace mla::wire
