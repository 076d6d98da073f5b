// Imported pages with scales that another server or an engine has written. A client gets the values
// that such a scale stands for, or NaN if it stands for none; never another number.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "kernels/formats/kv_format.h"
#include "scheduler/limits.h"
#include "server/pages/page_stream.h"
#include "tests/integration/dense_model.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

constexpr int kLatent = 64, kRope = 16, kWidth = kLatent + kRope;
constexpr uint32_t kRows = 4;     // a page, and the rows of the window
constexpr uint32_t kForeign = 2;  // the row whose scale is foreign
constexpr kernels::KvRowLayout kAt =
    kernels::MakeKvRowLayout(kernels::KvFormat::kFp8Page, kLatent, kRope);
using Parts = std::vector<v1::PagesPart>;

class ForeignPagesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    client_ = server_.Connect();
    v1::ModelSpec spec =
        SpecOf({.heads = 1, .lora = kLatent, .rope = kRope, .layers = 1, .page = kRows}, "w");
    spec.mutable_geometry()->set_nope_dim(0);
    spec.mutable_geometry()->set_v_dim(0);
    spec.clear_kv_dtype();
    spec.set_kv_format(v1::KV_FORMAT_FP8_PAGE);
    spec.set_attention(v1::ATTENTION_KIND_SPARSE_V4);
    spec.set_window(kRows + 1);
    spec.add_ratios(kRows);
    const auto registered = client_->RegisterModel(spec);
    ASSERT_TRUE(registered.ok()) << registered.status();
    session_ = *client_->OpenSession();
    sequence_ = *client_->OpenSequence("w");
    ASSERT_TRUE(Step(&*sequence_, kRows, 1.0f).ok());
    v1::ExportRequest request;
    request.set_sequence_id(sequence_->id());
    request.set_expected_epoch(sequence_->epoch());
    const absl::Status exported = client_->ExportPages(request, [&](const v1::PagesPart& part) {
      parts_.push_back(part);
      return absl::OkStatus();
    });
    ASSERT_TRUE(exported.ok()) << exported;
  }

  // Runs a step of `rows` rows and their entries, of equal values, with queries of zeros. Returns
  // the last row's output, the mean of the rows and entries that it sees.
  absl::StatusOr<std::vector<float>> Step(client::Sequence* sequence, uint32_t rows, float value) {
    auto step = session_->Begin("w", {{sequence, rows}});
    if (!step.ok()) return step.status();
    const uint64_t made = (*step)->EntriesOf(0, 0, rows);
    const std::vector<uint16_t> kv((rows + made) * kWidth, ToBf16(value)), q(size_t{rows} * kWidth);
    std::vector<float> o(q.size());
    client::AttendCall call;
    call.row_count = rows;
    call.num_heads = 1;
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = kv.data();
    call.q = q.data();
    call.o = o.data();
    if (const auto attended = (*step)->Attend(call); !attended.ok()) return attended.status();
    if (const auto ended = (*step)->End(); !ended.ok()) return ended.status();
    return std::vector<float>(o.end() - kWidth, o.end());
  }

  // Returns the exported parts with another exponent in the foreign row, and with digests of what
  // they hold then, as another server would send them.
  Parts With(uint8_t exponent) const {
    scheduler::PageTags tags;
    EXPECT_TRUE(server::ParseHeader(parts_.front().header(), scheduler::Limits(), &tags).ok());
    server::PageDigests digests(tags, server::DigestsOf(parts_.front().header().version()));
    Parts parts = parts_;
    bool of_window = false;  // the present group
    for (v1::PagesPart& part : parts) {
      if (part.has_group()) {
        of_window = part.group().content() == v1::PAGE_CONTENT_WINDOW;
        digests.BeginGroup({part.group().content(), static_cast<int64_t>(part.group().first_row()),
                            static_cast<int32_t>(part.group().rows())});
      } else if (part.has_chunk()) {
        std::string* const page = part.mutable_chunk()->mutable_payload();
        if (of_window) page->at(ExponentAt()) = static_cast<char>(exponent);
        digests.Add(*page);
      } else if (part.has_group_end()) {
        part.mutable_group_end()->set_sha256(digests.EndGroup());
      } else if (part.has_trailer()) {
        part.mutable_trailer()->set_sha256(digests.End());
      }
    }
    return parts;
  }
  static size_t ExponentAt() {
    return size_t{kRows} * kAt.row_bytes + kForeign * kAt.page_scales_bytes;
  }
  // Returns the exponent that the server has written for the foreign row.
  int Own() const {
    bool of_window = false;
    for (const v1::PagesPart& part : parts_) {
      if (part.has_group()) of_window = part.group().content() == v1::PAGE_CONTENT_WINDOW;
      if (!of_window || !part.has_chunk()) continue;
      EXPECT_EQ(static_cast<int64_t>(part.chunk().payload().size()),
                kernels::KvPageBytes(kAt, kAt.row_bytes, kRows));
      return static_cast<uint8_t>(part.chunk().payload().at(ExponentAt()));
    }
    ADD_FAILURE() << "no rows of a window";
    return 0;
  }

  absl::StatusOr<client::Sequence> Import(const Parts& parts) {
    v1::ImportTarget target;
    target.set_model_id("w");
    size_t sent = 0;
    return client_->ImportPages(target, [&]() -> absl::StatusOr<std::optional<v1::PagesPart>> {
      return sent == parts.size() ? std::optional<v1::PagesPart>() : parts[sent++];
    });
  }

  const TestServer server_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
  std::optional<client::Sequence> sequence_;
  Parts parts_;
};

