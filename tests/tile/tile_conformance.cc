// Runs every tile primitive of the architecture that this machine's GPU has, and compares each
// element with a formula on the host. Operands are distinct in every element, or whole numbers
// small enough that sums are exact, so a transposed, swapped or missing element cannot pass.
//
//   tile_conformance [--library LIB] [--image ARCH FILE]
//
// --image is device code for ARCH, used instead of the built-in code. Prints a line per probe. Exit
// status 0 only if a device was found and every element was right.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/formats/dtype.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "tests/tile/e4m3_cases.h"
#include "tests/tile/probe_args.h"

// Written by build_device_code.sh; empty where the compiler was missing.
extern "C" {
extern const std::byte mla_probe_gfx950_begin[], mla_probe_gfx950_end[];
extern const std::byte mla_probe_gfx942_begin[], mla_probe_gfx942_end[];
extern const std::byte mla_probe_sm_90_begin[], mla_probe_sm_90_end[];
}

namespace mla::tile_test {
namespace {

using kernels::Bf16;
using kernels::ToBf16;
using kernels::ToFloat;
using kernels::hip::GpuRuntime;

struct Matrix {
  int rows, cols;
  std::vector<Bf16> values;
  Matrix(int r, int c) : rows(r), cols(c), values(static_cast<size_t>(r) * c, 0) {}
  Bf16& at(int r, int c) { return values[static_cast<size_t>(r) * cols + c]; }
  float get(int r, int c) const { return ToFloat(values[static_cast<size_t>(r) * cols + c]); }
};

// A different finite value in every element: bit patterns in sequence.
Matrix Distinct(int rows, int cols) {
  Matrix m(rows, cols);
  for (size_t i = 0; i < m.values.size(); ++i) m.values[i] = static_cast<Bf16>(0x2400 + i);
  return m;
}
// One 1 a row, in different columns as far as there are enough columns.
Matrix OneHot(int rows, int cols) {
  Matrix m(rows, cols);
  for (int r = 0; r < rows; ++r) m.at(r, (r * 29 + 7) % cols) = ToBf16(1.0f);
  return m;
}
// Whole multiples of `unit`.
Matrix Whole(int rows, int cols, int most, uint32_t seed, float unit = 1.0f) {
  Matrix m(rows, cols);
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> value(-most, most);
  for (Bf16& v : m.values) v = ToBf16(static_cast<float>(value(random)) * unit);
  return m;
}

// a b^T or a b. A sum has one non-zero product, or whole numbers, so it is exact in any order.
std::vector<float> Product(const Matrix& a, const Matrix& b, bool b_transposed) {
  const int cols = b_transposed ? b.rows : b.cols;
  std::vector<float> out;
  for (int r = 0; r < a.rows; ++r) {
    for (int c = 0; c < cols; ++c) {
      double sum = 0.0;
      for (int k = 0; k < a.cols; ++k) {
        sum += static_cast<double>(a.get(r, k)) * (b_transposed ? b.get(c, k) : b.get(k, c));
      }
      out.push_back(static_cast<float>(sum));
    }
  }
  return out;
}

std::vector<float> Floats(const Matrix& m) {
  std::vector<float> out;
  for (const Bf16 v : m.values) out.push_back(ToFloat(v));
  return out;
}

bool BitEqual(float got, float wanted) {
  return std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(wanted) ||
         (got == 0.0f && wanted == 0.0f);
}
// For functions that the device approximates.
bool Near(float got, float wanted) {
  return std::abs(got - wanted) <= 1e-6f * (1.0f + std::abs(wanted));
}

struct Case {
  std::string kernel, what;
  uint32_t threads = 0;
  std::vector<Bf16> a = {}, b = {}, c = {};
  std::vector<float> c32 = {};
  std::vector<float> wanted = {};
  size_t approximate = 0;  // elements at the beginning; all others must be equal bit by bit
};

class Device {
 public:
  ~Device();
  struct Image {
    std::string arch;
    std::span<const std::byte> bytes;
  };
  static absl::StatusOr<std::unique_ptr<Device>> Open(kernels::hip::Vendor vendor,
                                                      const std::string& library,
                                                      const std::vector<Image>& images);
  const GpuRuntime& runtime() const { return *runtime_; }
  int wave() const { return runtime_->vendor() == kernels::hip::Vendor::kAmd ? 64 : 32; }
  // Counts the wrong elements and prints the first ones.
  absl::StatusOr<int64_t> Run(const Case& c);

