// The fast forms against protobuf: same bytes, same messages, and nothing read that protobuf would
// read otherwise.
#include "proto/wire/attend_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace mla::wire {
namespace {

std::vector<Fragment> Cut(const std::string& bytes, size_t first) {
  const auto* const data = reinterpret_cast<const std::byte*>(bytes.data());
  first = std::min(first, bytes.size());
  return {{}, {data, first}, {data + first, bytes.size() - first}};
}

class Values {
 public:
  explicit Values(uint64_t seed) : random_(seed) {}
  // Numbers of every length that a varint may have.
  uint32_t Number() { return static_cast<uint32_t>(random_()) >> random_() % 33 % 32; }
  uint32_t Small() { return Number() >> 1; }
  uint64_t Wide() { return random_() >> random_() % 64; }
  bool Flag() { return (random_() & 1) != 0; }

 private:
  std::mt19937_64 random_;
};

v1::AttendStreamRequest Request(Values& values) {
  v1::AttendStreamRequest request;
  request.set_tag(values.Wide());
  v1::Attend* const attend = request.mutable_attend();
  attend->set_step_id(values.Wide());
  attend->set_layer(values.Small());
  attend->set_row_begin(values.Small());
  attend->set_row_count(values.Small());
  attend->set_head_offset(values.Small());
  attend->set_num_heads(values.Small());
  attend->set_profile(static_cast<v1::Profile>(values.Small()));
  attend->set_has_kv(values.Flag());
  attend->set_want_lse(values.Flag());
  attend->set_q_dtype(static_cast<v1::DType>(values.Small()));
  attend->set_o_dtype(static_cast<v1::DType>(values.Small()));
  attend->set_timeout_us(values.Small());
  attend->set_lists(static_cast<v1::IndexLists>(values.Small()));
  attend->set_list_entries(values.Small());
  attend->set_want_lists(values.Flag());
  attend->set_kv_row_dtype(static_cast<v1::DType>(values.Small()));
  if (values.Flag()) {
    v1::SharedTensors* const shared = request.mutable_shared();
    shared->set_handle(std::string(values.Number() % 17, 'h'));
    shared->set_in_offset(values.Wide());
    shared->set_in_length(values.Wide());
    shared->set_out_offset(values.Wide());
    shared->set_out_length(values.Wide());
  }
  return request;
}

v1::AttendStreamReply Reply(Values& values) {
  v1::AttendStreamReply reply;
  reply.set_tag(values.Wide());
  reply.set_boot_id(values.Wide());
  v1::AttendReply* const attend = reply.mutable_attend();
  attend->set_row_begin(values.Small());
  attend->set_row_count(values.Small());
  attend->set_head_offset(values.Small());
  attend->set_num_heads(values.Small());
  attend->set_layer(values.Small());
  attend->set_o_dtype(static_cast<v1::DType>(values.Small()));
  if (values.Flag()) {
    v1::Timings* const timings = reply.mutable_timings();
    timings->set_queue_us(values.Small());
    timings->set_plan_us(values.Small());
    timings->set_kernel_us(values.Small());
    timings->set_write_us(values.Small());
    timings->set_launch_requests(values.Small());
    timings->set_launch_layers(values.Small());
    timings->set_launch_clients(values.Small());
    timings->set_plan_reused(values.Flag());
  }
  return reply;
}

// Encode and scan one message both ways, also into `used`; `encode` and `scan` are the fast forms.
template <typename Message, typename Encode, typename Scan>
void CheckMessage(const Message& message, const Message& used, size_t payload_size, Encode encode,
                  Scan scan) {
  std::string want;
  EncodeHeader(message, payload_size, &want);
  char got[kMaxAttendHeaderBytes];
  const size_t length = encode(message, payload_size, got);
  ASSERT_EQ(std::string(got, length), want) << message.ShortDebugString();

  const std::string bytes = want + std::string(payload_size, 'p');
  for (const size_t first : {want.size(), want.size() + payload_size / 2, bytes.size()}) {
    Message scanned;
    PayloadRange range;
    ASSERT_TRUE(scan(Cut(bytes, first), &scanned, &range)) << message.ShortDebugString();
    EXPECT_EQ(scanned.SerializeAsString(), message.SerializeAsString());
    EXPECT_EQ(range.size, payload_size);
    if (payload_size > 0) {
      EXPECT_EQ(range.offset, want.size());
    }
    // No field of an earlier use of the message may stay.
    scanned = used;
    scanned.set_tag(77);
    ASSERT_TRUE(scan(Cut(bytes, first), &scanned, &range));
    EXPECT_EQ(scanned.SerializeAsString(), message.SerializeAsString());
  }
}

TEST(AttendCodecTest, AgreesWithProtobuf) {
  Values values(5);
  for (int i = 0; i < 3000; ++i) {
    const size_t payload = i % 3 == 0 ? 0 : values.Number() % 5000;
    CheckMessage(Request(values), Request(values), payload, EncodeAttend, ScanAttend);
    CheckMessage(Reply(values), Reply(values), payload, EncodeAttendReply, ScanAttendReply);
  }
}

TEST(AttendCodecTest, TheLongestHeaderFits) {
  v1::AttendStreamRequest request;
  request.set_tag(UINT64_MAX);
  v1::Attend* const attend = request.mutable_attend();
  attend->set_step_id(UINT64_MAX);
  attend->set_layer(UINT32_MAX);
  attend->set_row_begin(UINT32_MAX);
  attend->set_row_count(UINT32_MAX);
  attend->set_head_offset(UINT32_MAX);
  attend->set_num_heads(UINT32_MAX);
  attend->set_profile(static_cast<v1::Profile>(-1));
  attend->set_has_kv(true);
  attend->set_want_lse(true);
  attend->set_q_dtype(static_cast<v1::DType>(-1));
  attend->set_o_dtype(static_cast<v1::DType>(-1));
  attend->set_timeout_us(UINT32_MAX);
  attend->set_lists(static_cast<v1::IndexLists>(-1));
  attend->set_list_entries(UINT32_MAX);
  attend->set_want_lists(true);
  attend->set_kv_row_dtype(static_cast<v1::DType>(-1));
  v1::SharedTensors* const shared = request.mutable_shared();
  shared->set_handle(std::string(16, 'h'));
  shared->set_in_offset(UINT64_MAX);
  shared->set_in_length(UINT64_MAX);
  shared->set_out_offset(UINT64_MAX);
  shared->set_out_length(UINT64_MAX);
  std::string want;
  EncodeHeader(request, SIZE_MAX, &want);
  char got[kMaxAttendHeaderBytes];
  const size_t length = EncodeAttend(request, SIZE_MAX, got);
  EXPECT_LE(length, kMaxAttendHeaderBytes);
  EXPECT_EQ(std::string(got, length), want);
  // Only protobuf reads values that do not fit a field or change its sign.
  PayloadRange range;
  EXPECT_FALSE(ScanAttend(Cut(request.SerializeAsString(), SIZE_MAX), &request, &range));
}

TEST(AttendCodecTest, LeavesTheUnusualToProtobuf) {
  Values values(6);
  const v1::AttendStreamRequest usual = Request(values);
  const std::string bytes = usual.SerializeAsString();
  v1::AttendStreamRequest scanned;
  PayloadRange range;
  const auto scans = [&](const std::string& message, size_t first = SIZE_MAX) {
    return ScanAttend(Cut(message, first), &scanned, &range);
  };
  ASSERT_TRUE(scans(bytes));
  EXPECT_FALSE(scans(""));
  EXPECT_FALSE(scans(bytes + bytes)) << "a message given twice is merged";
  EXPECT_FALSE(scans(bytes + std::string("\x38\x01", 2))) << "an unknown field";
  EXPECT_FALSE(scans(bytes, bytes.size() / 2)) << "a header in two fragments";
  EXPECT_TRUE(scans(std::string("\x08\x02\x1a\x00", 4)));
  // Protobuf reads lengths of at most five bytes.
  for (const std::string& zero : {std::string("\x80\x00", 2), std::string(7, '\x80') + '\0'}) {
    EXPECT_FALSE(scans("\x08\x02\x1a" + zero)) << "a number longer than it must be";
  }
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    // A shorter message may still be one; then protobuf must agree.
    const std::string prefix = bytes.substr(0, cut);
    v1::AttendStreamRequest parsed;
    if (scans(prefix)) {
      EXPECT_TRUE(parsed.ParseFromString(prefix));
      EXPECT_EQ(parsed.SerializeAsString(), scanned.SerializeAsString());
    }
  }

