// FakeDevice: execution of a launch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/host_memory/transfers.h"
#include "tests/simulation/device/fake_device.h"
#include "tests/simulation/oracle/patterns.h"

namespace mla::simulation {
namespace {

using kernels::DType;

double Load(const void* base, DType dtype, int64_t index) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, static_cast<const std::byte*>(base) + index * 4, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const std::byte*>(base) + index * 2, sizeof(bits));
  return FromBits(bits);
}

uint16_t ToBits(double value) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  if (std::isnan(value)) return kPoison;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void StoreAt(void* base, DType dtype, int64_t index, double value) {
  if (dtype == DType::kF32) {
    const float narrow = static_cast<float>(value);
    std::memcpy(static_cast<std::byte*>(base) + index * 4, &narrow, sizeof(narrow));
    return;
  }
  const uint16_t bits = ToBits(value);
  std::memcpy(static_cast<std::byte*>(base) + index * 2, &bits, sizeof(bits));
}

}  // namespace

int FakeDevice::TenantAt(const Slot& slot, const void* device) const {
  const auto* const at = static_cast<const std::byte*>(device);
  for (const Staged& staged : slot.staged) {
    if (at >= staged.device && at < staged.device + staged.bytes) return staged.tenant;
  }
  return 0;
}

uint16_t* FakeDevice::Element(int64_t page_table, int64_t layer_offset, int64_t row_stride,
                              int page_size, int position, std::span<const uint32_t> tables) {
  const int64_t entry = page_table + position / page_size;
  if (entry < 0 || entry >= static_cast<int64_t>(tables.size()) ||
      tables[static_cast<size_t>(entry)] == kWild) {
    Violation(absl::StrCat("position ", position, " lies on a page that was never published"));
    return nullptr;
  }
  const int64_t offset = tables[static_cast<size_t>(entry)] * kernels::kPageGranuleBytes +
                         layer_offset + (position % page_size) * row_stride;
  if (offset < 0 || offset + row_stride > limits_.kv_pool_bytes) {
    Violation(absl::StrCat("byte ", offset, " of the pool, limit ", limits_.kv_pool_bytes));
    return nullptr;
  }
  return &pool_[static_cast<size_t>(offset) / 2];
}

void FakeDevice::CheckWords(const uint16_t* first, int64_t count, int tenant, bool fresh,
                            const char* where) {
  for (int64_t i = 0; i < count; ++i) {
    const bool poison = first[i] == kPoison;
    if (fresh && (poison || first[i] == 0)) continue;
    if (!poison && TenantOf(first[i]) == tenant) continue;
    Violation(absl::StrCat("tenant ", tenant, " ", where, " a word ",
                           poison          ? "that was never written"
                           : first[i] == 0 ? "that was zeroed"
                                           : absl::StrCat("of tenant ", TenantOf(first[i]))));
    return;
  }
}

void FakeDevice::Execute(Slot& slot) {
  for (; slot.run < slot.to_run; ++slot.run) Execute(slot, slot.parts[slot.run]);
  if (slot.spoils) Spoil(slot);
}

void FakeDevice::Spoil(const Slot& slot) {
  constexpr int kPoisonByte = kPoison & 0xff;
  for (size_t part = slot.to_run; part < slot.parts.size(); ++part) {
    if (slot.parts[part].part == Part::kWritePages) {
      for (const kernels::PageTransfer& t : slot.launch->page_writes) {
        if (InPool(t)) {
          std::memset(PoolBytes() + t.pool_offset, kPoisonByte, static_cast<size_t>(t.bytes));
        }
      }
    }
    if (slot.parts[part].part == Part::kReadPages) {
      for (const kernels::PageTransfer& t : slot.launch->page_reads) {
        std::memset(t.host, kPoisonByte, static_cast<size_t>(t.bytes));
      }
    }
  }
}

void FakeDevice::TakeTables(const Slot& slot) {
  auto entries = slot.entries.begin();
  for (const kernels::TableRange& range : slot.launch->table_changes) {
    std::copy(entries, entries + range.count, tables_.begin() + range.first);
    entries += range.count;
  }
}

