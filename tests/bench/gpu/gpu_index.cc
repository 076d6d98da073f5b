// Times the two kernels of the indexer on this machine's GPU separately: logits, and the choice.
// GPU time by events, the L2 overwritten before each pair, median.
//
//   gpu_index [--batch 64] [--context 65536] [--top-k 2048] [--index-heads 64] [--block-keys 0]
//             [--iterations 20] [--image FILE] [--json FILE]
//
// One query row of bf16 a request; pages of 64 rows in random order. --block-keys: keys of a block
// of the first kernel; 0: as in the backend. A line has microseconds of both kernels, and GB/s of
// index keys (132 bytes each) of the first kernel and of both, also relative to a copy. The copy
// moves half of these bytes to the place of the other half, so it reads and writes as many in all.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/hip_backend.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

using kernels::Bf16;
using kernels::KvFormat;
using kernels::hip::DeviceBuffer;

constexpr int32_t kPage = 64;
constexpr int64_t kPageBytes = kPage * 132;
constexpr int64_t kFlushBytes = int64_t{256} << 20;
constexpr int32_t kWarmUp = 3;
static_assert(kPageBytes % kernels::kPageGranuleBytes == 0);

struct Flags {
  int32_t batch = 64, context = 65536, top_k = 2048, index_heads = 64, block_keys = 0;
  int32_t iterations = 20;
  std::string image, json;
};

class Indexer {
 public:
  Indexer(const Flags& flags, std::unique_ptr<kernels::hip::HipBackend> backend)
      : flags_(flags),
        backend_(std::move(backend)),
        runtime_(&backend_->runtime()),
        arch_(kernels::hip::FindArchTraits(runtime_->arch())),
        stream_(backend_->compute_stream()) {}
  absl::Status Run();

 private:
  absl::Status LoadKernels();
  absl::Status FillKeys();
  absl::Status MakeArguments();
  // Nanoseconds of the two kernels and of the copy.
  absl::Status Launch(int64_t (&ns)[3]);
  template <class T>
  const T* Put(const std::vector<T>& values) {
    return static_cast<const T*>(
        Keep(values.data(), static_cast<int64_t>(values.size() * sizeof(T))));
  }
  // Allocates device memory with these bytes, or zeros; the first error stays in status_.
  void* Keep(const void* from, int64_t bytes);

  const Flags flags_;
  std::unique_ptr<kernels::hip::HipBackend> backend_;
  kernels::hip::GpuRuntime* const runtime_;
  const kernels::hip::ArchTraits* const arch_;
  const kernels::hip::Stream stream_;
  std::vector<DeviceBuffer> kept_;
  absl::Status status_;
  kernels::hip::Function logits_ = nullptr, select_ = nullptr;
  kernels::hip::IndexArgs args_ = {};
  uint32_t blocks_ = 0;
  void* flush_ = nullptr;
  void* copy_ = nullptr;
  int64_t copied_ = 0;                  // bytes
  kernels::hip::Event events_[5] = {};  // around the kernels, and around the copy
};

void* Indexer::Keep(const void* from, int64_t bytes) {
  auto made = DeviceBuffer::Create(runtime_, "bench", bytes);
  status_.Update(made.status());
  if (!status_.ok()) return nullptr;
  kept_.push_back(*std::move(made));
  const kernels::hip::DevicePtr at = kept_.back().at();
  status_.Update(from == nullptr ? runtime_->Fill(at, 0, bytes, stream_)
                                 : runtime_->CopyIn(at, from, bytes, stream_));
  status_.Update(runtime_->Synchronize(stream_));
  return kept_.back().As<std::byte>();
}

absl::Status Indexer::LoadKernels() {
  auto images = kernels::hip::BuiltInKernelImages();
  std::string file;
  if (!flags_.image.empty()) {
    std::ifstream in(flags_.image, std::ios::binary);
    file.assign(std::istreambuf_iterator<char>(in), {});
    images = {{runtime_->arch(), std::as_bytes(std::span<const char>(file))}};
  }
  for (const auto& image : images) {
    if (image.arch != runtime_->arch()) continue;
    auto module = runtime_->Load(image.bytes);
    if (!module.ok()) return module.status();
    for (const auto& [name, shared, into] :
         {std::tuple(kernels::hip::kIndexLogitsKernel,
                     kernels::hip::IndexLogitsSharedBytes(*arch_, kernels::kMaxIndexHeads,
                                                          kernels::DType::kF32),
                     &logits_),
          std::tuple(kernels::hip::kIndexSelectKernel, arch_->index_select_shared_bytes,
                     &select_)}) {
      auto found = runtime_->Find(*module, name);
      if (!found.ok()) return found.status();
      *into = *found;
      if (absl::Status s = runtime_->AllowSharedBytes(*found, shared); !s.ok()) return s;
    }
    return absl::OkStatus();
  }
  return absl::UnimplementedError("no image with an indexer");
}

