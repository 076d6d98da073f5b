// Two links of this process over the UCX that is installed, for each transport of one machine.
// libucx-dev, with which the tests are built, brings it.
#include "proto/wire/ucx/ucx_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

#include "proto/wire/ucx/frames.h"

namespace mla::wire {
namespace {

// Puts payloads one after the other into a block, and keeps headers.
class Recorder final : public UcxReceiver {
 public:
  absl::StatusOr<std::byte*> Place(std::span<const std::byte> header, size_t bytes) override {
    if (refuses) return absl::InvalidArgumentError("refused by the test");
    std::byte* const place = memory.data() + used;
    used += bytes;
    EXPECT_LE(used, memory.size());
    places.push_back(
        {std::string(reinterpret_cast<const char*>(header.data()), header.size()), {place, bytes}});
    return place;
  }
  void OnArrived(std::span<const std::byte> header) override {
    arrived.emplace_back(reinterpret_cast<const char*>(header.data()), header.size());
  }
  void OnSent(uint64_t tag) override { sent.push_back(tag); }

  struct Placed {
    std::string header;
    std::span<std::byte> bytes;
  };
  bool refuses = false;
  std::vector<std::byte> memory = std::vector<std::byte>(20 << 20);
  size_t used = 0;
  std::vector<Placed> places;
  std::vector<std::string> arrived;
  std::vector<uint64_t> sent;
};

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

class UcxLinkTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto api = OpenUcxApi("");
    ASSERT_TRUE(api.ok()) << api.status();
    api_ = *api;
    Connect({.transports = GetParam(), .devices = ""});
  }
  void Connect(const UcxLinkOptions& options) {
    for (int side = 0; side < 2; ++side) {
      links_[side].reset();
      auto link = UcxLink::Open(api_, options, &ends_[side]);
      ASSERT_TRUE(link.ok()) << link.status();
      links_[side] = *std::move(link);
      ASSERT_TRUE(links_[side]->Register(ends_[side].memory).ok());
    }
    for (int side = 0; side < 2; ++side) {
      ASSERT_TRUE(links_[side]->Connect(links_[1 - side]->address()).ok());
    }
  }

  template <typename Done>
  bool Run(Done done) {
    for (int round = 0; round < 20'000'000; ++round) {
      if (done()) return true;
      links_[0]->Progress();
      links_[1]->Progress();
    }
    return false;
  }

  UcxApi api_{};
  Recorder ends_[2];
  std::deque<std::string> payloads_;  // UCX reads them until the links are gone
  std::unique_ptr<UcxLink> links_[2];
};

TEST_P(UcxLinkTest, CarriesFramesOfAllSizesBothWays) {
  const std::vector<size_t> sizes = {0, 1, 64, 4095, 8192, 65536, 1 << 20, 3'000'017};
  std::vector<std::string> payloads, headers;
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::string payload(sizes[i], '\0');
    for (size_t at = 0; at < payload.size(); ++at) payload[at] = static_cast<char>(at * 7 + i);
    payloads.push_back(std::move(payload));
    headers.push_back("frame " + std::to_string(i));
  }
  for (int side = 0; side < 2; ++side) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      ASSERT_TRUE(links_[side]->Send(Bytes(headers[i]), Bytes(payloads[i]), i).ok());
    }
  }
  ASSERT_TRUE(Run([&] {
    return ends_[0].arrived.size() == sizes.size() && ends_[1].arrived.size() == sizes.size() &&
           ends_[0].sent.size() == sizes.size() && ends_[1].sent.size() == sizes.size();
  })) << links_[0]->status()
      << links_[1]->status();
  for (const Recorder& end : ends_) {
    ASSERT_EQ(end.places.size(), sizes.size());
    for (const Recorder::Placed& placed : end.places) {
      const size_t i = static_cast<size_t>(placed.header.back() - '0');
      EXPECT_EQ(placed.header, headers[i]);
      ASSERT_EQ(placed.bytes.size(), payloads[i].size());
      EXPECT_EQ(std::memcmp(placed.bytes.data(), payloads[i].data(), payloads[i].size()), 0) << i;
    }
  }
}

// UCX emulates puts over the transports of one machine; RDMA has them.
TEST_P(UcxLinkTest, PutsAreThereBeforeTheirFrames) {
  ASSERT_NO_FATAL_FAILURE(Connect({.transports = GetParam(), .devices = "", .puts = true}));
  std::vector<std::byte> targets[2];
  const std::vector<size_t> sizes = {UcxLink::kLeastPutBytes, 65536, 3'000'017};
  constexpr size_t kStride = 4 << 20;
  std::vector<std::string> payloads;
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::string payload(sizes[i], '\0');
    for (size_t at = 0; at < payload.size(); ++at) payload[at] = static_cast<char>(at * 5 + i);
    payloads.push_back(std::move(payload));
  }
  for (int side = 0; side < 2; ++side) {
    targets[side].resize(kStride * sizes.size());
    const auto target = links_[side]->Offer(targets[side]);
    ASSERT_TRUE(target.ok()) << target.status();
    EXPECT_EQ(target->bytes, targets[side].size());
    EXPECT_FALSE(links_[1 - side]->reaches());
    ASSERT_EQ(links_[1 - side]->Reach(*target), absl::OkStatus());
    EXPECT_TRUE(links_[1 - side]->reaches());
  }
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (const auto& link : links_) {
        ASSERT_EQ(link->Put(Bytes("put"), Bytes(payloads[i]), i * kStride, i), absl::OkStatus());
      }
    }
    const size_t expected = (round + 1) * sizes.size();
    ASSERT_TRUE(Run([&] {
      return ends_[0].arrived.size() == expected && ends_[1].arrived.size() == expected;
    })) << links_[0]->status()
        << links_[1]->status();
    for (std::vector<std::byte>& target : targets) {
      for (size_t i = 0; i < sizes.size(); ++i) {
        ASSERT_EQ(std::memcmp(target.data() + i * kStride, payloads[i].data(), sizes[i]), 0) << i;
      }
      std::fill(target.begin(), target.end(), std::byte{0});
    }
  }
  const auto beyond = links_[0]->Put(Bytes("put"), Bytes(payloads[0]), 3 * kStride - 1, 0);
  EXPECT_EQ(beyond.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(links_[0]->status(), absl::OkStatus());
  for (auto& link : links_) link.reset();  // before the memory that it uses
}

