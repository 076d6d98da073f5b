// Queries and KV rows of 8 bits on every transport. Replies equal, bit by bit, the replies to the
// same values sent as bf16.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "proto/wire/fp8/fp8_tensor.h"
#include "tests/integration/dense_model.h"
#include "tests/integration/shared_memory/shared_memory_harness.h"

namespace mla::integration {
namespace {

using client::ClientOptions;
using Transport = client::ClientOptions::Transport;

class Fp8WireTest : public ::testing::TestWithParam<Transport> {
 protected:
  struct Tensors {
    std::vector<std::byte> sent;
    std::vector<uint16_t> decoded;
  };
  struct Outputs {
    std::vector<float> o, lse;
    uint32_t messages = 0;
  };

  void SetUp() override {
    client_ = server_.Connect(Over(GetParam()));
    spec_ = SpecOf(dims_, "m");
    ASSERT_TRUE(client_->RegisterModel(spec_).ok());
    session_ = *client_->OpenSession();
  }

  std::vector<float> Random(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }
  static Tensors Decode(const wire::Fp8Tensor& tensor, std::vector<std::byte> sent) {
    std::vector<uint16_t> decoded(static_cast<size_t>(tensor.values()));
    EXPECT_EQ(sent.size(), static_cast<size_t>(tensor.bytes()));
    EXPECT_EQ(wire::DecodeFp8Tensor(tensor, sent.data(), decoded.data()).vector, -1);
    return {std::move(sent), std::move(decoded)};
  }
  Tensors Queries(uint32_t rows) {
    const int64_t vectors = int64_t{rows} * dims_.heads;
    const auto values = Random(static_cast<size_t>(vectors * dims_.row()));
    return Decode({vectors, {dims_.lora, dims_.rope}},
                  client::EncodeFp8Queries(spec_, v1::PROFILE_ABSORBED, values));
  }
  Tensors Rows(uint32_t rows) {
    const auto values = Random(static_cast<size_t>(rows) * dims_.row());
    return Decode({rows, {dims_.lora, dims_.rope}}, client::EncodeFp8Rows(spec_, values));
  }

  // Runs one step of a new sequence.
  absl::StatusOr<Outputs> Step(uint32_t rows, v1::DType q_dtype, const void* q,
                               v1::DType kv_row_dtype, const void* kv) {
    client::Sequence sequence = *client_->OpenSequence("m");
    auto step = session_->Begin("m", {{&sequence, rows}});
    if (!step.ok()) return step.status();
    Outputs got;
    got.o.resize(size_t{rows} * dims_.heads * dims_.lora);
    got.lse.resize(size_t{rows} * dims_.heads);
    client::AttendCall call;
    call.row_count = rows;
    call.num_heads = static_cast<uint32_t>(dims_.heads);
    call.profile = v1::PROFILE_ABSORBED;
    call.q_dtype = q_dtype;
    call.kv_row_dtype = kv_row_dtype;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = kv;
    call.q = q;
    call.o = got.o.data();
    call.lse = got.lse.data();
    const auto times = (*step)->Attend(call);
    if (!times.ok()) return times.status();
    got.messages = times->messages;
    return got;
  }

  void ExpectEqual(const absl::StatusOr<Outputs>& got, const absl::StatusOr<Outputs>& want) {
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_TRUE(want.ok()) << want.status();
    EXPECT_EQ(got->o, want->o);
    EXPECT_EQ(got->lse, want->lse);
  }

