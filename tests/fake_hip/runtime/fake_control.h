// How a test steers the fake HIP runtime. The test opens the same library that the backend opens
// and gets the one control block through fake_hip_control(). The test sets it while no other thread
// calls the runtime.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_CONTROL_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_CONTROL_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string_view>

namespace mla::fake_hip {

// The versions of ROCm that the suite runs on, as hipRuntimeGetVersion says them: 10,000,000 for
// the first number, 100,000 for the second, and a build. The last one is what a test gets that
// says nothing; FAKE_HIP_VERSION in the environment names another, as in "6.4".
struct Version {
  const char* name;
  int number;
};
inline constexpr Version kVersions[] = {
    {"6.2", 60241134}, {"6.4", 60443484}, {"7.0", 70051831}, {"7.1", 70125424}, {"7.2", 70226015}};
// An unknown name ends the process: a suite must not pass on a version that it did not ask for.
int DefaultVersion();

// The part of a graph's replay that is left out, as some versions do now and then.
enum class StaleReplay : int {
  kNone,
  kArguments,  // the arguments that were set last: kernels see those before
  kInputs,     // the last copy from the host: kernels see what was in its place before
};

// What only shows where loops turn around, or in rows that are not finite.
enum class Flaw : int {
  kNone,
  kThirdItem,     // a unit's items from the third on are left out
  kLateTile,      // absorbed: KV rows from the twelfth tile of an item on read as the first ones
  kOddPages,      // absorbed: pages of three rows are taken for pages of four
  kNaNAsZero,     // absorbed: a NaN in a KV row counts as zero
  kNoKeys,        // absorbed: an item without keys is left out
  kSecondTile,    // expanded: query rows from 128 on take the rows before
  kCarriedWrong,  // expanded: items after a unit's first begin with the sums of the one before
};

struct Control {
  int version = DefaultVersion();  // of HIP; the entry points of CUDA have none
  int devices = 1;
  const char* arch = "gfx950";
  int64_t memory_bytes = int64_t{4} << 30;  // hipMalloc beyond it is out of memory

  // Call `fail_call` (an entry point's name) fails with `fail_code` once it has succeeded
  // `fail_after` times, -1 never, and does so `fail_times` times, -1 always.
  const char* fail_call = "";
  int fail_after = -1;
  int fail_code = 1;
  int fail_times = -1;
  int fail_seen = 0;  // calls of `fail_call` since it was named
  // Sticky: every call fails with hipErrorLaunchFailure (719). A fault of a kernel sets it.
  bool lost = false;
  bool hang = false;          // events never complete
  bool early_events = false;  // they are said to be complete before the work is done
  // Waits of streams for events are counted from 0; that of this number is accepted and not kept.
  int ignored_wait = -1;
  int stream_waits = 0;
  void* lazy_words = nullptr;  // this stream stores words once it is waited for
  // Streams of the process's first context store no words: others wait on all its connections.
  bool busy_connections = false;
  bool wrong_results = false;          // kernels do nothing
  const char* wrong_kernel = nullptr;  // if named, that one alone
  Flaw flaw = Flaw::kNone;             // of the attention kernels
  bool rounded_inputs = false;         // projections round fp32 inputs to bf16
  // The attribute of that name: discrete AMD devices say no, and the address that
  // hipHostGetDevicePointer has for a registered page says whether they do.
  int host_pointers_reach = 0;
  int64_t device_pointer_offset = 0;  // of such an address, to the host's
  StaleReplay stale_replay = StaleReplay::kNone;
  // A graph takes argument space whenever it is made and whenever a kernel in it is set, and gives
  // it back when it is destroyed, on HIP. Beyond so many bytes the runtime writes to no address.
  int64_t graph_argument_limit = int64_t{64} << 20;
  // How many descriptors of memory the process may hold; one more is refused.
  int descriptor_limit = 1 << 20;
  void (*on_launch)(const char* kernel) = nullptr;  // called for each launch of a kernel
  // Called before each launch of a kernel, without the fake's lock: a forked process could not
  // release the lock, because the lock belongs to a thread.
  void (*before_launch)(const char* kernel) = nullptr;

  // Counters.
  int64_t live_bytes = 0;  // of device memory
  int64_t allocations = 0;
  int64_t launches = 0;
  int64_t expanded_launches = 0;  // of them, attention of the expanded form
  int64_t early_starts = 0;       // of them, appends that let the next kernel start early
  int64_t graph_launches = 0;
  int64_t graph_updates = 0;              // of a kernel in a graph
  int64_t graphs = 0;                     // that have been made and not destroyed
  int64_t graphs_made = 0;                // to be launched, ever
  int64_t graph_argument_bytes = 0;       // that graphs hold now
  int64_t most_graph_argument_bytes = 0;  // that they ever held
  int descriptors = 0;                    // of memory, that the process holds
  int64_t registered_bytes = 0;           // of host memory
  int64_t copies_in = 0;                  // from the host, however many rows
  int64_t bytes_in = 0;                   // that these copied
  int64_t bytes_by_kernel = 0;            // that a kernel copied between host and device
  int64_t copies_out = 0;
  int64_t word_stores = 0;  // by streams
  int64_t copies_on_device = 0;
  const void* last_copied_in = nullptr;   // host address
  int64_t last_copied_in_bytes = 0;       // of hipMemcpyHtoDAsync
  const void* last_copied_out = nullptr;  // host address

  // The `after`-th next such call (0: the very next one) fails, once.
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
