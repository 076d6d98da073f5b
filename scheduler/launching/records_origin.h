// Which rows the records of a launch are of, at whatever layer. The layers of a step follow one
// another as launches of the same rows, whose records differ in little (RecordBuilder::Update).
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
  // The records of `batch` are there, built at this version of the cache (KvCache::version).
  void Note(const Batch& batch, uint64_t cache_version);
  void Forget() { cache_version_ = 0; }
  // Returns true if there are records of the same rows and the cache has not changed since.
  bool Matches(const Batch& batch, uint64_t cache_version) const;

 private:
  // All that the records depend on but the layer and where its tensors lie.
  struct Rows {
    const Step* step = nullptr;  // open: another step would have changed the cache
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
