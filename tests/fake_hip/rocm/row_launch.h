// A launch with tensors of one row, which may lie in pinned memory.
#ifndef MLA_TESTS_FAKE_HIP_ROCM_ROW_LAUNCH_H_
#define MLA_TESTS_FAKE_HIP_ROCM_ROW_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"

namespace mla::kernels::hip {

inline constexpr int64_t kRowBytes = 1152;
inline constexpr size_t kRowElements = 576;

// Stores a row, or compares it with the stored one. It must live until its Wait returns.
class RowLaunch {
 public:
  // Stores the row if `differs` is null, else compares.
  absl::Status Submit(HipBackend& backend, int32_t slot, const Bf16* row, int32_t position,
                      int32_t* differs = nullptr) {
    layout_ = LaunchLayout(backend, slot);
    layout_.ExpectOutputs(output_bytes_);
    const auto kv = layout_.InputReadOnce(row, kRowBytes);
    if (!kv.ok()) return kv.status();
    record_ = {*kv, DType::kBf16, 576, 0, layer_offset_, 1152, 64, position, 1, 576};
    if (differs != nullptr) {
      const auto out = layout_.Output(differs, sizeof(*differs));
      if (!out.ok()) return out.status();
      record_.differs = static_cast<int32_t*>(*out);
    }
    launch_.inputs = layout_.inputs();
    launch_.outputs = layout_.outputs();
    launch_.page_tables = {&page_, 1};
    launch_.table_changes = {&table_, 1};
    launch_.appends = {&record_, 1};
    return backend.Submit(slot, launch_);
  }
  void set_output_bytes(int64_t bytes) { output_bytes_ = bytes; }
  void set_layer_offset(int64_t bytes) { layer_offset_ = bytes; }
  void set_words(const WordValue& ready, int64_t limit_ns, const WordValue& done) {
    launch_.gate = {ready, limit_ns};
    done_ = done;
    launch_.signals = {&done_, 1};
  }
  // Call it after set_words; they must live until Wait has returned.
  void set_other_words(std::span<const WordValue> words) { launch_.gate.others = words; }
  bool in_place() const {
    return layout_.inputs()[0].in_place() &&
           (layout_.outputs().empty() || layout_.outputs()[0].in_place());
  }

 private:
  uint32_t page_ = 0;
  int64_t output_bytes_ = sizeof(int32_t);
  int64_t layer_offset_ = 0;
  const TableRange table_{0, 1};
  WordValue done_;
  AppendRecord record_{};
  LaunchLayout layout_;
  Launch launch_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_TESTS_FAKE_HIP_ROCM_ROW_LAUNCH_H_
