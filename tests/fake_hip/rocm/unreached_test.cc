// Tests AMD devices whose kernels do not reach registered host memory. Tensors are copied, and no
// kernel accesses an address that the runtime has not returned.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_hip/rocm/row_launch.h"

namespace mla::kernels::hip {
namespace {

// On AMD devices a kernel that reads an unmapped address ends the process. The backend therefore
// asks the runtime first and runs a probe only after that.
class UnreachedTest : public BackendOnFakeTest {
 protected:
  void TearDown() override {
    backend_->UnregisterHost(memory_);
    backend_.reset();
    BackendOnFakeTest::TearDown();
  }
  std::string Make(const std::vector<std::string>& parts = {}) {
    backend_.reset();
    HipBackendOptions options = Options();
    options.self_test = !parts.empty();
    options.self_test_options.parts = parts;
    auto backend = HipBackend::Create(options);
    EXPECT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    EXPECT_TRUE(backend_->Configure(Limits()).ok());
    for (const BackendNote& note : backend_->Info().notes) {
      if (note.name == "host_memory") return note.text;
    }
    return "no note";
  }
  // Expects that tensors are copied and not accessed by kernels.
  void ExpectCopies() {
    ASSERT_TRUE(backend_->RegisterHost(memory_).ok());
    EXPECT_FALSE(backend_->InPlace(memory_.data(), kRowBytes));
    EXPECT_EQ(backend_->Info().in_place_bytes, 0);
    EXPECT_FALSE(backend_->Info().waits_for_words);
    auto* const row = reinterpret_cast<Bf16*>(memory_.data());
    std::fill_n(row, kRowElements, Bf16{0x3f80});
    const int64_t by_kernel = control_->bytes_by_kernel;
    RowLaunch store, gated;
    ASSERT_TRUE(store.Submit(*backend_, 0, row, 0).ok());
    ASSERT_TRUE(backend_->Wait(0).ok());
    EXPECT_EQ(ReadRows(*backend_, 1), std::vector<Bf16>(kRowElements, 0x3f80));
    EXPECT_EQ(control_->bytes_by_kernel, by_kernel);
    auto* const word = reinterpret_cast<uint32_t*>(memory_.data() + 8192);
    gated.set_words({word, 0}, 1000, {word + 16, 1});
    EXPECT_EQ(gated.Submit(*backend_, 0, row, 0).code(), absl::StatusCode::kInvalidArgument);
    backend_->UnregisterHost(memory_);
  }

  std::vector<std::byte> bytes_ = std::vector<std::byte>(1 << 16);
  std::span<std::byte> memory_ = bytes_;
  std::unique_ptr<HipBackend> backend_;
};

TEST_F(UnreachedTest, OtherAddressesAreNeverTouched) {
  control_->device_pointer_offset = int64_t{1} << 40;
  const int64_t launches = control_->launches;
  EXPECT_EQ(Make(), "copied: the device has registered memory at other addresses than the host");
  EXPECT_EQ(control_->launches, launches);
  ExpectCopies();
}

TEST_F(UnreachedTest, TheAttributeIsEnough) {
  control_->device_pointer_offset = int64_t{1} << 40;
  control_->host_pointers_reach = 1;
  EXPECT_EQ(Make(), "kernels reach it");
  EXPECT_GT(backend_->Info().in_place_bytes, 0);
}

TEST_F(UnreachedTest, WhatComesBackWrongIsCopied) {
  control_->wrong_results = true;
  control_->wrong_kernel = kCopyTensorsKernel;
  const std::string note = Make();
  EXPECT_NE(note.find("copied: byte 1 of registered memory came back as 0, want 7"),
            std::string::npos)
      << note;
  ExpectCopies();
}

TEST_F(UnreachedTest, ARuntimeThatRefusesIsNamed) {
  for (const char* call : {"hipHostRegister", "hipHostGetDevicePointer", "hipHostMalloc"}) {
    control_->FailOnce(call);
    const std::string note = Make();
    EXPECT_TRUE(note.starts_with("copied: ")) << call << ": " << note;
    EXPECT_NE(note.find("GPU host "), std::string::npos) << call << ": " << note;
    ExpectCopies();
  }
}

// The probe only copies. Kernels that wait for words and set them have their own part of the
// self-test.
TEST_F(UnreachedTest, AKernelThatSetsNoWordLeavesTheOtherKernelsInUse) {
  control_->wrong_results = true;
  for (const char* kernel : {kGateKernel, kSignalKernel}) {
    control_->wrong_kernel = kernel;
    const std::string note = Make({"host_memory"});
    EXPECT_NE(note.find("copied: a launch that waits for a word that "), std::string::npos) << note;
    EXPECT_NE(note.find("(part host_memory)"), std::string::npos) << note;
    ExpectCopies();
  }
  control_->wrong_kernel = "none of them";
  EXPECT_EQ(Make({"host_memory"}), "kernels reach it");
}

// The runtime may answer differently for one piece of memory than for the probe's.
TEST_F(UnreachedTest, APieceAtAnotherAddressIsNotPinned) {
  EXPECT_EQ(Make(), "kernels reach it");
  const int64_t before = control_->registered_bytes;
  control_->device_pointer_offset = 4096;
  EXPECT_EQ(backend_->RegisterHost(memory_).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(control_->registered_bytes, before);
  EXPECT_FALSE(backend_->InPlace(memory_.data(), kRowBytes));
  control_->device_pointer_offset = 0;
  ASSERT_TRUE(backend_->RegisterHost(memory_).ok());
  EXPECT_TRUE(backend_->InPlace(memory_.data(), kRowBytes));
}

}  // namespace
}  // namespace mla::kernels::hip
