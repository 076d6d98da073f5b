#include "tests/conformance/sparse/indexer_workload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>

#include "absl/strings/str_cat.h"
#include "kernels/launch_layout.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::Bf16;
using kernels::DType;

constexpr int64_t kPlaneOffset = 48;  // of index keys, in a page group
constexpr size_t kMoves = 4096;       // pages that a launch reads or writes
constexpr double kGap = 1.0 / 256;
constexpr int32_t kFirstEntry = 5;  // first value of list_begin
constexpr int32_t kUntouched = -7;

// e4m3fn, by its definition.
double Decode(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double sign = (code & 0x80) != 0 ? -1 : 1;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8 + mantissa, exponent - 10);
}

// Encodes a tensor as a client sends it: fp32 or bf16.
std::vector<std::byte> Encode(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * kernels::ElementSize(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const Bf16 narrow = kernels::ToBf16(values[i]);
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      std::memcpy(&bytes[i * 2], &narrow, 2);
    }
  }
  return bytes;
}

double At(const std::vector<float>& values, size_t i, DType dtype) {
  return dtype == DType::kF32 ? values[i] : kernels::ToFloat(kernels::ToBf16(values[i]));
}

absl::Status Wrong(const std::string& what) { return absl::InternalError(what); }

}  // namespace

std::string ToString(const IndexerCase& c) {
  return absl::StrCat("indexer seed ", c.seed, " heads ", c.heads, " dim ", c.dim, " page ",
                      c.page_size, " positions ", c.positions, " rows ", c.rows, " top_k ", c.top_k,
                      c.dtype == DType::kF32 ? " fp32" : " bf16",
                      c.distinct > 0 ? absl::StrCat(" of ", c.distinct) : "",
                      c.alike ? " alike" : "");
}

kernels::BackendLimits IndexerLimits() {
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = 16 << 20;
  limits.page_table_entries = IndexerCase::kMostPositions;
  limits.launch_slots = 1;
  limits.launch_requests = 4;
  limits.launch_rows = 64;
  limits.max_top_k = IndexerCase::kMostTopK;
  limits.max_o_dim = 16;
  limits.partial_rows = 16;
  limits.max_geometry = {1, 16, 0, 0, 0};
  limits.table_ranges = 1;
  limits.page_ranges = 4096;
  limits.staging_in_bytes = 8 << 20;
  limits.staging_out_bytes = 1 << 20;
  limits.slot_workspace_bytes = 1 << 20;
  return limits;
}

IndexerWorkload::IndexerWorkload(const IndexerCase& c, const IndexerWorkload* before)
    : c_(c),
      random_(c.seed),
      first_entry_(before == nullptr ? 0 : before->table_.size()),
      logits_(static_cast<size_t>(c.rows)) {
  const int32_t pages = (c.positions + c.page_size - 1) / c.page_size;
  page_bytes_ = (int64_t{c.page_size} * (c.dim + 4) + 15) / 16 * 16;
  const int64_t group_granules = (kPlaneOffset + page_bytes_ + 255) / 256;
  const int64_t first_granule = before == nullptr ? 0 : before->end_granule_;
  end_granule_ = first_granule + pages * group_granules;
  if (before != nullptr) table_ = before->table_;
  std::vector<int32_t> order(static_cast<size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_);
  for (const int32_t page : order) {
    table_.push_back(static_cast<uint32_t>(first_granule + page * group_granules));
  }
  // Sizes vary widely, so that using another row's scale changes the order.
  std::normal_distribution<float> normal;
  const int32_t different = c.distinct > 0 ? c.distinct : c.positions;
  std::vector<float> distinct(static_cast<size_t>(different) * c.dim);
  for (int32_t row = 0; row < different; ++row) {
    const float size = c.alike ? 0.1f : std::ldexp(1.0f, static_cast<int>(random_() % 7) - 3);
    for (int32_t i = 0; i < c.dim; ++i) {
      const float same = c.alike ? static_cast<float>(i % 5 - 2) : 0.0f;
      distinct[static_cast<size_t>(row) * c.dim + i] = same + size * normal(random_);
    }
  }
  for (int32_t position = 0; position < c.positions; ++position) {
    const size_t row = c.distinct > 0 ? random_() % different : static_cast<size_t>(position);
    keys_.insert(keys_.end(), &distinct[row * c.dim], &distinct[row * c.dim] + c.dim);
  }
  queries_.resize(static_cast<size_t>(c.rows) * c.heads * c.dim);
  weights_.resize(static_cast<size_t>(c.rows) * c.heads);
  for (float& value : queries_) value = normal(random_);
  for (float& value : weights_) value = normal(random_);
  sent_keys_ = Encode(keys_, c.dtype);
  const std::vector<std::byte> queries = Encode(queries_, c.dtype);
  const size_t query_bytes = queries.size() / c.rows, weight_bytes = size_t{4} * c.heads;
  for (int32_t row = 0; row < c.rows; ++row) {
    inputs_.insert(inputs_.end(), &queries[row * query_bytes],
                   &queries[row * query_bytes] + query_bytes);
    const auto* const weights =
        reinterpret_cast<const std::byte*>(&weights_[static_cast<size_t>(row) * c.heads]);
    inputs_.insert(inputs_.end(), weights, weights + weight_bytes);
  }
}