 private:
  template <class T>
  absl::StatusOr<const T*> Upload(const std::vector<T>& values);

  std::unique_ptr<GpuRuntime> runtime_;
  kernels::hip::Module module_ = nullptr;
  kernels::hip::Stream stream_ = nullptr;
  std::vector<kernels::hip::DeviceBuffer> buffers_;  // for the current case
};

Device::~Device() {
  buffers_.clear();
  if (runtime_ == nullptr) return;
  runtime_->Destroy(stream_);
  runtime_->Unload(module_);
}

absl::StatusOr<std::unique_ptr<Device>> Device::Open(kernels::hip::Vendor vendor,
                                                     const std::string& library,
                                                     const std::vector<Image>& images) {
  std::vector<std::string> libraries;
  if (!library.empty()) libraries.push_back(library);
  auto runtime = GpuRuntime::Open(vendor, 0, libraries);
  if (!runtime.ok()) return runtime.status();
  auto device = std::make_unique<Device>();
  device->runtime_ = *std::move(runtime);
  for (const Image& image : images) {
    if (device->runtime_->arch() != image.arch || image.bytes.empty()) continue;
    auto module = device->runtime_->Load(image.bytes);
    if (!module.ok()) return module.status();
    device->module_ = *module;
  }
  if (device->module_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("no probes were built for ", device->runtime_->arch()));
  }
  auto stream = device->runtime_->CreateStream();
  if (!stream.ok()) return stream.status();
  device->stream_ = *stream;
  return device;
}

template <class T>
absl::StatusOr<const T*> Device::Upload(const std::vector<T>& values) {
  if (values.empty()) return nullptr;
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  auto buffer = kernels::hip::DeviceBuffer::Create(runtime_.get(), "operand", bytes);
  if (!buffer.ok()) return buffer.status();
  if (absl::Status s = runtime_->CopyIn(buffer->at(), values.data(), bytes, stream_); !s.ok()) {
    return s;
  }
  buffers_.push_back(*std::move(buffer));
  return buffers_.back().As<const T>();
}

absl::StatusOr<int64_t> Device::Run(const Case& c) {
  buffers_.clear();
  std::vector<float> out(c.wanted.size(), std::numeric_limits<float>::quiet_NaN());
  auto a = Upload(c.a), b = Upload(c.b), operand_c = Upload(c.c);
  auto c32 = Upload(c.c32), results = Upload(out);
  for (const absl::Status& s :
       {a.status(), b.status(), operand_c.status(), c32.status(), results.status()}) {
    if (!s.ok()) return s;
  }
  auto function = runtime_->Find(module_, c.kernel.c_str());
  if (!function.ok()) return function.status();
  absl::Status s = runtime_->AllowSharedBytes(*function, kSharedBytes);
  if (!s.ok()) return s;
  kernels::hip::LaunchShape shape;
  shape.threads = c.threads;
  shape.shared_bytes = runtime_->vendor() == kernels::hip::Vendor::kAmd ? 0 : kSharedBytes;
  const ProbeArgs args{*a, *b, *operand_c, *c32, const_cast<float*>(*results)};
  s = runtime_->Launch(*function, shape, &args, stream_);
  if (s.ok()) {
    s = runtime_->CopyOut(out.data(), reinterpret_cast<kernels::hip::DevicePtr>(*results),
                          static_cast<int64_t>(out.size() * sizeof(float)), stream_);
  }
  if (s.ok()) s = runtime_->Synchronize(stream_);
  if (!s.ok()) return s;
  int64_t wrong = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    if (i < c.approximate ? Near(out[i], c.wanted[i]) : BitEqual(out[i], c.wanted[i])) continue;
    if (++wrong <= 3) {
      std::printf("  %s %s: element %zu is %g, want %g\n", c.kernel.c_str(), c.what.c_str(), i,
                  static_cast<double>(out[i]), static_cast<double>(c.wanted[i]));
    }
  }
  return wrong;
}

// The three ways to fill the operands of a product.
struct Operands {
  const char* what;
  Matrix a, b;
};
std::vector<Operands> Fillings(int a_rows, int depth, int b_rows, int b_cols) {
  return {{"rows of a", Distinct(a_rows, depth), OneHot(b_rows, b_cols)},
          {"rows of b", OneHot(a_rows, depth), Distinct(b_rows, b_cols)},
          {"whole numbers", Whole(a_rows, depth, 8, 1), Whole(b_rows, b_cols, 8, 2)}};
}

