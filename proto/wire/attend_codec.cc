#include "proto/wire/attend_codec.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace mla::wire {
namespace {

// Every server's handles are of this size (SharedTensors.handle).
constexpr size_t kUsualHandleBytes = 16;

constexpr uint32_t kVarint = 0, kFixed64 = 1, kLengthDelimited = 2;

constexpr uint64_t Key(uint32_t field, uint32_t wire_type) { return field << 3 | wire_type; }

// ------------------------------------------------------------------------------------- Reading

struct Reader {
  const uint8_t* position;
  const uint8_t* end;

  bool Varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && position != end; shift += 7) {
      const uint8_t byte = *position++;
      *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte >= 0x80) continue;
      // A longer encoding than necessary is left to protobuf, which accepts some and refuses
      // others.
      const bool shortest = byte != 0 || shift == 0;
      return shortest && (shift < 63 || byte <= 1);
    }
    return false;
  }

  bool Take(uint64_t length, Reader* inside) {
    if (length > static_cast<uint64_t>(end - position)) return false;
    *inside = {position, position + length};
    position += length;
    return true;
  }
};

// Calls set(field, value) for every field of a message that holds small numbers only.
template <typename Set>
bool ReadNumbers(Reader reader, Set set) {
  while (reader.position != reader.end) {
    uint64_t key = 0, value = 0;
    if (!reader.Varint(&key) || (key & 7) != kVarint || !reader.Varint(&value)) return false;
    if (!set(key >> 3, value)) return false;
  }
  return true;
}

// Protobuf decides how wider values are cut or change their sign, so they are left to it.
bool Fits(uint64_t value) { return value <= std::numeric_limits<int32_t>::max(); }

bool ReadAttend(Reader reader, v1::Attend* attend) {
  return ReadNumbers(reader, [attend](uint64_t field, uint64_t value) {
    if (field == 1) {
      attend->set_step_id(value);
      return true;
    }
    if (!Fits(value)) return false;
    const auto number = static_cast<uint32_t>(value);
    switch (field) {
      case 2:
        attend->set_layer(number);
        return true;
      case 3:
        attend->set_row_begin(number);
        return true;
      case 4:
        attend->set_row_count(number);
        return true;
      case 5:
        attend->set_head_offset(number);
        return true;
      case 6:
        attend->set_num_heads(number);
        return true;
      case 7:
        attend->set_profile(static_cast<v1::Profile>(number));
        return true;
      case 8:
        attend->set_has_kv(number != 0);
        return true;
      case 9:
        attend->set_want_lse(number != 0);
        return true;
      case 10:
        attend->set_q_dtype(static_cast<v1::DType>(number));
        return true;
      case 11:
        attend->set_o_dtype(static_cast<v1::DType>(number));
        return true;
      case 12:
        attend->set_timeout_us(number);
        return true;
      case 13:
        attend->set_lists(static_cast<v1::IndexLists>(number));
        return true;
      case 14:
        attend->set_list_entries(number);
        return true;
      case 15:
        attend->set_want_lists(number != 0);
        return true;
      case 16:
        attend->set_kv_row_dtype(static_cast<v1::DType>(number));
        return true;
      default:
        return false;
    }
  });
}

bool ReadShared(Reader reader, v1::SharedTensors* shared) {
  while (reader.position != reader.end) {
    uint64_t key = 0, value = 0;
    if (!reader.Varint(&key) || !reader.Varint(&value)) return false;
    Reader handle{};
    switch (key) {
      case Key(1, kLengthDelimited):
        if (!reader.Take(value, &handle)) return false;
        shared->set_handle(handle.position, static_cast<size_t>(value));
        break;
      case Key(2, kVarint):
        shared->set_in_offset(value);
        break;
      case Key(3, kVarint):
        shared->set_in_length(value);
        break;
      case Key(4, kVarint):
        shared->set_out_offset(value);
        break;
      case Key(5, kVarint):
        shared->set_out_length(value);
        break;
      default:
        return false;
    }
  }
  return true;
}

bool ReadAttendReply(Reader reader, v1::AttendReply* attend) {
  return ReadNumbers(reader, [attend](uint64_t field, uint64_t value) {
    if (!Fits(value)) return false;
    const auto number = static_cast<uint32_t>(value);
    switch (field) {
      case 1:
        attend->set_row_begin(number);
        return true;
      case 2:
        attend->set_row_count(number);
        return true;
      case 3:
        attend->set_head_offset(number);
        return true;
      case 4:
        attend->set_num_heads(number);
        return true;
      case 5:
        attend->set_layer(number);
        return true;
      case 6:
        attend->set_o_dtype(static_cast<v1::DType>(number));
        return true;
      default:
        return false;
    }
  });
}

