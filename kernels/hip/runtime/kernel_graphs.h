// Kernels that run one after the other, launched by one call of the runtime in place of one each.
//
// A graph stands for a sequence of kernels, with whatever grids and arguments: those that differ
// from what the graph holds are set in it, each by a call, when it is launched. So the layers of a
// step, and the steps of a batch, are launches of one graph. Arguments of layers lie equally far
// apart: where those of the last three launches did, the next ones are set while the device works,
// on NVIDIA devices: nothing says that HIP keeps the arguments which a running kernel still reads.
//
// A graph is made when its sequence has been launched twice kernel by kernel, and stays until the
// end. HIP takes new device memory for the arguments of each kernel that is set and gives it back
// only with the graph, so there a graph is replaced by a new one when kMostSets have been set.
// A refusal of the runtime costs speed alone: such kernels are launched one by one as before.
//
// Threading: one thread at a time. Nothing is allocated after Open but what the runtime takes for a
// graph when that is made, and on AMD devices as above.
#ifndef MLA_KERNELS_HIP_RUNTIME_KERNEL_GRAPHS_H_
#define MLA_KERNELS_HIP_RUNTIME_KERNEL_GRAPHS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

// A launch of a kernel, not yet given to the device.
struct PendingKernel {
  static constexpr size_t kArgBytes = 256;
  Function function = nullptr;
  LaunchShape shape;
  uint32_t arg_bytes = 0;
  alignas(16) std::array<std::byte, kArgBytes> args;
};

struct GraphTable;
struct GraphHandle;
struct GraphExecHandle;
struct GraphNodeHandle;

class KernelGraphs final {
 public:
  // Of a graph: eight, and the copies around them. Longer sequences gain little.
  static constexpr size_t kMostKernels = 10;
  static constexpr size_t kMostGraphs = 16;
  static constexpr int32_t kUsesBefore = 2;  // launches kernel by kernel
  // Sets of kernels in one graph of HIP. A set has been seen to take 6 KiB: 1.5 MiB a graph, and
  // making one takes some 50 us, which a hundred launches share.
  static constexpr int32_t kMostSets = 256;

  // `runtime` outlives it. UNAVAILABLE: graphs are not to be used, or the library lacks the entry
  // point that is named.
  static absl::StatusOr<std::unique_ptr<KernelGraphs>> Open(GpuRuntime* runtime);
  ~KernelGraphs();
  KernelGraphs(const KernelGraphs&) = delete;
  KernelGraphs& operator=(const KernelGraphs&) = delete;

  // Launches the kernels in their order on `stream`. False: nothing has been launched, since there
  // is no graph of them, or the runtime refused.
  bool Launch(std::span<const PendingKernel> kernels, Stream stream);
  // Kernels have been launched one by one. May make their graph, in tens of microseconds: called
  // when the device has its work.
  void Learn(std::span<const PendingKernel> kernels);
  // Sets what the next launches of the graphs launched last will have by all appearances, and
  // replaces graphs that have been set too often; called when the device has its work. All launches
  // before those since the last call have ended.
  void Prepare();

 private:
  struct Node {
    GraphNodeHandle* handle = nullptr;
    PendingKernel held;      // by the graph
    PendingKernel last;      // as it was launched last
    PendingKernel expected;  // as far behind `last` as that was behind the one before
    bool regular = false;    // `last` was as expected
  };
  // The graph that the runtime has made, or null.
  struct Made {
    GraphHandle* graph = nullptr;
    GraphExecHandle* exec = nullptr;
  };
  // Of a sequence that has been seen.
  struct Entry {
    int32_t uses = 0;
    bool refused = false;   // by the runtime, for good
    bool launched = false;  // since Prepare
    int32_t sets = 0;       // of the graph
    size_t count = 0;
    std::array<Node, kMostKernels> nodes;
    Made made;
    Made replaced;  // which a launch may still use
  };

  KernelGraphs(GpuRuntime* runtime, std::unique_ptr<GraphTable> table);
  Entry* Find(std::span<const PendingKernel> kernels);
  bool Set(Entry& entry, Node& node, const PendingKernel& kernel);
  bool Make(Entry& entry);
  bool AddKernel(Entry& entry, size_t index);
  void Replace(Entry& entry);
  void Destroy(Made& made);

  GpuRuntime* const runtime_;
  const std::unique_ptr<GraphTable> api_;
  std::vector<Entry> entries_;  // capacity kMostGraphs
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_KERNEL_GRAPHS_H_