TEST_F(ForeignPagesTest, AScaleGivesItsValues) {
  const int own = Own();
  for (const int exponent : {0, 1, own - 3, own, own + 7}) {
    auto sequence = Import(With(static_cast<uint8_t>(exponent)));
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    const auto o = Step(&*sequence, 1, 1.0f);
    ASSERT_TRUE(o.ok()) << "exponent " << exponent << ": " << o.status();
    // Five rows and an entry of ones are seen, one row with the foreign scale.
    const float foreign = std::ldexp(1.0f, exponent - own);
    EXPECT_NEAR((*o)[0], (5.0f + foreign) / 6.0f, 1e-3f * (1.0f + foreign)) << exponent;
    EXPECT_NEAR((*o)[kLatent - 1], (*o)[0], 1e-6f * (1.0f + foreign)) << exponent;
    EXPECT_NEAR((*o)[kWidth - 1], 1.0f, 1e-3f) << "the rotated part has no scale";
  }
}

TEST_F(ForeignPagesTest, AByteThatIsNoScaleIsNaNInWhatSeesIt) {
  for (const int exponent : {200, 254, 255}) {  // above 2^72
    auto sequence = Import(With(static_cast<uint8_t>(exponent)));
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    const auto o = Step(&*sequence, 1, 1.0f);
    ASSERT_TRUE(o.ok()) << o.status();
    for (const float value : *o) EXPECT_TRUE(std::isnan(value)) << exponent << ": " << value;
    // Once the window has passed the row, results are numbers again.
    const auto later = Step(&*sequence, kForeign + 1, 1.0f);
    ASSERT_TRUE(later.ok()) << later.status();
    EXPECT_NEAR(later->front(), 1.0f, 1e-3f) << exponent;
  }
  // Other sequences go on.
  const auto o = Step(&*sequence_, 1, 1.0f);
  ASSERT_TRUE(o.ok()) << o.status();
  EXPECT_NEAR(o->front(), 1.0f, 1e-3f);
}

TEST_F(ForeignPagesTest, AChangedPageWithItsOldDigestIsRefused) {
  Parts parts = With(0);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].has_group_end()) parts[i] = parts_[i];
  }
  const auto sequence = Import(parts);
  const auto detail = client::DetailOf(sequence.status());
  ASSERT_TRUE(detail.has_value()) << sequence.status();
  EXPECT_EQ(detail->reason(), "digest_mismatch") << sequence.status();
}

}  // namespace
}  // namespace mla::integration
