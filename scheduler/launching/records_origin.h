// Remembers which rows the records of a launch are for, regardless of the layer. The layers of a
// step come one after another as launches of the same rows. Their records differ in few fields, so
// RecordBuilder::Update sets only those.
#ifndef MLA_SCHEDULER_LAUNCHING_RECORDS_ORIGIN_H_
#define MLA_SCHEDULER_LAUNCHING_RECORDS_ORIGIN_H_

#include <cstdint>

#include "kernels/formats/dtype.h"
#include "scheduler/batching/batch.h"
#include "scheduler/batching/batch_key.h"
#include "scheduler/request.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

class RecordsOrigin {
 public:
  // Call it when the records of `batch` have been built, with the version of the cache at that time
  // (KvCache::version).
  void Note(const Batch& batch, uint64_t cache_version);
  void Forget() { cache_version_ = 0; }
  // Returns true if there are records of the same rows and the cache has not changed since.
  bool Matches(const Batch& batch, uint64_t cache_version) const;

 private:
  // Everything that the records depend on, except the layer and the addresses of its tensors.
  struct Rows {
    // The open step; if another step used the same address, the version of the cache would have
    // changed.
    const Step* step = nullptr;
    int32_t first = 0, count = 0;
    int32_t head_offset = 0, num_heads = 0;
    int32_t expanded_min_rows = 0;
    Profile profile = Profile::kAbsorbed;
    kernels::DType q_dtype = kernels::DType::kBf16;
    bool has_kv = false;
    friend bool operator==(const Rows&, const Rows&) = default;
  };
  static Rows RowsOf(const StreamRequest& request);

  uint64_t cache_version_ = 0;  // 0: no records
  BatchKey key_;
  Rows rows_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_RECORDS_ORIGIN_H_
