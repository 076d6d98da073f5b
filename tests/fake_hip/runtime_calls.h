// Calls of the fake HIP runtime that tests make as a client's own program does.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_CALLS_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_CALLS_H_

#include <dlfcn.h>

#include "gtest/gtest.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::fake_hip {

// A stream.
class RuntimeStream {
 public:
  RuntimeStream() {
    EXPECT_EQ(Call<int(void**, unsigned)>("hipStreamCreateWithFlags")(&stream_, 1), 0);
  }
  ~RuntimeStream() { Call<int(void*)>("hipStreamDestroy")(stream_); }
  RuntimeStream(const RuntimeStream&) = delete;
  RuntimeStream& operator=(const RuntimeStream&) = delete;
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

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_CALLS_H_