// Fills all pages by repeating some.
absl::Status Indexer::FillKeys() {
  constexpr int64_t kPages = 256;
  const kernels::KvRowLayout row = kernels::MakeKvRowLayout(KvFormat::kIndexKey, 128, 0);
  std::vector<std::byte> some(kPages * kPageBytes);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(128);
  for (int64_t page = 0; page < kPages; ++page) {
    for (int32_t i = 0; i < kPage; ++i) {
      for (float& x : values) x = normal(random);
      kernels::EncodeKvRow(
          row, kernels::Fp8Kind::kE4m3Fn, values.data(), kernels::DType::kF32, 1.0f,
          kernels::KvRowIn(row, some.data() + page * kPageBytes, row.row_bytes, kPage, i));
    }
  }
  const int64_t pages = int64_t{flags_.batch} * ((flags_.context + kPage - 1) / kPage);
  args_.pool = static_cast<uint8_t*>(Keep(nullptr, pages * kPageBytes));
  copied_ = pages / 2 * kPageBytes;
  copy_ = Keep(nullptr, copied_);
  for (int64_t done = 0; done < pages && status_.ok(); done += kPages) {
    status_.Update(runtime_->CopyIn(reinterpret_cast<kernels::hip::DevicePtr>(args_.pool) +
                                        static_cast<uint64_t>(done * kPageBytes),
                                    some.data(), std::min(kPages, pages - done) * kPageBytes,
                                    stream_));
  }
  status_.Update(runtime_->Synchronize(stream_));
  std::vector<uint32_t> table(static_cast<size_t>(pages));
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] =
        static_cast<uint32_t>(static_cast<int64_t>(i) * kPageBytes / kernels::kPageGranuleBytes);
  }
  std::shuffle(table.begin(), table.end(), std::mt19937(3));
  args_.page_tables = Put(table);
  return status_;
}

absl::Status Indexer::MakeArguments() {
  const kernels::IndexerShape shape{flags_.index_heads, 128};
  const int64_t input_bytes = shape.input_bytes(kernels::DType::kBf16);
  const int32_t chosen = std::min(flags_.top_k, flags_.context);
  const int64_t keys = int64_t{flags_.batch} * flags_.context;
  args_.count = flags_.batch;
  args_.keys_per_block = flags_.block_keys > 0
                             ? flags_.block_keys
                             : kernels::hip::IndexKeysPerBlock(*arch_, keys, runtime_->units());
  const int32_t blocks = (flags_.context + args_.keys_per_block - 1) / args_.keys_per_block;
  const int32_t ranks = (flags_.context + kernels::hip::kIndexRowAlignment - 1) /
                        kernels::hip::kIndexRowAlignment * kernels::hip::kIndexRowAlignment;
  std::vector<std::byte> inputs(static_cast<size_t>(flags_.batch * input_bytes));
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (int32_t row = 0; row < flags_.batch; ++row) {
    std::byte* const row_inputs = &inputs[static_cast<size_t>(row * input_bytes)];
    for (int32_t i = 0; i < flags_.index_heads * 128; ++i) {
      const Bf16 value = kernels::ToBf16(normal(random));
      std::memcpy(row_inputs + i * 2, &value, 2);
    }
    for (int32_t i = 0; i < flags_.index_heads; ++i) {
      const float weight = normal(random);
      std::memcpy(row_inputs + flags_.index_heads * 256 + i * 4, &weight, 4);
    }
  }
  const std::byte* const staged = Put(inputs);
  const int32_t* const begin = Put(std::vector<int32_t>{0, chosen});
  auto* const lists = static_cast<int32_t*>(Keep(nullptr, int64_t{flags_.batch} * chosen * 4));
  std::vector<kernels::SelectRecord> records;
  std::vector<kernels::hip::IndexRow> rows;
  std::vector<int32_t> first_block = {0};
  for (int32_t i = 0; i < flags_.batch; ++i) {
    kernels::SelectRecord r{};
    r.inputs = staged + i * input_bytes;
    r.dtype = kernels::DType::kBf16;
    r.indexer = shape;
    r.page_table = int64_t{i} * ((flags_.context + kPage - 1) / kPage);
    r.row_stride = 128;
    r.page_size = kPage;
    r.rows = 1;
    r.kv_rows = flags_.context;
    r.list = lists + int64_t{i} * chosen;
    r.list_begin = begin;
    records.push_back(r);
    rows.push_back({i, 0, flags_.context, i * ranks});
    first_block.push_back(first_block.back() + blocks);
  }
  blocks_ = static_cast<uint32_t>(first_block.back());
  args_.records = Put(records);
  args_.rows = Put(rows);
  args_.first_block = Put(first_block);
  args_.ranks = static_cast<uint32_t*>(Keep(nullptr, int64_t{flags_.batch} * ranks * 4));
  args_.bins =
      static_cast<uint32_t*>(Keep(nullptr, int64_t{flags_.batch} * kernels::hip::kIndexBins * 4));
  flush_ = Keep(nullptr, kFlushBytes);
  for (kernels::hip::Event& event : events_) {
    auto created = runtime_->CreateEvent();
    status_.Update(created.status());
    if (created.ok()) event = *created;
  }
  return status_;
}

