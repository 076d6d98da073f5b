// What the GPU benchmarks have in common: flags, and the backend of whatever GPU there is.
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

// INVALID_ARGUMENT names a flag that is unknown, has no value or one that does not fit its type;
// numbers are at least 0. `arguments` are those behind the program's name.
absl::Status ReadFlags(std::span<const char* const> arguments, std::span<const Flag> flags);

// Writes rows of a benchmark, each a JSON object, as a list; nothing if `path` is empty.
absl::Status WriteJsonRows(const std::string& path, std::span<const std::string> rows);

// The AMD device, else the NVIDIA one; the status of the latter if there is neither. The vendor in
// `options` is not looked at.
absl::StatusOr<std::unique_ptr<kernels::hip::HipBackend>> AnyGpu(
    kernels::hip::HipBackendOptions options = {});
// The same with the device code in file `image` in place of what was built in, unless it is empty.
absl::StatusOr<std::unique_ptr<kernels::hip::HipBackend>> AnyGpu(const std::string& image);

// The largest difference of two outputs in bf16, rows of `row_values` values, over what those of
// one request in two batches may differ by: 2^-7 of the row's largest value. Above 1, too, where
// one is not a number.
double WorstOfAllowed(std::span<const std::byte> a, std::span<const std::byte> b,
                      size_t row_values);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_GPU_GPU_PROGRAMS_H_
