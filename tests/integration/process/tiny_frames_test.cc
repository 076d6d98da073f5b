// A client that does not use a gRPC library and cuts its messages into HTTP/2 frames of any size.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "proto/wire/tensor_codec.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

constexpr uint32_t kRows = 16;

std::string BigEndian(uint32_t value, int bytes) {
  std::string out;
  for (int i = bytes - 1; i >= 0; --i) out += static_cast<char>(value >> (8 * i));
  return out;
}

std::string Frame(char type, char flags, char stream, const std::string& payload) {
  return BigEndian(static_cast<uint32_t>(payload.size()), 3) + type + flags +
         BigEndian(static_cast<uint32_t>(stream), 4) + payload;
}

// One Attend stream on a connection of its own. Sends less than HTTP/2's first window in all.
class HandMadeStream final {
 public:
  HandMadeStream(const std::string& path, size_t frame_bytes)
      : frame_bytes_(frame_bytes), fd_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    std::string headers = "\x83\x86";  // POST, http
    const auto add = [&headers](const std::string& name, const std::string& value) {
      headers += name + static_cast<char>(value.size()) + value;
    };
    add("\x04", "/mla.v1.Attention/Attend");
    add("\x01", "localhost");
    add("\x0f\x10", "application/grpc");
    add(std::string(1, '\0') + "\x02te", "trailers");
    Send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(4, 0, 0, "") + Frame(1, 4, 1, headers));
  }
  ~HandMadeStream() { close(fd_); }

  // Sends a request and returns the reply, tensors included.
  v1::AttendStreamReply Ask(const v1::AttendStreamRequest& header, const std::string& payload) {
    std::string message;
    wire::EncodeHeader(header, payload.size(), &message);
    message += payload;
    message = std::string(1, '\0') + BigEndian(static_cast<uint32_t>(message.size()), 4) + message;
    std::string frames;
    for (size_t at = 0; at < message.size(); at += frame_bytes_) {
      frames += Frame(0, 0, 1, message.substr(at, frame_bytes_));
    }
    Send(frames);
    v1::AttendStreamReply reply;
    while (!TakeReply(&reply) && Receive()) {
    }
    return reply;
  }

 private:
  void Send(const std::string& bytes) {
    EXPECT_EQ(send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }

  static size_t Number(const std::string& bytes, size_t at, size_t size) {
    size_t value = 0;
    for (size_t i = 0; i < size; ++i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
    return value;
  }

  // Waits for bytes and takes the complete frames.
  bool Receive() {
    char buffer[65536];
    pollfd waiting{fd_, POLLIN, 0};
    if (poll(&waiting, 1, 20000) != 1) return false;
    const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
    if (got <= 0) return false;
    received_.append(buffer, static_cast<size_t>(got));
    while (received_.size() >= 9 && received_.size() >= 9 + Number(received_, 0, 3)) {
      const size_t size = Number(received_, 0, 3);
      if (received_[3] == 0) data_ += received_.substr(9, size);
      received_.erase(0, 9 + size);
    }
    return true;
  }

  bool TakeReply(v1::AttendStreamReply* reply) {
    if (data_.size() < 5 || data_.size() < 5 + Number(data_, 1, 4)) return false;
    const size_t size = Number(data_, 1, 4);
    EXPECT_TRUE(reply->ParseFromString(data_.substr(5, size)));
    data_.erase(0, 5 + size);
    return true;
  }

  const size_t frame_bytes_;
  const int fd_;
  std::string received_;  // bytes of an incomplete frame
  std::string data_;      // bytes of an incomplete message
};

class TinyFramesTest : public ::testing::Test {
 protected:
  TinyFramesTest()
      : server_([](server::Config& config) { config.backend = "cpu"; }),
        client_(server_.Connect()),
        worker_(client_.get(), ManyHeads(), "m", 1) {}

  static Dims ManyHeads() {
    Dims dims;
    dims.heads = 16;
    return dims;
  }

  // Appends `kv` to a new sequence and returns the outputs for `q`.
  std::string Outputs(size_t frame_bytes, const std::string& kv, const std::string& q) {
    Track track = *worker_.Open();
    HandMadeStream stream(server_.folder().File("mla.sock"), frame_bytes);
    v1::AttendStreamRequest begin, attend;
    begin.mutable_begin_step()->set_step_id(frame_bytes);
    begin.mutable_begin_step()->set_model_id("m");
    begin.mutable_begin_step()->set_participants(1);
    v1::StepSequence* sequence = begin.mutable_begin_step()->add_sequences();
    sequence->set_sequence_id(track.sequence.id());
    sequence->set_epoch(track.sequence.epoch());
    sequence->set_rows(kRows);
    const v1::AttendStreamReply begun = stream.Ask(begin, "");
    EXPECT_EQ(begun.begin_step().total_rows(), kRows) << begun.ShortDebugString();
    attend.mutable_attend()->set_step_id(frame_bytes);
    attend.mutable_attend()->set_row_count(kRows);
    attend.mutable_attend()->set_num_heads(static_cast<uint32_t>(worker_.dims().heads));
    attend.mutable_attend()->set_profile(v1::PROFILE_ABSORBED);
    attend.mutable_attend()->set_has_kv(true);
    const v1::AttendStreamReply attended = stream.Ask(attend, kv + q);
    EXPECT_TRUE(attended.has_attend()) << attended.error().message();
    return attended.payload();
  }

  std::string Random(size_t elements) {
    const std::vector<uint16_t> values = RandomBf16(elements, &worker_.random());
    return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
  }

  const TestServer server_;
  const std::unique_ptr<client::Client> client_;
  Worker worker_;
};

// All clients share a launch. It reads queries in place only if their slices are large enough to
// pay.
TEST_F(TinyFramesTest, QueriesInSmallFragmentsAreGathered) {
  const auto row = static_cast<size_t>(worker_.dims().row());
  const std::string kv = Random(kRows * row);
  const std::string q = Random(kRows * row * static_cast<size_t>(worker_.dims().heads));
  const uint64_t before = client_->GetStats()->copied_bytes();
  const std::string whole = Outputs(16384, kv, q);
  const uint64_t between = client_->GetStats()->copied_bytes();
  EXPECT_EQ(between - before, kv.size());
  const std::string small = Outputs(48, kv, q);
  EXPECT_EQ(client_->GetStats()->copied_bytes() - between, kv.size() + q.size());
  // The first row sees only itself.
  EXPECT_EQ(whole.substr(0, 64), kv.substr(0, 64));
  EXPECT_EQ(whole.size(), kRows * 16 * 32 * 2);
  EXPECT_EQ(small, whole);
}

}  // namespace
}  // namespace mla::integration
