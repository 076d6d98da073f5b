#include "kernels/hip/products/product_library.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/shared_library.h"
#include "base/status_macros.h"
#include "kernels/hip/runtime/call_watch.h"

namespace mla::kernels::hip {
namespace {

// cublas_api.h, cublasLt.h, library_types.h of CUDA 12 and 13; hipblas-common.h, hipblaslt.h,
// library_types.h of ROCm 6.2 to 7.
constexpr int kSuccess = 0;
constexpr int kFloat = 0, kBf16 = 14;  // CUDA_R_32F, CUDA_R_16BF; HIP has the same numbers
struct Numbers {
  int compute_float;                // CUBLAS_COMPUTE_32F, HIPBLAS_COMPUTE_32F
  int transposed;                   // CUBLAS_OP_T, HIPBLAS_OP_T
  int transposes_first;             // ..._MATMUL_DESC_TRANSA
  int most_workspace;               // ..._MATMUL_PREF_MAX_WORKSPACE_BYTES
  int reductions;                   // CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK; 0: none
  std::array<int, 4> alignments{};  // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES to D
};
constexpr Numbers kNvidiaNumbers{68, 1, 3, 1, 3, {5, 6, 7, 8}};
constexpr Numbers kAmdNumbers{2, 112, 0, 1, 0, {}};
// CUBLASLT_REDUCTION_SCHEME_INPLACE and _COMPUTE_TYPE: parts of a split depth are added up as fp32,
// in a fixed order.
constexpr uint32_t kFixedReductions = 1 | 2;

// Room for a result of the heuristic, which takes 96 bytes in cuBLASLt 13 and 56 in hipBLASLt 1.
constexpr size_t kResultBytes = 512;

const Numbers& NumbersOf(Vendor vendor) {
  return vendor == Vendor::kAmd ? kAmdNumbers : kNvidiaNumbers;
}
const char* NameOf(Vendor vendor) {
  if (vendor == Vendor::kAmd) return "hipBLASLt";
  return "cuBLASLt";
}

}  // namespace

struct ProductTable {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  size_t (*nvidia_version)();
  int (*amd_version)(void* handle, int*);
  int (*operation_create)(void**, int compute, int scale);
  int (*operation_destroy)(void*);
  int (*operation_set)(void*, int attribute, const void*, size_t);
  int (*layout_create)(void**, int type, uint64_t rows, uint64_t columns, int64_t pitch);
  int (*layout_destroy)(void*);
  int (*preference_create)(void**);
  int (*preference_destroy)(void*);
  int (*preference_set)(void*, int attribute, const void*, size_t);
  int (*heuristic)(void* handle, void* operation, void* a, void* b, void* c, void* d,
                   void* preference, int wanted, void* results, int* found);
  int (*multiply)(void* handle, void* operation, const void* alpha, const void* a, void* a_layout,
                  const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                  void* d, void* d_layout, const void* algorithm, void* workspace,
                  size_t workspace_bytes, Stream stream);
};

// The libraries count matrices by columns, so weights are their first operand, transposed, and sums
// their result, transposed.
struct ProductPlan {
  void* operation = nullptr;
  void *weights = nullptr, *rows = nullptr, *sums = nullptr;
  alignas(16) std::array<std::byte, kResultBytes> result{};
};

std::vector<std::string> ProductLibrary::Names(Vendor vendor, const std::string& runtime) {
  if (vendor == Vendor::kNvidia) return {"libcublasLt.so.13", "libcublasLt.so.12"};
  std::vector<std::string> folders = {"", "/opt/rocm/lib/"};
  if (const size_t slash = runtime.rfind('/'); slash != std::string::npos) {
    folders.insert(folders.begin(), runtime.substr(0, slash + 1));
  }
  std::vector<std::string> names;
  for (const std::string& folder : folders) {
    for (const char* name : {"libhipblaslt.so.1", "libhipblaslt.so.0"}) {
      names.push_back(absl::StrCat(folder, name));
    }
  }
  return names;
}

ProductLibrary::ProductLibrary(GpuRuntime* runtime, std::unique_ptr<ProductTable> table,
                               std::string name)
    : runtime_(runtime), api_(std::move(table)), description_(std::move(name)) {
  entries_.reserve(kMostPlans);
}

ProductLibrary::~ProductLibrary() {
  if (!runtime_->Bind().ok()) return;
  for (Entry& entry : entries_) {
    if (entry.plan != nullptr) Destroy(*entry.plan);
  }
  if (handle_ != nullptr) (void)api_->destroy(handle_);
}

absl::StatusOr<std::unique_ptr<ProductLibrary>> ProductLibrary::Open(
    GpuRuntime* runtime, std::span<const std::string> names) {
  const Vendor vendor = runtime->vendor();
  const std::vector<std::string> usual = Names(vendor, runtime->library());
  MLA_ASSIGN_OR_RETURN(
      const SharedLibrary library,
      OpenSharedLibrary(names.empty() ? std::span<const std::string>(usual) : names,
                        LoadedCopy::kShare, absl::StrCat("no ", NameOf(vendor))));
  auto table = std::make_unique<ProductTable>();
  SymbolTable symbols(library.handle);
  // A null name: the vendor has no such call.
  const auto need = [&](const char* amd, const char* nvidia, auto** function) {
    symbols.Need(vendor == Vendor::kAmd ? amd : nvidia, function);
  };
  need("hipblasLtCreate", "cublasLtCreate", &table->create);
  need("hipblasLtDestroy", "cublasLtDestroy", &table->destroy);
  need(nullptr, "cublasLtGetVersion", &table->nvidia_version);
  need("hipblasLtGetVersion", nullptr, &table->amd_version);
  need("hipblasLtMatmulDescCreate", "cublasLtMatmulDescCreate", &table->operation_create);
  need("hipblasLtMatmulDescDestroy", "cublasLtMatmulDescDestroy", &table->operation_destroy);
  need("hipblasLtMatmulDescSetAttribute", "cublasLtMatmulDescSetAttribute", &table->operation_set);
  need("hipblasLtMatrixLayoutCreate", "cublasLtMatrixLayoutCreate", &table->layout_create);
  need("hipblasLtMatrixLayoutDestroy", "cublasLtMatrixLayoutDestroy", &table->layout_destroy);
  need("hipblasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceCreate",
       &table->preference_create);
  need("hipblasLtMatmulPreferenceDestroy", "cublasLtMatmulPreferenceDestroy",
       &table->preference_destroy);
  need("hipblasLtMatmulPreferenceSetAttribute", "cublasLtMatmulPreferenceSetAttribute",
       &table->preference_set);
  need("hipblasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoGetHeuristic", &table->heuristic);
  need("hipblasLtMatmul", "cublasLtMatmul", &table->multiply);
  MLA_RETURN_IF_ERROR(symbols.Check(library.name));
  std::unique_ptr<ProductLibrary> made(new ProductLibrary(runtime, std::move(table), library.name));
  MLA_RETURN_IF_ERROR(made->Start());
  return made;
}

absl::Status ProductLibrary::Check(int code, const char* call) const {
  if (code == kSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(NameOf(runtime_->vendor()), ": ", call, " failed with status ", code));
}

absl::Status ProductLibrary::Start() {
  MLA_RETURN_IF_ERROR(runtime_->Bind());
  MLA_RETURN_IF_ERROR(Check(api_->create(&handle_), "create"));
  int version = 0;
  if (api_->nvidia_version != nullptr) {
    version = static_cast<int>(api_->nvidia_version());
  } else {
    MLA_RETURN_IF_ERROR(Check(api_->amd_version(handle_, &version), "version"));
  }
  absl::StrAppend(&description_, ", version ", version);
  return absl::OkStatus();
}

ProductLibrary::Entry* ProductLibrary::Known(const ProductShape& shape) {
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& e) { return e.shape == shape; });
  if (entry == entries_.end()) return nullptr;
  entry->used = ++turn_;
  return &*entry;
}

