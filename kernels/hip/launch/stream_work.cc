#include "kernels/hip/launch/stream_work.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <tuple>
#include <utility>

#include "base/status_macros.h"
#include "kernels/hip/launch/combine.h"

namespace mla::kernels::hip {
namespace {

constexpr int64_t kQueryDim = 576, kOutputDim = 512;
constexpr uintptr_t kAlignment = 16;  // alignment of addresses and sizes that kernels copy
// At most this number of new rows of a segment is appended by its items' blocks; each block appends
// all that its items see.
constexpr int32_t kMostOwnRows = 4;

// Counters for tiles with this many partial rows: each share of a tile has one within these.
int64_t MeetingsFor(int64_t partial_rows) { return partial_rows + kMostSplitShares; }

// Bounds of the time that a block waits for queries (StreamArgs). It is the least time plus that of
// a bus of 4 GB/s, because every bus that GPUs have is many times faster. The most is less than
// half the range of a 32-bit clock of nanoseconds, so that differences of times keep their sign.
constexpr int64_t kLeastPatienceNs = 1'000'000, kMostPatienceNs = 2'000'000'000;
constexpr int64_t kBytesPerNs = 4;

constexpr int64_t kWord = sizeof(uint32_t);
int64_t ArrivedBytes(const BackendLimits& l) { return l.launch_slots * kWord; }
int64_t FinishedBytes(const BackendLimits& l) { return kPushBlocks * l.launch_requests * kWord; }
int64_t MeetingBytes(const BackendLimits& l) { return MeetingsFor(l.partial_rows) * kWord; }
int64_t ReportBytes(const BackendLimits& l) {
  return l.launch_slots * static_cast<int64_t>(sizeof(StreamReport));
}

DevicePtr AddressOf(const void* at) { return reinterpret_cast<DevicePtr>(at); }

uint32_t PatienceFor(std::span<const TensorMove> queries) {
  int64_t bytes = 0;
  for (const TensorMove& copy : queries) bytes += copy.bytes;
  return static_cast<uint32_t>(std::min(kLeastPatienceNs + bytes / kBytesPerNs, kMostPatienceNs));
}

bool SameTile(const WorkInfo& a, const WorkInfo& b) {
  return a.segment == b.segment && a.q_begin == b.q_begin && a.heads == b.heads;
}
bool Follows(const WorkInfo& a, const WorkInfo& b) {
  if (a.segment != b.segment) return a.segment < b.segment;
  return a.q_begin < b.q_begin || (a.q_begin == b.q_begin && a.heads < b.heads);
}

// Finds the tensor that holds `bytes` bytes at `at`, in a list ordered by address. The search
// starts at `*next` and leaves the start of the next search there. Returns null if no tensor holds
// the bytes, or its rows are not contiguous.
template <class Tensor>
Tensor* FindTensor(std::vector<Tensor>& tensors, const void* at, int64_t bytes, size_t* next) {
  const auto* const begin = static_cast<const std::byte*>(at);
  for (size_t i = *next; i < tensors.size(); ++i) {
    Tensor& t = tensors[i];
    const int64_t size = t.rows * t.row_bytes;
    if (begin < t.device || begin + bytes > t.device + size) continue;
    *next = i;
    return t.rows == 1 || t.pitch == t.row_bytes ? &t : nullptr;
  }
  return nullptr;
}

// Marks the tensor with the byte at `at` as in place, if the list has it.
template <class Tensor>
void PutInPlace(std::vector<Tensor>& tensors, const void* at, size_t* next) {
  Tensor* const found = FindTensor(tensors, at, 1, next);
  if (found != nullptr) found->device = const_cast<std::byte*>(found->host);
}

bool Aligned(const void* a, const void* b, int64_t bytes) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
           static_cast<uintptr_t>(bytes)) %
          kAlignment) == 0;
}

}  // namespace

