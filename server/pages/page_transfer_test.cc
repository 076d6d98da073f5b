#include "server/pages/page_transfer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/formats/kv_format.h"
#include "kernels/host_memory/host_backend.h"
#include "kernels/host_memory/transfers.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/clock.h"
#include "scheduler/testing/engine_harness.h"
#include "server/pages/page_stream.h"

namespace mla::server {
namespace {

using kernels::Fp8Kind;
using kernels::KvFormat;
using scheduler::MovingPages;

constexpr char kTenant[] = "";
constexpr int64_t kRows = 7, kChunkBytes = 1 << 20;

struct Case {
  KvFormat format;
  int32_t index_dim = 0;
  int32_t window = 0;
};

float ValueOf(int64_t position, int32_t layer, int32_t plane, size_t i) {
  return std::ldexp(static_cast<float>(position * 8 + layer * 4 + plane * 2 + 1),
                    static_cast<int>(i % 5)) *
         (i % 3 == 0 ? -1.0f : 1.0f);
}

// Keeps the bytes that it is given, as a device does whose 8-bit floats are of that kind.
class PoolOf final : public kernels::HostBackend {
 public:
  explicit PoolOf(Fp8Kind kind) : info_(kernels::ReferenceBackend().Info()) { info_.fp8 = kind; }
  const kernels::BackendInfo& Info() const override { return info_; }
  kernels::PlanTraits Traits(const kernels::AttentionDesc&) const override { return {}; }
  int32_t ExpandedFormMinRows(const kernels::Geometry&) const override { return 1 << 20; }

 private:
  int64_t OwnWorkspaceSize(const kernels::BackendLimits&) const override { return 0; }
  absl::Status ConfigureOwn(const kernels::BackendLimits&) override { return absl::OkStatus(); }
  int64_t PackedWeightBytes(const kernels::Geometry&, int32_t) const override { return 0; }
  void PackWeights(const kernels::Geometry&, int32_t, const kernels::Bf16*, const kernels::Bf16*,
                   std::byte*) const override {}
  void UnpackWeights(const kernels::Geometry&, const std::byte*, kernels::Bf16*,
                     kernels::Bf16*) const override {}
  void Start(int32_t, const kernels::Launch& launch) override {
    const kernels::PoolView pool = Pool(launch.page_tables);
    for (const auto& transfer : launch.page_writes) kernels::WritePages(pool.base, transfer);
    for (const auto& range : launch.pages) kernels::WritePageRange(pool, range);
    for (const auto& transfer : launch.page_reads) kernels::ReadPages(pool.base, transfer);
  }
  bool Finished(int32_t) override { return true; }
  absl::StatusOr<int64_t> Finish(int32_t) override { return 0; }

  kernels::BackendInfo info_;
};

class PageTransferTest : public testing::TestWithParam<Case> {
 protected:
  // An engine with the model, and with bytes of that kind in its pool.
  void Start(Fp8Kind pool) {
    pool_ = pool;
    scheduler::EngineOptions options;
    options.limits = scheduler::testing::TinyLimits();
    engine_ = scheduler::Engine::Create(options, std::make_unique<PoolOf>(pool), &clock_).value();
    scales_.clear();
    spec_ = scheduler::testing::TinyModel();
    spec_.page_size = 4;
    spec_.kv_format = GetParam().format;
    if (GetParam().index_dim > 0) {
      spec_.attention = kernels::AttentionKind::kSparse;
      spec_.top_k = 2;
      spec_.indexer = {.heads = 2, .dim = GetParam().index_dim};
    }
    if (GetParam().window > 0) {
      spec_.attention = kernels::AttentionKind::kWindow;
      spec_.geometry.nope_dim = spec_.geometry.v_dim = 0;
      spec_.window = GetParam().window;
      spec_.ratios = {2, 4};
      spec_.entry_format = GetParam().format;
    }
    const bool scaled = spec_.kv_format == KvFormat::kFp8Tensor;
    if (scaled) scales_ = {0.5f, 3.0f};
    const auto model = engine_->RegisterModel(kTenant, spec_, 0, scales_);
    EXPECT_TRUE(model.ok()) << model.status();
    spec_ = model->spec;
  }

  // Tags of kRows rows of the model, as a server of that kind sends them.
  scheduler::ImportArgs Args(Fp8Kind kind) {
    scheduler::OpenArgs open;
    open.tenant = kTenant;
    open.model_id = spec_.id;
    scheduler::ImportArgs args;
    args.tenant = kTenant;
    args.model_id = spec_.id;
    args.tags.geometry = spec_.geometry;
    args.tags.layers = spec_.layers;
    args.tags.page_size = spec_.page_size;
    args.tags.index_dim = spec_.indexer.dim;
    args.tags.kv_format = spec_.kv_format;
    args.tags.fp8 = kind;
    args.tags.kv_scales = scales_;
    args.tags.rows = kRows;
    args.tags.window = spec_.window;
    args.tags.ratios = spec_.ratios;
    args.tags.entry_format = spec_.entry_format;
    const auto empty = engine_->OpenSequence(open).value();
    args.tags.group_bytes =
        engine_->BeginExport({kTenant, empty.id, empty.epoch, 0, 0, /*in_place=*/true})
            .value()
            .tags.group_bytes;
    return args;
  }