void AddWaveProducts(int wave, std::vector<Case>& cases) {
  for (const int rows : {16, 32}) {
    const std::string suffix = absl::StrCat("_", rows);
    const auto threads = static_cast<uint32_t>(wave);
    for (const Operands& o : Fillings(rows, kDepth, kKvRows, kDepth)) {
      cases.push_back({"probe_scores" + suffix,
                       o.what,
                       threads,
                       o.a.values,
                       o.b.values,
                       {},
                       {},
                       Product(o.a, o.b, true)});
    }
    for (const Operands& o : Fillings(rows, kKvRows, kKvRows, kOutCols)) {
      cases.push_back({"probe_outputs" + suffix,
                       o.what,
                       threads,
                       o.a.values,
                       o.b.values,
                       {},
                       {},
                       Product(o.a, o.b, false)});
    }
    // Sums of at most 64 products of at most 2 are whole in bf16.
    const Matrix a = Whole(rows, kDepth, 1, 3), b = Whole(kKvRows, kDepth, 2, 4);
    const Matrix v = Whole(kKvRows, kOutCols, 8, 5);
    Matrix p(rows, kKvRows);
    const std::vector<float> scores = Product(a, b, true);
    for (size_t i = 0; i < scores.size(); ++i) p.values[i] = ToBf16(scores[i]);
    cases.push_back({"probe_chain" + suffix,
                     "whole numbers",
                     threads,
                     a.values,
                     b.values,
                     v.values,
                     {},
                     Product(p, v, false)});
  }
}

// Lanes that hold parts of one packed row: on sm_90 four neighbours, on AMD lanes congruent modulo
// the rows of a wave.
void AddRows(int wave, std::vector<Case>& cases) {
  for (const int rows : {16, 32}) {
    const int slots = wave == 32 ? rows / 8 : 1;
    const auto row = [&](int lane) { return wave == 32 ? lane / 4 : lane % rows; };
    Case c{absl::StrCat("probe_rows_", rows), "sums", static_cast<uint32_t>(wave)};
    for (int i = 0; i < slots * wave; ++i) {  // distinct whole numbers, some negative
      c.c32.push_back(static_cast<float>((i * 37) % 1021 - 500));
    }
    for (int slot = 0; slot < slots; ++slot) {
      for (int lane = 0; lane < wave; ++lane) {
        float top = -std::numeric_limits<float>::infinity(), sum = 0.0f;
        for (int other = 0; other < wave; ++other) {
          if (row(other) != row(lane)) continue;
          top = std::max(top, c.c32[slot * wave + other]);
          sum += c.c32[slot * wave + other];
        }
        c.wanted.insert(c.wanted.end(), {top, sum});
      }
    }
    cases.push_back(c);
  }
}

void AddCopy(int wave, std::vector<Case>& cases) {
  constexpr int kPages = (kKvRows + kCopyPage - 1) / kCopyPage + 3;
  const Matrix pool = Distinct(kPages * kCopyPage, kCopyDim);
  Case c{"probe_copy", "paged rows", static_cast<uint32_t>(4 * wave), pool.values};
  for (int row = 0; row < kKvRows; ++row) {
    const int page = (row / kCopyPage * 5 + 2) % kPages;
    for (int e = 0; e < kCopyDim; ++e) {
      c.wanted.push_back(pool.get(page * kCopyPage + row % kCopyPage, e));
    }
  }
  for (int i = 0; i < kPages; ++i) {  // 32-bit entries, low half first
    c.b.insert(c.b.end(), {static_cast<Bf16>((i * 5 + 2) % kPages), Bf16{0}});
  }
  cases.push_back(c);
}