void FakeDevice::Execute(Slot& slot, const Work& work) {
  const kernels::Launch& launch = *slot.launch;
  switch (work.part) {
    case Part::kWritePages:
      for (const kernels::PageTransfer& t : launch.page_writes) {
        if (InPool(t)) kernels::WritePages(PoolBytes(), t);
      }
      break;
    case Part::kReadPages:
      for (const kernels::PageTransfer& t : launch.page_reads) {
        if (InPool(t)) kernels::ReadPages(PoolBytes(), t);
      }
      break;
    case Part::kPages:
      for (const kernels::PageRange& range : launch.pages) WriteRange(range);
      break;
    case Part::kTables:
      TakeTables(slot);
      break;
    case Part::kAppends:
      for (const kernels::AppendRecord& record : launch.appends) Append(slot, record);
      break;
    case Part::kAbsorb:
      for (const auto& record : launch.absorb.records) {
        ProjectRows(slot, launch.absorb, true, record);
      }
      break;
    case Part::kProject:
      for (const auto& record : launch.project.records) {
        ProjectRows(slot, launch.project, false, record);
      }
      break;
    case Part::kAttend:
      CheckPlan(*work.params);
      RunPlan(slot, *work.params);
      break;
    case Part::kCombine:
      CombinePlan(slot, *work.params);
      break;
  }
}

bool FakeDevice::InPool(const kernels::PageTransfer& transfer) {
  const int64_t end = transfer.pool_offset + transfer.bytes;
  const bool inside =
      transfer.pool_offset >= 0 && transfer.bytes >= 0 && end <= limits_.kv_pool_bytes;
  if (!inside) Violation("a page transfer outside the pool");
  return inside;
}

std::byte* FakeDevice::PoolBytes() { return reinterpret_cast<std::byte*>(pool_.data()); }

void FakeDevice::WriteRange(const kernels::PageRange& range) {
  if (range.count != 1) {
    for (int32_t i = 0; i < range.count; ++i) WriteRange(range.place(i));
    return;
  }
  const auto inside = [&](int64_t offset) {
    return offset >= 0 && range.bytes >= 0 && offset + range.bytes <= limits_.kv_pool_bytes;
  };
  if (!inside(range.target_offset) || (!range.zeroes() && !inside(range.source_offset))) {
    Violation("page work outside the pool");
    return;
  }
  uint16_t* const to = &pool_[static_cast<size_t>(range.target_offset) / 2];
  if (range.zeroes()) {
    std::memset(to, 0, static_cast<size_t>(range.bytes));
  } else {
    std::memmove(to, &pool_[static_cast<size_t>(range.source_offset) / 2],
                 static_cast<size_t>(range.bytes));
  }
}

void FakeDevice::Append(Slot& slot, const kernels::AppendRecord& record) {
  const int tenant = TenantAt(slot, record.kv);
  for (int row = 0; row < record.rows; ++row) {
    const int position = record.first_position + row;
    uint16_t* to = Element(record.page_table, record.layer_offset, record.row_stride,
                           record.page_size, position, TablesOf(slot));
    if (to == nullptr) return;
    const auto sent = [&](int i) {
      return ToBits(Load(record.kv, record.dtype, row * record.kv_row_stride + i));
    };
    if (record.differs != nullptr) {
      CheckWords(to, record.row_dim, tenant, /*fresh=*/false, "compares");
      record.differs[row] = 0;
      for (int i = 0; i < record.row_dim; ++i) record.differs[row] |= to[i] != sent(i);
      continue;
    }
    // Checks the whole page, because later rows would see what an earlier tenant left in it.
    const int64_t words = record.row_stride / 2;
    CheckWords(to - position % record.page_size * words, words * record.page_size, tenant,
               /*fresh=*/true, "is given");
    for (int i = 0; i < record.row_dim; ++i) to[i] = sent(i);
  }
}

void FakeDevice::ProjectRows(Slot& slot, const kernels::Projection& projection, bool absorbs,
                             const kernels::ProjectionRecord& r) {
  const kernels::Geometry& g = projection.geometry;
  const Weights* weights = WeightsOf(r.weights_slot, r.head_offset, r.num_heads);
  if (weights == nullptr) return;
  if (absorbs && r.rows > 0) {
    // Data between the projections belongs to the tenant of the query.
    Staged latent{static_cast<std::byte*>(r.out), 0, 0};
    latent.bytes = (int64_t{r.rows} - 1) * r.out_row_stride * 4 +
                   (int64_t{r.num_heads} - 1) * r.out_head_stride * 4 + 4;
    latent.tenant = TenantAt(slot, r.in);
    slot.staged.push_back(latent);
  }
  const int inner = absorbs ? g.nope_dim : g.kv_lora_rank;
  const int outer = absorbs ? g.kv_lora_rank : g.v_dim;
  for (int row = 0; row < r.rows; ++row) {
    for (int head = 0; head < r.num_heads; ++head) {
      const int64_t in = row * r.in_row_stride + head * r.in_head_stride;
      const int64_t out = row * r.out_row_stride + head * r.out_head_stride;
      const int64_t first = int64_t{r.head_offset + head} * inner * outer;
      const uint16_t* w = (absorbs ? weights->uk : weights->uv).data() + first;
      for (int i = 0; i < outer; ++i) {
        double sum = 0;
        for (int n = 0; n < inner; ++n) {
          sum += Load(r.in, projection.in, in + n) * FromBits(w[n * outer + i]);
        }
        StoreAt(r.out, projection.out, out + i, sum);
      }
      for (int i = 0; absorbs && i < g.rope_dim; ++i) {
        StoreAt(r.out, projection.out, out + outer + i, Load(r.in, projection.in, in + inner + i));
      }
    }
  }
}

