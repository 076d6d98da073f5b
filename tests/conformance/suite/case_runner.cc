#include "tests/conformance/suite/case_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/read_rows.h"
#include "tests/conformance/pages/poison.h"
#include "tests/conformance/suite/other_scales.h"

namespace mla::conformance {

using kernels::AppendRecord;
using kernels::Bf16;
using kernels::ElementSize;
using kernels::kPageGranuleBytes;
using kernels::ProjectionRecord;
using kernels::SegmentRecord;

namespace {

constexpr int32_t kSlot = 0;
constexpr int64_t kGap = 16;                 // elements between rows of strided tensors
constexpr unsigned char kPoisonByte = 0xff;  // NaN in bf16 and fp32
constexpr unsigned char kSentinelByte = 0x5a;

}  // namespace

// q, o and lse of one request as laid out in the arena, and where the backend sees them.
struct CaseRunner::Tensors {
  size_t request = 0;
  int64_t q_head_stride = 0, q_row_stride = 0, o_head_stride = 0, o_row_stride = 0;
  int64_t lse_row_stride = 0;
  std::byte *o_host = nullptr, *lse_host = nullptr;
  const void* q = nullptr;
  kernels::FragmentedInput q_fragments;  // used instead of q, if it has bytes
  void *o = nullptr, *lse = nullptr;
  const int32_t *list = nullptr, *list_begin = nullptr;  // for sparse cases
};

absl::StatusOr<std::unique_ptr<CaseRunner>> CaseRunner::Create(kernels::AttentionBackend& backend,
                                                               PlanBuilder plan,
                                                               const RunnerOptions& options) {
  if (absl::Status ok = backend.Configure(LimitsOf(options)); !ok.ok()) return ok;
  auto runner = std::unique_ptr<CaseRunner>(new CaseRunner(backend, std::move(plan), options));
  auto arena = backend.AllocateHost(static_cast<size_t>(options.staging_bytes));
  if (!arena.ok()) return arena.status();
  runner->arena_ = *std::move(arena);
  runner->layout_ = kernels::LaunchLayout(backend, kSlot);
  runner->tables_.resize(static_cast<size_t>(options.page_table_entries));
  return runner;
}

absl::StatusOr<std::byte*> CaseRunner::Take(int64_t bytes) {
  const int64_t aligned = (bytes + 255) / 256 * 256;
  if (arena_used_ + aligned > options_.staging_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("conformance arena: ", arena_used_, " + ",
                                                     aligned, ", limit ", options_.staging_bytes));
  }
  std::byte* address = arena_->bytes().data() + arena_used_;
  arena_used_ += aligned;
  return address;
}

absl::StatusOr<int32_t> CaseRunner::WeightsSlot(const Weights& weights) {
  for (size_t slot = 0; slot < loaded_.size(); ++slot) {
    if (loaded_[slot] == &weights) return static_cast<int32_t>(slot);
  }
  const auto slot = static_cast<int32_t>(loaded_.size());
  // In two ranges, the later one first, because uploads may bring heads in any order.
  const kernels::Geometry& g = weights.geometry;
  const int32_t half = g.num_heads / 2;
  for (const auto& [begin, end] : {std::pair(half, g.num_heads), std::pair(0, half)}) {
    if (begin == end) continue;
    const int64_t latent = int64_t{begin} * g.kv_lora_rank;
    absl::Status ok =
        backend_.LoadWeights(slot, g, begin, end, weights.w_uk.data() + latent * g.nope_dim,
                             weights.w_uv.data() + latent * g.v_dim);
    if (!ok.ok()) return ok;
  }
  loaded_.push_back(&weights);
  return slot;
}