IndexerWorkload::Lists IndexerWorkload::EmptyLists(int32_t first, int32_t rows) const {
  Lists lists{first, rows, {kFirstEntry}, {}, {}};
  for (int32_t row = first; row < first + rows; ++row) {
    lists.begin.push_back(lists.begin.back() + Wanted(row));
  }
  lists.list.assign(static_cast<size_t>(lists.begin.back() - kFirstEntry), kUntouched);
  lists.wanted.assign(static_cast<size_t>(rows) * c_.top_k, kUntouched);
  return lists;
}

absl::StatusOr<IndexerWorkload::Records> IndexerWorkload::Add(kernels::LaunchLayout& layout,
                                                              Lists& lists) const {
  const kernels::IndexerShape shape{c_.heads, c_.dim};
  const int64_t row_bytes = shape.input_bytes(c_.dtype);
  const auto bytes = [](const std::vector<int32_t>& of) { return std::ssize(of) * 4; };
  const auto keys = layout.Input(sent_keys_.data(), static_cast<int64_t>(sent_keys_.size()));
  const auto inputs =
      layout.Input(inputs_.data() + lists.first * row_bytes, lists.rows * row_bytes);
  const auto begins = layout.Input(lists.begin.data(), bytes(lists.begin));
  const auto list = layout.Output(lists.list.data(), bytes(lists.list));
  const auto copies = layout.Output(lists.wanted.data(), bytes(lists.wanted));
  for (const absl::Status& s :
       {keys.status(), inputs.status(), begins.status(), list.status(), copies.status()}) {
    if (!s.ok()) return s;
  }
  Records made;
  kernels::AppendRecord& append = made.append;
  append.kv = *keys;
  append.dtype = c_.dtype;
  append.kv_row_stride = c_.dim;
  append.page_table = static_cast<int64_t>(first_entry_);
  append.layer_offset = kPlaneOffset;
  append.row_stride = c_.dim;
  append.page_size = c_.page_size;
  append.rows = c_.positions;
  append.row_dim = c_.dim;
  append.format = kernels::KvFormat::kIndexKey;
  kernels::SelectRecord& select = made.select;
  select.indexer = shape;
  select.inputs = *inputs;
  select.dtype = c_.dtype;
  select.page_table = append.page_table;
  select.layer_offset = kPlaneOffset;
  select.row_stride = c_.dim;
  select.page_size = c_.page_size;
  select.rows = lists.rows;
  select.kv_rows = Visible(lists.first + lists.rows - 1);
  select.list = static_cast<int32_t*>(*list);
  select.list_begin = static_cast<const int32_t*>(*begins);
  select.wanted = static_cast<int32_t*>(*copies);
  select.wanted_width = c_.top_k;
  return made;
}

absl::Status IndexerWorkload::Launch(AttentionBackend& backend, const kernels::LaunchLayout& layout,
                                     std::span<const Records> records) const {
  std::vector<kernels::AppendRecord> appends;
  std::vector<kernels::SelectRecord> selects;
  for (const Records& r : records) {
    appends.push_back(r.append);
    selects.push_back(r.select);
  }
  const kernels::TableRange all{0, static_cast<int64_t>(table_.size())};
  kernels::Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  launch.page_tables = table_;
  launch.table_changes = {&all, 1};
  launch.appends = appends;
  launch.selects = selects;
  if (absl::Status s = backend.Submit(0, launch); !s.ok()) return s;
  return backend.Wait(0).status();
}

