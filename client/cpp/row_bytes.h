// Returns the bytes of a row in each tensor of an AttendCall, as the row is sent. Threading: any
// thread.
#ifndef MLA_CLIENT_CPP_ROW_BYTES_H_
#define MLA_CLIENT_CPP_ROW_BYTES_H_

#include <cstdint>

#include "client/cpp/session.h"
#include "mla/v1/model.pb.h"

namespace mla::client {

// The bytes of a row in each tensor; 0 if the call does not have the tensor.
struct RowBytes {
  uint64_t kv = 0, q = 0, lists = 0, o = 0, lse = 0, chosen = 0;
  uint64_t in() const { return kv + q + lists; }
  uint64_t out() const { return o + lse + chosen; }
};

// `lists` counts the indexer's inputs. Index lists differ by row, so they are not counted.
RowBytes RowBytesOf(const AttendCall& call, const v1::ModelSpec& model);
// Return true if the rows, or the queries, are sent as 8-bit floats and scales.
bool HasFp8Kv(const AttendCall& call);
bool HasFp8Queries(const AttendCall& call);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_ROW_BYTES_H_
