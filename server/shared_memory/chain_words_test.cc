// ChainWords: the words that are left to the ring's thread.
#include "server/shared_memory/chain_words.h"

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <span>
#include <utility>

#include "gtest/gtest.h"

namespace mla::server {
namespace {

constexpr uint64_t kEntries = 4;

class Words final : public kernels::SharedDeviceMemory {
 public:
  std::span<std::byte> bytes() const override { return std::as_writable_bytes(std::span(words_)); }
  const Export& exported() const override { return exported_; }
  absl::StatusOr<bool> Done(size_t) override { return true; }
  bool StoresWords() const override { return true; }
  void StoreWord(uint32_t* word, uint32_t value) override {
    *word = value;
    if (auto once = std::exchange(on_store, nullptr)) once();
  }

  std::function<void()> on_store;

 private:
  alignas(64) mutable std::array<uint32_t, 64> words_{};
  Export exported_;
};

// The driver may keep a call of it waiting; who brings answers does not wait with it.
TEST(ChainWordsTest, AWordMayBeLeftForLaterWhileTheDriverStoresOne) {
  wire::RingHeader header{};
  header.nearby = 1;
  std::array<wire::CompletionEntry, kEntries> completions{};
  Words device;
  ChainWords words(&header, completions.data(), kEntries);
  ASSERT_NE(words.Enable(&device), 0u);
  ASSERT_TRUE(words.Store(words.Done(0), /*signalled=*/false));
  std::future<bool> other;
  device.on_store = [&] {
    other = std::async(std::launch::async, [&] { return words.Store(words.Done(1), false); });
    EXPECT_EQ(other.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  };
  words.StoreLater();
  EXPECT_TRUE(other.get());
  EXPECT_EQ(*words.Done(0).nearby, 1u);
  EXPECT_EQ(*words.Done(1).nearby, 0u);
  EXPECT_TRUE(words.HasLater());
  words.StoreLater();
  EXPECT_EQ(*words.Done(1).nearby, 2u);
  EXPECT_FALSE(words.HasLater());
}

}  // namespace
}  // namespace mla::server
