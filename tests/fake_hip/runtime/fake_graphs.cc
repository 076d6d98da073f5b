// The fake HIP runtime's graphs of kernels, and its streams that wait for words in host memory.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <utility>

#include "tests/fake_hip/runtime/fake_state.h"

namespace mla::fake_hip {
namespace {

struct GraphNode {
  size_t index;
  PendingLaunch launch;
  const GraphNode* after = nullptr;
};
struct Graph {
  std::deque<GraphNode> nodes;
};
struct GraphExec {
  std::vector<PendingLaunch> launches;
  std::vector<PendingLaunch> launched;  // arguments of the last launch
  int64_t argument_bytes = 0;
};

// Bytes that each set of a kernel in a graph was measured to take on an MI300X. The runtime takes
// new device memory for it from a pool that lives as long as the graph.
constexpr int64_t kArgumentBytes = 5888;

// Returns false if no memory for arguments is left. The real runtime then writes to an invalid
// address.
bool TakeArguments(GraphExec& exec, size_t kernels) {
  Control& control = State().control;
  const int64_t bytes = static_cast<int64_t>(kernels) * kArgumentBytes;
  exec.argument_bytes += bytes;
  control.graph_argument_bytes += bytes;
  control.most_graph_argument_bytes =
      std::max(control.most_graph_argument_bytes, control.graph_argument_bytes);
  if (control.graph_argument_bytes <= control.graph_argument_limit) return true;
  std::fprintf(stderr, "fake runtime: graphs hold %lld bytes of arguments, limit %lld\n",
               static_cast<long long>(control.graph_argument_bytes),
               static_cast<long long>(control.graph_argument_limit));
  control.lost = true;
  return false;
}

// Swaps the bytes of the last copy from the host with those that it overwrote.
void ExchangeLastInput() {
  Runtime::LastInput& last = State().last_input;
  std::swap_ranges(last.before.begin(), last.before.end(), static_cast<std::byte*>(last.to));
}

// Returns the word that a stream names by its device address.
std::atomic_ref<uint32_t> WordAt(void* word) {
  const auto* const here =
      static_cast<const std::byte*>(word) - State().control.device_pointer_offset;
  const auto holds = [here](const auto& range) {
    const auto* const begin = static_cast<const std::byte*>(range.first);
    return here >= begin && here < begin + range.second;
  };
  const auto& registered = State().registered;
  const bool translated = std::any_of(registered.begin(), registered.end(), holds);
  return std::atomic_ref(*static_cast<uint32_t*>(translated ? const_cast<std::byte*>(here) : word));
}

}  // namespace
}  // namespace mla::fake_hip

namespace fake = mla::fake_hip;
using mla::fake_hip::Enter;
using mla::fake_hip::State;

