// Places the tensors of one Attend in one piece of memory: the contract's rule for regions and
// rings, which the server also follows in memory of its own.
#ifndef MLA_PROTO_WIRE_ATTEND_LAYOUT_H_
#define MLA_PROTO_WIRE_ATTEND_LAYOUT_H_

#include <cstdint>

#include "proto/wire/ring_layout.h"

namespace mla::wire {

// Places tensors one after the other. Each begins at the first aligned offset after its
// predecessor; an empty one takes no bytes.
class TensorRow {
 public:
  // Returns the offset of the next tensor.
  constexpr uint64_t Append(uint64_t bytes) {
    const uint64_t offset = AlignShared(bytes_);
    if (bytes > 0) bytes_ = offset + bytes;
    return offset;
  }
  // Returns all bytes so far.
  constexpr uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_ = 0;
};

// The offsets of the inputs kv, q and lists from the first input, and of the outputs o, lse and
// lists_out from the first output. kv and o begin at 0.
struct AttendLayout {
  // The bytes of each tensor.
  struct Sizes {
    uint64_t kv = 0, q = 0, lists = 0;
    uint64_t o = 0, lse = 0, lists_out = 0;
  };
  constexpr explicit AttendLayout(const Sizes& sizes) {
    inputs.Append(sizes.kv);
    q = inputs.Append(sizes.q);
    lists = inputs.Append(sizes.lists);
    outputs.Append(sizes.o);
    lse = outputs.Append(sizes.lse);
    lists_out = outputs.Append(sizes.lists_out);
  }

  uint64_t q = 0, lists = 0;
  uint64_t lse = 0, lists_out = 0;
  TensorRow inputs, outputs;
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_ATTEND_LAYOUT_H_
