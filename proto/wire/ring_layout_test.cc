#include "proto/wire/ring_layout.h"

#include <gtest/gtest.h>

namespace mla::wire {
namespace {

SubmissionEntry Attend(uint8_t flags, uint8_t dtypes) {
  SubmissionEntry entry = {};
  entry.kind = kEntryAttend;
  entry.flags = flags;
  entry.dtypes = dtypes;
  return entry;
}

struct Case {
  const char* name;
  uint8_t flags, dtypes;
  bool host_reads, on_device;
};

// Queries have the low half of the types, outputs the high half.
constexpr Case kCases[] = {
    {"bf16", kEntryHasKv | kEntryWantLse | kEntryChained, 0x11, false, true},
    {"fp32", kEntryHasKv, 0x22, false, true},
    {"lists", kEntryHasKv | kEntryHasLists, 0x11, true, false},
    {"inputs of lists", kEntryHasKv | kEntrySelects, 0x11, true, false},
    {"lists that are wanted", kEntryHasKv | kEntryWantLists, 0x11, false, false},
    {"rows of 8 bits", kEntryHasKv | kEntryFp8Kv, 0x11, true, false},
    {"queries of 8 bits", kEntryHasKv, 0x10 | kEntryDTypeFp8, true, false},
    {"outputs of that number", kEntryHasKv, kEntryDTypeFp8 << 4 | 1, false, true},
};

TEST(RingLayoutTest, HostReadsListsAndEightBits) {
  for (const Case& c : kCases) {
    EXPECT_EQ(HostReads(Attend(c.flags, c.dtypes)), c.host_reads) << c.name;
    EXPECT_EQ(MayLieOnDevice(Attend(c.flags, c.dtypes)), c.on_device) << c.name;
  }
}

TEST(RingLayoutTest, MessagesLieInTheArena) {
  SubmissionEntry entry = Attend(0, 0);
  entry.kind = kEntryMessage;
  EXPECT_FALSE(MayLieOnDevice(entry));
}

}  // namespace
}  // namespace mla::wire
