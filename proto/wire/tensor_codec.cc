#include "proto/wire/tensor_codec.h"

#include <google/protobuf/message_lite.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace mla::wire {
namespace {

// The longest varint that protobuf reads, in bytes. The payload's tag and length are not in the
// header that it parses afterwards, so they are bounded here.
constexpr int kMostVarintBytes = 10;
constexpr int kMostTagBytes = 5;
constexpr int kMostLengthBytes = 5;

// Reads forward over fragments without joining them.
class Cursor {
 public:
  explicit Cursor(std::span<const Fragment> fragments) : fragments_(fragments) { SkipEmpty(); }

  size_t offset() const { return offset_; }
  bool AtEnd() const { return index_ == fragments_.size(); }

  bool ReadByte(uint8_t* byte) {
    if (AtEnd()) return false;
    *byte = static_cast<uint8_t>(fragments_[index_][inside_]);
    Advance(1);
    return true;
  }

  bool ReadVarint(int most_bytes, uint64_t* value, std::string* copy) {
    *value = 0;
    for (int i = 0; i < most_bytes; ++i) {
      uint8_t byte = 0;
      if (!ReadByte(&byte)) return false;
      copy->push_back(static_cast<char>(byte));
      *value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if ((byte & 0x80) == 0) return true;
    }
    return false;
  }

  // Skips `size` bytes; appends them to `copy` unless it is null.
  bool Take(uint64_t size, std::string* copy) {
    while (size > 0) {
      if (AtEnd()) return false;
      const size_t here = std::min<uint64_t>(size, fragments_[index_].size() - inside_);
      if (copy != nullptr) {
        copy->append(reinterpret_cast<const char*>(fragments_[index_].data()) + inside_, here);
      }
      Advance(here);
      size -= here;
    }
    return true;
  }

 private:
  void Advance(size_t bytes) {
    offset_ += bytes;
    inside_ += bytes;
    SkipEmpty();
  }
  void SkipEmpty() {
    while (index_ < fragments_.size() && inside_ == fragments_[index_].size()) {
      ++index_;
      inside_ = 0;
    }
  }

  std::span<const Fragment> fragments_;
  size_t index_ = 0, inside_ = 0, offset_ = 0;
};

absl::Status Malformed(size_t offset) {
  return absl::InvalidArgumentError(
      absl::StrCat("message: not a protobuf message at byte ", offset));
}

// Bytes of the value after its tag, except for length-delimited ones, which carry their own length.
bool TakeScalar(Cursor* cursor, uint32_t wire_type, std::string* header) {
  uint64_t ignored = 0;
  switch (wire_type) {
    case 0:
      return cursor->ReadVarint(kMostVarintBytes, &ignored, header);
    case 1:
      return cursor->Take(8, header);
    case 5:
      return cursor->Take(4, header);
    default:
      return false;  // groups do not exist in this contract
  }
}

}  // namespace

absl::Status ScanMessage(std::span<const Fragment> fragments, std::string* header,
                         PayloadRange* payload, size_t most_header) {
  const auto too_long = [most_header] {
    return absl::InvalidArgumentError(
        absl::StrCat("message: more than ", most_header, " bytes besides the payload"));
  };
  header->clear();
  *payload = {};
  Cursor cursor(fragments);
  while (!cursor.AtEnd()) {
    const size_t start = cursor.offset();
    const size_t header_size = header->size();
    uint64_t tag = 0;
    if (!cursor.ReadVarint(kMostTagBytes, &tag, header)) return Malformed(start);
    const auto wire_type = static_cast<uint32_t>(tag & 7);
    if (tag >> 3 == 0 || tag > UINT32_MAX) return Malformed(start);
    if (wire_type != 2) {
      if (!TakeScalar(&cursor, wire_type, header)) return Malformed(start);
      if (header->size() > most_header) return too_long();
      continue;
    }
    uint64_t length = 0;
    if (!cursor.ReadVarint(kMostLengthBytes, &length, header)) return Malformed(start);
    const bool is_payload = tag >> 3 == kPayloadField;
    if (is_payload) {
      header->resize(header_size);
      *payload = {cursor.offset(), length};
    } else if (length > most_header - std::min(most_header, header->size())) {
      return too_long();
    }
    if (!cursor.Take(length, is_payload ? nullptr : header)) return Malformed(start);
  }
  return absl::OkStatus();
}

void GatherBytes(std::span<const Fragment> fragments, size_t offset, size_t size,
                 std::byte* target) {
  for (const Fragment& fragment : fragments) {
    if (size == 0) return;
    if (offset >= fragment.size()) {
      offset -= fragment.size();
      continue;
    }
    const size_t here = std::min(size, fragment.size() - offset);
    std::memcpy(target, fragment.data() + offset, here);
    target += here;
    size -= here;
    offset = 0;
  }
}

void EncodeHeader(const google::protobuf::MessageLite& header, size_t payload_size,
                  std::string* out) {
  out->clear();
  header.AppendToString(out);
  if (payload_size == 0) return;
  for (uint64_t value : {uint64_t{kPayloadField << 3 | 2}, uint64_t{payload_size}}) {
    while (value >= 0x80) {
      out->push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    out->push_back(static_cast<char>(value));
  }
}

}  // namespace mla::wire
