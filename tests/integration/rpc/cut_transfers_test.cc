// Exports and imports that their clients cut at any part, while steps run and pages are short.
// Results of other clients stay correct, and nothing remains of the cut transfers.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/faulty_backend.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using std::chrono::milliseconds;
using Parts = std::vector<v1::PagesPart>;

constexpr uint32_t kRows = 23;  // five whole pages and a part
constexpr int kRounds = 60;

absl::Status Cut() { return absl::CancelledError("cut"); }

// Reads the parts of an export, at most `most` of them.
absl::Status Export(client::Client* client, const client::Sequence& sequence, size_t most,
                    Parts* parts) {
  v1::ExportRequest request;
  request.set_sequence_id(sequence.id());
  request.set_expected_epoch(sequence.epoch());
  return client->ExportPages(request, [&](const v1::PagesPart& part) {
    if (parts->size() == most) return Cut();
    parts->push_back(part);
    return absl::OkStatus();
  });
}

absl::StatusOr<client::Sequence> Import(client::Client* client, const Parts& parts, size_t most) {
  v1::ImportTarget target;
  target.set_model_id("m");
  size_t sent = 0;
  return client->ImportPages(target, [&]() -> absl::StatusOr<std::optional<v1::PagesPart>> {
    if (sent == most) return Cut();
    if (sent == parts.size()) return std::nullopt;
    return parts[sent++];
  });
}

class CutTransfersTest : public ::testing::Test {
 protected:
  CutTransfersTest()
      : server_(
            [](server::Config& config) {
              config.limits.kv_cache_bytes = 64 << 10;
              config.limits.kv_wait_ms = 2000;
            },
            [] {
              auto backend = std::make_unique<scheduler::testing::FaultyBackend>(
                  std::make_unique<kernels::ReferenceBackend>());
              backend->SetTwoSlots();
              return backend;
            }),
        client_(server_.Connect()),
        mover_(server_.Connect()),
        worker_(client_.get(), Dims(), "m", 1) {}

  Track Fill() {
    Track track = *worker_.Open();
    EXPECT_EQ(worker_.Step({&track}, {kRows}, v1::PROFILE_ABSORBED), absl::OkStatus());
    return track;
  }
  // Waits until the cut calls have ended on the server, too.
  void Settle(uint32_t sequences) {
    for (int i = 0; i < 500 && client_->GetStats()->sequences() != sequences; ++i) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_EQ(client_->GetStats()->sequences(), sequences);
  }

  const TestServer server_;
  const std::unique_ptr<client::Client> client_, mover_;
  Worker worker_;
  std::mt19937_64 random_{7};
};

TEST_F(CutTransfersTest, CutImportsLeaveNoPageToOthersWhileBytesAreOnTheirWay) {
  Track source = Fill();
  Parts parts;
  ASSERT_TRUE(Export(client_.get(), source.sequence, SIZE_MAX, &parts).ok());
  for (int round = 0; round < kRounds; ++round) {
    const size_t most = random_() % parts.size();
    std::thread moves([&] { EXPECT_FALSE(Import(mover_.get(), parts, most).ok()); });
    Track fresh = Fill();
    EXPECT_EQ(worker_.Step({&fresh, &source}, {1, 1}, v1::PROFILE_ABSORBED), absl::OkStatus());
    moves.join();
    Track later = Fill();
    EXPECT_EQ(worker_.Step({&later, &fresh}, {1, 1}, v1::PROFILE_ABSORBED), absl::OkStatus());
    ASSERT_TRUE(source.sequence.Truncate(kRows).ok());
    source.cache.Truncate(Dims(), kRows);
  }
  Settle(1);
  const auto whole = Import(mover_.get(), parts, SIZE_MAX);
  ASSERT_TRUE(whole.ok()) << whole.status();
}

TEST_F(CutTransfersTest, CutExportsLeaveTheSequenceAsItWas) {
  Track source = Fill();
  for (int round = 0; round < kRounds; ++round) {
    Parts parts;
    std::thread moves([&, most = random_() % 16] {
      // Refused if it meets the open step.
      Export(mover_.get(), source.sequence, most, &parts).IgnoreError();
    });
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(worker_.Step({&source}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
    }
    Track fresh = Fill();
    EXPECT_EQ(worker_.Step({&fresh, &source}, {3, 1}, v1::PROFILE_ABSORBED), absl::OkStatus());
    moves.join();
    ASSERT_TRUE(source.sequence.Truncate(kRows - 2).ok());
    source.cache.Truncate(Dims(), kRows - 2);
    EXPECT_EQ(worker_.Step({&source}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  Settle(1);
}

}  // namespace
}  // namespace mla::integration