  // Visits the rows of a group's payload: a layout, where the row lies, its position, layer, plane.
  template <typename Visit>
  void EachRow(const MovingPages& pages, const StreamGroup& group, std::string* payload,
               const Visit& visit) {
    const bool window = group.content == v1::PAGE_CONTENT_WINDOW;
    const kvcache::GroupLayout& layout = window ? pages.window_layout : pages.layout;
    for (const kvcache::GroupPiece& piece : PiecesOf(pages, group)) {
      const kvcache::KvPlane& plane = layout.layers[piece.layer][piece.plane];
      const bool keys = piece.plane == 1;
      const kernels::KvRowLayout layout = kernels::MakeKvRowLayout(
          plane.format, keys ? spec_.indexer.dim : spec_.geometry.kv_lora_rank,
          keys ? 0 : spec_.geometry.rope_dim);
      auto* const page = reinterpret_cast<std::byte*>(payload->data()) + piece.payload_offset;
      for (int32_t row = 0; row < group.rows / plane.token_ratio; ++row) {
        visit(layout, kernels::KvRowIn(layout, page, plane.row_stride, plane.rows, row),
              group.first_row + row, piece.layer, piece.plane);
      }
    }
  }

  // The stream after the header, as a server with pages.tags.fp8 makes it.
  std::vector<v1::PagesPart> Stream(const MovingPages& pages) {
    const Fp8Kind kind = pages.tags.fp8;
    PageDigests digests(pages.tags);
    std::vector<v1::PagesPart> parts;
    for (int64_t index = 0; index < GroupCount(pages); ++index) {
      const StreamGroup group = GroupAt(pages, index);
      auto* const named = parts.emplace_back().mutable_group();
      named->set_content(group.content);
      named->set_first_row(static_cast<uint64_t>(group.first_row));
      named->set_rows(static_cast<uint32_t>(group.rows));
      digests.BeginGroup(group);
      std::string payload(kvcache::PayloadBytes(PiecesOf(pages, group)), '\0');
      EachRow(pages, group, &payload,
              [&](const kernels::KvRowLayout& layout, const kernels::KvRowPlace<std::byte>& place,
                  int64_t position, int32_t layer, int32_t plane) {
                std::vector<float> values(static_cast<size_t>(layout.latent_dim + layout.rope_dim));
                for (size_t i = 0; i < values.size(); ++i) {
                  values[i] = ValueOf(position, layer, plane, i);
                }
                if (position == nan_at_ && plane == 0) {
                  values[1] = std::numeric_limits<float>::quiet_NaN();
                }
                kernels::EncodeKvRow(layout, kind, values.data(), kernels::DType::kF32,
                                     Scale(layer, kind), place);
              });
      if (!payload.empty()) {
        digests.Add(payload);
        parts.emplace_back().mutable_chunk()->set_payload(payload);
      }
      parts.emplace_back().mutable_group_end()->set_sha256(digests.EndGroup());
    }
    auto* const trailer = parts.emplace_back().mutable_trailer();
    trailer->set_groups(static_cast<uint64_t>(GroupCount(pages)));
    trailer->set_sha256(digests.End());
    return parts;
  }

  float Scale(int32_t layer, Fp8Kind kind) const {
    if (scales_.empty()) return 1.0f;
    const float scale = scales_[static_cast<size_t>(layer)];
    return kind == Fp8Kind::kE4m3Fn ? scale : kernels::ScaleToKind(scale, kind);
  }

  absl::StatusOr<scheduler::SequenceInfo> Take(const MovingPages& pages,
                                               std::vector<v1::PagesPart> parts) {
    size_t next = 0;
    uint64_t bytes = 0;
    return TakePages(
        engine_.get(), kTenant, pages, kChunkBytes,
        [&]() -> absl::StatusOr<v1::PagesPart*> {
          return next < parts.size() ? &parts[next++] : nullptr;
        },
        nullptr, &bytes);
  }

