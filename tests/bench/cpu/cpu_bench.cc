#include "tests/bench/cpu/cpu_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "kernels/cpu/cpu_backend.h"

namespace mla::bench {
namespace {

using kernels::Bf16;
using kernels::DType;

constexpr float kKvScale = 0.0011f;  // rows of deviation 1/10 fill the range of 8 bits

std::vector<BenchRow>& Rows() {
  static std::vector<BenchRow>& rows = *new std::vector<BenchRow>;
  return rows;
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
    std::exit(1);
  }
  return *std::move(value);
}

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

std::vector<Bf16> Normals(size_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::vector<Bf16> table(65521), out(count);
  for (Bf16& value : table) value = kernels::ToBf16(normal(random));
  for (size_t i = 0; i < count; ++i) out[i] = table[i % table.size()];
  return out;
}

bool Value(std::string_view argument, std::string_view name, std::string* value) {
  if (argument.substr(0, name.size()) != name) return false;
  *value = argument.substr(name.size());
  return true;
}

// Parses comma-separated names of formats; exits on an unknown name.
std::vector<kernels::KvFormat> Formats(const std::string& names) {
  std::vector<kernels::KvFormat> formats;
  for (size_t at = 0; at <= names.size();) {
    const size_t comma = std::min(names.find(',', at), names.size());
    const std::string name = names.substr(at, comma - at);
    const auto* const found =
        std::find_if(std::begin(kernels::kKvFormats), std::end(kernels::kKvFormats),
                     [&](kernels::KvFormat format) { return kernels::Name(format) == name; });
    if (found == std::end(kernels::kKvFormats)) {
      std::fprintf(stderr, "--kv: '%s' is not one of bf16, fp8_tensor, fp8_row, fp8_page\n",
                   name.c_str());
      std::exit(2);
    }
    formats.push_back(*found);
    at = comma + 1;
  }
  return formats;
}

}  // namespace

BenchFlags ParseFlags(int argc, char** argv) {
  BenchFlags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    std::string value;
    if (Value(argument, "--json=", &flags.json) || Value(argument, "--isa=", &flags.isa) ||
        Value(argument, "--only=", &flags.only)) {
      continue;
    }
    if (argument == "--json" && i + 1 < argc) {
      flags.json = argv[++i];
    } else if (Value(argument, "--repeats=", &value)) {
      flags.repeats = std::max(1, std::atoi(value.c_str()));
    } else if (Value(argument, "--threads=", &value)) {
      flags.threads.clear();
      for (size_t at = 0; at < value.size();) {
        flags.threads.push_back(std::max(1, std::atoi(value.c_str() + at)));
        const size_t comma = value.find(',', at);
        at = comma == std::string::npos ? value.size() : comma + 1;
      }
    } else if (Value(argument, "--kv=", &value)) {
      flags.kv = Formats(value);
    } else if (Value(argument, "--top-k=", &value)) {
      flags.top_k = std::max(0, std::atoi(value.c_str()));
    } else if (Value(argument, "--window=", &value)) {
      flags.window = std::max(0, std::atoi(value.c_str()));
    } else if (Value(argument, "--spin-us=", &value)) {
      flags.spin_us = std::max(0, std::atoi(value.c_str()));
    } else if (argument == "--deterministic") {
      flags.deterministic = true;
    } else {
      std::fprintf(stderr,
                   "usage: %s [--json=FILE] [--isa=LEVEL] [--threads=1,2] [--repeats=5] "
                   "[--only=TEXT] [--spin-us=200] [--deterministic] "
                   "[--kv=bf16,fp8_tensor,fp8_row,fp8_page] [--top-k=0] [--window=0]\n",
                   argv[0]);
      std::exit(2);
    }
  }
  return flags;
}