const ProductPlan* ProductLibrary::Find(const ProductShape& shape) {
  const Entry* const entry = Known(shape);
  return entry == nullptr ? nullptr : entry->plan.get();
}

void ProductLibrary::Remember(const ProductShape& shape, std::unique_ptr<ProductPlan> plan) {
  if (entries_.size() < kMostPlans) {
    entries_.push_back({shape, std::move(plan), ++turn_});
    return;
  }
  Entry& oldest = *std::min_element(entries_.begin(), entries_.end(),
                                    [](const Entry& a, const Entry& b) { return a.used < b.used; });
  if (oldest.plan != nullptr) Destroy(*oldest.plan);
  oldest = {shape, std::move(plan), ++turn_};
}

absl::Status ProductLibrary::Choose(const ProductShape& shape, const LibraryProduct& trial,
                                    Stream stream) {
  if (Known(shape) != nullptr) return absl::OkStatus();
  CallWatch::NoteDriverCall("the choice of a matrix product");
  MLA_RETURN_IF_ERROR(runtime_->Bind());
  absl::StatusOr<std::unique_ptr<ProductPlan>> plan = Plan(shape);
  absl::Status s = plan.status();
  if (s.ok()) {
    LibraryProduct product = trial;
    product.plan = plan->get();
    s = Multiply(product, stream);
    s.Update(runtime_->Synchronize(stream));
    if (!s.ok()) Destroy(**plan);
  }
  Remember(shape, s.ok() ? *std::move(plan) : nullptr);
  return s;
}