void AddArithmetic(int wave, std::vector<Case>& cases) {
  Case c{"probe_math", "exp2, log2, pack", static_cast<uint32_t>(wave)};
  for (int i = 0; i < kMathValues; ++i) c.c32.push_back(0.001f + static_cast<float>(i) * 0.0617f);
  for (const float x : c.c32) c.wanted.push_back(std::exp2(x));
  for (const float x : c.c32) c.wanted.push_back(std::log2(x));
  for (int i = 0; i < kMathValues; ++i) {
    const uint32_t word =
        ToBf16(c.c32[i]) | static_cast<uint32_t>(ToBf16(c.c32[(i + 1) % kMathValues])) << 16;
    c.wanted.push_back(std::bit_cast<float>(word));
  }
  c.approximate = 2 * kMathValues;
  cases.push_back(c);

  Case lanes{"probe_lanes", "any, exchange, broadcast", static_cast<uint32_t>(wave)};
  for (int i = 0; i < wave; ++i) lanes.c32.push_back(static_cast<float>(100 + i));
  const auto add = [&](const std::function<float(int)>& value) {
    for (int lane = 0; lane < wave; ++lane) lanes.wanted.push_back(value(lane));
  };
  add([](int) { return 1.0f; });
  for (const int step : {1, 2, 16}) {
    add([&](int lane) { return lanes.c32[static_cast<size_t>(lane ^ step)]; });
  }
  add([&](int) { return lanes.c32[13]; });
  add([](int) { return 0.0f; });
  cases.push_back(lanes);
}

// Uses only numbers that codes hold, the smallest included: whole multiples of 2^-9.
void AddCodes(bool powers, std::vector<Case>& cases) {
  const auto power = [&](int row) { return static_cast<float>(powers ? 1 << row % 4 : 1); };
  const auto scale = [&](std::vector<float>& out, size_t cols) {
    for (size_t i = 0; i < out.size(); ++i) out[i] *= power(static_cast<int>(i / cols));
  };
  for (const int rows : {16, 32}) {
    if (powers && rows == 16) continue;
    const std::string suffix = absl::StrCat("_", rows);
    for (const auto& [what, a, b] : std::vector<Operands>{
             {"rows of a", Whole(rows, kDepth, 8, 6), OneHot(kKvRows, kDepth)},
             {"rows of b", OneHot(rows, kDepth), Whole(kKvRows, kDepth, 8, 7)},
             {"smallest of b", OneHot(rows, kDepth), Whole(kKvRows, kDepth, 7, 12, 0x1p-9f)},
             {"whole numbers", Whole(rows, kDepth, 8, 8), Whole(kKvRows, kDepth, 8, 9)}}) {
      Case c{"probe_codes" + suffix, what, 64, a.values, b.values, {}, {}, Product(a, b, true)};
      scale(c.wanted, kKvRows);
      cases.push_back(c);
    }
    for (const auto& [what, a, b] : std::vector<Operands>{
             {"rows of a", Whole(rows, kKvRows, 8, 6), OneHot(kKvRows, kOutCols)},
             {"rows of b", OneHot(rows, kKvRows), Whole(kKvRows, kOutCols, 8, 7)},
             {"smallest of a", Whole(rows, kKvRows, 7, 12, 0x1p-9f), OneHot(kKvRows, kOutCols)},
             {"whole numbers", Whole(rows, kKvRows, 8, 10), Whole(kKvRows, kOutCols, 8, 11)}}) {
      Case c{"probe_code_outputs" + suffix, what, 64, a.values, b.values, {}, {},
             Product(a, b, false)};
      scale(c.wanted, kOutCols);
      for (int row = 0; row < rows; ++row) {
        float sum = 0.0f;
        for (int k = 0; k < kKvRows; ++k) sum += a.get(row, k) * power(row);
        c.wanted.push_back(sum);
      }
      cases.push_back(c);
    }
  }
}

void AddWarpgroups(std::vector<Case>& cases) {
  constexpr uint32_t kThreads = 128;
  for (const Operands& o : Fillings(kGroupRows, kDepth, kKvRows, kDepth)) {
    std::vector<float> wanted = Product(o.a, o.b, true);
    cases.push_back(
        {"probe_wgmma_scores", o.what, kThreads, o.a.values, o.b.values, {}, {}, wanted});
  }
  for (const Operands& o : Fillings(kGroupRows, kKvRows, kKvRows, kGroupCols)) {
    std::vector<float> wanted = Product(o.a, o.b, false);
    wanted.insert(wanted.end(), wanted.begin(), wanted.begin() + kGroupRows * kGroupCols);
    cases.push_back(
        {"probe_wgmma_outputs", o.what, kThreads, o.a.values, o.b.values, {}, {}, wanted});
  }
  const Matrix m = Distinct(16, 16);
  std::vector<float> expected = Floats(m);
  // Each 8x8 matrix is transposed in its place.
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 16; ++c) {
      expected.push_back(m.get((r & 8) + (c & 7), (c & 8) + (r & 7)));
    }
  }
  const std::vector<float> plain = Floats(m);
  expected.insert(expected.end(), plain.begin(), plain.end());
  cases.push_back({"probe_matrices", "8x8 matrices", 32, m.values, {}, {}, {}, expected});
  const Matrix rows = Distinct(kKvRows, kDepth);
  cases.push_back({"probe_barriers",
                   "copies between groups",
                   2 * kThreads,
                   rows.values,
                   {},
                   {},
                   {},
                   Floats(rows)});
  for (const E4m3Case& c : E4m3Cases()) {
    cases.push_back({"probe_e4m3", c.what, kThreads, c.a, c.b, {}, {}, c.wanted});
  }
}