void Report(const BenchRow& row) {
  Rows().push_back(row);
  std::printf("%-12s %-34s %-10s %2d thr %10.1f us %8.1f GFLOP/s", row.bench.c_str(),
              row.shape.c_str(), Name(row.kv), row.threads, row.us, row.gflops);
  if (row.kv_rows_per_s > 0) std::printf(" %7.2f M rows/s", row.kv_rows_per_s * 1e-6);
  if (row.gb_per_s > 0) std::printf(" %6.1f GB/s", row.gb_per_s);
  if (row.gemm_only_us > 0) {
    std::printf("  gemm-only %10.1f us  ratio %.3f", row.gemm_only_us, row.gemm_only_us / row.us);
  }
  if (row.onednn_scaling > 0) std::printf("  oneDNN scaling %.2f", row.onednn_scaling);
  if (row.speedup > 0) std::printf("  speedup %.3f", row.speedup);
  if (row.of_peak > 0) std::printf("  of peak %.3f", row.of_peak);
  if (row.of_dense > 0) std::printf("  of dense %.3f", row.of_dense);
  std::printf("\n");
  std::fflush(stdout);
}

void WriteJson(const std::string& path) {
  if (path.empty()) return;
  std::ofstream out(path);
  out << "[\n";
  for (size_t i = 0; i < Rows().size(); ++i) {
    const BenchRow& r = Rows()[i];
    char line[512];
    std::snprintf(line, sizeof line,
                  "{\"bench\": \"%s\", \"shape\": \"%s\", \"kv\": \"%s\", \"threads\": %d, "
                  "\"us\": %.2f, "
                  "\"gflops\": %.2f, \"gemm_only_us\": %.2f, \"ratio\": %.4f, "
                  "\"onednn_scaling\": %.3f, \"speedup\": %.4f, \"of_dense\": %.4f, "
                  "\"of_peak\": %.4f, \"gb_per_s\": %.2f}",
                  r.bench.c_str(), r.shape.c_str(), Name(r.kv), r.threads, r.us, r.gflops,
                  r.gemm_only_us, r.us > 0 ? r.gemm_only_us / r.us : 0.0, r.onednn_scaling,
                  r.speedup, r.of_dense, r.of_peak, r.gb_per_s);
    out << line << (i + 1 < Rows().size() ? ",\n" : "\n");
  }
  out << "]\n";
}

std::vector<double> Medians(int32_t repeats, int32_t threads,
                            const std::vector<std::function<void()>>& bodies) {
  std::vector<std::vector<double>> times(bodies.size());
  for (const auto& body : bodies) body();
  for (int32_t repeat = 0; repeat < repeats; ++repeat) {
    for (size_t i = 0; i < bodies.size(); ++i) {
      if (threads > 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(15));
        bodies[i]();
      }
      const auto begin = std::chrono::steady_clock::now();
      bodies[i]();
      times[i].push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
              .count());
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& of : times) {
    std::nth_element(of.begin(), of.begin() + static_cast<int64_t>(of.size() / 2), of.end());
    medians.push_back(of[of.size() / 2]);
  }
  return medians;
}

double AttentionFlop(const std::vector<BenchRequest>& requests, int32_t heads, int32_t key_dim,
                     int32_t value_dim) {
  double pairs = 0.0;
  for (const BenchRequest& r : requests) {
    pairs += static_cast<double>(r.q_rows) * r.kv_rows -
             0.5 * r.q_rows * (r.q_rows - 1.0);  // row i misses the q_rows - 1 - i rows after it
  }
  return 2.0 * pairs * heads * (key_dim + value_dim);
}