  // Messages are small, so that a call of some hundred rows is cut.
  const TestServer server_{[](server::Config& config) { config.wire.message_bytes = 65536; }};
  const Dims dims_;
  v1::ModelSpec spec_;
  std::mt19937_64 random_{11};
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
};

TEST_P(Fp8WireTest, AnswersAreThoseOfTheValuesThatWereSent) {
  const Tensors q = Queries(5), kv = Rows(5);
  const auto want = Step(5, v1::DTYPE_BF16, q.decoded.data(), v1::DTYPE_BF16, kv.decoded.data());
  ExpectEqual(Step(5, v1::DTYPE_F8_E4M3, q.sent.data(), v1::DTYPE_F8_E4M3, kv.sent.data()), want);
  ExpectEqual(Step(5, v1::DTYPE_BF16, q.decoded.data(), v1::DTYPE_F8_E4M3, kv.sent.data()), want);
  ExpectEqual(Step(5, v1::DTYPE_F8_E4M3, q.sent.data(), v1::DTYPE_UNSPECIFIED, kv.decoded.data()),
              want);
}

TEST_P(Fp8WireTest, RowsBesideQueriesOfFp32AreDecodedToFp32) {
  const Tensors kv = Rows(3);
  const std::vector<float> q = Random(size_t{3} * dims_.heads * dims_.row());
  std::vector<float> rows(static_cast<size_t>(3 * dims_.row()));
  wire::DecodeFp8Tensor({3, {dims_.lora, dims_.rope}}, kv.sent.data(), rows.data());
  ExpectEqual(Step(3, v1::DTYPE_F32, q.data(), v1::DTYPE_F8_E4M3, kv.sent.data()),
              Step(3, v1::DTYPE_F32, q.data(), v1::DTYPE_F32, rows.data()));
}

TEST_P(Fp8WireTest, PiecesOfACallHaveTheirOwnScales) {
  constexpr uint32_t kRows = 500;
  const Tensors q = Queries(kRows), kv = Rows(kRows);
  const auto got = Step(kRows, v1::DTYPE_F8_E4M3, q.sent.data(), v1::DTYPE_F8_E4M3, kv.sent.data());
  ExpectEqual(got,
              Step(kRows, v1::DTYPE_BF16, q.decoded.data(), v1::DTYPE_BF16, kv.decoded.data()));
  ASSERT_TRUE(got.ok());
  EXPECT_GE(got->messages, 2u);
}

TEST_P(Fp8WireTest, ScalesThatAreNoneAreRefusedByName) {
  Tensors q = Queries(2), kv = Rows(2);
  const auto refused = [&](Tensors* tensor, int64_t values, int64_t scale, float value) {
    std::vector<std::byte> good = tensor->sent;
    std::memcpy(tensor->sent.data() + values + scale * 4, &value, sizeof(value));
    const absl::Status status =
        Step(2, v1::DTYPE_F8_E4M3, q.sent.data(), v1::DTYPE_F8_E4M3, kv.sent.data()).status();
    tensor->sent = std::move(good);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    const auto detail = client::DetailOf(status);
    return detail.has_value() ? detail->reason() + ": " + detail->got() : std::string();
  };
  const int64_t q_values = int64_t{2} * dims_.heads * dims_.row();
  EXPECT_EQ(refused(&kv, 2 * dims_.row(), 3, 0.0f), "bad_scale: kv row 1, scale 1: 0");
  EXPECT_EQ(refused(&kv, 2 * dims_.row(), 0, -1.0f), "bad_scale: kv row 0, scale 0: -1");
  EXPECT_EQ(refused(&q, q_values, 2 * dims_.heads + 2, NAN),
            "bad_scale: q row 1, head 1, scale 0: nan");
  EXPECT_EQ(refused(&q, q_values, 1, INFINITY), "bad_scale: q row 0, head 0, scale 1: inf");
  EXPECT_TRUE(Step(2, v1::DTYPE_F8_E4M3, q.sent.data(), v1::DTYPE_F8_E4M3, kv.sent.data()).ok())
      << "the stream goes on";
}

TEST_P(Fp8WireTest, ValuesThatAreNoNumbersReachTheResults) {
  Tensors q = Queries(1), kv = Rows(1);
  kv.sent[3] = std::byte{0x7f};
  const auto got = Step(1, v1::DTYPE_F8_E4M3, q.sent.data(), v1::DTYPE_F8_E4M3, kv.sent.data());
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(std::isnan(got->o[0]));
}

INSTANTIATE_TEST_SUITE_P(Transports, Fp8WireTest,
                         ::testing::Values(Transport::kInline, Transport::kShm, Transport::kRing,
                                           Transport::kUcx),
                         TransportName);

}  // namespace
}  // namespace mla::integration