absl::Status Indexer::Launch(int64_t (&ns)[3]) {
  kernels::hip::LaunchShape shape;
  absl::Status s =
      runtime_->Fill(reinterpret_cast<kernels::hip::DevicePtr>(flush_), 0, kFlushBytes, stream_);
  if (s.ok()) s = runtime_->Record(events_[0], stream_);
  shape.grid_x = blocks_;
  shape.threads = static_cast<uint32_t>(arch_->index_logits_threads);
  shape.shared_bytes = static_cast<uint32_t>(
      kernels::hip::IndexLogitsSharedBytes(*arch_, flags_.index_heads, kernels::DType::kBf16));
  if (s.ok()) s = runtime_->Launch(logits_, shape, &args_, stream_);
  if (s.ok()) s = runtime_->Record(events_[1], stream_);
  shape.grid_x = static_cast<uint32_t>(args_.count);
  shape.threads = kernels::hip::kIndexSelectThreads;
  shape.shared_bytes = static_cast<uint32_t>(arch_->index_select_shared_bytes);
  if (s.ok()) s = runtime_->Launch(select_, shape, &args_, stream_);
  if (s.ok()) s = runtime_->Record(events_[2], stream_);
  using Address = kernels::hip::DevicePtr;
  if (s.ok()) s = runtime_->Fill(reinterpret_cast<Address>(flush_), 0, kFlushBytes, stream_);
  if (s.ok()) s = runtime_->Record(events_[3], stream_);
  if (s.ok()) {
    s = runtime_->CopyDevice(reinterpret_cast<Address>(copy_),
                             reinterpret_cast<Address>(args_.pool), copied_, stream_);
  }
  if (s.ok()) s = runtime_->Record(events_[4], stream_);
  if (s.ok()) s = runtime_->Synchronize(stream_);
  for (int i = 0; i < 3 && s.ok(); ++i) {
    const int first = i == 2 ? 3 : i;
    auto elapsed = runtime_->ElapsedNs(events_[first], events_[first + 1]);
    s = elapsed.status();
    if (s.ok()) ns[i] = *elapsed;
  }
  return s;
}

absl::Status Indexer::Run() {
  absl::Status s = LoadKernels();
  if (s.ok()) s = FillKeys();
  if (s.ok()) s = MakeArguments();
  std::vector<int64_t> times[4];  // the third is for both kernels
  for (int32_t i = -kWarmUp; i < flags_.iterations && s.ok(); ++i) {
    int64_t ns[3] = {};
    s = Launch(ns);
    if (i < 0) continue;
    for (int part = 0; part < 2; ++part) times[part].push_back(ns[part]);
    times[2].push_back(ns[0] + ns[1]);
    times[3].push_back(ns[2]);
  }
  if (!s.ok()) return s;
  double us[4], least[4];
  for (int part = 0; part < 4; ++part) {
    std::sort(times[part].begin(), times[part].end());
    us[part] = static_cast<double>(times[part][times[part].size() / 2]) / 1e3;
    least[part] = static_cast<double>(times[part][0]) / 1e3;
  }
  const double kilobytes = 132.0 * flags_.batch * flags_.context / 1e3;
  const double rate = kilobytes / us[0];
  const double copied = 2.0 * static_cast<double>(copied_) / 1e3 / us[3];
  std::printf(
      "index h=%d b=%d ctx=%d top_k=%d, %d keys a block: logits %.1f us (least %.1f) %.0f "
      "GB/s, choice %.1f us (least %.1f), both %.1f us %.0f GB/s, a copy %.0f GB/s, of it %.3f\n",
      flags_.index_heads, flags_.batch, flags_.context, flags_.top_k, args_.keys_per_block, us[0],
      least[0], rate, us[1], least[1], us[2], kilobytes / us[2], copied,
      kilobytes / us[2] / copied);
  const std::vector<std::string> json = {absl::StrFormat(
      R"({"bench": "gpu_index", "heads": %d, "batch": %d, "context": %d, "top_k": %d, )"
      R"("logits_us": %.1f, "choice_us": %.1f, "key_gbps": %.0f})",
      flags_.index_heads, flags_.batch, flags_.context, flags_.top_k, us[0], us[1], rate)};
  return WriteJsonRows(flags_.json, json);
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--batch", &flags.batch},           {"--context", &flags.context},
                        {"--top-k", &flags.top_k},           {"--index-heads", &flags.index_heads},
                        {"--block-keys", &flags.block_keys}, {"--iterations", &flags.iterations},
                        {"--image", &flags.image},           {"--json", &flags.json}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  if (!s.ok()) {
    std::fprintf(stderr, "%s\n", s.ToString().c_str());
    return 2;
  }
  auto backend = AnyGpu(flags.image);
  s = backend.status();
  if (s.ok()) s = Indexer(flags, *std::move(backend)).Run();
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
