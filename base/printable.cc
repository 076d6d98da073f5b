#include "base/printable.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>

namespace mla::base {
namespace {

struct Range {
  uint32_t first, last;
};

// Unicode 15: categories Cc, Cf, Zl and Zp, with the rest of the blocks that hold little else, and
// the characters that there will never be. In order.
constexpr Range kUnprintable[] = {
    {0x0000, 0x001f},   {0x007f, 0x009f},   {0x00ad, 0x00ad},   {0x0600, 0x0605},
    {0x061c, 0x061c},   {0x06dd, 0x06dd},   {0x070f, 0x070f},   {0x0890, 0x0891},
    {0x08e2, 0x08e2},   {0x180e, 0x180e},   {0x200b, 0x200f},   {0x2028, 0x202e},
    {0x2060, 0x206f},   {0xfdd0, 0xfdef},   {0xfeff, 0xfeff},   {0xfff9, 0xfffb},
    {0xfffe, 0xffff},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f},
    {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe007f},
};

bool IsPrintable(uint32_t point) {
  const Range* const candidate =
      std::lower_bound(std::begin(kUnprintable), std::end(kUnprintable), point,
                       [](const Range& range, uint32_t value) { return range.last < value; });
  if (candidate != std::end(kUnprintable) && candidate->first <= point) return false;
  return (point & 0xfffe) != 0xfffe;  // the last two of each plane
}

// The first character of a text, with its number of bytes; 0 bytes if it is not UTF-8.
struct Character {
  uint32_t point = 0;
  size_t bytes = 0;
};

Character FrontOf(std::string_view text) {
  const auto byte = [text](size_t i) {
    return static_cast<uint32_t>(static_cast<uint8_t>(text[i]));
  };
  const uint32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  // Not fewer bytes than its value needs, no surrogates, and nothing beyond the last plane.
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return {};
  uint32_t point = first & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    point = point << 6 | (byte(i) & 0x3f);
  }
  const bool surrogate = point >= 0xd800 && point <= 0xdfff;
  if (point < kLeast[bytes] || point > 0x10ffff || surrogate) return {};
  return {point, bytes};
}

void AppendEscape(uint32_t unit, std::string* text) {
  char escape[8];
  std::snprintf(escape, sizeof(escape), "\\u%04x", unit);
  text->append(escape);
}

}  // namespace

bool IsPrintable(std::string_view text) {
  while (!text.empty()) {
    const Character front = FrontOf(text);
    if (front.bytes == 0 || !IsPrintable(front.point)) return false;
    text.remove_prefix(front.bytes);
  }
  return true;
}

std::string Printable(std::string_view text, std::string_view kept) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const Character front = FrontOf(text);
    if (front.bytes == 0) {
      result += "\xef\xbf\xbd";
    } else if (IsPrintable(front.point) || (front.bytes == 1 && kept.find(text[0]) != kept.npos)) {
      result.append(text.substr(0, front.bytes));
    } else if (front.point < 0x10000) {
      AppendEscape(front.point, &result);
    } else {
      AppendEscape(0xd7c0 + (front.point >> 10), &result);
      AppendEscape(0xdc00 + (front.point & 0x3ff), &result);
    }
    text.remove_prefix(std::max<size_t>(front.bytes, 1));
  }
  return result;
}

}  // namespace mla::base
