// Encrypted rings over a fake UCX, whose messages the test reads and changes.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "proto/wire/ucx/frame_seal.h"
#include "proto/wire/ucx/ucx_link.h"
#include "tests/fake_ucx/fake_ucx.h"
#include "tests/fake_ucx/ring_pair.h"

namespace mla {
namespace {

using fake_ucx::RingPair;

constexpr uint64_t kLarge = 20'000, kSmall = 100;

class EncryptedTest : public testing::Test {
 protected:
  void SetUp() override {
    secret_.fill(9);
    fake_ucx::Reset();
  }
  void TearDown() override {
    EXPECT_EQ(fake_ucx::counts().live_requests, 0u);
    EXPECT_EQ(fake_ucx::counts().registered, 0u);
  }
  wire::UcxSecret secret_{};
};

TEST_F(EncryptedTest, ServesRequestsInAnyOrderOfFrames) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    fake_ucx::Reset({.reorder = seed});
    RingPair pair;
    ASSERT_EQ(pair.Start(false, false, {}, secret_), absl::OkStatus());
    for (const uint64_t bytes : {kLarge, kSmall, RingPair::kSlotBytes}) {
      ASSERT_TRUE(pair.Run(12, bytes)) << pair.fault() << pair.relay()->status();
    }
    EXPECT_EQ(pair.fault(), "");
  }
}

TEST_F(EncryptedTest, APayloadThatWasChangedEndsTheRingBeforeItIsSeen) {
  for (const uint64_t bytes : {kLarge, kSmall}) {
    fake_ucx::Reset();
    RingPair pair;
    ASSERT_EQ(pair.Start(false, false, {}, secret_), absl::OkStatus());
    ASSERT_TRUE(pair.Run(4, bytes)) << pair.fault();
    const size_t before = pair.ring().submitted.size();
    fake_ucx::SetFlips(true);
    EXPECT_FALSE(pair.Run(1, bytes));
    EXPECT_EQ(pair.relay()->status().code(), absl::StatusCode::kPermissionDenied);
    EXPECT_EQ(pair.ring().submitted.size(), before);
    EXPECT_EQ(pair.fault(), "");
    fake_ucx::SetFlips(false);
  }
}

// In clear the same change is not noticed, so the test above can fail.
TEST_F(EncryptedTest, InClearAChangedPayloadIsAWrongRow) {
  RingPair pair;
  ASSERT_EQ(pair.Start(false, false), absl::OkStatus());
  fake_ucx::SetFlips(true);
  EXPECT_FALSE(pair.Run(1, kLarge));
  EXPECT_EQ(pair.fault(), "wrong inputs");
  fake_ucx::SetFlips(false);
}

TEST_F(EncryptedTest, EndsWithDifferentSecretsDoNotUnderstandEachOther) {
  RingPair pair;
  wire::UcxSecret other = secret_;
  other[0] ^= 1;
  ASSERT_EQ(pair.Start(false, false, {}, secret_, other), absl::OkStatus());
  EXPECT_FALSE(pair.Run(1, kSmall));
  EXPECT_EQ(pair.relay()->status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(pair.ring().submitted.empty());
}

TEST_F(EncryptedTest, PutsAndEncryptionExcludeEachOther) {
  RingPair pair;
  EXPECT_EQ(pair.Start(true, true, {}, secret_).code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace mla
