#include "scheduler/kvcache/pool/group_pieces.h"

#include <gtest/gtest.h>

#include <set>

namespace mla::kvcache {
namespace {

// Two layers with rows of 10 bytes a token and of 6 a pair of tokens, and a gap between layers.
GroupLayout TwoPlanes() {
  GroupLayout layout;
  layout.page_size = 4;
  for (int layer = 0; layer < 2; ++layer) {
    const int64_t begin = layer * 60;
    layout.layers.push_back({{begin, 10, 4, 1, kernels::KvFormat::kBf16},
                             {begin + 40, 6, 2, 2, kernels::KvFormat::kBf16}});
  }
  layout.bytes = 112;
  return layout;
}

TEST(GroupPiecesTest, RowsOfEveryPlaneAreThere) {
  const auto pieces = GroupPieces(TwoPlanes(), 3);
  ASSERT_EQ(pieces.size(), 4u);
  EXPECT_EQ(pieces[0].bytes, 30);
  EXPECT_EQ(pieces[1].bytes, 6);  // the second of its rows stands for the fourth token, too
  EXPECT_EQ(pieces[1].payload_offset, 30);
  EXPECT_EQ(pieces[2].group_offset, 60);
  EXPECT_EQ(PayloadBytes(pieces), 72);
  EXPECT_EQ(PayloadBytes(GroupPieces(TwoPlanes(), 4)), 104);
  EXPECT_EQ(PayloadBytes(GroupPieces(TwoPlanes(), 1)), 20);
}

TEST(GroupPiecesTest, PartsEndWhereRowsDo) {
  const auto pieces = GroupPieces(TwoPlanes(), 4);
  const int64_t all = PayloadBytes(pieces);
  for (int64_t limit = 1; limit <= all + 5; ++limit) {
    std::set<int64_t> cuts;
    int64_t offset = 0;
    while (offset < all) {
      const int64_t end = PartEnd(pieces, offset, limit);
      ASSERT_GT(end, offset);
      EXPECT_TRUE(IsPart(pieces, offset, end - offset)) << offset << " " << end;
      EXPECT_LE(end - offset, std::max<int64_t>(limit, 10));
      offset = end;
    }
    EXPECT_EQ(offset, all);
  }
}

TEST(GroupPiecesTest, OtherPartsAreRefused) {
  const auto pieces = GroupPieces(TwoPlanes(), 4);
  EXPECT_TRUE(IsPart(pieces, 0, 104));
  EXPECT_TRUE(IsPart(pieces, 20, 26));
  for (const auto& [offset, bytes] : {std::pair<int64_t, int64_t>{0, 0},
                                      {-10, 20},
                                      {5, 5},
                                      {0, 15},
                                      {0, 105},
                                      {104, 10},
                                      {94, INT64_MAX},
                                      {INT64_MAX, 10}}) {
    EXPECT_FALSE(IsPart(pieces, offset, bytes)) << offset << " " << bytes;
  }
}

TEST(GroupPiecesTest, TransfersJoinNeighboursAndLeaveGapsAlone) {
  const auto pieces = GroupPieces(TwoPlanes(), 4);
  std::vector<std::byte> host(104);
  std::vector<kernels::PageTransfer> transfers;
  AddTransfers(pieces, 0, 104, 1000, host.data(), &transfers);
  ASSERT_EQ(transfers.size(), 2u);  // 40 + 12 bytes of each layer, 8 bytes of nothing between
  EXPECT_EQ(transfers[0].pool_offset, 1000);
  EXPECT_EQ(transfers[0].bytes, 52);
  EXPECT_EQ(transfers[1].pool_offset, 1060);
  EXPECT_EQ(transfers[1].host, host.data() + 52);
  transfers.clear();
  AddTransfers(pieces, 30, 16, 0, host.data(), &transfers);
  ASSERT_EQ(transfers.size(), 1u);
  EXPECT_EQ(transfers[0].pool_offset, 30);
  EXPECT_EQ(transfers[0].bytes, 16);
}

}  // namespace
}  // namespace mla::kvcache