void FakeDevice::CheckPlan(const kernels::AttentionParams& params) {
  plan_segments_.clear();
  for (const kernels::SegmentRecord& r : params.segments) {
    int longest = 0;
    for (int row = 0; r.list_begin != nullptr && row < r.q_rows; ++row) {
      longest = std::max(longest, r.list_begin[row + 1] - r.list_begin[row]);
    }
    const bool sparse = params.desc.attention == kernels::AttentionKind::kSparse;
    if (sparse != (r.list_begin != nullptr)) Violation("lists in a launch of the other kind");
    plan_segments_.push_back(
        {r.q_rows, sparse ? longest : r.kv_rows, r.num_heads, r.causal != 0 && !sparse});
  }
  scheduler::PlanCapacity capacity;
  capacity.units = options_.traits.units;
  capacity.work_items = limits_.work_items;
  capacity.reduce_tiles = limits_.reduce_tiles;
  capacity.reduce_partials = limits_.reduce_partials;
  capacity.partial_rows = limits_.partial_rows;
  // The balance is not checked here, because the planner's own tests compare it.
  const double balance = std::numeric_limits<double>::quiet_NaN();
  const std::string fault =
      checker_.Fault(plan_segments_, Traits(params.desc), params.plan, capacity, balance);
  if (!fault.empty()) Violation(absl::StrCat("plan: ", fault));
}

void FakeDevice::RunPlan(Slot& slot, const kernels::AttentionParams& params) {
  const size_t rows = static_cast<size_t>(std::max(0, params.plan.partial_rows));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  slot.partial_sums.assign(rows * params.desc.geometry.kv_lora_rank, nan);
  slot.partial_most.assign(rows, nan);
  slot.partial_total.assign(rows, nan);
  for (size_t unit = 0; unit + 1 < params.plan.work_indptr.size(); ++unit) {
    for (int32_t i = params.plan.work_indptr[unit]; i < params.plan.work_indptr[unit + 1]; ++i) {
      RunItem(slot, params, params.plan.work_info[static_cast<size_t>(i)]);
    }
  }
}

void FakeDevice::RunItem(Slot& slot, const kernels::AttentionParams& params,
                         const kernels::WorkInfo& item) {
  const kernels::SegmentRecord& segment = params.segments[static_cast<size_t>(item.segment)];
  const int tenant = TenantAt(slot, segment.q);
  const int lora = params.desc.geometry.kv_lora_rank;
  int64_t packed = item.partial_row;
  for (int row = item.q_begin; row < item.q_end; ++row) {
    for (int head = item.head_begin(); head < item.head_end(); ++head, ++packed) {
      AttendPiece(slot, params, segment, item, row, head, tenant);
      if (item.partial_row == kernels::kUnsplit) {
        Store(params, segment, row, head, piece_);
        continue;
      }
      slot.partial_most[packed] = piece_.most;
      slot.partial_total[packed] = piece_.total;
      std::copy(piece_.sums.begin(), piece_.sums.end(), slot.partial_sums.begin() + packed * lora);
    }
  }
}