  // Expects that the sequence holds the rows that Stream has sent, in bytes of the pool's kind.
  void ExpectRows(const scheduler::SequenceInfo& info) {
    const auto pages =
        engine_->BeginExport({kTenant, info.id, info.epoch, 0, kRows, /*in_place=*/true});
    ASSERT_TRUE(pages.ok()) << pages.status();
    EXPECT_EQ(pages->tags.fp8, pool_);
    std::vector<StreamGroup> groups;
    std::vector<std::string> payloads;
    ASSERT_TRUE(SendPages(engine_.get(), kTenant, *pages, [&](const v1::PagesPart& part) {
                  if (part.has_group()) {
                    groups.push_back(GroupAt(*pages, static_cast<int64_t>(groups.size())));
                    payloads.emplace_back();
                  }
                  if (part.has_chunk()) payloads.back() += part.chunk().payload();
                  return absl::OkStatus();
                }).ok());
    for (size_t g = 0; g < groups.size(); ++g) {
      EachRow(*pages, groups[g], &payloads[g],
              [&](const kernels::KvRowLayout& at, const kernels::KvRowPlace<std::byte>& place,
                  int64_t position, int32_t layer,
                  int32_t plane) { CheckRow(at, place, position, layer, plane); });
    }
  }

  void CheckRow(const kernels::KvRowLayout& layout, const kernels::KvRowPlace<std::byte>& place,
                int64_t position, int32_t layer, int32_t plane) {
    const auto dim = static_cast<size_t>(layout.latent_dim + layout.rope_dim);
    std::vector<float> got(dim), want(dim);
    kernels::DecodeKvRow(layout, pool_, Scale(layer, pool_), {place.row, place.scales}, got.data());
    for (size_t i = 0; i < dim; ++i) want[i] = ValueOf(position, layer, plane, i);
    if (position == nan_at_ && plane == 0) want[1] = std::numeric_limits<float>::quiet_NaN();
    std::vector<std::byte> page(
        static_cast<size_t>(kernels::KvPageBytes(layout, layout.row_bytes, 1)));
    const auto once = kernels::KvRowIn(layout, page.data(), layout.row_bytes, 1, 0);
    kernels::EncodeKvRow(layout, Fp8Kind::kE4m3Fn, want.data(), kernels::DType::kF32,
                         Scale(layer, Fp8Kind::kE4m3Fn), once);
    kernels::DecodeKvRow(layout, Fp8Kind::kE4m3Fn, Scale(layer, Fp8Kind::kE4m3Fn),
                         {once.row, once.scales}, want.data());
    for (size_t i = 0; i < dim; ++i) {
      EXPECT_TRUE(got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i])))
          << "position " << position << " layer " << layer << " plane " << plane << " value " << i
          << ": " << got[i] << ", want " << want[i];
    }
  }

  scheduler::RealClock clock_;
  std::unique_ptr<scheduler::Engine> engine_;
  scheduler::ModelSpec spec_;
  std::vector<float> scales_;
  Fp8Kind pool_ = Fp8Kind::kE4m3Fn;
  int64_t nan_at_ = -1;
};

TEST_P(PageTransferTest, RowsOfEitherKindArriveInPoolsOfEither) {
  for (const Fp8Kind pool : {Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz}) {
    Start(pool);
    for (const Fp8Kind kind : {Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz}) {
      for (const int64_t nan_at : {-1, 5}) {
        nan_at_ = nan_at;
        const auto pages = engine_->BeginImport(Args(kind));
        ASSERT_TRUE(pages.ok()) << pages.status();
        EXPECT_EQ(pages->tags.fp8, kind);
        const auto info = Take(*pages, Stream(*pages));
        ASSERT_TRUE(info.ok()) << info.status();
        ExpectRows(*info);
      }
    }
  }
}

// Digests cover the bytes as sent, so a stream with a wrong kind is found.
TEST_P(PageTransferTest, ARelabelledStreamIsRefused) {
  Start(Fp8Kind::kE4m3Fn);
  const auto sent = engine_->BeginImport(Args(Fp8Kind::kE4m3Fnuz));
  ASSERT_TRUE(sent.ok()) << sent.status();
  const std::vector<v1::PagesPart> parts = Stream(*sent);
  const auto named = engine_->BeginImport(Args(Fp8Kind::kE4m3Fn));
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_TRUE(absl::IsDataLoss(Take(*named, parts).status()));
  EXPECT_TRUE(Take(*sent, parts).ok());
}

INSTANTIATE_TEST_SUITE_P(Formats, PageTransferTest,
                         testing::Values(Case{KvFormat::kBf16}, Case{KvFormat::kFp8Tensor},
                                         Case{KvFormat::kFp8Row}, Case{KvFormat::kFp8Page},
                                         Case{KvFormat::kFp8Row, /*index_dim=*/16},
                                         Case{KvFormat::kBf16, /*index_dim=*/16},
                                         Case{KvFormat::kFp8Page, /*index_dim=*/0, /*window=*/3}));

}  // namespace
}  // namespace mla::server
