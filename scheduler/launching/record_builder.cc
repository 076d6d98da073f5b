#include "scheduler/launching/record_builder.h"

#include <algorithm>
#include <limits>

#include "base/status_macros.h"

namespace mla::scheduler {

using kernels::DType;
using kernels::ElementSize;

namespace {

constexpr int64_t kRowAlignment = 64;  // bytes; adjacent latent rows stay aligned to it

// Begin offsets of the segment's lists within the lists of its request.
const int32_t* ListBegins(const Segment& segment) {
  const AttendArgs& args = segment.request->attend;
  return args.list_begin + (segment.row_begin - args.row_begin);
}

// Returns the number of list entries of the request's launched rows that come before the segment's.
int32_t EntriesBefore(const Segment& segment) {
  return ListBegins(segment)[0] -
         segment.request->attend.list_begin[segment.request->engine.rows_done];
}

int32_t LongestList(const Segment& segment) {
  if (!IsSparse(segment.request->attend)) return 0;
  const int32_t* const begin = ListBegins(segment);
  int32_t longest = 0;
  for (int32_t row = 0; row < segment.rows; ++row) {
    longest = std::max(longest, begin[row + 1] - begin[row]);
  }
  return longest;
}

// Returns the largest number of places that a row of the segment with a window attends to.
int32_t MostWindowPlaces(const Segment& segment, const kernels::WindowRecord& window) {
  const int32_t visible = segment.cached() + segment.rows;
  const bool listed = IsSparse(segment.request->attend);
  return kernels::WindowRows(window, visible) +
         (listed ? LongestList(segment) : kernels::WholeEntries(window, visible));
}

// Copies the fields that place rows of a layer.
template <typename Record>
void SetPlane(const Record& from, Record* target) {
  target->layer_offset = from.layer_offset;
  target->row_stride = from.row_stride;
  target->page_size = from.page_size;
  target->kv_scale = from.kv_scale;
}

}  // namespace

RecordBuilder::SegmentTemplate RecordBuilder::TemplateOf(const Segment& segment,
                                                         const TensorStager& staged,
                                                         const BatchKey& key) const {
  const AttendArgs& args = segment.request->attend;
  const Model& model = *segment.request->engine.step->model;
  const kernels::Geometry& g = model.spec->geometry;
  SegmentTemplate shared;
  shared.request = segment.request;
  shared.staged = &staged.request(segment.request->engine.batch_index);
  shared.append.dtype = args.q_dtype;
  shared.append.kv_row_stride = model.spec->sent_row_dim();
  const kvcache::KvPlane& rows = model.rows(args.layer);
  shared.append.layer_offset = rows.offset;
  shared.append.row_stride = rows.row_stride;
  shared.append.page_size = rows.rows;
  shared.append.row_dim = static_cast<int32_t>(g.kv_row_dim());
  shared.append.rope_dim = g.rope_dim;
  shared.append.format = rows.format;
  shared.append.kv_scale = model.kv_scale(args.layer);
  shared.appends_more = model.spec->windowed() || model.spec->indexer.heads > 0;
  shared.kv_row_bytes = model.spec->sent_row_dim() * int64_t(ElementSize(args.q_dtype));
  if (args.profile == Profile::kAppendOnly) return shared;

  kernels::SegmentRecord& sent = shared.sent;
  sent = Record(segment);
  sent.q_head_stride = model.spec->q_dim(args.profile);
  sent.q_row_stride = sent.q_head_stride * args.num_heads;  // PROJECTED: of its workspace
  sent.o_head_stride = model.spec->o_dim(args.profile);
  sent.o_row_stride = sent.o_head_stride * args.num_heads;
  sent.lse_head_stride = 1;
  sent.lse_row_stride = args.num_heads;
  shared.q_row_bytes = sent.q_row_stride * int64_t(ElementSize(args.q_dtype));
  shared.o_row_bytes = sent.o_row_stride * int64_t(ElementSize(args.o_dtype));
  if (args.profile == Profile::kAbsorbed) return shared;

  // The rest is for EXPANDED and PROJECTED in the absorbed form, whose attention lies between two
  // projections.
  shared.expanded_min_rows =
      IsSparse(args) ? std::numeric_limits<int32_t>::max() : model.ExpandedMinRows(args.q_dtype);
  kernels::SegmentRecord& latent = shared.latent;
  latent = sent;
  latent.q_head_stride = key.geometry.absorbed_q_dim();
  latent.q_row_stride = latent.q_head_stride * args.num_heads;
  latent.o_head_stride = key.geometry.kv_lora_rank;
  latent.o_row_stride = latent.o_head_stride * args.num_heads;
  shared.latent_q_row_bytes =
      latent.q_row_stride *
      int64_t(ElementSize(info_.absorbed_q_dtype(key.q_dtype, key.split_queries)));
  shared.latent_o_row_bytes = latent.o_row_stride * int64_t(ElementSize(info_.latent_o_dtype));
  kernels::ProjectionRecord& absorb = shared.absorb;
  absorb.in_row_stride = sent.q_row_stride;
  absorb.in_head_stride = sent.q_head_stride;
  absorb.out_row_stride = latent.q_row_stride;
  absorb.out_head_stride = latent.q_head_stride;
  absorb.num_heads = args.num_heads;
  absorb.head_offset = args.head_offset;
  absorb.weights_slot = sent.weights_slot;
  kernels::ProjectionRecord& project = shared.project;
  project = absorb;
  project.in_row_stride = latent.o_row_stride;
  project.in_head_stride = latent.o_head_stride;
  project.out_row_stride = sent.o_row_stride;
  project.out_head_stride = sent.o_head_stride;
  return shared;
}

const std::byte* RecordBuilder::KvOf(const Segment& segment, const SegmentTemplate& shared) {
  const int64_t skip = segment.row_begin - FirstRow(*segment.request);
  return shared.staged->kv + skip * shared.kv_row_bytes;
}

void RecordBuilder::SetTensors(const Segment& segment, const SegmentTemplate& shared,
                               kernels::SegmentRecord* record) {
  const StagedTensors& staged = *shared.staged;
  const int64_t skip = segment.row_begin - FirstRow(*segment.request);
  record->q = staged.q == nullptr ? nullptr : staged.q + skip * shared.q_row_bytes;
  record->o = staged.o + skip * shared.o_row_bytes;
  record->lse = staged.lse == nullptr ? nullptr : staged.lse + skip * record->lse_row_stride;
}

void RecordBuilder::AddAppend(BatchLaunch* launch, const Segment& segment,
                              const SegmentTemplate& shared, int64_t page_table) {
  // Fields are set where the record stays: writing a copy first and then moving it would stall on
  // each store.
  kernels::AppendRecord& record = launch->appends.emplace_back(shared.append);
  record.kv = KvOf(segment, shared);
  record.page_table = page_table;
  record.first_position = segment.cached();
  record.rows = segment.rows;
  if (shared.staged->differs != nullptr) {
    record.differs = shared.staged->differs + (segment.row_begin - FirstRow(*segment.request));
  }
  if (shared.appends_more) AddMoreAppends(launch, segment, shared, kernels::AppendRecord(record));
}

void RecordBuilder::AddMoreAppends(BatchLaunch* launch, const Segment& segment,
                                   const SegmentTemplate& shared,
                                   const kernels::AppendRecord& rows) {
  const ModelSpec& spec = *segment.request->engine.step->model->spec;
  if (spec.windowed()) AddEntries(launch, segment, *shared.staged, rows);
  if (spec.indexer.heads > 0) AddIndexKeys(launch, segment, rows);
}

// Appends the entries that the segment's rows complete.
void RecordBuilder::AddEntries(BatchLaunch* launch, const Segment& segment,
                               const StagedTensors& staged, const kernels::AppendRecord& rows) {
  const StreamRequest& request = *segment.request;
  const Step& step = *request.engine.step;
  const int32_t layer = request.attend.layer, ratio = step.model->spec->ratio(layer);
  if (ratio == 0) return;
  const int32_t first = segment.cached() / ratio;
  const int32_t count = (segment.cached() + segment.rows) / ratio - first;
  if (count == 0) return;
  const int64_t before = EntriesOfRows(step, layer, FirstRow(request), segment.row_begin);
  const kvcache::KvPlane& plane = step.model->entries(layer);
  kernels::AppendRecord& record = launch->appends.emplace_back(rows);
  record.kv = staged.entries + before * rows.kv_row_stride * int64_t(ElementSize(rows.dtype));
  record.page_table = cache_->compressed_table(segment.entry->slot);
  record.layer_offset = plane.offset;
  record.row_stride = plane.row_stride;
  record.page_size = plane.rows;
  record.first_position = first;
  record.rows = count;
  record.format = plane.format;
  if (staged.differs != nullptr) {
    record.differs = staged.differs + request.engine.rows_launched + before;
  }
}

kernels::WindowRecord RecordBuilder::Window(const Segment& segment,
                                            const StagedTensors& staged) const {
  const Model& model = *segment.request->engine.step->model;
  const int32_t layer = segment.request->attend.layer;
  kernels::WindowRecord record{};
  record.window = model.spec->window;
  record.ratio = model.spec->ratio(layer);
  record.sinks = staged.sinks;
  if (record.ratio == 0) return record;
  const kvcache::KvPlane& plane = model.entries(layer);
  record.page_table = cache_->compressed_table(segment.entry->slot);
  record.layer_offset = plane.offset;
  record.row_stride = plane.row_stride;
  record.page_size = plane.rows;
  return record;
}

// In the client's tensor each KV row is followed by its index key.
void RecordBuilder::AddIndexKeys(BatchLaunch* launch, const Segment& segment,
                                 const kernels::AppendRecord& rows) {
  const StreamRequest& request = *segment.request;
  const Model& model = *request.engine.step->model;
  const kvcache::KvPlane& keys = model.contents->layout.index_keys(request.attend.layer);
  kernels::AppendRecord& record = launch->appends.emplace_back(rows);
  record.kv = static_cast<const std::byte*>(rows.kv) +
              rows.row_dim * int64_t(ElementSize(request.attend.q_dtype));
  record.layer_offset = keys.offset;
  record.row_stride = keys.row_stride;
  record.page_size = keys.rows;
  record.row_dim = model.spec->indexer.dim;
  record.rope_dim = 0;
  record.format = keys.format;
  if (rows.differs != nullptr) record.differs = rows.differs + request.engine.rows_launched;
}

void RecordBuilder::AddSelect(BatchLaunch* launch, const Segment& segment,
                              const StagedTensors& staged, const kernels::SegmentRecord& attend) {
  const AttendArgs& args = segment.request->attend;
  const Model& model = *segment.request->engine.step->model;
  const kvcache::KvPlane& keys = model.contents->layout.index_keys(args.layer);
  const int64_t skip = segment.row_begin - FirstRow(*segment.request);
  kernels::SelectRecord record{};
  record.inputs = staged.index_inputs + skip * model.spec->indexer.input_bytes(args.q_dtype);
  record.dtype = args.q_dtype;
  record.indexer = model.spec->indexer;
  record.page_table = attend.page_table;
  record.layer_offset = keys.offset;
  record.row_stride = keys.row_stride;
  record.page_size = keys.rows;
  record.rows = attend.q_rows;
  record.kv_rows = attend.kv_rows;
  record.list = staged.selected + EntriesBefore(segment);
  record.list_begin = attend.list_begin;
  record.wanted_width = model.spec->top_k;
  if (staged.wanted != nullptr) record.wanted = staged.wanted + skip * record.wanted_width;
  launch->selects.push_back(record);
}

// Takes workspace for segment `index`, whose record has `rows` rows, and for the following segments
// with the same needs. A step of many sequences then takes workspace once.
absl::Status RecordBuilder::TakeLatents(BatchLaunch* launch, size_t index, int64_t rows,
                                        SegmentTemplate* shared) {
  const std::vector<Segment>& segments = launch->batch.segments;
  const bool aligned = shared->latent_q_row_bytes % kRowAlignment == 0 &&
                       shared->latent_o_row_bytes % kRowAlignment == 0;
  for (size_t next = index + 1; aligned && next < segments.size(); ++next) {
    const Segment& segment = segments[next];
    if (segment.request != shared->request || segment.rows >= shared->expanded_min_rows) break;
    rows += segment.rows;
  }
  MLA_ASSIGN_OR_RETURN(void* const q, launch->layout.Workspace(rows * shared->latent_q_row_bytes));
  MLA_ASSIGN_OR_RETURN(void* const o, launch->layout.Workspace(rows * shared->latent_o_row_bytes));
  shared->latent_q = static_cast<std::byte*>(q);
  shared->latent_o = static_cast<std::byte*>(o);
  shared->latent_rows = rows;
  return absl::OkStatus();
}

kernels::SegmentRecord RecordBuilder::Record(const Segment& segment) const {
  const AttendArgs& args = segment.request->attend;
  const Model& model = *segment.request->engine.step->model;
  kernels::SegmentRecord record{};
  record.page_table = cache_->page_table(segment.entry->slot);
  const kvcache::KvPlane& rows = model.rows(args.layer);
  record.layer_offset = rows.offset;
  record.row_stride = rows.row_stride;
  record.page_size = rows.rows;
  record.q_rows = segment.rows;
  record.kv_rows = segment.cached() + segment.rows;
  record.num_heads = args.num_heads;
  record.head_offset = args.head_offset;
  record.weights_slot =
      args.profile == Profile::kAbsorbed ? -1 : models_->weights_slot(model, args.layer);
  record.softmax_scale = static_cast<float>(model.spec->softmax_scale);
  record.causal = 1;
  record.kv_scale = model.kv_scale(args.layer);
  return record;
}

absl::Status RecordBuilder::AddCompute(BatchLaunch* launch, size_t index, int64_t page_table,
                                       SegmentTemplate* shared) {
  const Segment& segment = launch->batch.segments[index];
  const StagedTensors& staged = *shared->staged;
  const AttendArgs& args = segment.request->attend;
  int32_t rows = segment.rows;
  if (segment.run >= 0) {
    const RowRun& run = launch->batch.runs[segment.run];
    if (launch->batch.run_segments[run.first] != static_cast<int32_t>(index)) {
      return absl::OkStatus();  // the record of the run's first segment has its rows
    }
    rows = run.rows;
  }
  const bool is_expanded = IsExpanded(args.profile);
  const bool expands = is_expanded && rows >= shared->expanded_min_rows;
  const bool projects = is_expanded && !expands;
  FormRecords& form = expands ? launch->expanded : launch->absorbed;
  const size_t position = form.records.size();
  kernels::SegmentRecord& record =
      form.records.emplace_back(projects ? shared->latent : shared->sent);
  SetTensors(segment, *shared, &record);
  record.page_table = page_table;
  record.q_rows = rows;
  record.kv_rows = segment.cached() + rows;
  const bool sparse = IsSparse(args);
  if (sparse) {
    const int64_t skip = segment.row_begin - FirstRow(*segment.request);
    record.list_begin = staged.list_begin + skip;
    record.list = staged.list + EntriesBefore(segment);
    if (Selects(args)) AddSelect(launch, segment, staged, record);
  }
  const bool windowed = launch->batch.key.attention == kernels::AttentionKind::kWindow;
  int32_t places = sparse ? LongestList(segment) : record.kv_rows;
  if (windowed) {
    form.windows.push_back(Window(segment, staged));
    places = MostWindowPlaces(segment, form.windows.back());
  }
  form.lengths.push_back({record.q_rows, places, record.num_heads, !sparse && !windowed});
  if (projects) return AddProjections(launch, index, shared, &record);
  if (staged.q_fragments.bytes > 0) form.fragments.Add(position, Fragments(segment, *shared));
  return absl::OkStatus();
}

kernels::FragmentedInput RecordBuilder::Fragments(const Segment& segment,
                                                  const SegmentTemplate& shared) {
  kernels::FragmentedInput fragments = shared.staged->q_fragments;
  fragments.offset += (segment.row_begin - FirstRow(*segment.request)) * shared.q_row_bytes;
  fragments.bytes = segment.rows * shared.q_row_bytes;
  return fragments;
}

absl::Status RecordBuilder::AddProjections(BatchLaunch* launch, size_t index,
                                           SegmentTemplate* shared,
                                           kernels::SegmentRecord* record) {
  const Segment& segment = launch->batch.segments[index];
  if (shared->staged->q_fragments.bytes > 0) {
    launch->absorbs.fragments.Add(launch->absorbs.records.size(), Fragments(segment, *shared));
  }
  kernels::ProjectionRecord& absorb = launch->absorbs.records.emplace_back(shared->absorb);
  kernels::ProjectionRecord& project = launch->projects.records.emplace_back(shared->project);
  absorb.rows = project.rows = record->q_rows;
  return PlaceLatents(launch, index, shared, record, &absorb, &project);
}

absl::Status RecordBuilder::PlaceLatents(BatchLaunch* launch, size_t index, SegmentTemplate* shared,
                                         kernels::SegmentRecord* record,
                                         kernels::ProjectionRecord* absorb,
                                         kernels::ProjectionRecord* project) {
  if (shared->latent_rows == 0) {
    MLA_RETURN_IF_ERROR(TakeLatents(launch, index, record->q_rows, shared));
  }
  const int64_t rows = record->q_rows;
  absorb->in = record->q;
  absorb->out = shared->latent_q;
  project->in = shared->latent_o;
  project->out = record->o;
  record->q = shared->latent_q;
  record->o = shared->latent_o;
  shared->latent_q += rows * shared->latent_q_row_bytes;
  shared->latent_o += rows * shared->latent_o_row_bytes;
  shared->latent_rows -= rows;
  return absl::OkStatus();
}

void RecordBuilder::AddFused(BatchLaunch* launch, const Segment& segment,
                             const StagedTensors& staged) {
  const AttendArgs& args = segment.request->attend;
  const kernels::Geometry& g = launch->batch.key.geometry;
  const bool absorbed = args.profile == Profile::kAbsorbed;
  const DType q_dtype = absorbed
                            ? args.q_dtype
                            : info_.absorbed_q_dtype(args.q_dtype, launch->batch.key.split_queries);
  const DType o_dtype = absorbed ? args.o_dtype : info_.latent_o_dtype;
  const int64_t skip = segment.row_begin - FirstRow(*segment.request);
  kernels::SegmentRecord record = Record(segment);
  record.num_heads = launch->batch.slices[segment.slices].heads;
  record.q_head_stride = g.absorbed_q_dim();
  record.q_row_stride = record.q_head_stride * record.num_heads;
  record.o_head_stride = g.kv_lora_rank;
  record.o_row_stride = record.o_head_stride * record.num_heads;
  record.lse_head_stride = 1;
  record.lse_row_stride = record.num_heads;
  record.q = staged.q + skip * record.q_row_stride * int64_t(ElementSize(q_dtype));
  record.o = staged.o + skip * record.o_row_stride * int64_t(ElementSize(o_dtype));
  if (staged.lse != nullptr) record.lse = staged.lse + skip * record.lse_row_stride;
  launch->absorbed.records.push_back(record);
  launch->absorbed.lengths.push_back({record.q_rows, record.kv_rows, record.num_heads, true});
}

absl::Status RecordBuilder::Build(const TensorStager& staged, BatchLaunch* launch,
                                  bool absorbed_alone) {
  SegmentTemplate shared;
  for (size_t i = 0; i < launch->batch.segments.size(); ++i) {
    const Segment& segment = launch->batch.segments[i];
    const StreamRequest& request = *segment.request;
    if (shared.staged == nullptr || &request != shared.request) {
      shared = TemplateOf(segment, staged, launch->batch.key);
      if (absorbed_alone) shared.expanded_min_rows = std::numeric_limits<int32_t>::max();
    }
    const kvcache::SeqSlot slot = segment.entry->slot;
    cache_->TakeTableChanges(slot, &launch->tables);
    const int64_t page_table = cache_->page_table(slot);
    if (shared.staged->kv != nullptr) AddAppend(launch, segment, shared, page_table);
    if (request.attend.profile == Profile::kAppendOnly) continue;
    if (segment.slices >= 0) {
      AddFused(launch, segment, staged.slices(static_cast<size_t>(segment.slices)));
    } else
      MLA_RETURN_IF_ERROR(AddCompute(launch, i, page_table, &shared));
  }
  launch->origin.Note(launch->batch, cache_->version());
  return absl::OkStatus();
}

absl::Status RecordBuilder::Update(const TensorStager& staged, BatchLaunch* launch) {
  launch->origin.Forget();  // until all is well
  SegmentTemplate shared = TemplateOf(launch->batch.segments[0], staged, launch->batch.key);
  const AttendArgs& args = shared.request->attend;
  auto append = launch->appends.begin();
  auto absorbed = launch->absorbed.records.begin(), expanded = launch->expanded.records.begin();
  auto absorb = launch->absorbs.records.begin(), project = launch->projects.records.begin();
  for (size_t i = 0; i < launch->batch.segments.size(); ++i) {
    const Segment& segment = launch->batch.segments[i];
    if (shared.staged->kv != nullptr) {
      SetPlane(shared.append, &*append);
      append->format = shared.append.format;
      append->kv = KvOf(segment, shared);
      ++append;
    }
    if (args.profile == Profile::kAppendOnly) continue;
    const bool expands = IsExpanded(args.profile) && segment.rows >= shared.expanded_min_rows;
    kernels::SegmentRecord& record = expands ? *expanded++ : *absorbed++;
    SetPlane(shared.sent, &record);
    record.weights_slot = shared.sent.weights_slot;
    SetTensors(segment, shared, &record);
    if (expands || args.profile == Profile::kAbsorbed) continue;
    absorb->weights_slot = project->weights_slot = record.weights_slot;
    MLA_RETURN_IF_ERROR(PlaceLatents(launch, i, &shared, &record, &*absorb++, &*project++));
  }
  launch->origin.Note(launch->batch, cache_->version());
  return absl::OkStatus();
}

}  // namespace mla::scheduler