absl::StatusOr<StreamWork> StreamWork::Create(const DeviceState& device,
                                              const BackendLimits& limits, Stream stream) {
  StreamWork work(device);
  for (auto [buffer, what, bytes] :
       {std::tuple(&work.arrived_, "arrivals of queries", ArrivedBytes(limits)),
        std::tuple(&work.finished_, "finished outputs of a stream", FinishedBytes(limits)),
        std::tuple(&work.meetings_, "meetings of a stream's blocks", MeetingBytes(limits))}) {
    MLA_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Create(device.runtime, what, bytes));
    MLA_RETURN_IF_ERROR(device.runtime->Fill(buffer->at(), 0, bytes, stream));
  }
  // Waits, because words are stored from other streams.
  MLA_RETURN_IF_ERROR(device.runtime->Synchronize(stream));
  MLA_ASSIGN_OR_RETURN(work.reports_, PinnedBuffer::Create(device.runtime, "reports of streams",
                                                           ReportBytes(limits)));
  std::memset(work.reports_.data(), 0, static_cast<size_t>(ReportBytes(limits)));
  work.meetings_count_ = MeetingsFor(limits.partial_rows);
  work.page_tables_.reserve(static_cast<size_t>(limits.launch_requests));
  work.taken_.resize(static_cast<size_t>(limits.launch_slots));
  for (Taken& taken : work.taken_) {
    taken.inputs.reserve(kMostTensors);
    taken.outputs.reserve(kMostTensors);
    taken.queries.reserve(kMostTensors);
    taken.host_queries.reserve(static_cast<size_t>(limits.launch_requests));
    taken.tensors.reserve(static_cast<size_t>(limits.launch_requests));
    taken.writers.reserve(static_cast<size_t>(limits.launch_requests));
  }
  return work;
}

int64_t StreamWork::HostBytes(const BackendLimits& limits) { return ReportBytes(limits); }

int64_t StreamWork::WorkspaceBytes(const BackendLimits& limits) {
  return ArrivedBytes(limits) + FinishedBytes(limits) + MeetingBytes(limits);
}

bool StreamWork::Serves(const Launch& launch) const {
  const AttentionDesc& desc = launch.absorbed.desc;
  return desc.streamed && !launch.absorbed.segments.empty() && !device_->arch->stream.empty() &&
         device_->runtime->stores_words() && desc.kv_format == KvFormat::kBf16 &&
         desc.attention == AttentionKind::kDense && desc.q_dtype == DType::kBf16 &&
         launch.gate.ready.word == nullptr && launch.selects.empty() &&
         launch.absorb.records.empty() && launch.expanded.segments.empty() &&
         launch.inputs.size() <= kMostTensors && launch.outputs.size() <= kMostTensors;
}

int32_t StreamWork::BlocksPerUnit(const Cut& cut) const {
  const int32_t rows = device_->arch->stream.front().rows;
  return (cut.packed_rows + rows - 1) / rows;
}

bool StreamWork::FindCut(const PlanView& plan, Cut* cut) const {
  *cut = {};
  for (const WorkInfo& w : plan.work_info) {
    cut->packed_rows = std::max(cut->packed_rows, PackedRows(w.q_begin, w.q_end, w.heads));
    if (w.partial_row >= 0 && w.kv_begin == 0) cut->piece_rows = w.kv_end;
  }
  if (cut->piece_rows == 0) cut->piece_rows = std::numeric_limits<int32_t>::max();
  for (size_t unit = 0; unit + 1 < plan.work_indptr.size(); ++unit) {
    for (int32_t i = plan.work_indptr[unit]; i < plan.work_indptr[unit + 1]; ++i) {
      const WorkInfo& w = plan.work_info[static_cast<size_t>(i)];
      cut->units = static_cast<int32_t>(unit) + 1;
      if (i > plan.work_indptr[unit]) {
        const WorkInfo& before = plan.work_info[static_cast<size_t>(i) - 1];
        if (SameTile(before, w) || !Follows(before, w)) return false;
      }
      if (w.partial_row < 0) continue;
      const int32_t piece = w.kv_begin / cut->piece_rows;
      // Cuts lie within what a tile's first query row sees, so the last piece includes the rows
      // that only later query rows see.
      const int32_t more = w.kv_end - w.kv_begin - cut->piece_rows;
      if (w.kv_begin != piece * cut->piece_rows || more >= w.q_end - w.q_begin ||
          piece >= kMostStreamPieces ||
          w.partial_row < piece * PackedRows(w.q_begin, w.q_end, w.heads)) {
        return false;
      }
    }
  }
  const int32_t blocks = cut->units * BlocksPerUnit(*cut) + kPushBlocks;
  return cut->packed_rows >
             LeastRows(*device_->arch, KvFormat::kBf16, DType::kBf16, AttentionKind::kDense) &&
         BlocksPerUnit(*cut) <= kMostSplitShares && blocks <= device_->runtime->units() &&
         MeetingsFor(plan.partial_rows) <= meetings_count_;
}

