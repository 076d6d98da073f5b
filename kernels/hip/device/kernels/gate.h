// The kernels with which a launch waits for another process's GPU work and signals its own end, one
// block each.
//
// The gate waits for words of host memory, or of device memory shared with the processes that set
// them. The wait has a time limit. After a gate that ran out of time, kernels write nothing that
// others see (late.h), and the signal sets no word.
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_GATE_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_GATE_H_

#include "kernels/hip/args/gate_args.h"
#include "kernels/hip/device/primitives/block.h"

namespace mla::kernels::hip {

// The next kernel may occupy the device's units during the wait, so it must be small: a large one
// could keep units from the work that the gate waits for.
MLA_DEVICE void gate(const GateArgs& args) {
  let_next_kernel_start();
  if (thread_index() != 0) return;
  const uint64_t begin = realtime_ns();
  uint64_t waited = 0;
  bool late = false;
  for (int i = 0; i < args.count && !late; ++i) {
    const GateArgs::Word& w = args.words[i];
    while (static_cast<int32_t>(load_host_word(w.word) - w.value) < 0) {
      waited = realtime_ns() - begin;
      late = waited >= args.limit_ns;
      if (late) break;
    }
  }
  args.outcome->waited_ns = waited;
  args.outcome->ended = begin + waited;
  args.outcome->late = late ? 1 : 0;
}

MLA_DEVICE void signal(const SignalArgs& args) {
  wait_for_previous_kernel();
  const int i = thread_index();
  const bool late = args.outcome != nullptr && args.outcome->late != 0;
  if (!late && i < args.count) {
    const SignalArgs::Word& w = args.words[i];
    if (w.nearby != nullptr) store_host_word(w.nearby, w.value);
    store_host_word(w.word, w.value);
  }
  if (i == 0 && args.report != nullptr) {
    GateOutcome report = *args.outcome;
    report.ended = realtime_ns() - report.ended;
    *args.report = report;
  }
  if (!late && args.copied > 0) move_bytes(args.to, args.from, static_cast<int>(args.copied));
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_GATE_H_
