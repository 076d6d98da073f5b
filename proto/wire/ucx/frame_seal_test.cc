#include "proto/wire/ucx/frame_seal.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace mla::wire {
namespace {

std::vector<std::byte> Noise(size_t bytes, int seed) {
  std::vector<std::byte> noise(bytes);
  for (size_t i = 0; i < bytes; ++i) noise[i] = static_cast<std::byte>(i * 31 + seed + (i >> 8));
  return noise;
}

struct Sealed {
  std::vector<std::byte> header, payload;
};

class FrameSealTest : public testing::Test {
 protected:
  FrameSealTest() { secret_.fill(5); }
  static Sealed Seal(FrameSeal* seal, const std::vector<std::byte>& header,
                     const std::vector<std::byte>& payload) {
    Sealed sealed;
    sealed.header.resize(header.size() + FrameSeal::kOverhead);
    sealed.payload.resize(payload.size());
    seal->Seal(header, payload, sealed.header.data(), sealed.payload.data());
    return sealed;
  }
  // Returns true if the whole frame opens, as header and payload.
  static bool Opens(FrameSeal* seal, Sealed sealed, std::vector<std::byte>* header,
                    std::vector<std::byte>* payload) {
    if (sealed.header.size() < FrameSeal::kOverhead) return false;
    header->resize(sealed.header.size() - FrameSeal::kOverhead);
    FrameSeal::Opening opening;
    if (!seal->OpenHeader(sealed.header, header->data(), &opening)) return false;
    *payload = std::move(sealed.payload);
    return seal->OpenPayload(opening, *payload);
  }
  static bool Opens(FrameSeal* seal, const Sealed& sealed) {
    std::vector<std::byte> header, payload;
    return Opens(seal, sealed, &header, &payload);
  }

  UcxSecret secret_{};
};

TEST_F(FrameSealTest, OpensInAnyOrderWhatTheOtherEndHasSealed) {
  FrameSeal sends(secret_, FrameSeal::Sender::kClient);
  FrameSeal receives(secret_, FrameSeal::Sender::kClient);
  std::vector<Sealed> frames;
  const std::vector<size_t> sizes = {0, 1, 15, 16, 4096, 1'000'003};
  for (size_t i = 0; i < sizes.size(); ++i) {
    frames.push_back(Seal(&sends, Noise(104, i), Noise(sizes[i], i)));
  }
  for (size_t i = sizes.size(); i-- > 0;) {
    std::vector<std::byte> header, payload;
    ASSERT_TRUE(Opens(&receives, frames[i], &header, &payload)) << i;
    EXPECT_EQ(header, Noise(104, i));
    EXPECT_EQ(payload, Noise(sizes[i], i));
  }
}

TEST_F(FrameSealTest, NothingOfAFrameIsInClearAndNoTwoAreAlike) {
  FrameSeal sends(secret_, FrameSeal::Sender::kClient);
  const std::vector<std::byte> header = Noise(104, 1), payload = Noise(4096, 2);
  const Sealed first = Seal(&sends, header, payload), second = Seal(&sends, header, payload);
  EXPECT_NE(first.header, second.header);
  EXPECT_NE(first.payload, second.payload);
  const auto contains = [](const std::vector<std::byte>& where, const std::byte* what) {
    for (size_t i = 0; i + 8 <= where.size(); ++i) {
      if (std::memcmp(where.data() + i, what, 8) == 0) return true;
    }
    return false;
  };
  for (size_t at = 0; at + 8 <= header.size(); at += 8) {
    EXPECT_FALSE(contains(first.header, header.data() + at));
  }
  EXPECT_FALSE(contains(first.payload, payload.data()));
}

TEST_F(FrameSealTest, EveryChangedBitIsNoticed) {
  FrameSeal sends(secret_, FrameSeal::Sender::kServer);
  FrameSeal receives(secret_, FrameSeal::Sender::kServer);
  const Sealed frame = Seal(&sends, Noise(96, 1), Noise(64, 2));
  for (size_t index = 0; index < frame.header.size(); ++index) {
    Sealed changed = frame;
    changed.header[index] ^= std::byte{1};
    EXPECT_FALSE(Opens(&receives, changed)) << index;
  }
  for (size_t index = 0; index < frame.payload.size(); ++index) {
    Sealed changed = frame;
    changed.payload[index] ^= std::byte{0x80};
    std::vector<std::byte> header, payload;
    EXPECT_FALSE(Opens(&receives, changed, &header, &payload)) << index;
    EXPECT_EQ(payload, std::vector<std::byte>(64)) << "what was not authentic is not left there";
  }
  for (size_t bytes = 0; bytes < frame.header.size(); ++bytes) {
    Sealed cut = frame;
    cut.header.resize(bytes);
    EXPECT_FALSE(Opens(&receives, cut));
  }
  EXPECT_TRUE(Opens(&receives, frame));
}

TEST_F(FrameSealTest, SecretsDirectionsAndPayloadsOfOthersDoNotFit) {
  FrameSeal sends(secret_, FrameSeal::Sender::kClient);
  const Sealed first = Seal(&sends, Noise(104, 1), Noise(64, 2));
  const Sealed second = Seal(&sends, Noise(104, 1), Noise(64, 3));
  FrameSeal other_direction(secret_, FrameSeal::Sender::kServer);
  EXPECT_FALSE(Opens(&other_direction, first));
  UcxSecret other = secret_;
  other[31] ^= 1;
  FrameSeal other_secret(other, FrameSeal::Sender::kClient);
  EXPECT_FALSE(Opens(&other_secret, first));
  FrameSeal receives(secret_, FrameSeal::Sender::kClient);
  EXPECT_FALSE(Opens(&receives, {first.header, second.payload}));
  EXPECT_FALSE(Opens(&receives, {std::vector<std::byte>(2000), first.payload}));
}

}  // namespace
}  // namespace mla::wire