extern "C" {

int hipGraphCreate(fake::Graph** graph, unsigned) {
  FAKE_ENTER("hipGraphCreate");
  *graph = new fake::Graph;
  ++State().control.graphs;
  return 0;
}
int hipGraphDestroy(fake::Graph* graph) {
  delete graph;
  --State().control.graphs;
  return 0;
}
int hipGraphAddKernelNode(fake::GraphNode** node, fake::Graph* graph, fake::GraphNode* const* after,
                          size_t count, const fake::KernelNodeParams* params) {
  FAKE_ENTER("hipGraphAddKernelNode");
  if (count > 1) return fake::kInvalidValue;
  const size_t index = graph->nodes.size();
  graph->nodes.push_back({index, fake::PendingLaunch(*params), count > 0 ? *after : nullptr});
  *node = &graph->nodes.back();
  return 0;
}
int fake_hip_order_nodes(fake::GraphNode* before, fake::GraphNode* after, int overlaps) {
  if (after->after != nullptr) return fake::kInvalidValue;
  after->after = before;
  after->launch.overlaps = overlaps != 0;
  return 0;
}
// The backend needs its nodes to run one after another, so a graph with parallel nodes is an error.
int fake_hip_instantiate(fake::GraphExec** exec, fake::Graph* graph) {
  FAKE_ENTER("hipGraphInstantiateWithFlags");
  auto instance = std::make_unique<fake::GraphExec>();
  for (const fake::GraphNode& node : graph->nodes) {
    const fake::GraphNode* const before = node.index == 0 ? nullptr : &graph->nodes[node.index - 1];
    if (node.after != before) return fake::kInvalidValue;
    instance->launches.push_back(node.launch);
  }
  instance->launched = instance->launches;
  ++State().control.graphs_made;
  *exec = instance.release();
  return 0;
}
int hipGraphInstantiateWithFlags(fake::GraphExec** exec, fake::Graph* graph, unsigned long long) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  if (const int code = fake_hip_instantiate(exec, graph); code != 0) return code;
  return fake::TakeArguments(**exec, graph->nodes.size()) ? 0 : fake::kInvalidValue;
}
int hipGraphExecDestroy(fake::GraphExec* exec) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  State().control.graph_argument_bytes -= exec->argument_bytes;
  delete exec;
  return 0;
}
int fake_hip_set_node(fake::GraphExec* exec, fake::GraphNode* node,
                      const fake::KernelNodeParams* params) {
  FAKE_ENTER("hipGraphExecKernelNodeSetParams");
  ++State().control.graph_updates;
  fake::PendingLaunch& launch = exec->launches[node->index];
  const bool overlaps = launch.overlaps;
  launch = fake::PendingLaunch(*params);
  launch.overlaps = overlaps;
  return 0;
}
int hipGraphExecKernelNodeSetParams(fake::GraphExec* exec, fake::GraphNode* node,
                                    const fake::KernelNodeParams* params) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  if (const int code = fake_hip_set_node(exec, node, params); code != 0) return code;
  return fake::TakeArguments(*exec, 1) ? 0 : fake::kInvalidValue;
}
int hipGraphLaunch(fake::GraphExec* exec, fake::Stream* stream) {
  for (const fake::PendingLaunch& launch : exec->launches) fake::Announce(launch);
  FAKE_ENTER("hipGraphLaunch");
  ++State().control.graph_launches;
  const fake::StaleReplay stale = State().control.stale_replay;
  const auto& seen = stale == fake::StaleReplay::kArguments ? exec->launched : exec->launches;
  if (stale == fake::StaleReplay::kInputs) stream->Add(fake::ExchangeLastInput);
  for (const fake::PendingLaunch& launch : seen) fake::Enqueue(launch, *stream);
  if (stale == fake::StaleReplay::kInputs) stream->Add(fake::ExchangeLastInput);
  exec->launched = exec->launches;
  return 0;
}

int hipHostGetDevicePointer(void** there, void* here, unsigned) {
  FAKE_ENTER("hipHostGetDevicePointer");
  *there = static_cast<std::byte*>(here) + State().control.device_pointer_offset;
  return 0;
}
int hipStreamWaitValue32(fake::Stream* stream, void* word, uint32_t value, unsigned, uint32_t) {
  FAKE_ENTER("hipStreamWaitValue32");
  if (stream == nullptr) return fake::kInvalidValue;
  // The thread that changes the word may need the runtime's lock, which the thread that runs the
  // stream holds.
  stream->Add([word, value] {
    const std::atomic_ref<uint32_t> seen = fake::WordAt(word);
    while (static_cast<int32_t>(seen.load(std::memory_order_acquire) - value) < 0) {
      State().mutex.unlock();
      sched_yield();
      State().mutex.lock();
    }
  });
  return 0;
}
// Another process waits for the word and cannot run this process's streams, so the stream's work
// runs here.
int hipStreamWriteValue32(fake::Stream* stream, void* word, uint32_t value, unsigned) {
  FAKE_ENTER("hipStreamWriteValue32");
  ++State().control.word_stores;
  if (stream == nullptr) return fake::kInvalidValue;
  stream->Add([word, value] { fake::WordAt(word).store(value, std::memory_order_release); });
  const fake::Control& control = State().control;
  if (!control.hang && control.lazy_words != stream) stream->RunTo(stream->enqueued);
  return 0;
}

}  // extern "C"