bool ReadTimings(Reader reader, v1::Timings* timings) {
  return ReadNumbers(reader, [timings](uint64_t field, uint64_t value) {
    if (!Fits(value)) return false;
    const auto number = static_cast<uint32_t>(value);
    switch (field) {
      case 1:
        timings->set_queue_us(number);
        return true;
      case 2:
        timings->set_plan_us(number);
        return true;
      case 3:
        timings->set_kernel_us(number);
        return true;
      case 4:
        timings->set_write_us(number);
        return true;
      case 5:
        timings->set_launch_requests(number);
        return true;
      case 6:
        timings->set_launch_layers(number);
        return true;
      case 7:
        timings->set_launch_clients(number);
        return true;
      case 8:
        timings->set_plan_reused(number != 0);
        return true;
      default:
        return false;
    }
  });
}

// Reads the top level of both messages. set(key, reader) takes one field's value; the payload, if
// there is one, ends the message.
template <typename Set>
bool ReadMessage(std::span<const Fragment> fragments, PayloadRange* payload, Set set) {
  *payload = {};
  size_t total = 0;
  for (const Fragment& fragment : fragments) total += fragment.size();
  while (!fragments.empty() && fragments.front().empty()) fragments = fragments.subspan(1);
  if (fragments.empty()) return false;
  const auto* const begin = reinterpret_cast<const uint8_t*>(fragments.front().data());
  Reader reader{begin, begin + fragments.front().size()};
  while (reader.position != reader.end) {
    uint64_t key = 0;
    if (!reader.Varint(&key)) return false;
    if (key == Key(kPayloadField, kLengthDelimited)) {
      uint64_t length = 0;
      if (!reader.Varint(&length)) return false;
      *payload = {static_cast<size_t>(reader.position - begin), static_cast<size_t>(length)};
      return total - payload->offset == length;
    }
    if (!set(key, &reader)) return false;
  }
  return total == fragments.front().size();
}

bool TakeInside(Reader* reader, Reader* inside) {
  uint64_t length = 0;
  return reader->Varint(&length) && reader->Take(length, inside);
}

// ------------------------------------------------------------------------------------- Writing

class Writer {
 public:
  explicit Writer(char* out) : begin_(out), position_(out) {}

  size_t size() const { return static_cast<size_t>(position_ - begin_); }
  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) *position_++ = static_cast<char>(value | 0x80);
    *position_++ = static_cast<char>(value);
  }
  // Zero is not written, as in proto3.
  void Number(uint32_t field, uint64_t value) {
    if (value == 0) return;
    Varint(Key(field, kVarint));
    Varint(value);
  }
  // An enumeration's negative values are ten bytes long.
  void Enum(uint32_t field, int32_t value) {
    Number(field, static_cast<uint64_t>(static_cast<int64_t>(value)));
  }
  void Fixed64(uint32_t field, uint64_t value) {
    if (value == 0) return;
    Varint(Key(field, kFixed64));
    for (int shift = 0; shift < 64; shift += 8) *position_++ = static_cast<char>(value >> shift);
  }
  // REQUIRES: `fill` writes fewer than 128 bytes.
  template <typename Fill>
  void Message(uint32_t field, Fill fill) {
    Varint(Key(field, kLengthDelimited));
    char* const length = position_++;
    fill();
    *length = static_cast<char>(position_ - length - 1);
  }
  void Bytes(uint32_t field, std::string_view bytes) {
    if (bytes.empty()) return;
    Varint(Key(field, kLengthDelimited));
    Varint(bytes.size());
    position_ = std::copy(bytes.begin(), bytes.end(), position_);
  }
  void Payload(size_t size) {
    if (size == 0) return;
    Varint(Key(kPayloadField, kLengthDelimited));
    Varint(size);
  }

 private:
  char* const begin_;
  char* position_;
};

}  // namespace

bool ScanAttend(std::span<const Fragment> fragments, v1::AttendStreamRequest* request,
                PayloadRange* payload) {
  // Most streams send one kind of message, so its parts are reused instead of being made again.
  if (request->body_case() != v1::AttendStreamRequest::kAttend) request->Clear();
  request->set_tag(0);
  v1::Attend* const attend = request->mutable_attend();
  attend->Clear();
  bool found_attend = false, found_shared = false;
  const bool usual = ReadMessage(fragments, payload, [&](uint64_t key, Reader* reader) {
    uint64_t value = 0;
    Reader inside{};
    switch (key) {
      case Key(1, kVarint):
        if (!reader->Varint(&value)) return false;
        request->set_tag(value);
        return true;
      case Key(3, kLengthDelimited):
        return !std::exchange(found_attend, true) && TakeInside(reader, &inside) &&
               ReadAttend(inside, attend);
      case Key(6, kLengthDelimited):
        if (std::exchange(found_shared, true) || !TakeInside(reader, &inside)) return false;
        request->mutable_shared()->Clear();
        return ReadShared(inside, request->mutable_shared());
      default:
        return false;
    }
  });
  if (!found_shared && request->has_shared()) request->clear_shared();
  return usual && found_attend;
}

