// A stream of the fake runtime, as a client's own program makes one.
#ifndef MLA_TESTS_INTEGRATION_DEVICE_MEMORY_FAKE_STREAM_H_
#define MLA_TESTS_INTEGRATION_DEVICE_MEMORY_FAKE_STREAM_H_

#include <dlfcn.h>

#include "gtest/gtest.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::integration {

class FakeStream {
 public:
  FakeStream() {
    EXPECT_EQ(Call<int(void**, unsigned)>("hipStreamCreateWithFlags")(&stream_, 1), 0);
  }
  ~FakeStream() { Call<int(void*)>("hipStreamDestroy")(stream_); }
  FakeStream(const FakeStream&) = delete;
  FakeStream& operator=(const FakeStream&) = delete;
  void* get() const { return stream_; }
  void Finish() { EXPECT_EQ(Call<int(void*)>("hipStreamSynchronize")(stream_), 0); }

 private:
  template <class Function>
  Function* Call(const char* name) {
    void* const entry = dlsym(dlopen(kernels::hip::kLibrary, RTLD_NOW | RTLD_LOCAL), name);
    EXPECT_NE(entry, nullptr) << name;
    return reinterpret_cast<Function*>(entry);
  }
  void* stream_ = nullptr;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_DEVICE_MEMORY_FAKE_STREAM_H_