bool StreamWork::PlaceQueries(LaunchRecording& recording, const AttentionParams& params,
                              Taken& taken) const {
  size_t next = 0;
  const std::byte* expected = nullptr;  // where the last segment's input continues
  const HostInput* last = nullptr;
  const auto ended = [&] {
    return last == nullptr || expected == last->device + last->rows * last->row_bytes;
  };
  for (const SegmentRecord& r : params.segments) {
    const int64_t bytes = r.q_rows * r.q_row_stride * static_cast<int64_t>(sizeof(uint16_t));
    if (r.q_head_stride != kQueryDim || r.q_row_stride != r.num_heads * kQueryDim) return false;
    HostInput* const in = FindTensor(taken.inputs, r.q, bytes, &next);
    const auto* const q = static_cast<const std::byte*>(r.q);
    if (in == nullptr || in->in_place() || in->shared) return false;
    if (in != last && (!ended() || q != in->device)) return false;
    if (last != nullptr && in > last + 1) return false;  // other inputs lie in between
    if (in == last && q != expected) return false;
    if (in != last) {
      const int64_t whole = in->rows * in->row_bytes;
      if (!recording.Reaches(in->host, whole) || !Aligned(q, q, whole)) return false;
      taken.queries.push_back({AddressOf(q), AddressOf(in->host), whole});
    }
    last = in;
    expected = q + bytes;
    taken.host_queries.push_back(in->host + (q - in->device));
  }
  // Staged inputs are copied up to the last query, so no other input may follow it.
  return ended() && last == &taken.inputs.back();
}

bool StreamWork::PlaceOutputs(LaunchRecording& recording, const AttentionParams& params,
                              Taken& taken) const {
  const int64_t element = params.desc.o_dtype == DType::kF32 ? 4 : 2;
  struct Search {
    size_t next = 0;
    const HostOutput* reached = nullptr;
  };
  // Returns the address in host memory for the bytes at `address`, or null if the device does not
  // reach it.
  const auto placed = [&](const void* address, int64_t bytes, Search* search) -> std::byte* {
    const HostOutput* const out = FindTensor(taken.outputs, address, bytes, &search->next);
    if (out == nullptr || out->in_place() || out->shared) return nullptr;
    if (out != search->reached && !recording.Reaches(out->host, out->rows * out->row_bytes)) {
      return nullptr;
    }
    search->reached = out;
    return out->host + (static_cast<const std::byte*>(address) - out->device);
  };
  Search next_o, next_lse;
  for (const SegmentRecord& r : params.segments) {
    if (r.o_head_stride != kOutputDim || r.o_row_stride != r.num_heads * kOutputDim) return false;
    const int64_t bytes = r.q_rows * r.o_row_stride * element;
    std::byte* const o = placed(r.o, bytes, &next_o);
    if (o == nullptr || !Aligned(o, r.o, bytes)) return false;
    StreamedTensors& t = taken.tensors.emplace_back();
    t = {};
    t.o_to = reinterpret_cast<uint8_t*>(o);
    t.o_from = static_cast<const uint8_t*>(r.o);
    t.o_bytes = bytes;
    t.writers = taken.writers[taken.tensors.size() - 1];
    if (r.lse == nullptr) continue;
    if (r.lse_head_stride != 1 || r.lse_row_stride != r.num_heads) return false;
    t.lse_count = r.q_rows * r.num_heads;
    t.lse_from = r.lse;
    t.lse_to = reinterpret_cast<float*>(
        placed(r.lse, t.lse_count * static_cast<int64_t>(sizeof(float)), &next_lse));
    if (t.lse_to == nullptr) return false;
  }
  return true;
}

