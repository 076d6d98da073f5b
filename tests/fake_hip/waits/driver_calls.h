// Driver calls that wait for the device. A separate thread makes them between two calls of another
// thread.
#ifndef MLA_TESTS_FAKE_HIP_WAITS_DRIVER_CALLS_H_
#define MLA_TESTS_FAKE_HIP_WAITS_DRIVER_CALLS_H_

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fake_hip/waits/waiting_driver.h"

namespace mla::fake_hip {

inline constexpr char kWaitingLibrary[] = "tests/fake_hip/waits/libwaiting_driver.so";

// The driver's entry points for a test.
class DriverCalls {
 public:
  // `image` is a module's image and must outlive this object. Calls have CUDA's names below; with
  // `hip` those of HIP with the same meaning are made.
  explicit DriverCalls(const void* image, bool hip = false)
      : library_(dlopen(kWaitingLibrary, RTLD_NOW | RTLD_LOCAL)), image_(image), hip_(hip) {
    EXPECT_NE(library_, nullptr) << dlerror();
  }

  WaitingControl& control() const { return *Entry<WaitingControl*()>("waiting_driver_control")(); }

  // A call that waits for the device. `prepare` runs while the device is idle, creates what the
  // call needs and returns the call. `finish` frees it.
  struct Waiting {
    const char* name;
    std::function<std::function<void()>()> prepare;
    std::function<void()> finish = [] {};
  };
  // Returns every waiting call that the server makes, and the one that profilers make.
  std::vector<Waiting> All() {
    std::vector<Waiting> all;
    all.push_back({"cuCtxSynchronize", [this] { return Of<int()>("cuCtxSynchronize"); }});
    const auto giving_back = [&](const char* take, const char* give) {
      all.push_back({take, [this, take] { return Of<int(void**, size_t)>(take, &at_, kBytes); },
                     [this, give] { Do<int(void*)>(give, at_); }});
      all.push_back({give, [this, take, give] {
                       Do<int(void**, size_t)>(take, &at_, kBytes);
                       return Of<int(void*)>(give, at_);
                     }});
    };
    giving_back("cuMemAlloc_v2", "cuMemFree_v2");
    AddHostMemory(all);
    AddModules(all);
    AddVirtualMemory(all);
    return all;
  }
  // Makes the context current, as a server's thread does before its first call.
  void Bind() const {
    void* context = nullptr;
    if (hip_) return;  // device 0 is every thread's
    EXPECT_EQ(Entry<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0), 0);
    EXPECT_EQ(Entry<int(void*)>("cuCtxSetCurrent")(context), 0);
  }

 private:
  static constexpr size_t kBytes = size_t{2} << 20;  // granularity of virtual memory

  static const char* HipNameOf(std::string_view name) {
    static constexpr std::pair<std::string_view, const char*> kNames[] = {
        {"waiting_driver_control", "waiting_driver_control"},
        {"cuCtxSynchronize", "hipDeviceSynchronize"},
        {"cuMemAlloc_v2", "hipMalloc"},
        {"cuMemFree_v2", "hipFree"},
        {"cuMemHostAlloc", "hipHostMalloc"},
        {"cuMemFreeHost", "hipHostFree"},
        {"cuMemHostRegister_v2", "hipHostRegister"},
        {"cuMemHostUnregister", "hipHostUnregister"},
        {"cuModuleLoadData", "hipModuleLoadData"},
        {"cuModuleUnload", "hipModuleUnload"},
        {"cuMemCreate", "hipMemCreate"},
        {"cuMemMap", "hipMemMap"},
        {"cuMemSetAccess", "hipMemSetAccess"},
        {"cuMemUnmap", "hipMemUnmap"},
        {"cuMemRelease", "hipMemRelease"},
        {"cuMemAddressReserve", "hipMemAddressReserve"},
        {"cuMemAddressFree", "hipMemAddressFree"}};
    for (const auto& [cuda, hip] : kNames) {
      if (name == cuda) return hip;
    }
    return "";
  }

  template <class Call>
  Call* Entry(const char* name) const {
    auto* const entry = reinterpret_cast<Call*>(dlsym(library_, hip_ ? HipNameOf(name) : name));
    EXPECT_NE(entry, nullptr) << name;
    return entry;
  }
  template <class Call, class... Arguments>
  void Do(const char* name, Arguments... arguments) const {
    EXPECT_EQ(Entry<Call>(name)(arguments...), 0) << name;
  }
  template <class Call, class... Arguments>
  std::function<void()> Of(const char* name, Arguments... arguments) const {
    return [=, this] { Do<Call>(name, arguments...); };
  }

