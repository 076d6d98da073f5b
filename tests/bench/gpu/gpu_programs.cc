#include "tests/bench/gpu/gpu_programs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/formats/dtype.h"

namespace mla::bench {
namespace {

bool Set(const std::string& text, std::string* to) {
  *to = text;
  return true;
}
bool Set(const std::string& text, double* to) { return absl::SimpleAtod(text, to) && *to >= 0; }
bool Set(const std::string& text, bool* to) {
  *to = text == "1";
  return text == "0" || text == "1";
}
template <class T>
bool Set(const std::string& text, T* to) {
  return absl::SimpleAtoi(text, to) && *to >= 0;
}
bool Set(const std::string& text, std::vector<int32_t>* to) {
  to->clear();
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  for (const std::string& part : parts) {
    if (!Set(part, &to->emplace_back())) return false;
  }
  return true;
}

}  // namespace

absl::Status ReadFlags(std::span<const char* const> arguments, std::span<const Flag> flags) {
  for (size_t i = 0; i < arguments.size(); i += 2) {
    const std::string name = arguments[i];
    const auto flag = std::find_if(flags.begin(), flags.end(),
                                   [&name](const Flag& known) { return name == known.name; });
    if (flag == flags.end()) return absl::InvalidArgumentError(absl::StrCat("unknown flag ", name));
    if (i + 1 == arguments.size()) {
      return absl::InvalidArgumentError(absl::StrCat(name, " needs a value"));
    }
    const std::string value = arguments[i + 1];
    if (!std::visit([&value](auto* target) { return Set(value, target); }, flag->target)) {
      return absl::InvalidArgumentError(absl::StrCat(name, ": got \"", value, "\""));
    }
  }
  return absl::OkStatus();
}

absl::Status WriteJsonRows(const std::string& path, std::span<const std::string> rows) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path, std::ios::trunc);
  file << "[\n" << absl::StrJoin(rows, ",\n") << "\n]\n";
  file.close();
  return file ? absl::OkStatus() : absl::InternalError(absl::StrCat("--json: cannot write ", path));
}

absl::StatusOr<std::unique_ptr<kernels::hip::HipBackend>> AnyGpu(
    kernels::hip::HipBackendOptions options) {
  options.vendor = kernels::hip::Vendor::kAmd;
  auto backend = kernels::hip::HipBackend::Create(options);
  if (backend.ok()) return backend;
  options.vendor = kernels::hip::Vendor::kNvidia;
  return kernels::hip::HipBackend::Create(options);
}

absl::StatusOr<std::unique_ptr<kernels::hip::HipBackend>> AnyGpu(const std::string& image) {
  kernels::hip::HipBackendOptions options;
  if (image.empty()) return AnyGpu(options);
  std::ifstream file(image, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("no file ", image));
  const std::string code(std::istreambuf_iterator<char>(file), {});
  const auto bytes = std::as_bytes(std::span<const char>(code));
  for (const char* arch : {"gfx950", "gfx942", "sm_90"}) options.images.push_back({arch, bytes});
  return AnyGpu(options);
}

double WorstOfAllowed(std::span<const std::byte> a, std::span<const std::byte> b,
                      size_t row_values) {
  const auto value = [](std::span<const std::byte> of, size_t i) {
    kernels::Bf16 bits;
    std::memcpy(&bits, of.data() + i * sizeof(bits), sizeof(bits));
    return double{kernels::ToFloat(bits)};
  };
  double worst = 0;
  const size_t values = std::min(a.size(), b.size()) / sizeof(kernels::Bf16);
  for (size_t row = 0; row < values; row += row_values) {
    double largest = 0, difference = 0;
    for (size_t i = row; i < row + row_values; ++i) {
      largest = std::max(largest, std::abs(value(a, i)));
      const double here = std::abs(value(a, i) - value(b, i));
      if (std::isnan(here)) return std::numeric_limits<double>::infinity();
      difference = std::max(difference, here);
    }
    if (difference > 0) worst = std::max(worst, difference / (largest / 128));
  }
  return worst;
}

}  // namespace mla::bench