absl::StatusOr<std::vector<std::vector<int32_t>>> IndexerWorkload::ByRow(const Lists& of) const {
  std::vector<std::vector<int32_t>> lists;
  for (int32_t row = 0; row < of.rows; ++row) {
    lists.emplace_back(of.list.begin() + (of.begin[row] - kFirstEntry),
                       of.list.begin() + (of.begin[row + 1] - kFirstEntry));
    std::vector<int32_t> filled = lists.back();
    filled.resize(static_cast<size_t>(c_.top_k), -1);
    if (!std::equal(filled.begin(), filled.end(), of.wanted.begin() + int64_t{row} * c_.top_k)) {
      return Wrong(absl::StrCat("row ", of.first + row, ": the list as it is returned is another"));
    }
  }
  return lists;
}

absl::StatusOr<std::vector<std::vector<int32_t>>> IndexerWorkload::Run(AttentionBackend& backend,
                                                                       int32_t first,
                                                                       int32_t rows) {
  Lists lists = EmptyLists(first, rows);
  kernels::LaunchLayout layout(backend, 0);
  layout.Reserve(8, 8);
  const auto records = Add(layout, lists);
  if (!records.ok()) return records.status();
  if (absl::Status s = Launch(backend, layout, {&*records, 1}); !s.ok()) return s;
  if (absl::Status s = CheckPages(backend); !s.ok()) return s;
  return ByRow(lists);
}

std::vector<kernels::PageTransfer> IndexerWorkload::Transfers(std::vector<std::byte>& bytes) const {
  std::vector<kernels::PageTransfer> transfers;
  for (size_t page = 0; page < pages(); ++page) {
    transfers.push_back({int64_t{table_[first_entry_ + page]} * 256 + kPlaneOffset, page_bytes_,
                         &bytes[page * static_cast<size_t>(page_bytes_)]});
  }
  return transfers;
}