struct Flags {
  std::string library;
  std::string arch, image;  // the latter is the contents of the file
};

bool Parse(int argc, char** argv, Flags& flags) {
  for (int i = 1; i < argc;) {
    if (i + 1 < argc && std::strcmp(argv[i], "--library") == 0) {
      flags.library = argv[i + 1];
      i += 2;
    } else if (i + 2 < argc && std::strcmp(argv[i], "--image") == 0) {
      flags.arch = argv[i + 1];
      std::ifstream in(argv[i + 2], std::ios::binary);
      flags.image.assign(std::istreambuf_iterator<char>(in), {});
      if (flags.image.empty()) return false;
      i += 3;
    } else {
      return false;
    }
  }
  return true;
}

std::unique_ptr<Device> FindDevice(const Flags& flags) {
  const auto built_in = [](const char* arch, const std::byte* begin, const std::byte* end) {
    return Device::Image{arch, {begin, static_cast<size_t>(end - begin)}};
  };
  std::vector<Device::Image> images = {
      built_in("gfx950", mla_probe_gfx950_begin, mla_probe_gfx950_end),
      built_in("gfx942", mla_probe_gfx942_begin, mla_probe_gfx942_end),
      built_in("sm_90", mla_probe_sm_90_begin, mla_probe_sm_90_end)};
  std::vector<kernels::hip::Vendor> vendors = {kernels::hip::Vendor::kAmd,
                                               kernels::hip::Vendor::kNvidia};
  if (!flags.image.empty()) {
    images = {{flags.arch, std::as_bytes(std::span<const char>(flags.image))}};
    vendors = {flags.arch.starts_with("gfx") ? kernels::hip::Vendor::kAmd
                                             : kernels::hip::Vendor::kNvidia};
  }
  for (const kernels::hip::Vendor vendor : vendors) {
    auto opened = Device::Open(vendor, flags.library, images);
    if (opened.ok()) return *std::move(opened);
    std::printf("%s\n", std::string(opened.status().message()).c_str());
  }
  return nullptr;
}

int Main(int argc, char** argv) {
  Flags flags;
  if (!Parse(argc, argv, flags)) {
    std::fprintf(stderr, "usage: %s [--library LIB] [--image ARCH FILE]\n", argv[0]);
    return 2;
  }
  const std::unique_ptr<Device> device = FindDevice(flags);
  if (device == nullptr) return 1;
  std::vector<Case> cases;
  AddWaveProducts(device->wave(), cases);
  AddRows(device->wave(), cases);
  AddCopy(device->wave(), cases);
  AddArithmetic(device->wave(), cases);
  if (device->runtime().vendor() == kernels::hip::Vendor::kAmd) {
    AddCodes(device->runtime().arch() == "gfx950", cases);
  }
  if (device->runtime().vendor() == kernels::hip::Vendor::kNvidia) AddWarpgroups(cases);
  int64_t elements = 0, wrong = 0;
  for (const Case& c : cases) {
    auto result = device->Run(c);
    if (!result.ok()) {
      std::printf("FAIL %s: %s\n", c.kernel.c_str(), result.status().ToString().c_str());
      return 1;
    }
    std::printf("%s %s, %s: %zu elements, %lld wrong\n", *result == 0 ? "ok  " : "FAIL",
                c.kernel.c_str(), c.what.c_str(), c.wanted.size(), static_cast<long long>(*result));
    elements += static_cast<int64_t>(c.wanted.size());
    wrong += *result;
  }
  std::printf("%s (%s): %zu probes, %lld elements, %lld wrong\n", device->runtime().name().c_str(),
              device->runtime().arch().c_str(), cases.size(), static_cast<long long>(elements),
              static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace mla::tile_test

int main(int argc, char** argv) { return mla::tile_test::Main(argc, argv); }
