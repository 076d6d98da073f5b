#include "client/cpp/shared_memory/row_copier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace mla::client {
namespace {

constexpr int kDevice = 3;

// A job as the kernel's text reads it.
struct Job {
  const std::byte* from;
  std::byte* to;
  uint64_t from_pitch, to_pitch;
  uint32_t pieces, rows;
};

struct Driver {
  std::vector<std::byte> device = std::vector<std::byte>(1 << 16);
  int ordinal = kDevice;
  bool refuses_kernel = false;
  int loaded = 0, launches = 0, streams = 0;
  unsigned blocks = 0, jobs = 0;
} driver;

int LoadModule(void** module, const void* text) {
  if (driver.refuses_kernel) return 218;
  if (std::string(static_cast<const char*>(text)).find(".entry mla_copy_rows(") ==
      std::string::npos) {
    return 200;
  }
  ++driver.loaded;
  *module = &driver.loaded;
  return 0;
}
int UnloadModule(void*) {
  --driver.loaded;
  return 0;
}
int Function(void** function, void* module, const char* name) {
  if (module != &driver.loaded || std::string(name) != "mla_copy_rows") return 500;
  *function = &driver.launches;
  return 0;
}
// Does what the kernel's threads do, one after another.
int Launch(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
           unsigned, void*, void** parameters, void**) {
  if (function != &driver.launches || z != 1) return 400;
  ++driver.launches;
  driver.blocks = x;
  driver.jobs = y;
  const auto* const jobs = static_cast<const Job*>(parameters[0]);
  for (unsigned k = 0; k < y; ++k) {
    const Job& job = jobs[k];
    const uint32_t all = job.pieces * job.rows;
    for (uint32_t thread = 0; thread < x * threads; ++thread) {
      for (uint32_t piece = thread; piece < all; piece += x * threads) {
        const uint32_t row = piece / job.pieces, at = piece % job.pieces * 16;
        std::memcpy(job.to + row * job.to_pitch + at, job.from + row * job.from_pitch + at, 16);
      }
    }
  }
  return 0;
}
int PointerAttributes(unsigned count, int* which, void** values, const void* memory) {
  const auto* const at = static_cast<const std::byte*>(memory);
  if (at < driver.device.data() || at >= driver.device.data() + driver.device.size()) return 1;
  for (unsigned i = 0; i < count; ++i) {
    if (which[i] == 2) *static_cast<unsigned*>(values[i]) = 2;
    if (which[i] == 9) *static_cast<int*>(values[i]) = driver.ordinal;
  }
  return 0;
}
int StreamCreate(void** stream, unsigned) {
  ++driver.streams;
  *stream = &driver.streams;
  return 0;
}
int StreamDestroy(void*) {
  --driver.streams;
  return 0;
}
int StreamFinish(void*) { return 0; }

class RowCopierTest : public ::testing::Test {
 protected:
  RowCopierTest() {
    driver = Driver();
    for (size_t i = 0; i < driver.device.size(); ++i) {
      driver.device[i] = static_cast<std::byte>(i * 7 + i / 256);
    }
    api_.nvidia_load_module = LoadModule;
    api_.nvidia_unload_module = UnloadModule;
    api_.nvidia_function = Function;
    api_.nvidia_launch = Launch;
    api_.nvidia_pointer_attributes = PointerAttributes;
    api_.stream_create = StreamCreate;
    api_.stream_destroy = StreamDestroy;
    api_.stream_finish = StreamFinish;
  }

  // A whole tensor, and rows of 48 bytes that lie 112 bytes apart, for places 64 bytes apart.
  std::array<DeviceCopy, 2> Two() {
    std::byte* const from = AlignedStart();
    return {DeviceCopy{target_.data(), from, 4096, 1, 4096, 4096},
            DeviceCopy{target_.data() + 8192, from + 8192, 48, 9, 64, 112}};
  }
  static std::byte* AlignedStart() {
    const auto at = reinterpret_cast<uintptr_t>(driver.device.data());
    return driver.device.data() + (16 - at % 16) % 16;
  }