absl::Status IndexerWorkload::Poison(AttentionBackend& backend) const {
  std::vector<std::byte> bytes(pages() * static_cast<size_t>(page_bytes_), std::byte{0xff});
  const std::vector<kernels::PageTransfer> writes = Transfers(bytes);
  for (size_t done = 0; done < writes.size(); done += kMoves) {
    kernels::Launch launch;
    launch.page_writes = std::span(writes).subspan(done, std::min(kMoves, writes.size() - done));
    if (absl::Status s = backend.Submit(0, launch); !s.ok()) return s;
    if (absl::Status s = backend.Wait(0).status(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// Every backend must store the same numbers; the first backend's are kept.
absl::Status IndexerWorkload::CheckPages(AttentionBackend& backend) {
  std::vector<std::byte> stored(pages() * static_cast<size_t>(page_bytes_));
  const std::vector<kernels::PageTransfer> reads = Transfers(stored);
  for (size_t done = 0; done < reads.size(); done += kMoves) {
    kernels::Launch launch;
    launch.page_reads = std::span(reads).subspan(done, std::min(kMoves, reads.size() - done));
    if (absl::Status s = backend.Submit(0, launch); !s.ok()) return s;
    if (absl::Status s = backend.Wait(0).status(); !s.ok()) return s;
  }
  // In that kind the same byte is half as large.
  const double kind = backend.Info().fp8 == kernels::Fp8Kind::kE4m3Fn ? 1.0 : 0.5;
  const bool first = stored_.empty();
  for (int32_t position = 0; position < c_.positions; ++position) {
    for (int32_t i = 0; i < c_.dim; ++i) {
      const double key = Stored(stored, position, i) * kind;
      if (first) {
        stored_.push_back(key);
      } else if (key != Key(position, i)) {
        return Wrong(absl::StrCat("the key at ", position, " is stored as other bytes"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status IndexerWorkload::CheckKeys() const {
  for (int32_t position = 0; position < c_.positions; ++position) {
    double largest = 0;
    for (int32_t i = 0; i < c_.dim; ++i) {
      largest = std::max(largest, std::abs(double{keys_[size_t(position) * c_.dim + i]}));
    }
    for (int32_t i = 0; i < c_.dim; ++i) {
      const double sent = At(keys_, static_cast<size_t>(position) * c_.dim + i, c_.dtype);
      if (std::abs(Key(position, i) - sent) <= std::abs(sent) / 16 + largest / 32768) continue;
      return Wrong(
          absl::StrCat("the key at ", position, " differs too much from the one that was sent"));
    }
  }
  return absl::OkStatus();
}

absl::Status IndexerWorkload::CheckList(int32_t row, const std::vector<int32_t>& list) {
  const int32_t visible = Visible(row), wanted = Wanted(row);
  const auto wrong = [&](const std::string& what) {
    return Wrong(absl::StrCat("row ", row, ": ", what));
  };
  if (list.size() != static_cast<size_t>(wanted)) return wrong("a list of another length");
  if (!std::is_sorted(list.begin(), list.end()) ||
      std::adjacent_find(list.begin(), list.end()) != list.end()) {
    return wrong("positions that do not ascend");
  }
  if (list.front() < 0 || list.back() >= visible) return wrong("a position that it does not see");
  if (wanted == visible) return absl::OkStatus();
  std::vector<double>& logits = logits_[static_cast<size_t>(row)];
  for (auto position = static_cast<int32_t>(logits.size()); position < visible; ++position) {
    logits.push_back(Logit(row, position));
  }
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  double largest = 0;
  for (const double logit : logits) largest = std::max(largest, std::abs(logit));
  const double threshold = logits[order[wanted - 1]], next = logits[order[wanted]];
  std::vector<int32_t> best(order.begin(), order.begin() + wanted);
  std::sort(best.begin(), best.end());
  // Equal keys have equal logits under any rounding, so among few distinct keys the choice is
  // exact.
  if ((threshold - next > kGap * largest || c_.distinct > 0) && list != best) {
    return wrong("another choice than the oracle's");
  }
  for (const int32_t position : list) {
    if (logits[position] >= threshold - kGap * largest) continue;
    return wrong(absl::StrCat("position ", position, " has logit ", logits[position],
                              ", the last of the best ", threshold));
  }
  return absl::OkStatus();
}

absl::Status IndexerWorkload::Check(AttentionBackend& backend) {
  if (absl::Status s = Poison(backend); !s.ok()) return s;
  const auto lists = Run(backend, 0, c_.rows);
  if (!lists.ok()) return lists.status();
  if (absl::Status s = CheckKeys(); !s.ok()) return s;
  for (int32_t row = 0; row < c_.rows; ++row) {
    const std::vector<int32_t>& list = (*lists)[static_cast<size_t>(row)];
    if (absl::Status s = CheckList(row, list); !s.ok()) return s;
    if (row % (1 + c_.rows / 8) != 0) continue;  // some of many rows
    const auto alone = Run(backend, row, 1);
    if (!alone.ok()) return alone.status();
    if ((*alone)[0] != list) {
      return Wrong(absl::StrCat("row ", row, ": another list alone than in company"));
    }
  }
  return absl::OkStatus();
}

absl::Status IndexerWorkload::CheckWith(AttentionBackend& backend, IndexerWorkload& next) {
  const auto own = Run(backend, 0, c_.rows), others = next.Run(backend, 0, next.c_.rows);
  if (!own.ok() || !others.ok()) return own.ok() ? others.status() : own.status();
  Lists lists[] = {EmptyLists(0, c_.rows), next.EmptyLists(0, next.c_.rows)};
  kernels::LaunchLayout layout(backend, 0);
  layout.Reserve(8, 8);
  const auto first = Add(layout, lists[0]), second = next.Add(layout, lists[1]);
  if (!first.ok() || !second.ok()) return first.ok() ? second.status() : first.status();
  const Records both[] = {*first, *second};
  if (absl::Status s = next.Launch(backend, layout, both); !s.ok()) return s;
  const auto together = ByRow(lists[0]), others_together = next.ByRow(lists[1]);
  if (!together.ok() || !others_together.ok()) {
    return together.ok() ? others_together.status() : together.status();
  }
  if (*together != *own) return Wrong("other lists than without the second request");
  if (*others_together != *others) return Wrong("other lists than without the first request");
  return absl::OkStatus();
}

double IndexerWorkload::Stored(const std::vector<std::byte>& pages, int32_t position,
                               int32_t i) const {
  const std::byte* const page = &pages[size_t(position / c_.page_size) * page_bytes_];
  const int64_t in_page = position % c_.page_size;
  float scale = 0;
  std::memcpy(&scale, page + int64_t{c_.page_size} * c_.dim + in_page * 4, 4);
  return Decode(std::to_integer<uint8_t>(page[in_page * c_.dim + i])) * scale;
}

double IndexerWorkload::Key(int32_t position, int32_t i) const {
  return stored_[static_cast<size_t>(position) * c_.dim + i];
}

double IndexerWorkload::Logit(int32_t row, int32_t position) const {
  double logit = 0;
  for (int32_t head = 0; head < c_.heads; ++head) {
    const size_t packed = static_cast<size_t>(row) * c_.heads + head;
    double dot = 0;
    for (int32_t i = 0; i < c_.dim; ++i) {
      dot += At(queries_, packed * c_.dim + i, c_.dtype) * Key(position, i);
    }
    logit += weights_[packed] * std::max(dot, 0.0);
  }
  return logit;
}

}  // namespace mla::conformance
