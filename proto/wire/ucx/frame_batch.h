// Packs several frames into one active message of UCX, so that one doorbell rings for all of them
// (docs/rdma.md). The message's header is a list: for each frame a BatchedFrame, its header, and
// its payload. One frame's payload may be the message's own instead, which is not copied.
//
// Bounds are checked here; what the frames say is checked as if they had come one by one. Plain
// data. Threading: none.
#ifndef MLA_PROTO_WIRE_UCX_FRAME_BATCH_H_
#define MLA_PROTO_WIRE_UCX_FRAME_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace mla::wire {

// The id of the active message, in both directions.
inline constexpr unsigned kUcxBatchId = 2;
// A list has at most this number of bytes. UCX takes headers of that size over its transports;
// where it does not, no frames are batched.
inline constexpr size_t kMostBatchBytes = 4096;
// A payload above this is not copied into the list.
inline constexpr size_t kMostBatchedPayload = 1024;
inline constexpr uint16_t kPayloadFollows = 0xffff;

struct BatchedFrame {
  uint16_t header_bytes;
  uint16_t payload_bytes;  // kPayloadFollows: the message's payload is this frame's; one has it
};
static_assert(sizeof(BatchedFrame) == 4);
static_assert(kMostBatchedPayload < kPayloadFollows);

class FrameBatch final {
 public:
  // Adds a frame with a copy of its payload. Returns true if it fits; else nothing has changed.
  // REQUIRES: the payload has at most kMostBatchedPayload bytes.
  bool Add(std::span<const std::byte> header, std::span<const std::byte> payload) {
    return Append(header, payload, static_cast<uint16_t>(payload.size()));
  }
  // Adds the frame whose payload the message carries. Also returns false if there is already such a
  // frame.
  bool AddCarried(std::span<const std::byte> header) {
    if (carries_ || !Append(header, {}, kPayloadFollows)) return false;
    carries_ = true;
    return true;
  }

  std::span<const std::byte> bytes() const { return bytes_; }
  bool empty() const { return bytes_.empty(); }
  void Clear() {
    bytes_.clear();
    carries_ = false;
  }

 private:
  bool Append(std::span<const std::byte> header, std::span<const std::byte> payload,
              uint16_t payload_bytes) {
    const size_t more = sizeof(BatchedFrame) + header.size() + payload.size();
    if (more > kMostBatchBytes - bytes_.size()) return false;
    const BatchedFrame frame{static_cast<uint16_t>(header.size()), payload_bytes};
    const auto* const lengths = reinterpret_cast<const std::byte*>(&frame);
    bytes_.insert(bytes_.end(), lengths, lengths + sizeof(frame));
    bytes_.insert(bytes_.end(), header.begin(), header.end());
    bytes_.insert(bytes_.end(), payload.begin(), payload.end());
    return true;
  }

  std::vector<std::byte> bytes_;
  bool carries_ = false;
};

// Reads such a list, which may be anything, frame by frame.
class BatchReader final {
 public:
  struct Frame {
    std::span<const std::byte> header, payload;
    bool payload_follows = false;  // `payload` is empty: the message's is this frame's
  };

  explicit BatchReader(std::span<const std::byte> bytes) : rest_(bytes) {}
  bool done() const { return rest_.empty(); }
  // False: the list is not well formed. REQUIRES: not done().
  bool Next(Frame* frame) {
    BatchedFrame lengths;
    if (rest_.size() < sizeof(lengths)) return false;
    std::memcpy(&lengths, rest_.data(), sizeof(lengths));
    frame->payload_follows = lengths.payload_bytes == kPayloadFollows;
    const size_t payload_bytes = frame->payload_follows ? 0 : lengths.payload_bytes;
    std::span<const std::byte> rest = rest_.subspan(sizeof(lengths));
    if (payload_bytes > kMostBatchedPayload || lengths.header_bytes > rest.size() ||
        payload_bytes > rest.size() - lengths.header_bytes) {
      return false;
    }
    frame->header = rest.first(lengths.header_bytes);
    frame->payload = rest.subspan(lengths.header_bytes, payload_bytes);
    rest_ = rest.subspan(lengths.header_bytes + payload_bytes);
    return !frame->payload_follows || !std::exchange(carries_, true);
  }
  // Returns true if one of the frames had the message's payload.
  bool carries() const { return carries_; }

 private:
  std::span<const std::byte> rest_;
  bool carries_ = false;
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_UCX_FRAME_BATCH_H_