  void AddHostMemory(std::vector<Waiting>& all) {
    all.push_back(
        {"cuMemHostAlloc",
         [this] { return Of<int(void**, size_t, int)>("cuMemHostAlloc", &at_, kBytes, 0); },
         [this] { Do<int(void*)>("cuMemFreeHost", at_); }});
    all.push_back({"cuMemFreeHost", [this] {
                     Do<int(void**, size_t, int)>("cuMemHostAlloc", &at_, kBytes, 0);
                     return Of<int(void*)>("cuMemFreeHost", at_);
                   }});
    memory_.resize(kBytes);
    void* const memory = memory_.data();
    all.push_back({"cuMemHostRegister",
                   [this, memory] {
                     return Of<int(void*, size_t, int)>("cuMemHostRegister_v2", memory, kBytes, 0);
                   },
                   [this, memory] { Do<int(void*)>("cuMemHostUnregister", memory); }});
    all.push_back({"cuMemHostUnregister", [this, memory] {
                     Do<int(void*, size_t, int)>("cuMemHostRegister_v2", memory, kBytes, 0);
                     return Of<int(void*)>("cuMemHostUnregister", memory);
                   }});
  }

  void AddModules(std::vector<Waiting>& all) {
    const auto load = [this] { Do<int(void**, const void*)>("cuModuleLoadData", &at_, image_); };
    all.push_back(
        {"cuModuleLoadData",
         [this] { return Of<int(void**, const void*)>("cuModuleLoadData", &at_, image_); },
         [this] { Do<int(void*)>("cuModuleUnload", at_); }});
    all.push_back({"cuModuleUnload", [this, load] {
                     load();
                     return Of<int(void*)>("cuModuleUnload", at_);
                   }});
    if (hip_) return;  // HIP has no such call
    all.push_back({"cuFuncLoad",
                   [this, load] {
                     load();
                     void* function = nullptr;
                     Do<int(void**, void*, const char*)>("cuModuleGetFunction", &function, at_,
                                                         "mla_move");
                     return Of<int(void*)>("cuFuncLoad", function);
                   },
                   [this] { Do<int(void*)>("cuModuleUnload", at_); }});
  }

  // Adds cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap and cuMemRelease. For each of them, the
  // other four run before or after the tested call.
  void AddVirtualMemory(std::vector<Waiting>& all) {
    using Step = std::function<void()>;
    const std::vector<std::pair<const char*, Step>> steps = {
        {"cuMemCreate",
         [this] {
           Do<int(uint64_t*, size_t, const void*, uint64_t)>("cuMemCreate", &handle_, kBytes,
                                                             nullptr, 0);
         }},
        {"cuMemMap",
         [this] {
           Do<int(void*, size_t, size_t, uint64_t, uint64_t)>("cuMemMap", at_, kBytes, 0, handle_,
                                                              0);
         }},
        {"cuMemSetAccess",
         [this] {
           Do<int(void*, size_t, const void*, size_t)>("cuMemSetAccess", at_, kBytes, nullptr, 0);
         }},
        {"cuMemUnmap", [this] { Do<int(void*, size_t)>("cuMemUnmap", at_, kBytes); }},
        {"cuMemRelease", [this] { Do<int(uint64_t)>("cuMemRelease", handle_); }}};
    for (size_t chosen = 0; chosen < steps.size(); ++chosen) {
      all.push_back({steps[chosen].first,
                     [this, steps, chosen] {
                       Do<int(void**, size_t, size_t, void*, uint64_t)>("cuMemAddressReserve", &at_,
                                                                        kBytes, 0, nullptr, 0);
                       for (size_t i = 0; i < chosen; ++i) steps[i].second();
                       return steps[chosen].second;
                     },
                     [this, steps, chosen] {
                       for (size_t i = chosen + 1; i < steps.size(); ++i) steps[i].second();
                       Do<int(void*, size_t)>("cuMemAddressFree", at_, kBytes);
                     }});
    }
  }

  void* const library_;
  const void* const image_;
  const bool hip_;
  void* at_ = nullptr;
  uint64_t handle_ = 0;
  std::vector<std::byte> memory_;
};

// While this object lives, another thread makes `call` just before the `place`-th driver call (from
// 0) of the thread that constructed the object. That driver call continues when the other thread
// waits for the device or has returned.
class Intrusion {
 public:
  Intrusion(DriverCalls& driver, const DriverCalls::Waiting& call, int place)
      : driver_(driver), call_(call.prepare()), finish_(call.finish), place_(place) {
    the_intrusion = this;
    driver_.control().before_call = [](const char*) {
      if (the_intrusion != nullptr) the_intrusion->Note();
    };
  }
  ~Intrusion() {
    the_intrusion = nullptr;
    driver_.control().before_call = nullptr;
    if (thread_.joinable()) thread_.join();
    if (!made()) call_();  // so that finish_ has something to free
    finish_();
  }
  Intrusion(const Intrusion&) = delete;
  Intrusion& operator=(const Intrusion&) = delete;

  // Returns false if the thread has made at most `place` calls.
  bool made() const { return seen_ > place_; }
  bool waited() const { return waited_; }

 private:
  void Note() {
    if (seen_++ != place_) return;
    const int64_t before = driver_.control().waits;
    thread_ = std::thread([this] {
      driver_.Bind();
      call_();
      ended_ = true;
    });
    while (!ended_ && driver_.control().waiting == 0) std::this_thread::yield();
    waited_ = driver_.control().waits > before;
  }

  static inline thread_local Intrusion* the_intrusion = nullptr;

  DriverCalls& driver_;
  const std::function<void()> call_, finish_;
  const int place_;
  int seen_ = 0;
  bool waited_ = false;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_WAITS_DRIVER_CALLS_H_
