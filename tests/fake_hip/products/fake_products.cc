// The entry points of hipBLASLt and cuBLASLt that the backend uses, on top of the fake HIP runtime
// in the same library. Products are made on the fake's streams, in order, with sums in fp32. Faults
// are named by hipBLASLt's calls. In addition it checks the libraries' own rules: an algorithm is
// used for the shape that it was found for, with as much workspace as it needs, with operands as
// aligned as promised and within one allocation; and objects are not used after their end.
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "tests/fake_hip/runtime/fake_state.h"

extern "C" int fake_cuda_has_context();

namespace mla::fake_hip {
namespace {

constexpr int kInvalid = 7;                // CUBLAS_STATUS_INVALID_VALUE
constexpr int kNotInitialized = 1;         // CUBLAS_STATUS_NOT_INITIALIZED
constexpr int kUnsupported = 15;           // CUBLAS_STATUS_NOT_SUPPORTED
constexpr int kFloat = 0, kBf16Type = 14;  // of both vendors
constexpr uint32_t kOutputReductions = 4;  // CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE

struct Numbers {
  int compute_float, transposed, transposes_first, most_workspace, reductions, first_alignment;
};
constexpr Numbers kCuda{68, 1, 3, 1, 3, 5};
constexpr Numbers kHip{2, 112, 0, 1, -1, -1};

struct Operation {
  bool transposes_first = false;
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t pitch;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t reductions = 7;
  std::array<uint32_t, 4> alignments{256, 256, 256, 256};
};
struct Algorithm {
  uint64_t shape, workspace;
  std::array<uint16_t, 4> alignments;
};
static_assert(sizeof(Algorithm) <= 24);  // hipblasLtMatmulAlgo_t

struct Operands {
  const Layout *a, *b, *c, *d;
};

// Returns 0 for layouts that do not match.
uint64_t ShapeOf(const Operands& of) {
  const Layout &a = *of.a, &b = *of.b, &c = *of.c, &d = *of.d;
  const bool types = a.type == kBf16Type && b.type == kBf16Type && c.type == kFloat;
  const bool dims = a.rows == b.rows && d.rows == a.columns && d.columns == b.columns;
  const bool same =
      c.type == d.type && c.rows == d.rows && c.columns == d.columns && c.pitch == d.pitch;
  const auto wide = [](const Layout& l) { return l.pitch >= static_cast<int64_t>(l.rows); };
  if (!types || !dims || !same || !wide(a) || !wide(b) || !wide(d)) return 0;
  uint64_t mixed = 1;
  for (const uint64_t n : {a.rows, a.columns, b.columns, static_cast<uint64_t>(a.pitch),
                           static_cast<uint64_t>(b.pitch), static_cast<uint64_t>(d.pitch)}) {
    mixed = (mixed ^ n) * 0x9e3779b97f4a7c15u;
  }
  return mixed | 1;
}

// Returns true if the device's memory has a matrix there.
bool Holds(const void* at, const Layout& layout, int64_t element) {
  const auto* const begin = static_cast<const std::byte*>(at);
  const int64_t bytes = ((static_cast<int64_t>(layout.columns) - 1) * layout.pitch +
                         static_cast<int64_t>(layout.rows)) *
                        element;
  for (const auto& [memory, size] : State().device_memory) {
    const auto* const first = static_cast<const std::byte*>(memory);
    if (begin >= first && begin + bytes <= first + size) return true;
  }
  return false;
}

float Widened(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

struct Product {
  const uint16_t *a, *b;
  float* d;
  Layout of_a, of_b, of_d;

  void Run(bool wrong) const {
    for (uint64_t row = 0; row < of_b.columns; ++row) {
      for (uint64_t column = 0; column < of_a.columns; ++column) {
        const uint16_t* const x = b + static_cast<int64_t>(row) * of_b.pitch;
        const uint16_t* const w = a + static_cast<int64_t>(column) * of_a.pitch;
        float sum = 0.0f;
        for (uint64_t k = wrong ? 1 : 0; k < of_a.rows; ++k) sum += Widened(x[k]) * Widened(w[k]);
        d[static_cast<int64_t>(row) * of_d.pitch + static_cast<int64_t>(column)] = sum;
      }
    }
  }
};

int Refuse(const char* why) {
  std::fprintf(stderr, "fake product: %s\n", why);
  return kInvalid;
}

template <class Object>
int Destroy(void* object) {
  --State().control.product_objects;
  delete static_cast<Object*>(object);
  return 0;
}
template <class Object>
int Create(void** made, Object object) {
  ++State().control.product_objects;
  *made = new Object(object);
  return 0;
}

int CreateOperation(const Numbers& numbers, void** made, int compute, int scale) {
  FAKE_ENTER("hipblasLtMatmulDescCreate");
  if (compute != numbers.compute_float || scale != kFloat) return Refuse("a type");
  return Create(made, Operation{});
}
int SetOperation(const Numbers& numbers, void* operation, int attribute, const void* value,
                 size_t bytes) {
  FAKE_ENTER("hipblasLtMatmulDescSetAttribute");
  int32_t transpose = 0;
  if (attribute != numbers.transposes_first || bytes != sizeof(transpose)) {
    return Refuse("an attribute of the operation");
  }
  std::memcpy(&transpose, value, sizeof(transpose));
  static_cast<Operation*>(operation)->transposes_first = transpose == numbers.transposed;
  return 0;
}
int CreateLayout(void** made, int type, uint64_t rows, uint64_t columns, int64_t pitch) {
  FAKE_ENTER("hipblasLtMatrixLayoutCreate");
  return Create(made, Layout{type, rows, columns, pitch});
}
int CreatePreference(void** made) {
  FAKE_ENTER("hipblasLtMatmulPreferenceCreate");
  return Create(made, Preference{});
}
int SetPreference(const Numbers& numbers, void* of, int attribute, const void* value,
                  size_t bytes) {
  FAKE_ENTER("hipblasLtMatmulPreferenceSetAttribute");
  auto& preference = *static_cast<Preference*>(of);
  if (attribute == numbers.most_workspace && bytes == sizeof(preference.workspace)) {
    std::memcpy(&preference.workspace, value, bytes);
    return 0;
  }
  if (numbers.reductions < 0 || bytes != sizeof(uint32_t)) return Refuse("a preference");
  uint32_t number = 0;
  std::memcpy(&number, value, bytes);
  const int operand = attribute - numbers.first_alignment;
  if (attribute == numbers.reductions) {
    preference.reductions = number;
  } else if (operand >= 0 && operand < 4) {
    preference.alignments[static_cast<size_t>(operand)] = number;
  } else {
    return Refuse("a preference");
  }
  return 0;
}

int Find(const Numbers& numbers, const Operation& operation, const Operands& of,
         const Preference& preference, int wanted, void* results, int* found) {
  FAKE_ENTER("hipblasLtMatmulAlgoGetHeuristic");
  Control& control = State().control;
  const uint64_t shape = ShapeOf(of);
  if (shape == 0 || !operation.transposes_first || wanted != 1) return Refuse("the heuristic");
  ++control.product_choices;
  *found = 0;
  const bool fixed = numbers.reductions < 0 || (preference.reductions & kOutputReductions) == 0;
  const auto needed = static_cast<uint64_t>(control.product_workspace);
  if (!control.finds_products || !fixed || needed > preference.workspace) return 0;
  Algorithm algorithm{shape, needed, {}};
  for (size_t i = 0; i < 4; ++i) {
    algorithm.alignments[i] =
        numbers.reductions < 0 ? 2 : static_cast<uint16_t>(preference.alignments[i]);
  }
  std::memset(results, 0, 56);
  std::memcpy(results, &algorithm, sizeof(algorithm));
  *found = 1;
  return 0;
}

int Multiply(const Operation& operation, const float* alpha, const void* a, const void* b,
             const float* beta, const void* c, void* d, const Operands& of, const void* found,
             const void* workspace, size_t workspace_bytes, Stream* stream) {
  FAKE_ENTER("hipblasLtMatmul");
  Control& control = State().control;
  Algorithm algorithm;
  std::memcpy(&algorithm, found, sizeof(algorithm));
  if (algorithm.shape != ShapeOf(of) || !operation.transposes_first) {
    return Refuse("an algorithm for another shape");
  }
  if (*alpha != 1.0f || *beta != 0.0f || c != d) return Refuse("factors");
  const Layout room{kFloat, workspace_bytes, 1, static_cast<int64_t>(workspace_bytes)};
  if (workspace_bytes < algorithm.workspace || !Holds(workspace, room, 1)) {
    return kUnsupported;
  }
  const void* const operands[] = {a, b, c, d};
  for (size_t i = 0; i < 4; ++i) {
    if (reinterpret_cast<uintptr_t>(operands[i]) % algorithm.alignments[i] != 0) {
      return Refuse("an alignment");
    }
  }
  if (!Holds(a, *of.a, 2) || !Holds(b, *of.b, 2) || !Holds(d, *of.d, 4)) {
    return Refuse("an operand outside of memory");
  }
  ++control.products;
  const Product product{static_cast<const uint16_t*>(a),
                        static_cast<const uint16_t*>(b),
                        static_cast<float*>(d),
                        *of.a,
                        *of.b,
                        *of.d};
  stream->AddWork({[product, wrong = control.wrong_products] { product.Run(wrong); }, true, false});
  return 0;
}

Operands OperandsOf(void* a, void* b, void* c, void* d) {
  return {static_cast<Layout*>(a), static_cast<Layout*>(b), static_cast<Layout*>(c),
          static_cast<Layout*>(d)};
}

}  // namespace
}  // namespace mla::fake_hip

namespace fake = mla::fake_hip;
using mla::fake_hip::Enter;
using mla::fake_hip::State;

#define NEED_CONTEXT() \
  if (fake_cuda_has_context() == 0) return fake::kNotInitialized

extern "C" {

int hipblasLtCreate(void** handle) {
  FAKE_ENTER("hipblasLtCreate");
  return fake::Create(handle, 0);
}
int hipblasLtDestroy(void* handle) { return fake::Destroy<int>(handle); }
int hipblasLtGetVersion(void*, int* version) {
  *version = 100202;
  return 0;
}
int hipblasLtMatmulDescCreate(void** made, int compute, int scale) {
  return fake::CreateOperation(fake::kHip, made, compute, scale);
}
int hipblasLtMatmulDescDestroy(void* of) { return fake::Destroy<fake::Operation>(of); }
int hipblasLtMatmulDescSetAttribute(void* of, int attribute, const void* value, size_t bytes) {
  return fake::SetOperation(fake::kHip, of, attribute, value, bytes);
}
int hipblasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns,
                                int64_t pitch) {
  return fake::CreateLayout(made, type, rows, columns, pitch);
}
int hipblasLtMatrixLayoutDestroy(void* of) { return fake::Destroy<fake::Layout>(of); }
int hipblasLtMatmulPreferenceCreate(void** made) { return fake::CreatePreference(made); }
int hipblasLtMatmulPreferenceDestroy(void* of) { return fake::Destroy<fake::Preference>(of); }
int hipblasLtMatmulPreferenceSetAttribute(void* of, int attribute, const void* value,
                                          size_t bytes) {
  return fake::SetPreference(fake::kHip, of, attribute, value, bytes);
}
int hipblasLtMatmulAlgoGetHeuristic(void*, void* operation, void* a, void* b, void* c, void* d,
                                    void* preference, int wanted, void* results, int* found) {
  return fake::Find(fake::kHip, *static_cast<fake::Operation*>(operation),
                    fake::OperandsOf(a, b, c, d), *static_cast<fake::Preference*>(preference),
                    wanted, results, found);
}
int hipblasLtMatmul(void*, void* operation, const void* alpha, const void* a, void* a_layout,
                    const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                    void* d, void* d_layout, const void* algorithm, void* workspace,
                    size_t workspace_bytes, fake::Stream* stream) {
  return fake::Multiply(*static_cast<fake::Operation*>(operation), static_cast<const float*>(alpha),
                        a, b, static_cast<const float*>(beta), c, d,
                        fake::OperandsOf(a_layout, b_layout, c_layout, d_layout), algorithm,
                        workspace, workspace_bytes, stream);
}

int cublasLtCreate(void** handle) {
  NEED_CONTEXT();
  return hipblasLtCreate(handle);
}
int cublasLtDestroy(void* handle) { return hipblasLtDestroy(handle); }
size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(void** made, int compute, int scale) {
  return fake::CreateOperation(fake::kCuda, made, compute, scale);
}
int cublasLtMatmulDescDestroy(void* of) { return hipblasLtMatmulDescDestroy(of); }
int cublasLtMatmulDescSetAttribute(void* of, int attribute, const void* value, size_t bytes) {
  return fake::SetOperation(fake::kCuda, of, attribute, value, bytes);
}
int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns,
                               int64_t pitch) {
  return hipblasLtMatrixLayoutCreate(made, type, rows, columns, pitch);
}
int cublasLtMatrixLayoutDestroy(void* of) { return hipblasLtMatrixLayoutDestroy(of); }
int cublasLtMatmulPreferenceCreate(void** made) { return hipblasLtMatmulPreferenceCreate(made); }
int cublasLtMatmulPreferenceDestroy(void* of) { return hipblasLtMatmulPreferenceDestroy(of); }
int cublasLtMatmulPreferenceSetAttribute(void* of, int attribute, const void* value, size_t bytes) {
  return fake::SetPreference(fake::kCuda, of, attribute, value, bytes);
}
int cublasLtMatmulAlgoGetHeuristic(void*, void* operation, void* a, void* b, void* c, void* d,
                                   void* preference, int wanted, void* results, int* found) {
  NEED_CONTEXT();
  return fake::Find(fake::kCuda, *static_cast<fake::Operation*>(operation),
                    fake::OperandsOf(a, b, c, d), *static_cast<fake::Preference*>(preference),
                    wanted, results, found);
}
int cublasLtMatmul(void* handle, void* operation, const void* alpha, const void* a, void* a_layout,
                   const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                   void* d, void* d_layout, const void* algorithm, void* workspace,
                   size_t workspace_bytes, fake::Stream* stream) {
  NEED_CONTEXT();
  return hipblasLtMatmul(handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d,
                         d_layout, algorithm, workspace, workspace_bytes, stream);
}

}  // extern "C"
