// Rows of the tensors of an AttendCall: where they lie, and how some of them are taken out and put
// back. Steps whose rows belong to several servers use this. Threading: any thread.
#ifndef MLA_CLIENT_CPP_CLUSTER_ROW_TENSORS_H_
#define MLA_CLIENT_CPP_CLUSTER_ROW_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "client/cpp/session.h"
#include "mla/v1/model.pb.h"

namespace mla::client {

// Bytes of a row in each part of a tensor: tensors of 8-bit floats have the codes of all rows, then
// the scales of all rows; others have one part.
struct RowForm {
  uint64_t bytes = 0;
  uint64_t scale_bytes = 0;
};

struct CallForms {
  RowForm kv, q, index_inputs;
  uint64_t o = 0, lse = 0, chosen = 0;  // bytes of a row
};

CallForms FormsOf(const AttendCall& call, const v1::ModelSpec& model);

// Returns true if the ascending places follow each other without a gap.
bool AreTogether(std::span<const uint32_t> places);

// Returns rows `places` of a tensor of `total` rows, in the same form. If they lie together in one
// part, they are not copied and `copy` stays empty. Null for a null tensor.
const void* TakeRows(const RowForm& form, const void* tensor, uint64_t total,
                     std::span<const uint32_t> places, std::vector<std::byte>* copy);

// Copies consecutive rows to `places` of a tensor.
void PutRows(uint64_t row_bytes, const std::byte* rows, std::span<const uint32_t> places,
             void* tensor);
// Fills rows with a pattern of `element` bytes, as far as they go.
void FillRows(uint64_t row_bytes, std::span<const std::byte> element,
              std::span<const uint32_t> places, void* tensor);

// Returns the index lists of some rows of a call; they point into `entries` and `begins` if they
// are copied.
IndexLists TakeLists(const IndexLists& lists, std::span<const uint32_t> places,
                     std::vector<int32_t>* entries, std::vector<int32_t>* begins);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_ROW_TENSORS_H_
