#include "kernels/hip/products/product_library.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kernels/hip/self_test/projected.h"
#include "kernels/hip/self_test/self_test.h"

namespace mla::kernels::hip {

absl::Status SelfTestProducts(AttentionBackend& backend, const ProductLibrary& products,
                              SelfTestRun& run) {
  return run.Do("products", [&]() -> absl::Status {
    // The weights of both products run once when they are loaded, with any results.
    constexpr int64_t kLaunches = 2, kTrials = 2;
    const int64_t before = products.multiplied();
    absl::Status s = self_test::CheckManyRows(backend);
    if (!s.ok() || products.multiplied() == before + kLaunches + kTrials) return s;
    return absl::UnavailableError(absl::StrCat("the library multiplied ",
                                               products.multiplied() - before, " times, want ",
                                               kLaunches + kTrials));
  });
}

}  // namespace mla::kernels::hip