// Reads rows in place if the device reaches all of them, because a copy and the wait for it take
// longer.
void StreamWork::PlaceRows(LaunchRecording& recording, std::span<const AppendRecord> appends,
                           Taken& taken) const {
  size_t next = 0;
  const HostInput* reached = nullptr;
  bool all = true;
  for (size_t i = 0; i < appends.size(); ++i) {
    const AppendRecord& r = appends[i];
    StreamedTensors& t = taken.tensors[i];
    t.row_pitch = r.kv_row_stride * static_cast<int64_t>(sizeof(uint16_t));
    HostInput* const in = FindTensor(taken.inputs, r.kv, r.rows * t.row_pitch, &next);
    all = all && in != nullptr && !in->shared &&
          (in == reached || recording.Reaches(in->host, in->rows * in->row_bytes));
    if (!all) continue;
    reached = in;
    const auto* const from = in->host + (static_cast<const std::byte*>(r.kv) - in->device);
    all = Aligned(from, from, t.row_pitch);
    t.rows = reinterpret_cast<const uint8_t*>(from);
  }
  next = 0;
  for (size_t i = 0; i < appends.size(); ++i) {
    if (all) {
      PutInPlace(taken.inputs, appends[i].kv, &next);
    } else {
      taken.tensors[i].rows = static_cast<const uint8_t*>(appends[i].kv);
    }
  }
}

bool StreamWork::ReadPlan(const PlanView& plan, size_t segments, Taken& taken) const {
  if (plan.generation != 0 && plan.generation == taken.plan && segments == taken.writers.size()) {
    return true;
  }
  taken.plan = 0;
  if (!FindCut(plan, &taken.cut)) return false;
  const int32_t rows = device_->arch->stream.front().rows;
  taken.writers.assign(segments, 0);
  for (const WorkInfo& w : plan.work_info) {
    const int32_t packed_rows = PackedRows(w.q_begin, w.q_end, w.heads);
    taken.writers[static_cast<size_t>(w.segment)] +=
        static_cast<uint32_t>((packed_rows + rows - 1) / rows);
  }
  taken.plan = plan.generation;
  return true;
}

// Returns true if each segment's new KV rows belong to its queries, are few, and are appended by a
// record of their own. append_rows handles only this case.
bool StreamWork::AppendsOwnRows(const Launch& launch) {
  const std::span<const SegmentRecord> segments = launch.absorbed.segments;
  if (launch.appends.size() != segments.size()) return false;
  page_tables_.clear();
  for (size_t i = 0; i < segments.size(); ++i) {
    const SegmentRecord& r = segments[i];
    const AppendRecord& rows = launch.appends[i];
    const int64_t pitch = rows.kv_row_stride * static_cast<int64_t>(sizeof(uint16_t));
    if (rows.page_table != r.page_table || rows.layer_offset != r.layer_offset ||
        rows.first_position != r.kv_rows - r.q_rows || rows.rows != r.q_rows ||
        rows.rows > kMostOwnRows || rows.row_dim != kQueryDim || rows.dtype != DType::kBf16 ||
        rows.format != KvFormat::kBf16 || rows.differs != nullptr ||
        !Aligned(rows.kv, rows.kv, pitch)) {
      return false;
    }
    page_tables_.push_back(r.page_table);
  }
  // Fails for two segments of one sequence, because one may see rows that the other appends.
  std::sort(page_tables_.begin(), page_tables_.end());
  return std::adjacent_find(page_tables_.begin(), page_tables_.end()) == page_tables_.end();
}