void FakeDevice::AttendPiece(const Slot& slot, const kernels::AttentionParams& params,
                             const kernels::SegmentRecord& segment, const kernels::WorkInfo& item,
                             int row, int head, int tenant) {
  const kernels::Geometry& g = params.desc.geometry;
  const int dim = g.kv_row_dim();
  double query[64] = {};
  const int64_t q = row * segment.q_row_stride + head * segment.q_head_stride;
  if (params.desc.form == kernels::AttentionForm::kAbsorbed) {
    for (int i = 0; i < dim; ++i) query[i] = Load(segment.q, params.desc.q_dtype, q + i);
  } else if (const Weights* w = WeightsOf(segment.weights_slot, segment.head_offset + head, 1)) {
    const uint16_t* uk =
        w->uk.data() + int64_t{segment.head_offset + head} * g.nope_dim * g.kv_lora_rank;
    for (int n = 0; n < g.nope_dim; ++n) {
      const double value = Load(segment.q, params.desc.q_dtype, q + n);
      for (int i = 0; i < g.kv_lora_rank; ++i) {
        query[i] += value * FromBits(uk[n * g.kv_lora_rank + i]);
      }
    }
    for (int i = 0; i < g.rope_dim; ++i) {
      query[g.kv_lora_rank + i] = Load(segment.q, params.desc.q_dtype, q + g.nope_dim + i);
    }
  }
  piece_.most = -std::numeric_limits<double>::infinity();
  piece_.total = 0;
  piece_.sums.assign(g.kv_lora_rank, 0.0);
  const int sees =
      segment.causal != 0 ? segment.kv_rows - segment.q_rows + row + 1 : segment.kv_rows;
  const bool sparse = segment.list_begin != nullptr;
  const int places = sparse ? segment.list_begin[row + 1] - segment.list_begin[row] : sees;
  for (int place = item.kv_begin; place < std::min(item.kv_end, places); ++place) {
    int j = place;
    if (sparse) j = segment.list[segment.list_begin[row] - segment.list_begin[0] + place];
    if (j < 0 || j >= sees) return Violation("a list names a row that its query row does not see");
    const uint16_t* kv = Element(segment.page_table, segment.layer_offset, segment.row_stride,
                                 segment.page_size, j, TablesOf(slot));
    if (kv == nullptr) return;
    CheckWords(kv, dim, tenant, /*fresh=*/false, "reads");
    double logit = 0;
    for (int i = 0; i < dim; ++i) logit += query[i] * FromBits(kv[i]);
    logit *= segment.softmax_scale;
    const double maximum = std::max(piece_.most, logit);
    const double scale = piece_.total > 0 ? std::exp(piece_.most - maximum) : 0.0;
    const double weight = std::exp(logit - maximum);
    piece_.total = piece_.total * scale + weight;
    for (int i = 0; i < g.kv_lora_rank; ++i) {
      piece_.sums[i] = piece_.sums[i] * scale + weight * FromBits(kv[i]);
    }
    piece_.most = maximum;
  }
}

void FakeDevice::Store(const kernels::AttentionParams& params,
                       const kernels::SegmentRecord& segment, int row, int head,
                       const Piece& piece) {
  const kernels::Geometry& g = params.desc.geometry;
  const double inverse = piece.total > 0 ? 1 / piece.total : 0;
  const int64_t o = row * segment.o_row_stride + head * segment.o_head_stride;
  if (params.desc.form == kernels::AttentionForm::kAbsorbed) {
    for (int i = 0; i < g.kv_lora_rank; ++i) {
      StoreAt(segment.o, params.desc.o_dtype, o + i, piece.sums[i] * inverse);
    }
  } else if (const Weights* w = WeightsOf(segment.weights_slot, segment.head_offset + head, 1)) {
    const uint16_t* uv =
        w->uv.data() + int64_t{segment.head_offset + head} * g.v_dim * g.kv_lora_rank;
    for (int n = 0; n < g.v_dim; ++n) {
      double sum = 0;
      for (int i = 0; i < g.kv_lora_rank; ++i) {
        sum += piece.sums[i] * inverse * FromBits(uv[i * g.v_dim + n]);
      }
      StoreAt(segment.o, params.desc.o_dtype, o + n, sum);
    }
  }
  if (segment.lse == nullptr) return;
  StoreAt(segment.lse, DType::kF32, row * segment.lse_row_stride + head * segment.lse_head_stride,
          piece.most + std::log(piece.total));
}

void FakeDevice::CombinePlan(Slot& slot, const kernels::AttentionParams& params) {
  const kernels::PlanView& plan = params.plan;
  const int lora = params.desc.geometry.kv_lora_rank;
  for (size_t t = 0; t < plan.reduce_final_map.size(); ++t) {
    const kernels::ReduceTile& tile = plan.reduce_final_map[t];
    const kernels::SegmentRecord& segment = params.segments[static_cast<size_t>(tile.segment)];
    int64_t packed = 0;
    for (int row = tile.q_begin; row < tile.q_end; ++row) {
      for (int head = tile.head_begin(); head < tile.head_end(); ++head, ++packed) {
        double maximum = -std::numeric_limits<double>::infinity();
        for (int32_t p = plan.reduce_indptr[t]; p < plan.reduce_indptr[t + 1]; ++p) {
          maximum = std::max(maximum, slot.partial_most[plan.reduce_partial_map[p] + packed]);
        }
        merged_.most = maximum;
        merged_.total = 0;
        merged_.sums.assign(lora, 0.0);
        for (int32_t p = plan.reduce_indptr[t]; p < plan.reduce_indptr[t + 1]; ++p) {
          const int64_t index = plan.reduce_partial_map[p] + packed;
          if (slot.partial_total[index] == 0) continue;
          const double scale = std::exp(slot.partial_most[index] - maximum);
          merged_.total += slot.partial_total[index] * scale;
          for (int i = 0; i < lora; ++i) {
            merged_.sums[i] += slot.partial_sums[index * lora + i] * scale;
          }
        }
        Store(params, segment, row, head, merged_);
      }
    }
  }
}

}  // namespace mla::simulation