  DeviceRuntime api_{};
  struct alignas(16) Target : std::array<std::byte, 16384> {
  } target_{};
};

TEST_F(RowCopierTest, CopiesRowsInOneLaunch) {
  const auto copier = RowCopier::Create(api_, kDevice);
  ASSERT_NE(copier, nullptr);
  EXPECT_EQ(driver.launches, 1) << "nothing may be loaded by the first copy";
  EXPECT_EQ(driver.streams, 0);
  const auto copies = Two();
  ASSERT_TRUE(copier->Takes(copies));
  ASSERT_EQ(copier->Copy(copies, nullptr), 0);
  EXPECT_EQ(driver.launches, 2);
  EXPECT_EQ(driver.jobs, 2U);
  Target want{};
  std::memcpy(want.data(), copies[0].from, 4096);
  for (int row = 0; row < 9; ++row) {
    std::memcpy(want.data() + 8192 + row * 64,
                static_cast<const std::byte*>(copies[1].from) + row * 112, 48);
  }
  EXPECT_EQ(target_, want);
}

TEST_F(RowCopierTest, LargeCopiesTakeSeveralTurns) {
  const auto copier = RowCopier::Create(api_, kDevice);
  std::vector<std::byte> large(size_t{16} * 256 * 1024 * 2 + 16);
  driver.device = large;
  driver.device[driver.device.size() - 17] = std::byte{5};
  std::vector<std::byte> to(large.size());
  auto* const from = AlignedStart();
  auto* const target = to.data() + (16 - reinterpret_cast<uintptr_t>(to.data()) % 16) % 16;
  const uint64_t bytes = large.size() - 16;
  const std::array<DeviceCopy, 2> copies = {
      DeviceCopy{target, from, bytes / 2, 2, bytes / 2, bytes / 2},
      DeviceCopy{target_.data(), from, 16, 1, 16, 16}};
  ASSERT_TRUE(copier->Takes(copies));
  ASSERT_EQ(copier->Copy(copies, nullptr), 0);
  EXPECT_EQ(driver.blocks, 1024U);
  EXPECT_EQ(std::memcmp(target, from, bytes), 0);
}

TEST_F(RowCopierTest, LeavesOtherCopiesToTheRuntime) {
  const auto copier = RowCopier::Create(api_, kDevice);
  const auto two = Two();
  EXPECT_FALSE(copier->Takes({})) << "none";
  EXPECT_FALSE(copier->Takes(std::span(two).first(1))) << "one";
  EXPECT_FALSE(copier->Takes(std::vector<DeviceCopy>(9, two[0]))) << "more than the kernel has";
  const auto changed = [&](auto&& change) {
    auto copies = Two();
    change(copies[1]);
    return copier->Takes(copies);
  };
  EXPECT_TRUE(changed([](DeviceCopy&) {}));
  EXPECT_FALSE(changed([](DeviceCopy& c) { c.width = 40; }));
  EXPECT_FALSE(changed([](DeviceCopy& c) { c.from_pitch = 120; }));
  EXPECT_FALSE(changed([](DeviceCopy& c) { c.to_pitch = 72; }));
  EXPECT_FALSE(changed([](DeviceCopy& c) { c.to = static_cast<std::byte*>(c.to) + 8; }));
  EXPECT_FALSE(changed([](DeviceCopy& c) { c.from = static_cast<const std::byte*>(c.from) + 8; }));
  EXPECT_FALSE(changed([this](DeviceCopy& c) { c.from = target_.data(); })) << "memory of the host";
  EXPECT_FALSE(changed([](DeviceCopy& c) { c.rows = uint64_t{1} << 32; }));
  EXPECT_FALSE(changed([](DeviceCopy& c) { c.rows = INT32_MAX / 3 + 1; })) << "pieces overflow";
  driver.ordinal = kDevice + 1;
  EXPECT_FALSE(copier->Takes(two)) << "memory of another device";
  auto known = two;
  for (DeviceCopy& copy : known) copy.from_here = true;
  EXPECT_TRUE(copier->Takes(known)) << "the driver is not asked";
  known[1].from = static_cast<const std::byte*>(known[1].from) + 8;
  EXPECT_FALSE(copier->Takes(known)) << "pieces are looked at all the same";
}

TEST_F(RowCopierTest, IsAbsentWhereTheDriverLacksACall) {
  driver.refuses_kernel = true;
  EXPECT_EQ(RowCopier::Create(api_, kDevice), nullptr);
  driver.refuses_kernel = false;
  api_.nvidia_pointer_attributes = nullptr;
  EXPECT_EQ(RowCopier::Create(api_, kDevice), nullptr);
  EXPECT_EQ(driver.loaded, 0);
}

TEST_F(RowCopierTest, UnloadsItsKernel) {
  { const auto copier = RowCopier::Create(api_, kDevice); }
  EXPECT_EQ(driver.loaded, 0);
}

}  // namespace
}  // namespace mla::client