absl::Status CaseRunner::WriteTables(const Workload& workload) {
  int64_t used = 0;
  for (const RequestData& data : workload.requests) {
    used += static_cast<int64_t>(data.page_table.size());
  }
  const int64_t last_byte = (workload.first_granule + workload.granules) * kPageGranuleBytes;
  if (used > static_cast<int64_t>(tables_.size()) || last_byte > options_.kv_pool_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("case needs ", used, " table entries and ", last_byte, " pool bytes"));
  }
  int64_t next = 0;
  table_first_.clear();
  for (const RequestData& data : workload.requests) {
    table_first_.push_back(next);
    std::copy(data.page_table.begin(), data.page_table.end(), tables_.begin() + next);
    next += static_cast<int64_t>(data.page_table.size());
  }
  table_ranges_.assign(1, {0, next});
  return absl::OkStatus();
}

absl::Status CaseRunner::Launch() {
  launch_.inputs = layout_.inputs();
  launch_.outputs = layout_.outputs();
  launch_.page_tables = tables_;
  absl::Status s = backend_.Submit(kSlot, launch_);
  if (s.ok()) s = backend_.Wait(kSlot).status();
  launch_ = kernels::Launch();
  layout_.Clear();
  return s;
}

absl::Status CaseRunner::Poison(const Workload& workload) {
  const CaseSpec& spec = workload.spec;
  const int64_t bytes = workload.granules * kPageGranuleBytes;
  const int64_t used = arena_used_, block = std::min(bytes, kPoisonBlockBytes);
  auto host = Take(block);
  if (!host.ok()) return host.status();
  arena_used_ = used;  // for this call alone
  const std::byte poison =
      PoisonByte(spec.kv_format, backend_.Info().fp8, /*alternate=*/spec.seed % 2 != 0);
  return PoisonPages(backend_, kSlot, workload.first_granule * kPageGranuleBytes, bytes, poison,
                     {*host, static_cast<size_t>(block)});
}

absl::Status CaseRunner::Append(const Workload& workload) {
  AppendRecord record{};
  appends_.clear();
  compares_.clear();
  const CaseSpec& spec = workload.spec;
  const bool with_attention = spec.own_rows;  // new rows; otherwise compared
  for (size_t i = 0; i < workload.requests.size(); ++i) {
    const RequestData& data = workload.requests[i];
    auto host = Take(static_cast<int64_t>(data.kv.size()));
    if (!host.ok()) return host.status();
    std::copy(data.kv.begin(), data.kv.end(), *host);
    auto staged = layout_.Input(*host, static_cast<int64_t>(data.kv.size()));
    if (!staged.ok()) return staged.status();
    record.dtype = spec.kv_source;
    record.kv_row_stride = spec.geometry.kv_row_dim();
    record.page_table = table_first_[i];
    record.layer_offset = data.layer_offset;
    record.row_stride = data.row_stride;
    record.page_size = spec.requests[i].page_size;
    record.row_dim = spec.geometry.kv_row_dim();
    record.rope_dim = spec.geometry.rope_dim;
    record.format = spec.kv_format;
    record.kv_scale = spec.kv_scales[spec.requests[i].layer];
    // Cached rows and new rows come in two records, as in the life of a sequence.
    record.kv = *staged;
    record.first_position = 0;
    record.rows = spec.requests[i].cached_rows;
    appends_.push_back(record);
    record.kv = static_cast<const std::byte*>(*staged) +
                int64_t{record.rows} * record.row_dim * int64_t(ElementSize(record.dtype));
    record.first_position = record.rows;
    record.rows = spec.requests[i].q_rows;
    if (with_attention) {
      compares_.push_back(record);
      record.first_position = -1;
    }
    appends_.push_back(record);
  }
  record.first_position = -1;  // padding: must be skipped whole
  appends_.push_back(record);
  // The host's inputs must stay unchanged for the comparison.
  const std::vector<kernels::HostInput> inputs(layout_.inputs().begin(), layout_.inputs().end());
  launch_.table_changes = table_ranges_;
  launch_.appends = appends_;
  if (absl::Status ok = Launch(); !ok.ok()) return ok;
  for (const kernels::HostInput& in : inputs) {
    if (auto again = layout_.Input(in.host, in.row_bytes); !again.ok()) return again.status();
  }
  if (spec.other_scales) return ChangeAllScales();
  if (!with_attention) return Compare();
  differs_.clear();
  launch_.appends = compares_;
  return absl::OkStatus();
}

