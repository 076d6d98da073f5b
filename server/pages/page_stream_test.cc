#include "server/pages/page_stream.h"

#include <gtest/gtest.h>

#include <set>

#include "absl/strings/escaping.h"
#include "base/error.h"

namespace mla::server {
namespace {

constexpr int64_t kChunk = 64;

// Two layers of pages of 4 rows of 8 bytes; 6 rows from row 4 on.
scheduler::MovingPages Pages() {
  scheduler::MovingPages pages;
  pages.layout = kvcache::MakeLayout({8, 4, 2, kernels::KvFormat::kBf16});
  pages.tags.geometry = {2, 3, 1, 2, 2};
  pages.tags.layers = 2;
  pages.tags.page_size = 4;
  pages.tags.group_bytes = 64;
  pages.tags.first_row = 4;
  pages.tags.rows = 6;
  return pages;
}

// The parts after the header, as an export gives them.
std::vector<v1::PagesPart> Parts(const scheduler::MovingPages& pages,
                                 DigestKind kind = DigestKind::kSha256) {
  PageDigests digests(pages.tags, kind);
  std::vector<v1::PagesPart> parts;
  uint64_t groups = 0;
  for (int64_t row = 0; row < pages.tags.rows; row += pages.tags.page_size, ++groups) {
    const auto rows = static_cast<int32_t>(std::min<int64_t>(4, pages.tags.rows - row));
    v1::PageGroup* const group = parts.emplace_back().mutable_group();
    group->set_first_row(static_cast<uint64_t>(pages.tags.first_row + row));
    group->set_rows(static_cast<uint32_t>(rows));
    digests.BeginGroup({v1::PAGE_CONTENT_ROWS, pages.tags.first_row + row, rows});
    for (int layer = 0; layer < 2; ++layer) {
      const std::string payload(static_cast<size_t>(rows) * 8,
                                static_cast<char>('a' + row + layer));
      parts.emplace_back().mutable_chunk()->set_payload(payload);
      digests.Add(payload);
    }
    parts.emplace_back().mutable_group_end()->set_sha256(digests.EndGroup());
  }
  v1::PagesTrailer* const trailer = parts.emplace_back().mutable_trailer();
  trailer->set_groups(groups);
  trailer->set_sha256(digests.End());
  return parts;
}

struct Outcome {
  absl::Status status;
  std::vector<PagePlace> places;
};

Outcome Read(const std::vector<v1::PagesPart>& parts, DigestKind kind = DigestKind::kSha256) {
  const scheduler::MovingPages pages = Pages();
  PageStreamReader reader(pages, kChunk, kind);
  Outcome outcome;
  std::optional<PagePlace> place;
  for (const v1::PagesPart& part : parts) {
    outcome.status = reader.Add(part, &place);
    if (!outcome.status.ok()) return outcome;
    if (place) outcome.places.push_back(*place);
  }
  outcome.status = reader.Finish();
  return outcome;
}

TEST(PageStreamTest, WholeStreamsAreTakenAndPlaced) {
  const Outcome outcome = Read(Parts(Pages()));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  ASSERT_EQ(outcome.places.size(), 4u);
  EXPECT_EQ(outcome.places[0].page, 1);
  EXPECT_EQ(outcome.places[1].offset, 32);
  EXPECT_EQ(outcome.places[2].page, 2);
  EXPECT_EQ(outcome.places[2].group.rows, 2);
  EXPECT_EQ(outcome.places[3].offset, 16);
}

TEST(PageStreamTest, DigestsOfXxh3AreComparedToo) {
  std::vector<v1::PagesPart> parts = Parts(Pages(), DigestKind::kXxh3);
  EXPECT_EQ(parts.back().trailer().sha256().size(), 16u);
  EXPECT_TRUE(Read(parts, DigestKind::kXxh3).status.ok());
  // A stream of one kind is none of the other.
  EXPECT_EQ(Read(parts).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Read(Parts(Pages()), DigestKind::kXxh3).status.code(), absl::StatusCode::kDataLoss);
  for (v1::PagesPart& part : parts) {
    if (!part.has_chunk()) continue;
    std::string& payload = *part.mutable_chunk()->mutable_payload();
    payload.back() = static_cast<char>(payload.back() ^ 1);
    EXPECT_EQ(Read(parts, DigestKind::kXxh3).status.code(), absl::StatusCode::kDataLoss);
    payload.back() = static_cast<char>(payload.back() ^ 1);
  }
  parts.back().mutable_trailer()->mutable_sha256()->back() ^= 1;
  EXPECT_EQ(Read(parts, DigestKind::kXxh3).status.code(), absl::StatusCode::kDataLoss);
}

// Digests of foreign implementations must be equal: XXH3_128bits and SHA-256 of known bytes.
TEST(PageDigestTest, DigestsAreThoseOfTheStandards) {
  const auto digest = [](DigestKind kind, absl::string_view bytes) {
    PageDigest one(kind);
    one.Add("forgotten");
    one.Begin();
    for (const char c : bytes) one.Add(absl::string_view(&c, 1));
    return absl::BytesToHexString(one.End());
  };
  EXPECT_EQ(digest(DigestKind::kXxh3, ""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(digest(DigestKind::kSha256, "abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest(DigestKind::kXxh3, "abc"), "06b05ab6733a618578af5f94892f3950");
}

TEST(PageStreamTest, OfAWindowTheStreamHasEntriesThenRowsThenTheTail) {
  scheduler::MovingPages pages = Pages();
  pages.tags.first_row = 0;
  pages.tags.rows = 21;
  pages.tags.window = 6;
  pages.window_layout = kvcache::MakeLayout({8, 2, 2, kernels::KvFormat::kBf16});
  pages.tags.tail_bytes = 100;
  EXPECT_EQ(GroupCount(pages), 6 + 4);  // rows 14 to 20: rows from 15 on, in whole pages
  pages.tags.tail_position = 20;
  ASSERT_EQ(GroupCount(pages), 6 + 4 + 1);
  const auto is = [&](int64_t index, v1::PageContent content, int64_t first, int32_t rows) {
    const StreamGroup group = GroupAt(pages, index);
    EXPECT_EQ(group.content, content) << index;
    EXPECT_EQ(group.first_row, first) << index;
    EXPECT_EQ(group.rows, rows) << index;
  };
  is(0, v1::PAGE_CONTENT_ROWS, 0, 4);
  is(5, v1::PAGE_CONTENT_ROWS, 20, 1);
  is(6, v1::PAGE_CONTENT_WINDOW, 14, 2);
  is(9, v1::PAGE_CONTENT_WINDOW, 20, 1);
  is(10, v1::PAGE_CONTENT_TAIL, 20, 0);
  EXPECT_EQ(MostPayloadBytes(pages), 6 * 64 + 4 * 32 + 100);
  const std::string tags = TagText(pages.tags);
  pages.tags.tail_position = 19;
  EXPECT_NE(TagText(pages.tags), tags);
  pages.tags.window = 0;
  EXPECT_EQ(TagText(pages.tags).find("window"), std::string::npos);
}

class SinksOfAHeaderTest : public ::testing::Test {
 protected:
  SinksOfAHeaderTest() {
    model_.id = std::string("w");
    model_.geometry = {2, 3, 1, 0, 0};
    model_.layers = 2;
    model_.softmax_scale = 0.5;
    model_.page_size = 4;
    model_.attention = kernels::AttentionKind::kWindow;
    model_.window = 6;
    model_.ratios = {0, 2};
    pages_.tags.first_row = 0;
    pages_.tags.geometry = model_.geometry;
    pages_.tags.window = model_.window;
    pages_.tags.ratios = model_.ratios;
    pages_.tags.sinks = std::vector<float>{1.0f, -0.5f, scheduler::kNoSink, 3.0f};
  }
  v1::PagesHeader Filled() {
    v1::PagesHeader header;
    FillHeader(model_, pages_.tags, &header);
    return header;
  }
  static std::string Refused(const v1::PagesHeader& header) {
    scheduler::PageTags tags;
    return DetailOf(ParseHeader(header, scheduler::Limits(), &tags)).field;
  }

  scheduler::ModelSpec model_;
  scheduler::MovingPages pages_ = Pages();
};

TEST_F(SinksOfAHeaderTest, ComeBackAndArePartOfTheDigests) {
  for (const std::vector<float>& sinks : {*pages_.tags.sinks, std::vector<float>()}) {
    pages_.tags.sinks = sinks;
    const v1::PagesHeader header = Filled();
    EXPECT_EQ(header.version(), kPagesVersionWithSinks);
    scheduler::PageTags tags;
    ASSERT_EQ(ParseHeader(header, scheduler::Limits(), &tags), absl::OkStatus());
    EXPECT_EQ(tags.sinks, sinks);
    EXPECT_EQ(TagText(tags), TagText(pages_.tags));
  }
  std::set<std::string> texts;
  for (const std::vector<float>& sinks : {std::vector<float>{1, 2, 3, 4}, {2, 1, 3, 4}, {}}) {
    pages_.tags.sinks = sinks;
    texts.insert(TagText(pages_.tags));
  }
  pages_.tags.sinks.reset();
  texts.insert(TagText(pages_.tags));
  EXPECT_EQ(texts.size(), 4u);
}

TEST_F(SinksOfAHeaderTest, ComeBackInTheVersionOfXxh3) {
  v1::PagesHeader header;
  FillHeader(model_, pages_.tags, &header, DigestKind::kXxh3);
  EXPECT_EQ(header.version(), kPagesVersionWithXxh3);
  EXPECT_EQ(DigestsOf(header.version()), DigestKind::kXxh3);
  scheduler::PageTags tags;
  ASSERT_EQ(ParseHeader(header, scheduler::Limits(), &tags), absl::OkStatus());
  EXPECT_EQ(tags.sinks, pages_.tags.sinks);
  EXPECT_EQ(TagText(tags, DigestKind::kXxh3), TagText(pages_.tags, DigestKind::kXxh3));
  EXPECT_NE(TagText(tags, DigestKind::kXxh3), TagText(tags));
}

TEST_F(SinksOfAHeaderTest, AreNotKnownOfServersThatDidNotSay) {
  pages_.tags.sinks.reset();
  v1::PagesHeader header = Filled();
  EXPECT_EQ(header.version(), kPagesVersion);
  scheduler::PageTags tags;
  ASSERT_EQ(ParseHeader(header, scheduler::Limits(), &tags), absl::OkStatus());
  EXPECT_FALSE(tags.sinks.has_value());
  EXPECT_EQ(TagText(tags).substr(0, 12), "mla-pages/1\n");
  EXPECT_EQ(TagText(tags).find("sinks"), std::string::npos);
}

TEST_F(SinksOfAHeaderTest, AreOneALayerAndHeadOfAWindow) {
  v1::PagesHeader header = Filled();
  header.add_sinks(1);
  EXPECT_EQ(Refused(header), "part.header.sinks");
  header = Filled();
  header.set_version(kPagesVersion);
  EXPECT_EQ(Refused(header), "part.header.sinks");
  for (const uint32_t version : {0u, kPagesVersionWithXxh3 + 1, ~0u}) {
    header.set_version(version);
    EXPECT_EQ(Refused(header), "part.header.version");
  }
  model_.attention = kernels::AttentionKind::kDense;
  EXPECT_EQ(Refused(Filled()), "part.header.version");
}

TEST(PageStreamTest, NoPartMayBeMissingTwiceThereOrElsewhere) {
  const std::vector<v1::PagesPart> good = Parts(Pages());
  for (size_t i = 0; i < good.size(); ++i) {
    std::vector<v1::PagesPart> parts = good;
    parts.erase(parts.begin() + static_cast<int64_t>(i));
    EXPECT_FALSE(Read(parts).status.ok()) << "without part " << i;
    parts = good;
    parts.insert(parts.begin() + static_cast<int64_t>(i), good[i]);
    EXPECT_FALSE(Read(parts).status.ok()) << "with part " << i << " twice";
    for (size_t j = 0; j < i; ++j) {
      if (good[i].SerializeAsString() == good[j].SerializeAsString()) continue;
      parts = good;
      std::swap(parts[i], parts[j]);
      EXPECT_FALSE(Read(parts).status.ok()) << "with parts " << i << " and " << j << " exchanged";
    }
  }
  EXPECT_EQ(DetailOf(Read({}).status).reason, "missing");
}

TEST(PageStreamTest, AnyChangedByteIsFound) {
  const std::vector<v1::PagesPart> good = Parts(Pages());
  for (size_t i = 0; i < good.size(); ++i) {
    for (const size_t byte : {size_t{0}, size_t{15}}) {
      std::vector<v1::PagesPart> parts = good;
      std::string* bytes = nullptr;
      if (parts[i].has_chunk()) bytes = parts[i].mutable_chunk()->mutable_payload();
      if (parts[i].has_group_end()) bytes = parts[i].mutable_group_end()->mutable_sha256();
      if (parts[i].has_trailer()) bytes = parts[i].mutable_trailer()->mutable_sha256();
      if (bytes == nullptr) continue;
      (*bytes)[byte] ^= 1;
      const absl::Status status = Read(parts).status;
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << i << ": " << status;
      EXPECT_EQ(DetailOf(status).reason, "digest_mismatch");
    }
  }
}

TEST(PageStreamTest, DigestsDependOnWhatTheRowsAre) {
  const std::string before = TagText(Pages().tags);
  const auto differs = [&](auto change) {
    scheduler::PageTags tags = Pages().tags;
    change(&tags);
    return TagText(tags) != before;
  };
  EXPECT_TRUE(differs([](auto* t) { ++t->geometry.num_heads; }));
  EXPECT_TRUE(differs([](auto* t) { ++t->geometry.v_dim; }));
  EXPECT_TRUE(differs([](auto* t) { ++t->layers; }));
  EXPECT_TRUE(differs([](auto* t) { ++t->index_dim; }));
  EXPECT_TRUE(differs([](auto* t) { ++t->first_row; }));
  EXPECT_TRUE(differs([](auto* t) { ++t->rows; }));
  EXPECT_TRUE(differs([](auto* t) { t->kv_format = kernels::KvFormat::kFp8Row; }));
  EXPECT_TRUE(differs([](auto* t) { t->fp8 = kernels::Fp8Kind::kE4m3Fnuz; }));
  EXPECT_TRUE(differs([](auto* t) { t->weights_digest = std::string(32, 'd'); }));
  EXPECT_TRUE(differs([](auto* t) { t->kv_scales = {0.5f}; }));
}

// The format, byte by byte: other programs write and read it.
TEST(PageStreamTest, TagsAndDigestsAreThoseOfTheFormat) {
  EXPECT_EQ(TagText(Pages().tags),
            "mla-pages/1\ngeometry 2 3 1 2 2\nlayers 2\npage_size 4\nindex_dim 0\nkv_format "
            "1\nfp8_kind 1\n"
            "group_bytes 64\nfirst_row 4\nrows 6\nweights_digest \nkv_scales\n");
  scheduler::PageTags tags = Pages().tags;
  tags.window = 6;
  tags.ratios = {0, 2};
  tags.sinks = std::vector<float>{1.0f, -2.0f};
  // ee4ac73c2bd27756ab82780f27c73a7bc4d3f0bb6acb37e008bc27eccd7e588b-256 of the bytes 00 00 80 3f
  // 00 00 00 c0.
  EXPECT_EQ(TagText(tags),
            "mla-pages/2\ngeometry 2 3 1 2 2\nlayers 2\npage_size 4\nindex_dim 0\nkv_format "
            "1\nfp8_kind 1\n"
            "group_bytes 64\nfirst_row 4\nrows 6\nweights_digest \nkv_scales\n"
            "window 6\nratios 0 2\nentry_format 1\ntail_bytes 0\ntail_position -1\n"
            "sinks ee4ac73c2bd27756ab82780f27c73a7bc4d3f0bb6acb37e008bc27eccd7e588b\n");
}

TEST(PageStreamTest, ChunksAreWholeRowsWithinTheBound) {
  std::vector<v1::PagesPart> parts = Parts(Pages());
  for (const size_t bytes : {0, 7, 72, 1000}) {
    parts[1].mutable_chunk()->set_payload(std::string(bytes, 'x'));
    EXPECT_EQ(DetailOf(Read(parts).status).reason, "payload_size") << bytes;
  }
}

}  // namespace
}  // namespace mla::server
