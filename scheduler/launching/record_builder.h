// Builds the records of a launch from the staged tensors of its batch.
//
// In EXPANDED and PROJECTED, short segments take the absorbed form between two projections; the
// backend groups their rows by weights. Long segments take the expanded form. ABSORBED has only the
// absorbed form. A form that no segment needs is absent: no records are built for it. Fused slices
// take the absorbed form in one record over all their heads.
//
// Threading: owned by the engine role. A launch allocates nothing.
#ifndef MLA_SCHEDULER_LAUNCHING_RECORD_BUILDER_H_
#define MLA_SCHEDULER_LAUNCHING_RECORD_BUILDER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/types/attention_params.h"
#include "scheduler/batching/batch.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/launching/batch_launch.h"
#include "scheduler/launching/tensor_stager.h"
#include "scheduler/tables/model_table.h"

namespace mla::scheduler {

class RecordBuilder final {
 public:
  RecordBuilder(const kernels::BackendInfo& info, kvcache::KvCache* cache, const ModelTable* models)
      : info_(info), cache_(cache), models_(models) {}

  // Adds the records of the batch to `launch`, after TensorStager::Stage has placed its tensors and
  // added the records of fused slices. Also takes the page table changes that the launch will
  // publish. RESOURCE_EXHAUSTED if the workspace is full; `launch` then keeps the table changes,
  // and its records must be cleared before another Build. `absorbed_alone`: no segment takes the
  // expanded form, however long it is; the caller must then make launch.origin forget, because the
  // form is not recorded there.
  absl::Status Build(const TensorStager& staged, BatchLaunch* launch, bool absorbed_alone = false);
  // Returns true if Update may replace Build: the records in `launch` are for the same rows as its
  // batch.
  bool MayUpdate(const BatchLaunch& launch) const {
    return launch.origin.Matches(launch.batch, cache_->version());
  }
  // As Build, for records made for another layer of the same rows: sets only the fields that differ
  // between layers. REQUIRES: MayUpdate returned true for this batch.
  absl::Status Update(const TensorStager& staged, BatchLaunch* launch);

 private:
  // Holds the fields that the records of a request's segments share. A decode step has a segment
  // for each of its sequences, at every layer.
  struct SegmentTemplate {
    const StreamRequest* request = nullptr;
    const StagedTensors* staged = nullptr;
    int32_t expanded_min_rows = 0;  // EXPANDED, PROJECTED: shorter segments take the absorbed form
    bool appends_more = false;      // entries of windows or index keys are appended, too
    int64_t kv_row_bytes = 0, q_row_bytes = 0, o_row_bytes = 0;  // as sent
    kernels::AppendRecord append{};
    // Attention over the tensors as sent, and attention between the projections.
    kernels::SegmentRecord sent{}, latent{};
    kernels::ProjectionRecord absorb{}, project{};
    int64_t latent_q_row_bytes = 0, latent_o_row_bytes = 0;
    // The workspace that was taken but not yet given to a segment.
    std::byte *latent_q = nullptr, *latent_o = nullptr;
    int64_t latent_rows = 0;
  };

  // Returns the template of the segment's request.
  SegmentTemplate TemplateOf(const Segment& segment, const TensorStager& staged,
                             const BatchKey& key) const;
  // Returns the first byte of the segment's part of its request's KV rows.
  static const std::byte* KvOf(const Segment& segment, const SegmentTemplate& shared);
  static void SetTensors(const Segment& segment, const SegmentTemplate& shared,
                         kernels::SegmentRecord* record);
  kernels::SegmentRecord Record(const Segment& segment) const;
  // `page_table` is that of the segment's rows.
  void AddAppend(BatchLaunch* launch, const Segment& segment, const SegmentTemplate& shared,
                 int64_t page_table);
  void AddMoreAppends(BatchLaunch* launch, const Segment& segment, const SegmentTemplate& shared,
                      const kernels::AppendRecord& rows);
  static void AddIndexKeys(BatchLaunch* launch, const Segment& segment,
                           const kernels::AppendRecord& rows);
  void AddEntries(BatchLaunch* launch, const Segment& segment, const StagedTensors& staged,
                  const kernels::AppendRecord& rows);
  kernels::WindowRecord Window(const Segment& segment, const StagedTensors& staged) const;
  // Adds the record by which the indexer chooses the lists of `attend`.
  static void AddSelect(BatchLaunch* launch, const Segment& segment, const StagedTensors& staged,
                        const kernels::SegmentRecord& attend);
  // Adds segment `index` of the batch.
  absl::Status AddCompute(BatchLaunch* launch, size_t index, int64_t page_table,
                          SegmentTemplate* shared);
  // For EXPANDED in the absorbed form: adds the projections before and after `record`, and makes
  // its tensors the latent ones.
  absl::Status AddProjections(BatchLaunch* launch, size_t index, SegmentTemplate* shared,
                              kernels::SegmentRecord* record);
  // Gives segment `index` workspace for the tensors between its projections and enters it in the
  // records.
  absl::Status PlaceLatents(BatchLaunch* launch, size_t index, SegmentTemplate* shared,
                            kernels::SegmentRecord* record, kernels::ProjectionRecord* absorb,
                            kernels::ProjectionRecord* project);
  // Sets the segment's part of its request's fragmented queries.
  static kernels::FragmentedInput Fragments(const Segment& segment, const SegmentTemplate& shared);
  absl::Status TakeLatents(BatchLaunch* launch, size_t index, int64_t rows,
                           SegmentTemplate* shared);
  void AddFused(BatchLaunch* launch, const Segment& segment, const StagedTensors& staged);

  const kernels::BackendInfo& info_;
  kvcache::KvCache* const cache_;
  const ModelTable* const models_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_RECORD_BUILDER_H_
