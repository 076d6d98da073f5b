// Code shared by the GPU benchmarks: flags, and the backend of this machine's GPU.
#ifndef MLA_TESTS_BENCH_GPU_GPU_PROGRAMS_H_
#define MLA_TESTS_BENCH_GPU_GPU_PROGRAMS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/hip_backend.h"

namespace mla::bench {

// `--name value`. Lists are separated by commas; a bool is false for 0 and true for 1.
struct Flag {
  const char* name;
  std::variant<int32_t*, int64_t*, double*, bool*, std::string*, std::vector<int32_t>*> target;
};

// INVALID_ARGUMENT names a flag that is unknown, lacks a value, or has a value that does not fit
// its type; numbers are at least 0. `arguments` are those after the program's name.
absl::Status ReadFlags(std::span<const char* const> arguments, std::span<const Flag> flags);

// Writes rows of a benchmark, each a JSON object, as a list; nothing if `path` is empty.
absl::Status WriteJsonRows(const std::string& path, std::span<const std::string> rows);

// Returns the AMD device, or else the NVIDIA device, or the latter's error if there is neither.
// Ignores the vendor in `options`.
absl::StatusOr<std::unique_ptr<kernels::hip::HipBackend>> AnyGpu(
    kernels::hip::HipBackendOptions options = {});
// The same, with the device code in file `image` instead of the built-in code, unless it is empty.
absl::StatusOr<std::unique_ptr<kernels::hip::HipBackend>> AnyGpu(const std::string& image);

// The largest difference of two bf16 outputs, in rows of `row_values` values, relative to the
// difference that one request may have in two batches: 2^-7 of the row's largest value. Also above
// 1 if one value is NaN.
double WorstOfAllowed(std::span<const std::byte> a, std::span<const std::byte> b,
                      size_t row_values);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_GPU_GPU_PROGRAMS_H_
