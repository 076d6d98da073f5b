// Turns of tenants, bounds, and pages that are no longer wanted.
#include "scheduler/moves/waiting_pages.h"

#include <vector>

#include "gtest/gtest.h"

namespace mla::scheduler {
namespace {

WaitingPage Page(TenantKey tenant, int32_t node) {
  return {.node = node, .life = 1, .tenant = tenant};
}

std::vector<int32_t> TakeAll(WaitingPages* pages) {
  std::vector<int32_t> nodes;
  while (!pages->empty()) {
    const int32_t next = pages->front().node;
    nodes.push_back(pages->Take().node);
    EXPECT_EQ(nodes.back(), next);
  }
  return nodes;
}

TEST(WaitingPages, TenantsTakeTurns) {
  WaitingPages pages;
  for (int32_t node = 0; node < 5; ++node) EXPECT_TRUE(pages.Add(Page(1, node)));
  for (int32_t node = 10; node < 12; ++node) EXPECT_TRUE(pages.Add(Page(2, node)));
  EXPECT_TRUE(pages.Add(Page(3, 20)));
  EXPECT_EQ(pages.size(), 8u);
  EXPECT_EQ(TakeAll(&pages), (std::vector<int32_t>{0, 10, 20, 1, 11, 2, 3, 4}));
}

TEST(WaitingPages, OneThatMovesOnceMoreGoesBeforeItsTenantsOthers) {
  WaitingPages pages;
  pages.Add(Page(1, 0));
  pages.Add(Page(1, 1));
  pages.Add(Page(2, 10));
  pages.AddFirst(pages.Take());
  EXPECT_EQ(TakeAll(&pages), (std::vector<int32_t>{10, 0, 1}));
}

TEST(WaitingPages, TenantsAreBoundedByThemselvesAndTogether) {
  WaitingPages pages;
  const auto fill = [&](TenantKey tenant) {
    size_t taken = 0;
    while (pages.Add(Page(tenant, 0))) ++taken;
    EXPECT_EQ(pages.room(tenant), 0u);
    return taken;
  };
  constexpr TenantKey kFew = WaitingPages::kMost / WaitingPages::kMostOfTenant;
  for (TenantKey tenant = 1; tenant <= kFew; ++tenant) {
    EXPECT_EQ(pages.room(tenant), WaitingPages::kMostOfTenant);
    EXPECT_EQ(fill(tenant), WaitingPages::kMostOfTenant);
  }
  EXPECT_EQ(pages.size(), WaitingPages::kMost);
  EXPECT_EQ(fill(kFew + 1), 0u);
  pages.Take();
  EXPECT_EQ(fill(kFew + 1), 1u);
}

TEST(WaitingPages, WhatIsNotWantedIsTakenOut) {
  WaitingPages pages;
  for (int32_t node = 0; node < 6; ++node) pages.Add(Page(1 + node % 2, node));
  const auto dead = pages.TakeIf([](const WaitingPage& page) {
    return page.node < 2 || page.tenant == 2;  // all of one tenant
  });
  EXPECT_EQ(dead.size(), 4u);
  EXPECT_EQ(pages.size(), 2u);
  EXPECT_EQ(TakeAll(&pages), (std::vector<int32_t>{2, 4}));
}

}  // namespace
}  // namespace mla::scheduler
