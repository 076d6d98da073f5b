#include "scheduler/kvcache/prefix/event_log.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

namespace mla::kvcache {
namespace {

constexpr TenantKey kOne = 1, kTwo = 2;

Event Stored(uint64_t sequence) {
  Event event;
  event.sequence = sequence;
  return event;
}

std::vector<Event> ReadAll(const EventLog& log, TenantKey tenant, uint64_t after = 0) {
  EventLog::Cursor cursor = log.After(tenant, after);
  return log.Read(tenant, 1000, &cursor);
}

TEST(EventLogTest, EventsAreTheTenantsOwnAndNumberedWithoutGaps) {
  EventLog log(7, 16);
  log.SetLayout(0, kOne, "one", "a");
  log.SetLayout(1, kTwo, "two", "b");
  log.SetLayout(2, kOne, "one", "c");
  for (uint64_t i = 0; i < 9; ++i) log.Add(static_cast<LayoutId>(i % 3), Stored(i));
  log.Add(5, Stored(99));  // without a tenant
  const std::vector<Event> ones = ReadAll(log, kOne), twos = ReadAll(log, kTwo);
  ASSERT_EQ(ones.size(), 6u);
  ASSERT_EQ(twos.size(), 3u);
  for (size_t i = 1; i < ones.size(); ++i) EXPECT_EQ(ones[i].number, ones[i - 1].number + 1);
  for (size_t i = 1; i < twos.size(); ++i) EXPECT_EQ(twos[i].number, twos[i - 1].number + 1);
  EXPECT_NE(ones[0].number >> 32, twos[0].number >> 32);
  EXPECT_EQ(*ones[1].model, "c");
  EXPECT_EQ(ones[1].sequence, 2u);
  EXPECT_GT(ones[0].unix_ms, 0);
  EXPECT_TRUE(ReadAll(log, 3).empty());
}

TEST(EventLogTest, WithoutATenantEventsAreOfAllInTheirOrder) {
  EventLog log(7, 4);
  log.SetLayout(0, kOne, "one", "a");
  log.SetLayout(1, kTwo, "two", "b");
  for (uint64_t i = 0; i < 6; ++i) {
    log.Add(static_cast<LayoutId>(i % 2), Stored(i));
    log.Add(static_cast<LayoutId>(i % 2), Miss());
  }
  EventLog::Cursor cursor = log.Begin();
  const std::vector<Event> events = log.Read(std::nullopt, 100, &cursor);
  ASSERT_EQ(events.size(), 4u);
  for (size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i].sequence, i + 2);
  EXPECT_EQ(*events[0].tenant_name, "one");
  EXPECT_EQ(*events[1].tenant_name, "two");
  const std::vector<Miss> misses = log.Misses(std::nullopt, 100);
  ASSERT_EQ(misses.size(), 4u);
  EXPECT_EQ(*misses[0].tenant_name, "two");
}

TEST(EventLogTest, AReaderGoesOnWhereItWas) {
  EventLog log(7, 16);
  log.SetLayout(0, kOne, "one", "a");
  EventLog::Cursor end = log.End();
  for (uint64_t i = 0; i < 5; ++i) log.Add(0, Stored(i));
  EXPECT_EQ(log.Read(kOne, 2, &end).size(), 2u);
  const std::vector<Event> rest = log.Read(kOne, 100, &end);
  ASSERT_EQ(rest.size(), 3u);
  EXPECT_EQ(rest[0].sequence, 2u);
  EXPECT_TRUE(log.Read(kOne, 100, &end).empty());
  EXPECT_EQ(ReadAll(log, kOne, rest[1].number).size(), 1u);
  EXPECT_EQ(ReadAll(log, kOne, rest[2].number).size(), 0u);
}

TEST(EventLogTest, WhatIsLostIsSeenFromTheNumbers) {
  EventLog log(7, 4);
  log.SetLayout(0, kOne, "one", "a");
  log.SetLayout(1, kTwo, "two", "b");
  log.Add(0, Stored(0));
  const uint64_t last = ReadAll(log, kOne).back().number;
  EventLog::Cursor cursor = log.End();
  log.Add(0, Stored(1));
  for (uint64_t i = 2; i < 5; ++i) log.Add(1, Stored(i));
  log.Add(0, Stored(5));
  const std::vector<Event> read = log.Read(kOne, 100, &cursor);
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].number, last + 2);
  EXPECT_EQ(ReadAll(log, kOne, last).front().number, last + 2);  // `last` was dropped
}

TEST(EventLogTest, ATenantThatComesAgainBeginsElsewhere) {
  EventLog log(7, 16);
  log.SetLayout(0, kOne, "one", "a");
  log.Add(0, Stored(1));
  log.DropLayout(0);
  log.Add(0, Stored(2));  // no effect
  log.SetLayout(0, kOne, "one", "a");
  log.Add(0, Stored(3));
  const std::vector<Event> events = ReadAll(log, kOne);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_NE(events[1].number, events[0].number + 1);
}

TEST(EventLogTest, MissesAreTheLatestOfTheTenant) {
  EventLog log(7, 4);
  log.SetLayout(0, kOne, "one", "a");
  log.SetLayout(1, kTwo, "two", "b");
  for (int64_t i = 0; i < 6; ++i) {
    Miss miss;
    miss.rows_asked = i;
    miss.end = MatchEnd::kEvicted;
    log.Add(static_cast<LayoutId>(i % 2), std::move(miss));
  }
  const std::vector<Miss> misses = log.Misses(kOne, 100);
  ASSERT_EQ(misses.size(), 2u);  // the latest of four
  EXPECT_EQ(misses[0].rows_asked, 4);
  EXPECT_EQ(misses[1].rows_asked, 2);
  EXPECT_EQ(*misses[0].model, "a");
  EXPECT_EQ(log.Misses(kTwo, 1).size(), 1u);
  EXPECT_TRUE(log.Misses(3, 100).empty());
}

TEST(EventLogTest, ReadersAndTheEngineDoNotDisturbEachOther) {
  EventLog log(7, 64);
  log.SetLayout(0, kOne, "one", "a");
  constexpr uint64_t kEvents = 20000;
  std::thread reader([&log] {
    EventLog::Cursor cursor = log.After(kOne, 0);
    for (uint64_t last = 0, sequence = 0; sequence + 1 < kEvents;) {
      for (const Event& event : log.Read(kOne, 10, &cursor)) {
        EXPECT_GT(event.number, last);
        last = event.number;
        sequence = event.sequence;
      }
    }
  });
  for (uint64_t i = 0; i < kEvents; ++i) log.Add(0, Stored(i));
  reader.join();
}

}  // namespace
}  // namespace mla::kvcache
