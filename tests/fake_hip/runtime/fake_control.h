// Lets a test control the fake HIP runtime. The test opens the same library as the backend and gets
// its one control block through fake_hip_control(). The test changes the block only while no other
// thread calls the runtime.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_CONTROL_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_CONTROL_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string_view>

namespace mla::fake_hip {

// The versions of ROCm that the suite runs on, as hipRuntimeGetVersion returns them: 10,000,000
// times the first number plus 100,000 times the second plus a build number. The last one is the
// default; FAKE_HIP_VERSION in the environment names another, for example "6.4".
struct Version {
  const char* name;
  int number;
};
inline constexpr Version kVersions[] = {
    {"6.2", 60241134}, {"6.4", 60443484}, {"7.0", 70051831}, {"7.1", 70125424}, {"7.2", 70226015}};
// An unknown name ends the process, so that the suite cannot pass on a version that was not
// requested.
int DefaultVersion();

// The part of a graph's replay that is stale, as on some versions of ROCm.
enum class StaleReplay : int {
  kNone,
  kArguments,  // kernels see the arguments from before the last change
  kInputs,     // kernels see the memory from before the last copy from the host
};

// Flaws that show only in later iterations of loops, or in rows with non-finite values.
enum class Flaw : int {
  kNone,
  kThirdItem,     // a unit's items from the third on are skipped
  kLateTile,      // absorbed: from an item's twelfth tile on, KV rows of the first tile are read
  kOddPages,      // absorbed: pages of three rows are treated as pages of four
  kNaNAsZero,     // absorbed: a NaN in a KV row counts as zero
  kNoKeys,        // absorbed: an item without keys is skipped
  kSecondTile,    // expanded: query rows from 128 on use the preceding rows
  kCarriedWrong,  // expanded: items after a unit's first start with the previous item's sums
};

struct Control {
  int version = DefaultVersion();  // of HIP; CUDA's entry points do not use it
  int devices = 1;
  bool served_by_mps = true;  // CUDA: processes use a device at the same time
  const char* arch = "gfx950";
  int64_t memory_bytes = int64_t{4} << 30;  // hipMalloc of more fails with out of memory

  // Calls of the entry point `fail_call` fail with `fail_code` after `fail_after` calls have
  // succeeded (-1: they never fail). `fail_times` calls fail (-1: all further ones).
  const char* fail_call = "";
  int fail_after = -1;
  int fail_code = 1;
  int fail_times = -1;
  int fail_seen = 0;  // calls of `fail_call` since the test named it
  // If true, every call fails with hipErrorLaunchFailure (719). A kernel fault sets this.
  bool lost = false;
  bool hang = false;  // events never complete
  // If true, events do not wait for copies to pinned memory of the host: such a copy arrives when a
  // caller waits for a stream or gives memory back. HIP itself waits for copies to other memory.
  bool late_copies_out = false;
  bool encodes_maps = true;         // CUDA: tensor maps can be made
  bool encodes_narrow_maps = true;  // also those whose boxes are narrower than 128 bytes
  // Number of a stream's wait for an event, from 0, that is accepted but not performed.
  int ignored_wait = -1;
  int stream_waits = 0;
  void* lazy_words = nullptr;  // this stream stores words only when a caller waits for it
  // If true, streams of the process's first context store no words, as if other waits held all its
  // connections.
  bool busy_connections = false;
  bool wrong_results = false;          // kernels do nothing
  const char* wrong_kernel = nullptr;  // if set, only this kernel does nothing
  Flaw flaw = Flaw::kNone;             // flaw of the attention kernels
  bool rounded_inputs = false;         // projections round fp32 inputs to bf16
  // Value of the device attribute of this name. It is 0 on discrete AMD devices, where the address
  // that hipHostGetDevicePointer returns for a registered page shows whether kernels reach it.
  int host_pointers_reach = 0;
  int64_t device_pointer_offset = 0;  // of such an address from the host's
  StaleReplay stale_replay = StaleReplay::kNone;
  // With HIP a graph takes memory for arguments when it is made and when a kernel in it is set, and
  // frees it when it is destroyed. Beyond this number of bytes the real runtime writes to invalid
  // addresses.
  int64_t graph_argument_limit = int64_t{64} << 20;
  // Number of memory descriptors that the process may hold; one more is refused.
  int descriptor_limit = 1 << 20;
  void (*on_launch)(const char* kernel) = nullptr;  // called for each launch of a kernel
  // Called before each launch of a kernel, without the fake's lock: a forked process could not
  // release the lock, because the lock belongs to a thread.
  void (*before_launch)(const char* kernel) = nullptr;

  // CUDA's attributes of writes by network devices: how they are ordered for the GPU's own kernels
  // (100: for them), and how it can be asked to show them (1: by a call).
  int remote_order = 100, remote_flushes = 1;

  // Counters.
  int64_t remote_shown = 0;  // calls that showed writes of network devices
  int64_t remote_bytes = 0;  // of device memory that was made for network devices, in total
  int64_t live_bytes = 0;    // of device memory
  int64_t allocations = 0;
  int64_t launches = 0;
  int64_t expanded_launches = 0;  // those of attention in the expanded form
  int64_t early_starts = 0;       // appends that let the next kernel start early
  int64_t graph_launches = 0;
  int64_t graph_updates = 0;              // kernels set in graphs
  int64_t graphs = 0;                     // graphs that exist
  int64_t graphs_made = 0;                // executable graphs that were made, in total
  int64_t graph_argument_bytes = 0;       // argument memory that graphs hold now
  int64_t most_graph_argument_bytes = 0;  // largest value of graph_argument_bytes
  int descriptors = 0;                    // memory descriptors that the process holds
  int64_t registered_bytes = 0;           // of host memory
  int64_t copies_in = 0;                  // copies from the host, whatever the number of rows
  int64_t bytes_in = 0;                   // bytes of these copies
  int64_t bytes_by_kernel = 0;            // bytes that a kernel copied between host and device
  int64_t copies_out = 0;
  int64_t word_stores = 0;  // by streams
  int64_t copies_on_device = 0;
  const void* last_copied_in = nullptr;   // host address
  int64_t last_copied_in_bytes = 0;       // size of the last hipMemcpyHtoDAsync
  const void* last_copied_out = nullptr;  // host address

  // Makes one call fail: the next one if `after` is 0, else the one after `after` further calls.
  void FailOnce(const char* call, int after = 0, int code = 1) {
    fail_call = call;
    fail_after = after;
    fail_code = code;
    fail_times = 1;
    fail_seen = 0;
  }
};

inline int DefaultVersion() {
  const char* const wanted = std::getenv("FAKE_HIP_VERSION");
  if (wanted == nullptr || *wanted == '\0') return std::end(kVersions)[-1].number;
  for (const Version& version : kVersions) {
    if (std::string_view(version.name) == wanted) return version.number;
  }
  std::fprintf(stderr, "fake runtime: FAKE_HIP_VERSION: got %s\n", wanted);
  std::abort();
}

}  // namespace mla::fake_hip

extern "C" mla::fake_hip::Control* fake_hip_control();

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_CONTROL_H_
