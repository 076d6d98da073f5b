// Properties that requests must have in common to share a launch.
#ifndef MLA_SCHEDULER_BATCHING_BATCH_KEY_H_
#define MLA_SCHEDULER_BATCHING_BATCH_KEY_H_

#include "kernels/formats/dtype.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/launch.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// A request that only appends fits any launch: its key is the default key with profile kAppendOnly.
struct BatchKey {
  kernels::Geometry geometry;
  Profile profile = Profile::kAbsorbed;
  kernels::KvFormat kv_format = kernels::KvFormat::kBf16;
  kernels::DType q_dtype = kernels::DType::kBf16;
  kernels::DType o_dtype = kernels::DType::kBf16;
  kernels::AttentionKind attention = kernels::AttentionKind::kDense;
  kernels::DType products = kernels::DType::kBf16;            // of both forms
  kernels::KvFormat entry_format = kernels::KvFormat::kBf16;  // for kWindow
  // for EXPANDED and PROJECTED: QueryPrecision::kSplit
  bool split_queries = false;
  kernels::RopeLayout rope = kernels::RopeLayout::kNone;  // for PROJECTED
  friend bool operator==(const BatchKey&, const BatchKey&) = default;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_BATCH_KEY_H_