TEST_P(UcxLinkTest, EncryptedFramesComeOutInClearAndOthersNotAtAll) {
  UcxSecret secret{};
  secret.fill(3);
  links_[0]->Encrypt(secret, FrameSeal::Sender::kClient);
  links_[1]->Encrypt(secret, FrameSeal::Sender::kServer);
  const std::vector<size_t> sizes = {0, 64, 65536, 3'000'017};
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::string header = "frame " + std::to_string(i);
    for (auto& link : links_) {
      payloads_.push_back(std::string(sizes[i], static_cast<char>('a' + i)));
      ASSERT_TRUE(link->Send(Bytes(header), Bytes(payloads_.back()), i).ok());
    }
  }
  ASSERT_TRUE(Run([&] {
    return ends_[0].arrived.size() == sizes.size() && ends_[1].arrived.size() == sizes.size();
  })) << links_[0]->status()
      << links_[1]->status();
  for (const Recorder& end : ends_) {
    for (const Recorder::Placed& placed : end.places) {
      const size_t i = static_cast<size_t>(placed.header.back() - '0');
      ASSERT_EQ(placed.bytes.size(), sizes[i]);
      const auto expected = static_cast<std::byte>('a' + i);
      EXPECT_TRUE(std::all_of(placed.bytes.begin(), placed.bytes.end(),
                              [&](std::byte byte) { return byte == expected; }));
    }
  }
  // One that knows the address and not the secret.
  Recorder stranger;
  auto link = UcxLink::Open(api_, {.transports = GetParam(), .devices = ""}, &stranger);
  ASSERT_TRUE(link.ok()) << link.status();
  ASSERT_TRUE((*link)->Connect(links_[1]->address()).ok());
  ASSERT_TRUE((*link)->Send(Bytes("frame 9"), Bytes(payloads_[0]), 0).ok());
  ASSERT_TRUE(Run([&] {
    (*link)->Progress();
    return !links_[1]->status().ok();
  }));
  EXPECT_EQ(links_[1]->status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ends_[1].arrived.size(), sizes.size());
}

TEST_P(UcxLinkTest, ARefusedFrameEndsTheLink) {
  ends_[1].refuses = true;
  const std::string header = "header", small(100, 'x'), large(1 << 20, 'x');
  ASSERT_TRUE(links_[0]->Send(Bytes(header), Bytes(large), 1).ok());
  ASSERT_TRUE(Run([&] { return !links_[1]->status().ok(); }));
  EXPECT_EQ(links_[1]->status().message(), "refused by the test");
  EXPECT_FALSE(links_[1]->Send(Bytes(header), Bytes(small), 2).ok());
  EXPECT_TRUE(ends_[1].arrived.empty());
}

TEST_P(UcxLinkTest, APeerMayGoWhileFramesAreUnderWay) {
  const std::string header = "header", large(2 << 20, 'x');
  // UCX 1.13 ends the process over TCP if the peer goes while the connection is made.
  for (auto& link : links_) ASSERT_TRUE(link->Send(Bytes(header), {}, 0).ok());
  ASSERT_TRUE(Run([&] { return !ends_[0].arrived.empty() && !ends_[1].arrived.empty(); }));
  for (uint64_t i = 0; i < 8; ++i) {
    links_[0]->Send(Bytes(header), Bytes(large), i).IgnoreError();
  }
  for (int i = 0; i < 50; ++i) {
    links_[0]->Progress();
    links_[1]->Progress();
  }
  links_[1].reset();
  for (int i = 0; i < 1000; ++i) links_[0]->Progress();
  links_[0].reset();
}

INSTANTIATE_TEST_SUITE_P(Transports, UcxLinkTest,
                         testing::Values("tcp", "posix", "sysv", "posix,cma"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& letter : name) letter = letter == ',' ? '_' : letter;
                           return name;
                         });

TEST(UcxApiTest, AnAbsentLibraryIsAReason) {
  const auto api = OpenUcxApi("/nowhere/libucp.so.0");
  ASSERT_FALSE(api.ok());
  EXPECT_EQ(api.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(api.status().message().find("/nowhere/libucp.so.0"), std::string::npos);
}

TEST(UcxApiTest, ALibraryWithoutTheCallsIsAReason) {
  const auto api = OpenUcxApi("libm.so.6");
  ASSERT_FALSE(api.ok());
  EXPECT_EQ(api.status().message(), "UCX has no entry point ucp_get_version");
}

}  // namespace
}  // namespace mla::wire