std::optional<LaunchTensors> StreamWork::Take(LaunchRecording& recording, int32_t index,
                                              const Launch& launch) {
  Taken& taken = taken_[static_cast<size_t>(index)];
  const AttentionParams& params = launch.absorbed;
  if (!Serves(launch) || !ReadPlan(params.plan, params.segments.size(), taken)) return std::nullopt;
  taken.inputs.assign(launch.inputs.begin(), launch.inputs.end());
  taken.outputs.assign(launch.outputs.begin(), launch.outputs.end());
  taken.queries.clear();
  taken.host_queries.clear();
  taken.tensors.clear();
  if (!PlaceQueries(recording, params, taken) || !PlaceOutputs(recording, params, taken)) {
    return std::nullopt;
  }
  size_t input = 0, output = 0;
  for (const SegmentRecord& r : params.segments) {
    PutInPlace(taken.inputs, r.q, &input);
    PutInPlace(taken.outputs, r.o, &output);
  }
  output = 0;
  for (const SegmentRecord& r : params.segments) {
    if (r.lse != nullptr) PutInPlace(taken.outputs, r.lse, &output);
  }
  taken.appends = AppendsOwnRows(launch);
  if (taken.appends) PlaceRows(recording, launch.appends, taken);
  return LaunchTensors{taken.inputs, taken.outputs};
}

void StreamWork::AddArrivals(LaunchRecording& recording, int32_t index) {
  Taken& taken = taken_[static_cast<size_t>(index)];
  if (++ticket_ == 0) ++ticket_;  // skips the initial value of the words
  taken.ticket = ticket_;
  recording.SetArrivals(
      {taken.queries, AddressOf(arrived_.As<uint32_t>() + index), taken.ticket, ReportOf(index)});
}

absl::Status StreamWork::Add(LaunchRecording& recording, int32_t index,
                             const AttentionParams& params, const DevicePlan& plan) {
  const Taken& taken = taken_[static_cast<size_t>(index)];
  const RowsVariant& variant = device_->arch->stream.front();
  MLA_ASSIGN_OR_RETURN(auto segments, PutSegments(recording, *device_, params, taken.host_queries));
  MLA_ASSIGN_OR_RETURN(auto tensors,
                       recording.metadata().PutEach(std::span<const StreamedTensors>(taken.tensors),
                                                    [](const StreamedTensors& t) { return t; }));
  StreamArgs args = {};
  args.segments = segments;
  args.page_tables = device_->table_mirror.As<uint32_t>();
  args.pool = device_->pool.As<uint8_t>() + params.segments[0].layer_offset;
  args.work_indptr = plan.work_indptr;
  args.work_info = plan.work_info;
  args.partial_o = device_->partial_o.As<float>();
  args.partial_lse = device_->partial_lse.As<float>();
  args.granule_bytes = kPageGranuleBytes;
  args.blocks_per_unit = BlocksPerUnit(taken.cut);
  args.o_is_f32 = params.desc.o_dtype == DType::kF32;
  args.blocks = taken.cut.units * args.blocks_per_unit;
  args.xcds = 1;
  args.arrived = arrived_.As<uint32_t>() + index;
  args.tensors = tensors;
  args.finished = finished_.As<uint32_t>();
  args.meetings = meetings_.As<uint32_t>();
  args.report = ReportOf(index);
  args.ticket = taken.ticket;
  args.segment_count = static_cast<int32_t>(taken.tensors.size());
  args.piece_rows = taken.cut.piece_rows;
  args.patience_ns = PatienceFor(taken.queries);
  const LaunchShape shape{.grid_x = static_cast<uint32_t>(args.blocks + kPushBlocks),
                          .threads = static_cast<uint32_t>(variant.threads),
                          .shared_bytes = static_cast<uint32_t>(variant.shared_bytes),
                          .overlap_predecessor = true,
                          .blocks_meet = true};
  return recording.AddKernel(device_->kernels.stream.front(), shape, args);
}

}  // namespace mla::kernels::hip