  v1::AttendStreamRequest shared = usual;
  shared.mutable_shared()->set_handle(std::string(17, 'h'));
  const std::string twice("\x32\x02\x10\x01\x32\x02\x18\x01", 8);
  v1::AttendStreamRequest end;
  end.mutable_end_step()->set_step_id(1);
  char out[kMaxAttendHeaderBytes];
  EXPECT_TRUE(scans("\x1a\x02\x10\x01" + twice.substr(0, 4)));
  EXPECT_FALSE(scans("\x1a\x02\x10\x01" + twice)) << "shared tensors given twice are merged";
  EXPECT_FALSE(scans("\x1a\x02\x10\x01\x32\x02\x30\x01")) << "an unknown field of theirs";
  EXPECT_FALSE(scans(end.SerializeAsString()));
  EXPECT_EQ(EncodeAttend(shared, 0, out), 0u);
  EXPECT_EQ(EncodeAttend(end, 0, out), 0u);

  // A payload that is not the end of the message, or longer than it.
  std::string header;
  EncodeHeader(usual, 10, &header);
  EXPECT_TRUE(scans(header + std::string(10, 'p')));
  EXPECT_FALSE(scans(header + std::string(9, 'p')));
  EXPECT_FALSE(scans(header + std::string(11, 'p')));
}

// Messages with one bit changed: whatever the fast form accepts, it must read as protobuf does.
template <typename Message, typename Make, typename Scan>
void CheckChangedMessages(Make make, Scan scan) {
  std::mt19937_64 random(7);
  Values values(8);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = make(values).SerializeAsString();
    bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    Message scanned;
    PayloadRange range;
    if (!scan(Cut(bytes, SIZE_MAX), &scanned, &range)) continue;
    Message parsed;
    std::string header;
    PayloadRange same;
    const Fragment whole[] = {{reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}};
    ASSERT_TRUE(ScanMessage(whole, &header, &same).ok());
    ASSERT_TRUE(parsed.ParseFromString(header));
    EXPECT_EQ(scanned.SerializeAsString(), parsed.SerializeAsString());
    EXPECT_EQ(range.size, same.size);
    ++accepted;
  }
  EXPECT_GT(accepted, 1000);
}

TEST(AttendCodecTest, ReadsWhateverItAcceptsAsProtobufDoes) {
  CheckChangedMessages<v1::AttendStreamRequest>(Request, ScanAttend);
  CheckChangedMessages<v1::AttendStreamReply>(Reply, ScanAttendReply);
}

}  // namespace
}  // namespace mla::wire
