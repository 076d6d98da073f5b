#include "server/hand_over/grpc_peer.h"

#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "server/hand_over/abandoned_imports.h"
#include "server/hand_over/hand_over.h"

namespace mla::server {
namespace {

TEST(GrpcPeer, WordsOfAnotherServerAreBoundedAndPrintable) {
  EXPECT_EQ(PrintablePeerMessage("no room"), "no room");
  EXPECT_EQ(PrintablePeerMessage("a\nb\x1b[31m\x7f\xc3\xa4"), "a?b?[31m???");
  EXPECT_EQ(PrintablePeerMessage(std::string("\0x", 2)), "?x");
  const std::string most(kMostPeerMessageBytes, 'm');
  EXPECT_EQ(PrintablePeerMessage(most), most);
  EXPECT_EQ(PrintablePeerMessage(most + "m"), most + "...");
}

TEST(GrpcPeer, ReasonsAreTokens) {
  EXPECT_EQ(PeerReason("pages_exhausted"), "pages_exhausted");
  EXPECT_EQ(PeerReason("fp8_kind"), "fp8_kind");
  const std::string longest(kMostPeerReasonBytes, 'r');
  EXPECT_EQ(PeerReason(longest), longest);
  for (const std::string& reason :
       {std::string(), longest + "r", std::string("No"), std::string("a b"), std::string("a\n"),
        std::string("a\0", 2)}) {
    EXPECT_EQ(PeerReason(reason), "peer_failed") << reason;
  }
}

TEST(HandOver, ChunksAreOfTheSizeThatThePeerTakesWithinBounds) {
  const std::pair<uint64_t, uint64_t> sizes[] = {{0, kSentChunkBytes},
                                                 {1, kLeastPeerChunkBytes},
                                                 {kLeastPeerChunkBytes, kLeastPeerChunkBytes},
                                                 {300000, 300000},
                                                 {kMostPeerChunkBytes + 1, kMostPeerChunkBytes},
                                                 {UINT64_MAX, kMostPeerChunkBytes}};
  for (const auto& [told, chunk] : sizes) {
    v1::GetServerInfoReply info;
    info.mutable_limits()->set_weight_chunk_bytes(told);
    EXPECT_EQ(PeerChunkBytes(info), static_cast<int64_t>(chunk)) << told;
  }
}

TEST(AbandonedImports, TheLatestAreRemembered) {
  AbandonedImports abandoned;
  abandoned.Add(0);
  EXPECT_FALSE(abandoned.Contains(0));
  for (uint64_t attempt = 1; attempt <= kMostAbandonedImports + 2; ++attempt) {
    abandoned.Add(attempt);
    abandoned.Add(attempt);
  }
  EXPECT_FALSE(abandoned.Contains(2));
  EXPECT_TRUE(abandoned.Contains(3));
  EXPECT_TRUE(abandoned.Contains(kMostAbandonedImports + 2));
}

}  // namespace
}  // namespace mla::server
