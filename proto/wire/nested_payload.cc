#include "proto/wire/nested_payload.h"

#include <google/protobuf/message_lite.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace mla::wire {
namespace {

constexpr uint32_t kVarint = 0, kLengthDelimited = 2;
// Varints of tags and lengths; protobuf reads no longer ones.
constexpr int kMostKeyBytes = 5;
constexpr int kMostNumberBytes = 10;

constexpr uint64_t Key(int field) { return static_cast<uint64_t>(field) << 3 | kLengthDelimited; }

void Append(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

// The first bytes of a message, of which `total` are known to follow.
class Head {
 public:
  Head(std::span<const Fragment> fragments, size_t total) : total_(total) {
    size_ = std::min(total, bytes_.size());
    GatherBytes(fragments, 0, size_, bytes_.data());
  }

  size_t at() const { return position_; }
  size_t left() const { return total_ - position_; }
  // Longer encodings than necessary are left to protobuf, which accepts some and refuses others.
  bool Varint(int most_bytes, uint64_t* value) {
    *value = 0;
    for (int i = 0; i < most_bytes && position_ < size_; ++i) {
      const auto byte = std::to_integer<uint8_t>(bytes_[position_++]);
      *value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if ((byte & 0x80) == 0) return byte != 0 || i == 0;
    }
    return false;
  }
  std::string Text(size_t begin, size_t end) const {
    return std::string(reinterpret_cast<const char*>(bytes_.data()) + begin, end - begin);
  }

 private:
  std::array<std::byte, kMostNestedHeader> bytes_;
  size_t size_ = 0, position_ = 0;
  const size_t total_;
};

}  // namespace

void EncodeNested(std::span<const int> path, const google::protobuf::MessageLite& inside,
                  size_t payload_size, std::string* out) {
  std::string end;
  inside.AppendToString(&end);
  Append(Key(kPayloadField), &end);
  Append(payload_size, &end);
  // From the innermost message outwards, since each length counts what is inside.
  for (size_t i = path.size(); i-- > 0;) {
    std::string outer;
    Append(Key(path[i]), &outer);
    Append(end.size() + payload_size, &outer);
    end = outer + end;
  }
  *out = std::move(end);
}

bool ScanNested(std::span<const Fragment> fragments, std::span<const int> path, std::string* inside,
                PayloadRange* payload) {
  size_t total = 0;
  for (const Fragment& fragment : fragments) total += fragment.size();
  Head head(fragments, total);
  uint64_t key = 0, number = 0;
  for (const int field : path) {
    if (!head.Varint(kMostKeyBytes, &key) || key != Key(field)) return false;
    if (!head.Varint(kMostKeyBytes, &number) || number != head.left()) return false;
  }
  const size_t begin = head.at();
  while (true) {
    const size_t end = head.at();
    if (!head.Varint(kMostKeyBytes, &key)) return false;
    if (key == Key(kPayloadField)) {
      if (!head.Varint(kMostKeyBytes, &number) || number != head.left()) return false;
      *inside = head.Text(begin, end);
      *payload = {head.at(), number};
      return true;
    }
    if ((key & 7) != kVarint || key >> 3 == 0 || key > UINT32_MAX) return false;
    if (!head.Varint(kMostNumberBytes, &number)) return false;
  }
}

}  // namespace mla::wire