absl::Status CaseRunner::ChangeAllScales() {
  launch_.appends = {};
  differs_.clear();
  appends_.pop_back();  // the padding
  for (size_t i = 0; i < appends_.size(); ++i) {
    // Every second record has a request's new rows. If there are several, only the last query row
    // sees the last one, whose NaN must not reach the others.
    const bool invalid = i % 2 == 1 && appends_[i].rows > 1;
    absl::Status changed = ChangeScales(backend_, kSlot, tables_, appends_[i], invalid);
    if (!changed.ok()) return changed;
  }
  return absl::OkStatus();
}

// Sends the stored rows again, for comparison, with the launch that attends to them.
absl::Status CaseRunner::Compare() {
  int64_t rows = 0;
  for (const AppendRecord& record : appends_) rows += record.rows;
  differs_.assign(static_cast<size_t>(rows), -1);
  auto staged = layout_.Output(differs_.data(), rows * int64_t{sizeof(int32_t)});
  if (!staged.ok()) return staged.status();
  compares_ = appends_;
  compares_.pop_back();  // the padding
  auto* differs = static_cast<int32_t*>(*staged);
  for (AppendRecord& record : compares_) {
    record.differs = differs;
    differs += record.rows;
  }
  differs_.resize(static_cast<size_t>(differs - static_cast<int32_t*>(*staged)));
  launch_.appends = compares_;
  return absl::OkStatus();
}

// Splits queries into pieces if the options ask for it and the backend supports it. The tensor
// itself is then overwritten, so that the backend cannot have read it.
absl::Status CaseRunner::StageQueries(std::byte* host, int64_t bytes, Tensors& tensors) {
  if (options_.query_piece_bytes == 0 || !backend_.Info().reads_fragments) {
    auto q = layout_.Input(host, bytes);
    if (q.ok()) tensors.q = *q;
    return q.status();
  }
  constexpr int64_t kMostSkew = 63, kHeader = 5;
  std::vector<kernels::InputFragment>& pieces = fragments_.emplace_back();
  for (int64_t begin = 0; begin < bytes;) {
    const auto index = static_cast<int64_t>(pieces.size());
    const int64_t piece = std::min(bytes - begin, options_.query_piece_bytes + index * 37 % 61);
    auto room = Take(piece + kMostSkew);
    if (!room.ok()) return room.status();
    std::byte* const at = *room + index * 29 % (kMostSkew + 1);
    std::memcpy(at, host + begin, static_cast<size_t>(piece));
    pieces.push_back({at, begin + kHeader});  // as if other bytes came before them
    begin += piece;
  }
  std::memset(host, kPoisonByte, static_cast<size_t>(bytes));
  tensors.q_fragments = {pieces, kHeader, bytes};
  return absl::OkStatus();
}

absl::StatusOr<const int32_t*> CaseRunner::StageIndices(const std::vector<int32_t>& values) {
  if (values.empty()) return nullptr;
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(int32_t));
  auto host = Take(bytes);
  if (!host.ok()) return host.status();
  std::memcpy(*host, values.data(), static_cast<size_t>(bytes));
  auto staged = layout_.Input(*host, bytes);
  if (!staged.ok()) return staged.status();
  return static_cast<const int32_t*>(*staged);
}