bool ScanAttendReply(std::span<const Fragment> fragments, v1::AttendStreamReply* reply,
                     PayloadRange* payload) {
  reply->Clear();
  bool found_attend = false, timed = false;
  const bool usual = ReadMessage(fragments, payload, [&](uint64_t key, Reader* reader) {
    uint64_t value = 0;
    Reader inside{};
    switch (key) {
      case Key(1, kVarint):
        if (!reader->Varint(&value)) return false;
        reply->set_tag(value);
        return true;
      case Key(2, kFixed64):
        if (!reader->Take(8, &inside)) return false;
        for (int i = 0; i < 8; ++i) value |= static_cast<uint64_t>(inside.position[i]) << 8 * i;
        reply->set_boot_id(value);
        return true;
      case Key(4, kLengthDelimited):
        return !std::exchange(found_attend, true) && TakeInside(reader, &inside) &&
               ReadAttendReply(inside, reply->mutable_attend());
      case Key(8, kLengthDelimited):
        return !std::exchange(timed, true) && TakeInside(reader, &inside) &&
               ReadTimings(inside, reply->mutable_timings());
      default:
        return false;
    }
  });
  return usual && found_attend;
}

size_t EncodeAttend(const v1::AttendStreamRequest& request, size_t payload_size, char* out) {
  const v1::SharedTensors& shared = request.shared();
  if (!request.has_attend() || shared.handle().size() > kUsualHandleBytes) return 0;
  const v1::Attend& attend = request.attend();
  Writer writer(out);
  writer.Number(1, request.tag());
  writer.Message(3, [&] {
    writer.Number(1, attend.step_id());
    writer.Number(2, attend.layer());
    writer.Number(3, attend.row_begin());
    writer.Number(4, attend.row_count());
    writer.Number(5, attend.head_offset());
    writer.Number(6, attend.num_heads());
    writer.Enum(7, attend.profile());
    writer.Number(8, attend.has_kv() ? 1 : 0);
    writer.Number(9, attend.want_lse() ? 1 : 0);
    writer.Enum(10, attend.q_dtype());
    writer.Enum(11, attend.o_dtype());
    writer.Number(12, attend.timeout_us());
    writer.Enum(13, attend.lists());
    writer.Number(14, attend.list_entries());
    writer.Number(15, attend.want_lists() ? 1 : 0);
    writer.Enum(16, attend.kv_row_dtype());
  });
  if (request.has_shared()) {
    writer.Message(6, [&] {
      writer.Bytes(1, shared.handle());
      writer.Number(2, shared.in_offset());
      writer.Number(3, shared.in_length());
      writer.Number(4, shared.out_offset());
      writer.Number(5, shared.out_length());
    });
  }
  writer.Payload(payload_size);
  return writer.size();
}

size_t EncodeAttendReply(const v1::AttendStreamReply& reply, size_t payload_size, char* out) {
  if (!reply.has_attend()) return 0;
  const v1::AttendReply& attend = reply.attend();
  Writer writer(out);
  writer.Number(1, reply.tag());
  writer.Fixed64(2, reply.boot_id());
  writer.Message(4, [&] {
    writer.Number(1, attend.row_begin());
    writer.Number(2, attend.row_count());
    writer.Number(3, attend.head_offset());
    writer.Number(4, attend.num_heads());
    writer.Number(5, attend.layer());
    writer.Enum(6, attend.o_dtype());
  });
  if (reply.has_timings()) {
    const v1::Timings& timings = reply.timings();
    writer.Message(8, [&] {
      writer.Number(1, timings.queue_us());
      writer.Number(2, timings.plan_us());
      writer.Number(3, timings.kernel_us());
      writer.Number(4, timings.write_us());
      writer.Number(5, timings.launch_requests());
      writer.Number(6, timings.launch_layers());
      writer.Number(7, timings.launch_clients());
      writer.Number(8, timings.plan_reused() ? 1 : 0);
    });
  }
  writer.Payload(payload_size);
  return writer.size();
}

}  // namespace mla::wire
