// Random W_UQ and W_O of a model of PROJECTED, chunk by chunk, for `mlactl bench`.
#ifndef MLA_CLIENT_MLACTL_BENCH_PROJECTED_CHUNKS_H_
#define MLA_CLIENT_MLACTL_BENCH_PROJECTED_CHUNKS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "client/cpp/client.h"
#include "mla/v1/model.pb.h"

namespace mla::mlactl {

// Makes the chunks of all layers: in each layer W_UQ of all heads, and then W_O. They are e4m3
// codes with the scales of their blocks if the model's `projected_dtype` is DTYPE_F8_E4M3, else
// bf16. All chunks of one kind have the same random weights. Threading: one thread.
class ProjectedChunks final {
 public:
  // `most_bytes` is the bound of a chunk, or one head if that is more. The model must have
  // q_lora_rank and hidden_size.
  ProjectedChunks(const v1::ModelSpec& model, uint64_t most_bytes, uint64_t seed);
  // Returns the next chunk; nullopt after the last one.
  std::optional<client::WeightsChunk> Next();
  // Returns the part that is done, 0..1.
  double done() const;

 private:
  bool fp8() const { return model_.projected_dtype() == v1::DTYPE_F8_E4M3; }
  // Returns the elements of one head, and the number that a sum of its products has.
  uint64_t HeadElements() const;
  uint64_t Depth() const;
  // Returns the number of scales of heads [head_, head_ + heads).
  uint64_t Blocks(uint32_t heads) const;
  // Fills in the weights of as many heads as a chunk of this part may have.
  void Draw();

  const v1::ModelSpec model_;
  const uint64_t most_bytes_, seed_;
  bool outputs_ = false;  // the part that comes next
  uint32_t layer_ = 0, head_ = 0;
  uint32_t heads_a_chunk_ = 0;
  std::string drawn_;  // their elements
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_PROJECTED_CHUNKS_H_