AttentionBench::AttentionBench(const Options& options)
    : options_(options),
      row_(kernels::MakeKvRowLayout(options.kv_format, options.geometry.kv_lora_rank,
                                    options.geometry.rope_dim)) {
  const kernels::Geometry& g = options.geometry;
  kernels::BackendOptions backend_options;
  backend_options.threads = options.threads;
  backend_options.cpu_isa = options.isa;
  backend_options.deterministic = options.deterministic;
  backend_options.spin_us = options.spin_us;
  backend_ = Must(kernels::CpuBackend::Create(backend_options));
  const int64_t packed = static_cast<int64_t>(options.max_q_rows) * g.num_heads;
  kernels::BackendLimits limits;
  limits.page_table_entries = options.max_kv_rows / options.page_size + 64;
  const int64_t rows_bytes = kernels::KvPageBytes(row_, row_.row_bytes, options.page_size);
  const int64_t page_bytes = (rows_bytes + kernels::kPageGranuleBytes - 1) /
                             kernels::kPageGranuleBytes * kernels::kPageGranuleBytes;
  limits.kv_pool_bytes = (limits.page_table_entries + 1) * page_bytes;
  limits.weights_slots = 1;
  limits.weights_bytes =
      static_cast<int64_t>(g.num_heads) * g.kv_lora_rank * (g.nope_dim + g.v_dim) * 2;
  limits.launch_slots = 1;
  limits.launch_requests = 64;
  limits.launch_rows = options.max_q_rows;
  limits.launch_packed_rows = packed;
  limits.partial_rows = int64_t{1} << 20;
  limits.max_o_dim = static_cast<int32_t>(AbsorbedDim());
  limits.reduce_tiles = 65536;
  limits.max_geometry = g;
  Must(backend_->Configure(limits));
  buffers_ = Must(scheduler::MetadataBuffers::Create(
      {options.threads, 262144, 65536, 262144, int64_t{1} << 20}, *backend_));
  // Pages are in order of address, except that every other pair is swapped, so that they are not
  // one run.
  tables_.resize(static_cast<size_t>(limits.page_table_entries));
  for (size_t i = 0; i < tables_.size(); ++i) {
    const size_t page = i ^ (i / 2 % 2);
    tables_[i] =
        static_cast<uint32_t>(static_cast<int64_t>(page) * page_bytes / kernels::kPageGranuleBytes);
  }
  const std::vector<Bf16> rows = Normals(static_cast<size_t>(g.kv_row_dim()) * 4096);
  for (int64_t first = 0; first < options.max_kv_rows; first += 4096) {
    const int64_t count = std::min<int64_t>(4096, options.max_kv_rows - first);
    kernels::AppendRecord record =
        AppendOf(static_cast<int32_t>(first), static_cast<int32_t>(count));
    record.kv = rows.data();
    record.dtype = DType::kBf16;
    kernels::Launch launch;
    launch.page_tables = tables_;
    launch.appends = {&record, 1};
    Must(backend_->Submit(0, launch));
    Must(backend_->Wait(0));
  }
  if (options.form == kernels::AttentionForm::kExpanded) {
    const auto w = Normals(static_cast<size_t>(limits.weights_bytes / 2));
    const size_t uk = static_cast<size_t>(g.num_heads) * g.kv_lora_rank * g.nope_dim;
    Must(backend_->LoadWeights(0, g, 0, g.num_heads, w.data(), w.data() + uk));
  }
  q_ = Normals(static_cast<size_t>(packed) * static_cast<size_t>(g.absorbed_q_dim()));
  o_.resize(static_cast<size_t>(packed * AbsorbedDim()));
  sinks_.assign(static_cast<size_t>(g.num_heads), 0.5f);
}

AttentionBench::~AttentionBench() = default;

int64_t AttentionBench::AbsorbedDim() const {
  const kernels::Geometry& g = options_.geometry;
  return options_.window > 0 ? g.kv_row_dim() : g.kv_lora_rank;
}

kernels::AppendRecord AttentionBench::AppendOf(int32_t first_position, int32_t rows) const {
  kernels::AppendRecord record{};
  record.kv_row_stride = options_.geometry.kv_row_dim();
  record.row_stride = row_.row_bytes;
  record.page_size = options_.page_size;
  record.first_position = first_position;
  record.rows = rows;
  record.row_dim = options_.geometry.kv_row_dim();
  record.rope_dim = options_.geometry.rope_dim;
  record.format = options_.kv_format;
  record.kv_scale = kKvScale;
  return record;
}

void AttentionBench::MakeLists(const std::vector<BenchRequest>& requests) {
  std::mt19937 random(4);
  lists_.clear();
  list_begins_.clear();
  for (const BenchRequest& request : requests) {
    const int32_t seen = request.kv_rows - request.q_rows + 1;  // seen by the first query row
    std::vector<int32_t> all(static_cast<size_t>(options_.window > 0 ? seen / kEntryRatio : seen));
    std::iota(all.begin(), all.end(), 0);
    list_begins_.push_back(static_cast<int32_t>(lists_.size()));
    for (int32_t row = 0; row < request.q_rows; ++row) {
      std::sample(all.begin(), all.end(), std::back_inserter(lists_), options_.top_k, random);
      list_begins_.push_back(static_cast<int32_t>(lists_.size()));
    }
  }
}