absl::StatusOr<CaseRunner::Tensors> CaseRunner::MakeTensors(const Workload& workload,
                                                            size_t request) {
  const CaseSpec& spec = workload.spec;
  const RequestSpec& r = spec.requests[request];
  Tensors t;
  t.request = request;
  const int64_t gap = spec.seed % 2 == 0 && !spec.streamed ? kGap : 0;
  t.q_head_stride = spec.q_dim() + gap;
  t.q_row_stride = t.q_head_stride * r.num_heads + gap;
  t.o_head_stride = spec.o_dim() + gap;
  t.o_row_stride = t.o_head_stride * r.num_heads;
  t.lse_row_stride = r.num_heads + gap;
  const auto q_size = static_cast<int64_t>(ElementSize(spec.q_dtype));
  const int64_t q_bytes = std::max<int64_t>(1, r.q_rows * t.q_row_stride * q_size);
  const int64_t o_bytes = std::max<int64_t>(
      1, r.q_rows * t.o_row_stride * static_cast<int64_t>(ElementSize(spec.o_dtype)));
  const int64_t lse_bytes = std::max<int64_t>(1, r.q_rows * t.lse_row_stride * 4);
  auto q_host = Take(q_bytes), o_host = Take(o_bytes), lse_host = Take(lse_bytes);
  for (const auto& taken : {q_host, o_host, lse_host}) {
    if (!taken.ok()) return taken.status();
  }
  std::memset(*q_host, kPoisonByte, static_cast<size_t>(q_bytes));
  std::memset(*o_host, kSentinelByte, static_cast<size_t>(o_bytes));
  std::memset(*lse_host, kSentinelByte, static_cast<size_t>(lse_bytes));
  const int64_t row_bytes = spec.q_dim() * q_size;
  for (int64_t row = 0; row < r.q_rows; ++row) {
    for (int64_t head = 0; head < r.num_heads; ++head) {
      std::memcpy(*q_host + (row * t.q_row_stride + head * t.q_head_stride) * q_size,
                  workload.requests[request].q.data() + (row * r.num_heads + head) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  }
  if (absl::Status q = StageQueries(*q_host, q_bytes, t); !q.ok()) return q;
  auto o = layout_.Output(*o_host, o_bytes);
  auto lse = layout_.Output(*lse_host, lse_bytes);
  if (!o.ok()) return o.status();
  if (!lse.ok()) return lse.status();
  const IndexLists& lists = workload.requests[request].lists;
  auto list = StageIndices(lists.entries), begin = StageIndices(lists.begin);
  if (!list.ok() || !begin.ok()) return list.ok() ? begin.status() : list.status();
  t.list = *list;
  t.list_begin = *begin;
  t.o_host = *o_host;
  t.lse_host = *lse_host;
  t.o = *o;
  t.lse = *lse;
  return t;
}

// Absorb turns the tensors' q into latent queries and makes them the records' q; Project turns
// latent outputs into outputs.
absl::Status CaseRunner::Project(const Workload& workload, const std::vector<Tensors>& tensors,
                                 bool absorb) {
  const CaseSpec& spec = workload.spec;
  const int64_t latent_dim = absorb ? spec.geometry.absorbed_q_dim() : spec.geometry.kv_lora_rank;
  std::vector<ProjectionRecord>& projections = absorb ? absorbs_ : projects_;
  projections.clear();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensors& t = tensors[i];
    SegmentRecord& record = records_[i];
    const int64_t head_stride = latent_dim, row_stride = latent_dim * record.num_heads;
    auto latent = layout_.Workspace(std::max<int64_t>(
        1,
        record.q_rows * row_stride *
            static_cast<int64_t>(ElementSize(absorb ? spec.latent_q_dtype : spec.latent_o_dtype))));
    if (!latent.ok()) return latent.status();
    ProjectionRecord p{};
    p.rows = record.q_rows;
    p.num_heads = record.num_heads;
    p.head_offset = record.head_offset;
    p.weights_slot = record.weights_slot;
    if (absorb) {
      p.in = t.q;
      p.in_row_stride = t.q_row_stride;
      p.in_head_stride = t.q_head_stride;
      p.out = *latent;
      p.out_row_stride = row_stride;
      p.out_head_stride = head_stride;
      record.q = *latent;
      record.q_row_stride = row_stride;
      record.q_head_stride = head_stride;
    } else {
      p.in = *latent;
      p.in_row_stride = row_stride;
      p.in_head_stride = head_stride;
      p.out = t.o;
      p.out_row_stride = t.o_row_stride;
      p.out_head_stride = t.o_head_stride;
      record.o = *latent;
      record.o_row_stride = row_stride;
      record.o_head_stride = head_stride;
    }
    projections.push_back(p);
  }
  return absl::OkStatus();
}

absl::StatusOr<kernels::PlanView> CaseRunner::Plan(const kernels::AttentionDesc& desc,
                                                   std::span<const PlanShape> shapes,
                                                   int32_t units) {
  const kernels::PlanTraits own = backend_.Traits(desc);
  kernels::PlanTraits traits = own;
  // All blocks of a streamed launch must run at the same time.
  traits.units = desc.streamed ? std::min(units, own.units) : units;
  auto plan = plan_(shapes, traits);
  if (!plan.ok() || own.rounds.workspace_bytes == 0) return plan;
  if (round_units_ < own.units) {  // units differ with the dims
    round_units_ = own.units;
    const scheduler::RoundCapacity capacity{own.units, kRoundItems, kRoundExpansions, 64};
    round_planner_ = std::make_unique<scheduler::RoundPlanner>(capacity);
    rounds_ = std::make_unique<scheduler::RoundBuffers>(capacity);
  }
  std::vector<scheduler::PlanSegment> segments;
  for (const auto& s : shapes) segments.push_back({s.q_rows, s.kv_rows, s.num_heads, s.causal});
  round_view_ = round_planner_->Build(*plan, segments, own, *rounds_);
  if (!round_view_.ok()) return round_view_.status();
  plan->rounds = &*round_view_;
  return plan;
}

absl::Status CaseRunner::Attend(const Workload& workload, const RunOptions& options,
                                std::vector<Tensors>& tensors) {
  const CaseSpec& spec = workload.spec;
  int32_t weights_slot = -1;
  if (workload.weights != nullptr) {
    auto slot = WeightsSlot(*workload.weights);
    if (!slot.ok()) return slot.status();
    weights_slot = *slot;
  }
  records_.clear();
  queries_.clear();
  std::vector<PlanShape> shapes;
  for (const Tensors& t : tensors) {
    const RequestSpec& r = spec.requests[t.request];
    const RequestData& data = workload.requests[t.request];
    SegmentRecord record{};
    record.q = t.q;
    record.o = t.o;
    record.lse = static_cast<float*>(t.lse);
    record.q_row_stride = t.q_row_stride;
    record.q_head_stride = t.q_head_stride;
    record.o_row_stride = t.o_row_stride;
    record.o_head_stride = t.o_head_stride;
    record.lse_row_stride = t.lse_row_stride;
    record.lse_head_stride = 1;
    record.page_table = table_first_[t.request];
    record.layer_offset = data.layer_offset;
    record.row_stride = data.row_stride;
    record.page_size = r.page_size;
    record.q_rows = r.q_rows;
    record.kv_rows = r.seen_rows();
    record.num_heads = r.num_heads;
    record.head_offset = r.head_offset;
    record.weights_slot = weights_slot;
    record.softmax_scale = spec.softmax_scale;
    record.causal = r.causal ? 1 : 0;
    record.kv_scale = spec.kv_scales[r.layer];
    record.list = t.list;
    record.list_begin = t.list_begin;
    records_.push_back(record);
    queries_.push_back(t.q_fragments);
    shapes.push_back(spec.sparse ? PlanShape{r.q_rows, data.lists.longest, r.num_heads, false}
                                 : PlanShape{r.q_rows, r.seen_rows(), r.num_heads, r.causal});
  }
  kernels::AttentionParams params;
  params.desc = spec.Desc();
  if (spec.route == Route::kAbsorbProject) {
    for (const bool absorb : {true, false}) {
      if (absl::Status ok = Project(workload, tensors, absorb); !ok.ok()) return ok;
    }
    launch_.absorb = {spec.geometry, spec.q_dtype, spec.latent_q_dtype, absorbs_, queries_};
    launch_.project = {spec.geometry, spec.latent_o_dtype, spec.o_dtype, projects_, {}};
  } else {
    params.q_fragments = queries_;
  }
  params.segments = records_;
  auto plan = Plan(params.desc, shapes, options.units > 0 ? options.units : spec.units);
  if (!plan.ok()) return plan.status();
  params.plan = *plan;
  const bool expanded = params.desc.form == kernels::AttentionForm::kExpanded;
  (expanded ? launch_.expanded : launch_.absorbed) = params;
  return Launch();  // while the plan is alive
}

void CaseRunner::Collect(const Workload& workload, const std::vector<Tensors>& tensors,
                         CaseOutput& output) {
  const CaseSpec& spec = workload.spec;
  const int64_t size = static_cast<int64_t>(ElementSize(spec.o_dtype));
  const auto sentinel = std::byte{kSentinelByte};
  for (const Tensors& t : tensors) {
    const RequestSpec& r = spec.requests[t.request];
    for (int64_t row = 0; row < r.q_rows; ++row) {
      for (int64_t head = 0; head < r.num_heads; ++head) {
        const int64_t first = row * t.o_row_stride + head * t.o_head_stride;
        for (int64_t i = 0; i < t.o_head_stride; ++i) {
          const std::byte* element = t.o_host + (first + i) * size;
          if (i >= spec.o_dim()) {
            if (!backend_.Info().unified_memory || *element == sentinel) continue;
            output.violation = absl::StrCat("stray write after output row ", row, ", head ", head,
                                            " of request ", t.request);
          } else if (spec.o_dtype == kernels::DType::kF32) {
            output.o.push_back(*reinterpret_cast<const float*>(element));
          } else {
            output.o.push_back(kernels::ToFloat(*reinterpret_cast<const Bf16*>(element)));
          }
        }
        const auto* const lse = reinterpret_cast<const float*>(t.lse_host);
        output.lse.push_back(lse[row * t.lse_row_stride + head]);
      }
    }
  }
}

std::string CaseRunner::CheckStored(const Workload& workload) {
  for (size_t row = 0; row < differs_.size(); ++row) {
    if (differs_[row] == 0) continue;
    return absl::StrCat("row ", row, " of all, sent again, is said to differ: ", differs_[row]);
  }
  for (size_t i = 0; i < workload.requests.size(); ++i) {
    const RequestData& data = workload.requests[i];
    AppendRecord where = appends_[2 * i];
    where.rows = workload.spec.requests[i].kv_rows();
    std::vector<Bf16> stored(data.stored.size());
    const absl::Status read = kernels::ReadRows(backend_, kSlot, tables_, where, stored.data());
    if (!read.ok()) return read.ToString();
    for (size_t k = 0; k < stored.size(); ++k) {
      const float got = kernels::ToFloat(stored[k]);
      const float want = kernels::ToFloat(kernels::ToBf16(data.stored[k]));
      if (got == want || (std::isnan(got) && std::isnan(want))) continue;
      return absl::StrCat("request ", i, ": stored row ", k / where.row_dim, " element ",
                          k % where.row_dim, " got ", got, ", want ", want);
    }
  }
  return "";
}

absl::StatusOr<CaseOutput> CaseRunner::Run(const Workload& workload, const RunOptions& options) {
  arena_used_ = 0;
  launch_ = kernels::Launch();
  layout_.Clear();
  fragments_.clear();
  if (absl::Status ok = WriteTables(workload); !ok.ok()) return ok;
  if (absl::Status ok = Poison(workload); !ok.ok()) return ok;
  if (absl::Status ok = Append(workload); !ok.ok()) return ok;
  std::vector<Tensors> tensors;
  for (size_t i = 0; i < workload.requests.size(); ++i) {
    if (options.only_request >= 0 && static_cast<size_t>(options.only_request) != i) continue;
    auto made = MakeTensors(workload, i);
    if (!made.ok()) return made.status();
    tensors.push_back(*made);
  }
  if (absl::Status ok = Attend(workload, options, tensors); !ok.ok()) return ok;
  CaseOutput output;
  Collect(workload, tensors, output);
  const bool as_sent = options.check_stored_rows && !workload.spec.other_scales;
  if (as_sent && output.violation.empty()) {
    output.violation = CheckStored(workload);
  }
  return output;
}

}  // namespace mla::conformance
