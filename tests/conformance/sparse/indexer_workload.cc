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

constexpr int32_t kMostPositions = 1500;
constexpr int32_t kLongPositions = 9500;
constexpr int32_t kMostTopK = 256;    // for drawn cases
constexpr int32_t kWholeTopK = 2048;  // DeepSeek V3.2's
constexpr int64_t kPlaneOffset = 48;  // of index keys, in a page group
constexpr size_t kReads = 4096;
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
  limits.page_table_entries = kLongPositions;
  limits.launch_slots = 1;
  limits.launch_requests = 4;
  limits.launch_rows = 64;
  limits.max_top_k = kWholeTopK;
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

std::vector<IndexerCase> IndexerCases(int32_t count, const std::vector<int32_t>& dims) {
  std::vector<IndexerCase> cases;
  std::mt19937_64 random(7);
  const auto pick = [&](const std::vector<int32_t>& of) { return of[random() % of.size()]; };
  for (int32_t i = 0; i < count; ++i) {
    IndexerCase c;
    c.seed = static_cast<uint64_t>(i) + 1;
    c.heads = pick({64, 64, 32, 1, 17, 128});
    c.dim = pick(dims);
    c.page_size = pick({1, 4, 64, 7, 64, 192});
    c.rows = pick({1, 2, 3, 6});
    c.top_k = pick({1, 16, 100, 128, kMostTopK});
    c.positions =
        c.rows + static_cast<int32_t>(random() % (i % 4 == 0 ? kMostPositions - 10 : 400));
    c.dtype = random() % 2 == 0 ? DType::kBf16 : DType::kF32;
    c.distinct = i % 5 == 0 ? 7 : 0;
    cases.push_back(c);
  }
  return cases;
}

std::vector<IndexerCase> LongIndexerCases() {
  std::vector<IndexerCase> cases;
  for (int32_t i = 0; i < 4; ++i) {
    IndexerCase c;
    c.seed = static_cast<uint64_t>(i) + 101;
    c.positions = kLongPositions + i;
    c.heads = i % 2 == 0 ? 8 : 1;
    c.top_k = i % 2 == 0 ? kMostTopK : 100;
    c.distinct = i < 2 ? i + 1 : 0;
    c.alike = i == 2;
    cases.push_back(c);
  }
  for (int32_t i = 0; i < 3; ++i) {
    IndexerCase c;
    c.seed = static_cast<uint64_t>(i) + 111;
    c.top_k = kWholeTopK;
    c.heads = 8;
    // Cases: logits that differ; equal logits for all positions; and rows that see one position too
    // few, exactly enough, and one too many.
    c.positions = i < 2 ? kLongPositions - 8 + i : kWholeTopK + 1;
    c.rows = i < 2 ? 1 : 3;
    c.distinct = i == 1 ? 1 : 0;
    cases.push_back(c);
  }
  return cases;
}

IndexerCase ManyRowsIndexerCase() {
  IndexerCase c;
  c.seed = 121;
  c.positions = kLongPositions;
  c.rows = 32;
  c.heads = 8;
  return c;
}