absl::StatusOr<std::unique_ptr<ProductPlan>> ProductLibrary::Plan(const ProductShape& shape) const {
  auto plan = std::make_unique<ProductPlan>();
  const auto columns = static_cast<uint64_t>(shape.columns),
             rows = static_cast<uint64_t>(shape.rows), depth = static_cast<uint64_t>(shape.depth);
  const Numbers& numbers = NumbersOf(runtime_->vendor());
  absl::Status s = Check(api_->operation_create(&plan->operation, numbers.compute_float, kFloat),
                         "the operation");
  const int32_t transposed = numbers.transposed;
  if (s.ok()) {
    s = Check(api_->operation_set(plan->operation, numbers.transposes_first, &transposed,
                                  sizeof(transposed)),
              "the operation's transpose");
  }
  const auto layout = [&](void** made, int type, uint64_t down, uint64_t across, int32_t pitch) {
    if (s.ok()) s = Check(api_->layout_create(made, type, down, across, pitch), "a layout");
  };
  layout(&plan->weights, kBf16, depth, columns, shape.depth);
  layout(&plan->rows, kBf16, depth, rows, shape.depth);
  layout(&plan->sums, kFloat, columns, rows, shape.pitch);
  if (s.ok()) s = Ask(shape, *plan);
  if (s.ok()) return plan;
  Destroy(*plan);
  return s;
}

// Asks for the algorithm that the library expects to be the fastest within the workspace.
absl::Status ProductLibrary::Ask(const ProductShape& shape, ProductPlan& plan) const {
  const Numbers& numbers = NumbersOf(runtime_->vendor());
  void* preference = nullptr;
  absl::Status s = Check(api_->preference_create(&preference), "the preference");
  const auto set = [&](int attribute, const auto& value) {
    if (!s.ok()) return;
    s = Check(api_->preference_set(preference, attribute, &value, sizeof(value)),
              "an attribute of the preference");
  };
  set(numbers.most_workspace, static_cast<uint64_t>(kWorkspaceBytes));
  if (numbers.reductions != 0) {
    set(numbers.reductions, kFixedReductions);
    for (size_t i = 0; i < numbers.alignments.size(); ++i) {
      set(numbers.alignments[i], i < 2 ? kOperandAlignment : kSumsAlignment);
    }
  }
  int found = 0;
  if (s.ok()) {
    s = Check(api_->heuristic(handle_, plan.operation, plan.weights, plan.rows, plan.sums,
                              plan.sums, preference, 1, plan.result.data(), &found),
              "the heuristic");
  }
  if (s.ok() && found < 1) {
    s = absl::UnimplementedError(absl::StrCat(
        NameOf(runtime_->vendor()), " has no algorithm for ", shape.rows, " rows, ", shape.columns,
        " columns, depth ", shape.depth, " and ", kWorkspaceBytes, " bytes of workspace"));
  }
  if (preference != nullptr) (void)api_->preference_destroy(preference);
  return s;
}

void ProductLibrary::Destroy(ProductPlan& plan) const {
  for (void** layout : {&plan.weights, &plan.rows, &plan.sums}) {
    if (*layout != nullptr) (void)api_->layout_destroy(std::exchange(*layout, nullptr));
  }
  if (plan.operation != nullptr) {
    (void)api_->operation_destroy(std::exchange(plan.operation, nullptr));
  }
}

absl::Status ProductLibrary::Multiply(const LibraryProduct& product, Stream stream) const {
  constexpr float kOne = 1.0f, kNone = 0.0f;
  CallWatch::NoteDriverCall("a matrix product");
  MLA_RETURN_IF_ERROR(runtime_->Bind());
  const ProductPlan& plan = *product.plan;
  const auto at = [](DevicePtr address) { return reinterpret_cast<void*>(address); };
  const int code = api_->multiply(
      handle_, plan.operation, &kOne, at(product.weights), plan.weights, at(product.rows),
      plan.rows, &kNone, at(product.sums), plan.sums, at(product.sums), plan.sums,
      plan.result.data(), at(product.workspace), static_cast<size_t>(kWorkspaceBytes), stream);
  multiplied_ += code == kSuccess ? 1 : 0;
  return Check(code, "a matrix product");
}

}  // namespace mla::kernels::hip
