// The fake HIP runtime's graphs of kernels, and streams that wait for words of the host's memory.
#include <sched.h>

#include <atomic>
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
};

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
int fake_hip_order_nodes(fake::GraphNode* before, fake::GraphNode* after) {
  if (after->after != nullptr) return fake::kInvalidValue;
  after->after = before;
  return 0;
}
// Nodes that are not in one line might run side by side: the backend wants none of these.
int hipGraphInstantiateWithFlags(fake::GraphExec** exec, fake::Graph* graph, unsigned long long) {
  FAKE_ENTER("hipGraphInstantiateWithFlags");
  auto made = std::make_unique<fake::GraphExec>();
  for (const fake::GraphNode& node : graph->nodes) {
    const fake::GraphNode* const before = node.index == 0 ? nullptr : &graph->nodes[node.index - 1];
    if (node.after != before) return fake::kInvalidValue;
    made->launches.push_back(node.launch);
  }
  *exec = made.release();
  return 0;
}
int hipGraphExecDestroy(fake::GraphExec* exec) {
  delete exec;
  return 0;
}
int hipGraphExecKernelNodeSetParams(fake::GraphExec* exec, fake::GraphNode* node,
                                    const fake::KernelNodeParams* params) {
  FAKE_ENTER("hipGraphExecKernelNodeSetParams");
  ++State().control.graph_updates;
  exec->launches[node->index] = fake::PendingLaunch(*params);
  return 0;
}
int hipGraphLaunch(fake::GraphExec* exec, fake::Stream* stream) {
  for (const fake::PendingLaunch& launch : exec->launches) fake::Announce(launch);
  FAKE_ENTER("hipGraphLaunch");
  ++State().control.graph_launches;
  for (const fake::PendingLaunch& launch : exec->launches) fake::Enqueue(launch, *stream);
  return 0;
}

int hipHostGetDevicePointer(void** there, void* here, unsigned) {
  FAKE_ENTER("hipHostGetDevicePointer");
  *there = here;
  return 0;
}
int hipStreamWaitValue32(fake::Stream* stream, void* word, uint32_t value, unsigned, uint32_t) {
  FAKE_ENTER("hipStreamWaitValue32");
  if (stream == nullptr) return fake::kInvalidValue;
  // Who changes the word may need the runtime, which the thread that runs the stream holds.
  stream->Add([word, value] {
    const std::atomic_ref<uint32_t> seen(*static_cast<uint32_t*>(word));
    while (static_cast<int32_t>(seen.load(std::memory_order_acquire) - value) < 0) {
      State().mutex.unlock();
      sched_yield();
      State().mutex.lock();
    }
  });
  return 0;
}
// Another process waits for the word, and cannot run this one's streams, so their work ends here.
int hipStreamWriteValue32(fake::Stream* stream, void* word, uint32_t value, unsigned) {
  FAKE_ENTER("hipStreamWriteValue32");
  ++State().control.word_stores;
  if (stream == nullptr) return fake::kInvalidValue;
  stream->Add([word, value] {
    const std::atomic_ref<uint32_t> stored(*static_cast<uint32_t*>(word));
    stored.store(value, std::memory_order_release);
  });
  const fake::Control& control = State().control;
  if (!control.hang && control.lazy_words != stream) stream->RunTo(stream->enqueued);
  return 0;
}

}  // extern "C"