void AttentionBench::Prepare(const std::vector<BenchRequest>& requests) {
  const kernels::Geometry& g = options_.geometry;
  const bool expanded = options_.form == kernels::AttentionForm::kExpanded;
  const int64_t q_dim = expanded ? g.expanded_q_dim() : g.absorbed_q_dim();
  const int64_t o_dim = expanded ? g.v_dim : AbsorbedDim();
  std::vector<scheduler::PlanSegment> shapes;
  records_.clear();
  windows_.clear();
  int64_t q_at = 0, o_at = 0, page = 0;
  size_t begins = 0;
  if (options_.top_k > 0) MakeLists(requests);
  for (const BenchRequest& request : requests) {
    kernels::SegmentRecord record{};
    record.q = q_.data() + q_at;
    record.o = o_.data() + o_at;
    record.q_row_stride = q_dim * g.num_heads;
    record.q_head_stride = q_dim;
    record.o_row_stride = o_dim * g.num_heads;
    record.o_head_stride = o_dim;
    record.page_table = page;
    record.row_stride = row_.row_bytes;
    record.page_size = options_.page_size;
    record.kv_scale = kKvScale;
    record.q_rows = request.q_rows;
    record.kv_rows = request.kv_rows;
    record.num_heads = g.num_heads;
    record.weights_slot = expanded ? 0 : -1;
    record.softmax_scale = 0.135234f;
    record.causal = 1;
    if (options_.top_k > 0) {
      record.list_begin = &list_begins_[begins];
      record.list = &lists_[static_cast<size_t>(list_begins_[begins])];
      begins += static_cast<size_t>(request.q_rows) + 1;
    }
    records_.push_back(record);
    if (options_.window > 0) {
      windows_.push_back({options_.window, kEntryRatio, page, 0, row_.row_bytes, options_.page_size,
                          sinks_.data()});
    }
    const int32_t places = options_.top_k + std::min(options_.window, request.kv_rows);
    shapes.push_back({request.q_rows, options_.top_k > 0 ? places : request.kv_rows, g.num_heads,
                      options_.top_k == 0});
    q_at += q_dim * g.num_heads * request.q_rows;
    o_at += o_dim * g.num_heads * request.q_rows;
    page += (request.kv_rows + options_.page_size - 1) / options_.page_size;
  }
  launch_ = kernels::Launch();
  launch_.page_tables = tables_;
  kernels::AttentionParams& params = expanded ? launch_.expanded : launch_.absorbed;
  params.desc.geometry = g;
  params.desc.form = options_.form;
  params.desc.kv_format = options_.kv_format;
  if (options_.top_k > 0) params.desc.attention = kernels::AttentionKind::kSparse;
  if (options_.window > 0) {
    params.desc.attention = kernels::AttentionKind::kWindow;
    params.desc.entry_format = options_.kv_format;
    params.windows = windows_;
  }
  params.desc.page_size = options_.page_size;
  params.segments = records_;
  params.plan = Must(planner_.Build(shapes, backend_->Traits(params.desc), *buffers_));
}

void AttentionBench::Run() {
  Must(backend_->Submit(0, launch_));
  Must(backend_->Wait(0));
}

void AttentionBench::Append(int32_t sequences, int32_t rows, DType dtype) {
  const kernels::Geometry& g = options_.geometry;
  if (kv_.empty()) kv_.resize(static_cast<size_t>(g.kv_row_dim()) * options_.max_kv_rows, 0.25f);
  appends_.clear();
  for (int32_t i = 0; i < sequences; ++i) {
    kernels::AppendRecord& record = appends_.emplace_back(AppendOf(i * rows, rows));
    record.kv = kv_.data() + static_cast<int64_t>(i) * rows * g.kv_row_dim();
    record.dtype = dtype;
  }
  kernels::Launch launch;
  launch.page_tables = tables_;
  launch.appends = appends_;
  Must(backend_->Submit(0, launch));
  Must(backend_->Wait(0));
}

}  // namespace mla::bench
