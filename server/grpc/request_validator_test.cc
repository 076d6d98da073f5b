// Bad-input table: every field of every message with every hostile value. Values inside the
// documented range are accepted, and all others are refused under the field's own path.
#include "server/grpc/request_validator.h"
#include "base/error.h"
#include "server/grpc/weights_chunk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"

namespace mla::server {
namespace {

using scheduler::Limits;

constexpr uint64_t kValues[] = {0,
                                1,
                                2,
                                (uint64_t{1} << 31) - 1,
                                uint64_t{1} << 31,
                                (uint64_t{1} << 32) - 1,
                                (uint64_t{1} << 63) - 1,
                                uint64_t{1} << 63,
                                std::numeric_limits<uint64_t>::max()};

// One field of one message: how to set it and which values must pass.
template <typename Message>
struct Row {
  const char* field;  // as a refusal must name it
  uint64_t type_max;  // values above it cannot be put on the wire for this field
  uint64_t low, high;
  std::function<void(Message*, uint64_t)> set;
};

constexpr uint64_t kMax32 = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kMax64 = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// Runs the table; returns the number of cases.
template <typename Message>
int RunTable(const Message& good, const std::vector<Row<Message>>& rows,
             const std::function<absl::Status(const Message&)>& parse) {
  EXPECT_EQ(parse(good), absl::OkStatus());
  int cases = 0;
  for (const Row<Message>& row : rows) {
    // Tries the bounds and the values next to them, because a mistaken bound is mostly off by one.
    std::set<uint64_t> values(std::begin(kValues), std::end(kValues));
    values.insert({row.low, row.high});
    if (row.low > 0) values.insert(row.low - 1);
    if (row.high < kMax64) values.insert(row.high + 1);
    for (const uint64_t value : values) {
      if (value > row.type_max) continue;
      ++cases;
      Message message = good;
      row.set(&message, value);
      const absl::Status status = parse(message);
      const bool fine = value >= row.low && value <= row.high;
      EXPECT_EQ(status.ok(), fine) << row.field << " = " << value << ": " << status;
      if (fine) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row.field << " = " << value;
      EXPECT_EQ(DetailOf(status).field, row.field) << value;
      EXPECT_FALSE(DetailOf(status).limit.empty()) << row.field;
      EXPECT_NE(DetailOf(status).got.find(absl::StrCat(value)), std::string::npos)
          << row.field << DetailOf(status).got;
      EXPECT_FALSE(DetailOf(status).reason.empty()) << row.field;
    }
  }
  return cases;
}

scheduler::ModelSpec Model() {
  scheduler::ModelSpec model;
  model.id = "m";
  model.geometry = {4, 32, 8, 16, 16};
  model.layers = 2;
  model.softmax_scale = 0.5;
  model.page_size = 16;
  return model;
}

TEST(RequestValidatorTest, BeginStep) {
  v1::BeginStep good;
  good.set_model_id("m");
  good.add_sequences()->set_rows(1);
  const Limits limits;
  using M = v1::BeginStep;
  const std::vector<Row<M>> rows = {
      {"begin_step.participants", kMax32, 0, 64,
       [](M* m, uint64_t v) { m->set_participants(static_cast<uint32_t>(v)); }},
      {"begin_step.lease_ms", kMax32, 0, 60000,
       [](M* m, uint64_t v) { m->set_lease_ms(static_cast<uint32_t>(v)); }},
      {"begin_step.step_id", kMax64, 0, kMax64, [](M* m, uint64_t v) { m->set_step_id(v); }},
      {"begin_step.sequences[0].sequence_id", kMax64, 0, kMax64,
       [](M* m, uint64_t v) { m->mutable_sequences(0)->set_sequence_id(v); }},
      {"begin_step.sequences[0].epoch", kMax64, 0, kMax64,
       [](M* m, uint64_t v) { m->mutable_sequences(0)->set_epoch(v); }},
      {"begin_step.sequences[0].start_position", kMax64, 0, 163840,
       [](M* m, uint64_t v) { m->mutable_sequences(0)->set_start_position(v); }},
      {"begin_step.sequences[0].rows", kMax32, 1, 8192,
       [](M* m, uint64_t v) { m->mutable_sequences(0)->set_rows(static_cast<uint32_t>(v)); }},
  };
  const int cases = RunTable<M>(good, rows, [&](const M& m) {
    scheduler::BeginStepArgs args;
    int32_t total = 0;
    return ParseBeginStep(m, limits, &args, &total);
  });
  EXPECT_GT(cases, 40);
}

TEST(RequestValidatorTest, BeginStepAsAWhole) {
  const Limits limits;
  scheduler::BeginStepArgs args;
  int32_t total = 0;
  v1::BeginStep step;
  step.set_model_id("m");
  EXPECT_EQ(DetailOf(ParseBeginStep(step, limits, &args, &total)).field, "begin_step.sequences");
  // Each is allowed, together they are too many; the sum must not overflow either.
  step.add_sequences()->set_rows(8192);
  step.add_sequences()->set_rows(8192);
  EXPECT_EQ(DetailOf(ParseBeginStep(step, limits, &args, &total)).got, "16384");
  step.clear_sequences();
  for (int i = 0; i < 513; ++i) step.add_sequences()->set_rows(1);
  EXPECT_EQ(DetailOf(ParseBeginStep(step, limits, &args, &total)).got, "513");
  step.mutable_sequences()->DeleteSubrange(512, 1);
  ASSERT_TRUE(ParseBeginStep(step, limits, &args, &total).ok());
  EXPECT_EQ(total, 512);
  EXPECT_EQ(args.participants, 1);
}

TEST(RequestValidatorTest, Attend) {
  v1::Attend good;
  good.set_row_begin(1);
  good.set_row_count(1);
  good.set_head_offset(1);
  good.set_num_heads(1);
  good.set_profile(v1::PROFILE_ABSORBED);
  using M = v1::Attend;
  // The payload size follows from the message, so that only the field under test is wrong.
  const auto parse = [](const M& m) {
    const uint64_t wide = uint64_t{m.row_count()} * m.num_heads() * 40 * 2;
    scheduler::AttendArgs args;
    AttendSizes sizes;
    return ParseAttend(m, Model(), 4, static_cast<int64_t>(wide & 0xffffff), 1 << 20, &args,
                       &sizes);
  };
  const std::vector<Row<M>> rows = {
      {"attend.step_id", kMax64, 0, kMax64, [](M* m, uint64_t v) { m->set_step_id(v); }},
      {"attend.layer", kMax32, 0, 1,
       [](M* m, uint64_t v) { m->set_layer(static_cast<uint32_t>(v)); }},
      {"attend.row_count", kMax32, 1, 3,
       [](M* m, uint64_t v) { m->set_row_count(static_cast<uint32_t>(v)); }},
      {"attend.num_heads", kMax32, 1, 3,
       [](M* m, uint64_t v) { m->set_num_heads(static_cast<uint32_t>(v)); }},
      {"attend.timeout_us", kMax32, 0, kMax32,
       [](M* m, uint64_t v) { m->set_timeout_us(static_cast<uint32_t>(v)); }},
      {"attend.row_begin", kMax32, 0, 3,
       [](M* m, uint64_t v) { m->set_row_begin(static_cast<uint32_t>(v)); }},
      {"attend.head_offset", kMax32, 0, 3,
       [](M* m, uint64_t v) { m->set_head_offset(static_cast<uint32_t>(v)); }},
  };
  EXPECT_GT(RunTable<M>(good, rows, parse), 40);
  for (const int value : {-1, 3, 4, 5, 15, 2147483647, std::numeric_limits<int>::min()}) {
    for (const char* field : {"attend.q_dtype", "attend.o_dtype", "attend.profile"}) {
      M bad = good;
      if (value == 3 && std::string(field) == "attend.q_dtype") continue;  // F8_E4M3
      if (std::string(field) == "attend.q_dtype") bad.set_q_dtype(static_cast<v1::DType>(value));
      if (std::string(field) == "attend.o_dtype") bad.set_o_dtype(static_cast<v1::DType>(value));
      if (std::string(field) == "attend.profile") {
        if (value == 3) continue;  // APPEND_ONLY
        if (value == 4) continue;  // PROJECTED, which the model does not have
        bad.set_profile(static_cast<v1::Profile>(value));
      }
      EXPECT_EQ(parse(bad).code(), absl::StatusCode::kInvalidArgument) << field << value;
      EXPECT_EQ(DetailOf(parse(bad)).field, field);
    }
  }
}

TEST(RequestValidatorTest, AttendSizesFollowTheShapes) {
  const scheduler::ModelSpec model = Model();
  v1::Attend attend;
  attend.set_row_count(3);
  attend.set_num_heads(2);
  attend.set_profile(v1::PROFILE_EXPANDED);
  attend.set_has_kv(true);
  attend.set_want_lse(true);
  attend.set_o_dtype(v1::DTYPE_F32);
  scheduler::AttendArgs args;
  AttendSizes sizes;
  const int64_t kv = 3 * 40 * 2, q = 3 * 2 * 24 * 2;
  ASSERT_TRUE(ParseAttend(attend, model, 4, kv + q, 1 << 20, &args, &sizes).ok());
  EXPECT_EQ(sizes.kv_bytes, kv);
  EXPECT_EQ(sizes.q_bytes, q);
  EXPECT_EQ(sizes.o_bytes, 3 * 2 * 16 * 4);
  EXPECT_EQ(sizes.lse_bytes, 3 * 2 * 4);
  for (const int64_t wrong : {int64_t{0}, kv + q - 1, kv + q + 1, int64_t{1} << 40}) {
    EXPECT_EQ(DetailOf(ParseAttend(attend, model, 4, wrong, 1 << 20, &args, &sizes)).field,
              "payload");
    EXPECT_EQ(DetailOf(ParseAttend(attend, model, 4, wrong, 1 << 20, &args, &sizes)).reason,
              "payload_size");
  }
  EXPECT_EQ(DetailOf(ParseAttend(attend, model, 4, kv + q, 700, &args, &sizes)).reason,
            "reply_too_large");
  attend.set_profile(v1::PROFILE_APPEND_ONLY);
  attend.set_want_lse(false);
  ASSERT_TRUE(ParseAttend(attend, model, 4, kv, 1 << 20, &args, &sizes).ok());
  EXPECT_EQ(sizes.o_bytes, 0);
  attend.set_has_kv(false);
  EXPECT_EQ(DetailOf(ParseAttend(attend, model, 4, 0, 1 << 20, &args, &sizes)).field,
            "attend.has_kv");
}

TEST(RequestValidatorTest, ExpandedNeedsItsDims) {
  scheduler::ModelSpec model = Model();
  model.geometry.nope_dim = model.geometry.v_dim = 0;
  v1::Attend attend;
  attend.set_row_count(1);
  attend.set_num_heads(1);
  attend.set_profile(v1::PROFILE_EXPANDED);
  scheduler::AttendArgs args;
  AttendSizes sizes;
  EXPECT_EQ(ParseAttend(attend, model, 4, 0, 1 << 20, &args, &sizes).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(ParseAttend(attend, model, 4, 0, 1 << 20, &args, &sizes)).reason,
            "no_expanded_profile");
}

TEST(RequestValidatorTest, Model) {
  v1::ModelSpec good;
  good.set_model_id("m");
  good.mutable_geometry()->set_num_heads(2);
  good.mutable_geometry()->set_kv_lora_rank(2);
  good.mutable_geometry()->set_nope_dim(2);
  good.mutable_geometry()->set_v_dim(2);
  good.set_layers(2);
  good.set_softmax_scale(0.5);
  good.set_rope_owner(v1::ROPE_OWNER_WORKER);
  const Limits limits;
  using M = v1::ModelSpec;
  const auto parse = [&](const M& m) {
    scheduler::ModelSpec spec;
    return ParseModelSpec(m, limits, &spec);
  };
  const std::vector<Row<M>> rows = {
      {"model.geometry.num_heads", kMax32, 1, 128,
       [](M* m, uint64_t v) { m->mutable_geometry()->set_num_heads(static_cast<uint32_t>(v)); }},
      {"model.geometry.kv_lora_rank", kMax32, 1, 576,
       [](M* m, uint64_t v) { m->mutable_geometry()->set_kv_lora_rank(static_cast<uint32_t>(v)); }},
      {"model.geometry.rope_dim", kMax32, 0, 574,
       [](M* m, uint64_t v) { m->mutable_geometry()->set_rope_dim(static_cast<uint32_t>(v)); }},
      {"model.layers", kMax32, 1, 128,
       [](M* m, uint64_t v) { m->set_layers(static_cast<uint32_t>(v)); }},
      {"model.page_size", kMax32, 0, 4096,
       [](M* m, uint64_t v) { m->set_page_size(static_cast<uint32_t>(v)); }},
  };
  EXPECT_GT(RunTable<M>(good, rows, parse), 25);
  for (const uint32_t value : {uint32_t{256}, uint32_t{257}, uint32_t{1} << 31, UINT32_MAX}) {
    for (const bool nope : {true, false}) {
      M changed = good;
      nope ? changed.mutable_geometry()->set_nope_dim(value)
           : changed.mutable_geometry()->set_v_dim(value);
      EXPECT_EQ(parse(changed).ok(), value == 256) << value;
      if (value == 256) continue;
      const ErrorDetail detail = DetailOf(parse(changed));
      EXPECT_EQ(detail.field, nope ? "model.geometry.nope_dim" : "model.geometry.v_dim");
      EXPECT_EQ(detail.limit, "0..256");
    }
  }
  for (const double scale : {1.18e-38, 0.135, 3.4e38}) {
    M odd = good;
    odd.set_softmax_scale(scale);
    EXPECT_TRUE(parse(odd).ok()) << scale;
  }
  for (const double scale :
       {0.0, -1.0, 1.17e-38, 5e-324, 3.41e38, 1e39, -1e39, std::numeric_limits<double>::infinity(),
        std::numeric_limits<double>::quiet_NaN()}) {
    M bad = good;
    bad.set_softmax_scale(scale);
    EXPECT_EQ(DetailOf(parse(bad)).field, "model.softmax_scale");
  }
  M bad = good;
  bad.set_rope_owner(v1::ROPE_OWNER_UNSPECIFIED);
  EXPECT_EQ(DetailOf(parse(bad)).field, "model.rope_owner");
  bad = good;
  bad.set_kv_dtype(v1::DTYPE_F32);
  EXPECT_EQ(DetailOf(parse(bad)).field, "model.kv_dtype");
  bad = good;
  bad.mutable_geometry()->set_nope_dim(0);  // v_dim without nope_dim has no meaning
  EXPECT_EQ(DetailOf(parse(bad)).field, "model.geometry.v_dim");
}

TEST(RequestValidatorTest, QueryPrecision) {
  v1::ModelSpec model;
  model.set_model_id("m");
  *model.mutable_geometry() = [] {
    v1::Geometry g;
    g.set_num_heads(4);
    g.set_kv_lora_rank(32);
    return g;
  }();
  model.set_layers(1);
  model.set_softmax_scale(0.5);
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  for (const int value : {0, 1, 2, 3, -1}) {
    model.set_query_precision(static_cast<v1::QueryPrecision>(value));
    scheduler::ModelSpec spec;
    const absl::Status parsed = ParseModelSpec(model, Limits(), &spec);
    EXPECT_EQ(parsed.ok(), value >= 0 && value <= 2);
    EXPECT_EQ(DetailOf(parsed).field, value < 0 || value > 2 ? "model.query_precision" : "");
  }
}

TEST(RequestValidatorTest, Fp8Compute) {
  using scheduler::Fp8Compute;
  v1::ModelSpec model;
  model.set_model_id("m");
  model.mutable_geometry()->set_num_heads(4);
  model.mutable_geometry()->set_kv_lora_rank(32);
  model.set_layers(1);
  model.set_softmax_scale(0.5);
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  constexpr Fp8Compute kWant[] = {Fp8Compute::kAuto, Fp8Compute::kOff, Fp8Compute::kOn};
  for (const int value : {0, 1, 2, 3, -1}) {
    model.set_fp8_compute(static_cast<v1::Fp8Compute>(value));
    scheduler::ModelSpec spec;
    const absl::Status parsed = ParseModelSpec(model, Limits(), &spec);
    const bool known = value >= 0 && value <= 2;
    EXPECT_EQ(parsed.ok(), known);
    EXPECT_EQ(DetailOf(parsed).field, known ? "" : "model.fp8_compute");
    if (!known) continue;
    EXPECT_EQ(spec.fp8_compute, kWant[value]);
  }
}

TEST(RequestValidatorTest, KvFormat) {
  v1::ModelSpec model;
  model.set_model_id("m");
  model.mutable_geometry()->set_num_heads(4);
  model.mutable_geometry()->set_kv_lora_rank(32);
  model.set_layers(1);
  model.set_softmax_scale(0.5);
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  using kernels::KvFormat;
  constexpr KvFormat kWant[] = {KvFormat::kBf16, KvFormat::kBf16, KvFormat::kFp8Tensor,
                                KvFormat::kFp8Row, KvFormat::kFp8Page};
  for (const v1::DType dtype : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_BF16}) {
    for (const int value : {0, 1, 2, 3, 4, 5, -1}) {
      model.set_kv_dtype(dtype);
      model.set_kv_format(static_cast<v1::KvFormat>(value));
      scheduler::ModelSpec spec;
      const bool known = value >= 0 && value <= 4;
      const bool conflict = dtype == v1::DTYPE_BF16 && value > 1;
      const absl::Status parsed = ParseModelSpec(model, Limits(), &spec);
      ASSERT_EQ(parsed.ok(), known && !conflict) << value;
      if (known && !conflict) {
        EXPECT_EQ(spec.kv_format, kWant[value]);
      } else {
        EXPECT_EQ(DetailOf(parsed).field, "model.kv_format");
        EXPECT_EQ(DetailOf(parsed).reason, known ? "conflict" : "unknown_value");
      }
    }
  }
}

TEST(RequestValidatorTest, WeightsChunk) {
  v1::UploadWeightsRequest::Chunk good;
  good.set_head_begin(1);
  good.set_head_count(1);
  const std::string one_head(32 * (16 + 16) * 2, '<');
  good.set_payload(one_head);
  using M = v1::UploadWeightsRequest::Chunk;
  const auto parse = [](const M& m) {
    int64_t bytes = 0;
    return ParseWeightsChunk(m, Model(), &bytes);
  };
  const std::vector<Row<M>> rows = {
      {"chunk.layer", kMax32, 0, 1,
       [](M* m, uint64_t v) { m->set_layer(static_cast<uint32_t>(v)); }},
      {"chunk.head_begin", kMax32, 0, 3,
       [](M* m, uint64_t v) { m->set_head_begin(static_cast<uint32_t>(v)); }},
      {"chunk.head_count", kMax32, 1, 3,
       [&](M* m, uint64_t v) {
         m->set_head_count(static_cast<uint32_t>(v));
         m->clear_payload();
         for (uint64_t head = 0; head < std::min<uint64_t>(v, 4); ++head) {
           *m->mutable_payload() += one_head;
         }
       }},
  };
  EXPECT_GT(RunTable<M>(good, rows, parse), 15);
  M bad = good;
  bad.mutable_payload()->pop_back();
  EXPECT_EQ(DetailOf(parse(bad)).field, "chunk.payload");
}

TEST(RequestValidatorTest, Names) {
  const Limits limits;
  EXPECT_TRUE(CheckName(std::string(128, 'x'), "f", false, limits).ok());
  EXPECT_EQ(DetailOf(CheckName(std::string(129, 'x'), "f", false, limits)).got, "129 bytes");
  EXPECT_FALSE(CheckName("", "f", false, limits).ok());
  EXPECT_TRUE(CheckName("", "f", true, limits).ok());
  EXPECT_FALSE(CheckName("a\nb", "f", true, limits).ok());
  EXPECT_FALSE(CheckName(std::string("a\0b", 3), "f", true, limits).ok());
  EXPECT_TRUE(CheckName("größe", "f", true, limits).ok());
  for (const char* const name :
       {"a\u0085", "\u009b2J", "a\u2028b", "a\u202eb", "\u2066a", "a\u200b"}) {
    EXPECT_EQ(DetailOf(CheckName(name, "f", true, limits)).reason, "name_characters");
  }
}

TEST(RequestValidatorTest, Sequences) {
  const Limits limits;
  v1::ForkRequest fork;
  scheduler::ForkArgs fork_args;
  ASSERT_TRUE(ParseFork(fork, limits, &fork_args).ok());
  EXPECT_FALSE(fork_args.length.has_value());
  for (const uint64_t value : kValues) {
    fork.set_length(value);
    EXPECT_EQ(ParseFork(fork, limits, &fork_args).ok(), value <= kMaxInt64) << value;
    v1::TruncateRequest truncate;
    truncate.set_length(value);
    int64_t length = 0;
    EXPECT_EQ(ParseTruncate(truncate, &length).ok(), value <= kMaxInt64) << value;
    if (value > kMax32) continue;
    v1::OpenRequest open;
    open.set_model_id("m");
    open.set_lease_ms(static_cast<uint32_t>(value));
    scheduler::OpenArgs open_args;
    EXPECT_EQ(ParseOpen(open, limits, &open_args).ok(), value <= 3600000) << value;
  }
  v1::RenewLeaseRequest renew;
  scheduler::SequenceSelection selection;
  int64_t lease = 0;
  EXPECT_EQ(DetailOf(ParseRenew(renew, limits, &selection, &lease)).reason, "missing");
  renew.set_client_id("c");
  EXPECT_TRUE(ParseRenew(renew, limits, &selection, &lease).ok());
  v1::GetRequest get;
  scheduler::SequencePage page;
  ASSERT_TRUE(ParseGet(get, limits, &selection, &page).ok());
  EXPECT_FALSE(page.all_tenants);
  EXPECT_EQ(page.most, std::numeric_limits<int32_t>::max()) << "all of a tenant's";
  get.set_all_tenants(true);
  ASSERT_TRUE(ParseGet(get, limits, &selection, &page).ok());
  EXPECT_EQ(page.most, 1000);
  get.set_most(4096);
  EXPECT_TRUE(ParseGet(get, limits, &selection, &page).ok());
  get.set_most(4097);
  EXPECT_EQ(DetailOf(ParseGet(get, limits, &selection, &page)).field, "most");
  get.set_most(0);
  get.add_sequence_ids(7);
  EXPECT_EQ(DetailOf(ParseGet(get, limits, &selection, &page)).reason, "inconsistent");
  v1::ReleaseRequest release;
  std::vector<scheduler::SequenceId> ids;
  for (int i = 0; i < 2 * limits.max_sequences; ++i) release.add_sequence_ids(1);
  EXPECT_TRUE(ParseRelease(release, limits, &ids).ok());
  release.add_sequence_ids(1);
  EXPECT_EQ(DetailOf(ParseRelease(release, limits, &ids)).field, "sequence_ids");
}

TEST(RequestValidatorTest, EndStep) {
  const Limits limits;
  scheduler::EndStepArgs args;
  for (const uint64_t value : kValues) {
    if (value > kMax32) continue;
    v1::EndStep end;
    end.add_committed_rows(0);
    end.add_committed_rows(static_cast<uint32_t>(value));
    const bool fine = value <= static_cast<uint64_t>(limits.max_step_rows);
    const absl::Status parsed = ParseEndStep(end, limits, &args);
    EXPECT_EQ(parsed.ok(), fine) << value;
    EXPECT_EQ(DetailOf(parsed).field, fine ? "" : "end_step.committed_rows[1]");
  }
}

}  // namespace
}  // namespace mla::server
