#include "kernels/hip/device_state/kernel_set.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/hip/args/gate_args.h"
#include "kernels/hip/args/row_args.h"

namespace mla::kernels::hip {
namespace {

// Loads the function's code now. Otherwise the CUDA driver loads it at the function's first launch,
// which then waits for the device. Drivers before 12.4 lack the call; with them the self-test,
// which launches all kernels, has the same effect. HIP loads all code with its module.
absl::Status Load(GpuRuntime& runtime, Function function) {
  int (*load)(Function) = nullptr;
  runtime.Symbols().Want("cuFuncLoad", &load);
  return load == nullptr ? absl::OkStatus() : runtime.Check(load(function), "function load");
}

// `shared` is the largest dynamic shared memory, in bytes, of a launch of the kernel.
absl::Status Find(GpuRuntime& runtime, Module module, const char* name, int32_t shared,
                  Function* into) {
  MLA_ASSIGN_OR_RETURN(Function kernel, runtime.Find(module, name));
  *into = kernel;
  MLA_RETURN_IF_ERROR(Load(runtime, kernel));
  return shared > 0 ? runtime.AllowSharedBytes(kernel, shared) : absl::OkStatus();
}

}  // namespace

absl::Status FindKernels(GpuRuntime& runtime, Module module, const ArchTraits& arch,
                         KernelSet* kernels) {
  absl::Status s;
  const auto find = [&](const char* name, int32_t shared, Function* into) {
    if (s.ok()) s = Find(runtime, module, name, shared, into);
  };
  find(kMoveKernel, 0, &kernels->move);
  find(kDigestKernel, 0, &kernels->digest);
  find(kCopyTensorsKernel, 0, &kernels->copy_tensors);
  find(kGateKernel, 0, &kernels->gate);
  find(kSignalKernel, 0, &kernels->signal);
  find(kAppendKernel, 0, &kernels->append);
  find(kCombineKernel, arch.combine_shared_bytes, &kernels->combine);
  find(kProjectKernel, arch.project_shared_bytes, &kernels->project);
  if (arch.project_row_wide_shared_bytes > 0) {
    find(kProjectRowWideKernel, arch.project_row_wide_shared_bytes, &kernels->project_row_wide);
    find(kProjectRowDeepKernel, arch.project_row_deep_shared_bytes, &kernels->project_row_deep);
  }
  find(kPackRowsKernel, 0, &kernels->pack_rows);
  find(kFewRowsKernel, arch.few_rows.shared_bytes, &kernels->few_rows);
  find(kManyRowsKernel, arch.many_rows.shared_bytes, &kernels->many_rows);
  find(kFewRowsOfCodesKernel, arch.few_rows.code_shared_bytes, &kernels->few_code_rows);
  find(kManyRowsOfCodesKernel, arch.many_rows.code_shared_bytes, &kernels->many_code_rows);
  find(kFinishRowsKernel, 0, &kernels->finish_rows);
  if (arch.widens_lists) find(kWidenKernel, 0, &kernels->widen);
  if (arch.indexer) {
    find(kIndexLogitsKernel, IndexLogitsSharedBytes(arch, kMaxIndexHeads, DType::kF32),
         &kernels->index_logits);
    find(kIndexSelectKernel, arch.index_select_shared_bytes, &kernels->index_select);
  }
  for (const AttendVariant& v : arch.attend) {
    find(v.kernel, v.shared_bytes, &kernels->attend.emplace_back());
  }
  for (const FormatVariant& v : arch.split) {
    find(v.kernel, v.shared_bytes, &kernels->split.emplace_back());
  }
  for (const FormatVariant& v : arch.boxes) {
    find(v.kernel, v.shared_bytes, &kernels->boxes.emplace_back());
  }
  for (const RowsVariant& v : arch.stream) {
    find(v.kernel, v.shared_bytes, &kernels->stream.emplace_back());
  }
  for (const ExpandVariant& v : arch.expand) {
    Function& into = kernels->expand.emplace_back();
    if (v.products == DType::kBf16) find(v.kernel, v.shared_bytes, &into);
  }
  for (const ExpandedVariant& v : arch.expanded) {
    Function& into = kernels->expanded.emplace_back();
    if (v.products == DType::kBf16) find(v.kernel, v.shared_bytes, &into);
  }
  return s;
}

absl::Status FindPrefillKernels(GpuRuntime& runtime, Module module, const ArchTraits& arch,
                                KernelSet* kernels) {
  if (arch.expanded_products_keys == 0) {
    return absl::UnimplementedError(
        absl::StrCat("no kernels for these are written for ", std::string(arch.arch)));
  }
  absl::Status s;
  for (size_t i = 0; i < arch.expanded.size() && s.ok(); ++i) {
    const ExpandedVariant& v = arch.expanded[i];
    if (v.products == DType::kBf16) continue;
    s = Find(runtime, module, v.kernel, v.shared_bytes, &kernels->expanded[i]);
  }
  for (size_t i = 0; i < arch.expand.size() && s.ok(); ++i) {
    const ExpandVariant& v = arch.expand[i];
    if (v.products == DType::kBf16) continue;
    s = Find(runtime, module, v.kernel, v.shared_bytes, &kernels->expand[i]);
  }
  return s;
}

}  // namespace mla::kernels::hip