IndexerWorkload::IndexerWorkload(const IndexerCase& c)
    : c_(c), random_(c.seed), logits_(static_cast<size_t>(c.rows)) {
  const int32_t pages = (c.positions + c.page_size - 1) / c.page_size;
  page_bytes_ = (int64_t{c.page_size} * (c.dim + 4) + 15) / 16 * 16;
  group_granules_ = (kPlaneOffset + page_bytes_ + 255) / 256;
  table_.resize(static_cast<size_t>(pages));
  std::iota(table_.begin(), table_.end(), 0);
  std::shuffle(table_.begin(), table_.end(), random_);
  for (uint32_t& page : table_) page = page * static_cast<uint32_t>(group_granules_);
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

absl::Status IndexerWorkload::Launch(AttentionBackend& backend, int32_t first, int32_t rows,
                                     const std::vector<int32_t>& begin, int32_t* list,
                                     int32_t* wanted) {
  kernels::LaunchLayout layout(backend, 0);
  layout.Reserve(8, 8);
  const kernels::IndexerShape shape{c_.heads, c_.dim};
  const int64_t row_bytes = shape.input_bytes(c_.dtype);
  const auto keys = layout.Input(sent_keys_.data(), static_cast<int64_t>(sent_keys_.size()));
  const auto inputs = layout.Input(inputs_.data() + first * row_bytes, rows * row_bytes);
  const auto begins = layout.Input(begin.data(), static_cast<int64_t>(begin.size()) * 4);
  const auto lists = layout.Output(list, int64_t{begin.back() - begin.front()} * 4);
  const auto copies = layout.Output(wanted, int64_t{rows} * c_.top_k * 4);
  for (const absl::Status& s :
       {keys.status(), inputs.status(), begins.status(), lists.status(), copies.status()}) {
    if (!s.ok()) return s;
  }
  kernels::AppendRecord append{};
  append.kv = *keys;
  append.dtype = c_.dtype;
  append.kv_row_stride = c_.dim;
  append.layer_offset = kPlaneOffset;
  append.row_stride = c_.dim;
  append.page_size = c_.page_size;
  append.rows = c_.positions;
  append.row_dim = c_.dim;
  append.format = kernels::KvFormat::kIndexKey;
  kernels::SelectRecord select{};
  select.indexer = shape;
  select.inputs = *inputs;
  select.dtype = c_.dtype;
  select.layer_offset = kPlaneOffset;
  select.row_stride = c_.dim;
  select.page_size = c_.page_size;
  select.rows = rows;
  select.kv_rows = Visible(first + rows - 1);
  select.list = static_cast<int32_t*>(*lists);
  select.list_begin = static_cast<const int32_t*>(*begins);
  select.wanted = static_cast<int32_t*>(*copies);
  select.wanted_width = c_.top_k;
  const kernels::TableRange all{0, static_cast<int64_t>(table_.size())};
  kernels::Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  launch.page_tables = table_;
  launch.table_changes = {&all, 1};
  launch.appends = {&append, 1};
  launch.selects = {&select, 1};
  if (absl::Status s = backend.Submit(0, launch); !s.ok()) return s;
  return backend.Wait(0).status();
}

absl::StatusOr<std::vector<std::vector<int32_t>>> IndexerWorkload::Run(AttentionBackend& backend,
                                                                       int32_t first,
                                                                       int32_t rows) {
  std::vector<int32_t> begin = {kFirstEntry};
  for (int32_t row = first; row < first + rows; ++row) begin.push_back(begin.back() + Wanted(row));
  std::vector<int32_t> list(static_cast<size_t>(begin.back() - kFirstEntry), kUntouched);
  std::vector<int32_t> wanted(static_cast<size_t>(rows) * c_.top_k, kUntouched);
  if (absl::Status s = Launch(backend, first, rows, begin, list.data(), wanted.data()); !s.ok()) {
    return s;
  }
  if (absl::Status s = CheckPages(backend); !s.ok()) return s;
  std::vector<std::vector<int32_t>> lists;
  for (int32_t row = 0; row < rows; ++row) {
    lists.emplace_back(list.begin() + (begin[row] - kFirstEntry),
                       list.begin() + (begin[row + 1] - kFirstEntry));
    std::vector<int32_t> filled = lists.back();
    filled.resize(static_cast<size_t>(c_.top_k), -1);
    if (!std::equal(filled.begin(), filled.end(), wanted.begin() + int64_t{row} * c_.top_k)) {
      return Wrong(absl::StrCat("row ", first + row, ": the list as it is returned is another"));
    }
  }
  return lists;
}

// Every backend must store the same numbers; the first backend's are kept.
absl::Status IndexerWorkload::CheckPages(AttentionBackend& backend) {
  std::vector<std::byte> pages(table_.size() * static_cast<size_t>(page_bytes_));
  std::vector<kernels::PageTransfer> reads;
  for (size_t page = 0; page < table_.size(); ++page) {
    reads.push_back({int64_t{table_[page]} * 256 + kPlaneOffset, page_bytes_,
                     &pages[page * static_cast<size_t>(page_bytes_)]});
  }
  for (size_t done = 0; done < reads.size(); done += kReads) {
    kernels::Launch launch;
    launch.page_reads = std::span(reads).subspan(done, std::min(kReads, reads.size() - done));
    if (absl::Status s = backend.Submit(0, launch); !s.ok()) return s;
    if (absl::Status s = backend.Wait(0).status(); !s.ok()) return s;
  }
  // In that kind the same byte is half as large.
  const double kind = backend.Info().fp8 == kernels::Fp8Kind::kE4m3Fn ? 1.0 : 0.5;
  const bool first = stored_.empty();
  for (int32_t position = 0; position < c_.positions; ++position) {
    for (int32_t i = 0; i < c_.dim; ++i) {
      const double key = Stored(pages, position, i) * kind;
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
  const auto lists = Run(backend, 0, c_.rows);
  if (!lists.ok()) return lists.status();
  if (absl::Status s = CheckKeys(); !s.ok()) return s;
  for (int32_t row = 0; row < c_.rows; ++row) {
    const std::vector<int32_t>& list = (*lists)[static_cast<size_t>(row)];
    if (absl::Status s = CheckList(row, list); !s.ok()) return s;
    const auto alone = Run(backend, row, 1);
    if (!alone.ok()) return alone.status();
    if ((*alone)[0] != list) {
      return Wrong(absl::StrCat("row ", row, ": another list alone than in company"));
    }
  }
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
